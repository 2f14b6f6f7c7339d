"""Contents of the page of several runs, as plain data for its template: results, and settings that differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kubetune.config.resolved import resolved
from kubetune.reporting import cards
from kubetune.reporting.differences import differences
from kubetune.reporting.reading import RunRecord
from kubetune.reporting.run_charts import labels, letter
from kubetune.reporting.run_page import MOST_ANSWERS, sentence

# Colours of lines and runs in the style sheet. Further runs differ only by their letters.
COLOURS = 12


def comparison_facts(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Return what the template `compare.html` needs, but for the charts."""
    names = labels(runs)

    cards_of_runs, headings = _cards_of(runs)
    damage = []
    for name, run in zip(names, runs, strict=True):
        for problem in cards.damage(run):
            damage.append((name, problem))

    # Values are better than others only if they measure the same thing on the same rows.
    cautions = _cautions(runs, names)
    best: dict[str, float] = {}
    if not cautions["tasks"] and not cautions["data"]:
        best = _best_of_columns(headings, cards_of_runs)
    columns, alike = _columns(headings, cards_of_runs)
    sentences = {sentence(run) for run in runs}

    different, common = differences([resolved(run.config) for run in runs])
    packages, _ = differences([run.report.get("versions") or {} for run in runs])
    return {
        "title": " · ".join(names),
        "runs": [_run(index, name, runs[index]) for index, name in enumerate(names)],
        "sentence": sentences.pop() if len(sentences) == 1 else "",
        "headings": columns,
        "alike": alike,
        "cards": cards_of_runs,
        "best": best,
        "settings": different,
        "common": common,
        "packages": packages,
        "same_data": _same_data(runs, names)[1],
        "damage": damage,
        "answers": _answers(runs),
        "cautions": [text for text in cautions.values() if text],
        "other_tasks": cautions["tasks"],
        "first_axis": "share" if cautions["lengths"] else "step",
    }


def _cards_of(runs: Sequence[RunRecord]) -> tuple[list[dict[str, cards.Card]], list[str]]:
    """Return the cards of each run by their labels, and all labels: not every run has each card."""
    cards_of_runs = []
    headings: dict[str, None] = {}
    for run in runs:
        shown = [*cards.cards(run), *cards.evaluation_loss(run)]
        by_label = {card.label: card for card in shown}
        for card in cards.judged_cards(run):
            # The same checkpoint's, with an interval.
            by_label.pop(f"Best {card.label}", None)
            by_label[card.label] = card
        cards_of_runs.append(by_label)
        headings |= dict.fromkeys(by_label)
    return cards_of_runs, list(headings)


def _best_of_columns(
    headings: Sequence[str], cards_of_runs: Sequence[Mapping[str, cards.Card]]
) -> dict[str, float]:
    """Return the best value of each column that every run has and in which one value is better than another."""
    best = {}
    for heading in headings:
        of_column = [by_label[heading] for by_label in cards_of_runs if heading in by_label]
        value = _best(of_column)
        if value is not None and len(of_column) == len(cards_of_runs):
            best[heading] = value
    return best


def _columns(
    headings: Iterable[str], cards_of_runs: Sequence[Mapping[str, cards.Card]]
) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the headings whose values differ between runs, and heading and value of the others."""
    columns = []
    alike = []
    for heading in headings:
        values = {
            by_label[heading].value if heading in by_label else None for by_label in cards_of_runs
        }
        only = next(iter(values))
        if len(values) > 1 or only is None:
            columns.append(heading)
        else:
            alike.append((heading, only))
    return columns, alike


# Runs of lengths that differ by this factor are laid over each other by their share, not by their steps.
_OTHER_LENGTH = 1.5


def _cautions(runs: Sequence[RunRecord], names: Sequence[str]) -> dict[str, str]:
    """Return sentences on what cannot be compared: tasks, data, lengths; "" for each that is the same."""
    lengths = [cards.last_step(run) for run in runs]
    shortest = min(lengths)
    longest = max(lengths)
    text = ""
    if longest > _OTHER_LENGTH * max(1, shortest):
        text = f"the runs took {shortest:,} to {longest:,} steps, so curves lie over the share of each run."
    differ, about = _same_data(runs, names)
    return {
        "tasks": _other_tasks(runs, names),
        "data": about[0].lower() + about[1:] if differ else "",
        "lengths": text,
    }


def _run(index: int, name: str, run: RunRecord) -> dict[str, Any]:
    """Return what the page shows above its charts of one of the runs."""
    return {
        "name": name,
        "path": run.path,
        "state": cards.status(run),
        "sentence": sentence(run),
        "letter": letter(index),
        "colour": index % COLOURS,
    }


def _best(column: Sequence[cards.Card]) -> float | None:
    """Return the best value of a column, None if its values are all alike or none is better."""
    values = {card.order for card in column if card.order is not None}
    if len(values) < 2 or not column[0].better:
        return None
    return max(values) if column[0].better > 0 else min(values)


def _other_tasks(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    """Return a warning that the runs learn different things, "" if they do not."""
    by_task: dict[str, list[str]] = {}
    for name, run in zip(names, runs, strict=True):
        by_task.setdefault(run.config.task, []).append(name)
    if len(by_task) < 2:
        return ""
    tasks = "; ".join(f"{task}: {', '.join(of_task)}" for task, of_task in by_task.items())
    return f"the runs learn different tasks ({tasks}), so their losses and scores measure different things."


def _same_data(runs: Sequence[RunRecord], names: Sequence[str]) -> tuple[bool, str]:
    """Return whether runs were trained on different rows, and a sentence on it."""
    # The report has it at the end, data.json as soon as the data are prepared.
    fingerprints = set()
    unknown = []
    for name, run in zip(names, runs, strict=True):
        fingerprint = run.report.get("data_fingerprint") or run.data.get("fingerprint")
        if fingerprint:
            fingerprints.add(fingerprint)
        else:
            unknown.append(name)

    # Different fingerprints settle it, whatever the others have.
    if len(fingerprints) > 1:
        return True, "The prepared data differ, so losses and scores are not of the same rows."
    if unknown:
        text = (
            "Whether the prepared data are the same is not known: no fingerprint is recorded in "
            f"{', '.join(unknown)}."
        )
        return False, text

    return False, "All have the same prepared data."


def _answers(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return requests with the answer of each run. Those that most runs answered come first."""
    # A run without an answer to a request keeps its place, so that columns are runs:
    #     {"2 + 2 =": {"answers": ["4", None, "5"]}}
    by_prompt: dict[str, dict[str, Any]] = {}
    for index, run in enumerate(runs):
        for line in run.answers:
            prompt = line["prompt"]
            if prompt not in by_prompt:
                by_prompt[prompt] = {"request": line, "answers": [None] * len(runs)}
            by_prompt[prompt]["answers"][index] = line["after"]

    entries = sorted(by_prompt.values(), key=lambda entry: entry["answers"].count(None))
    return entries[:MOST_ANSWERS]
