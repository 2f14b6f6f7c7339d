"""Contents of the page of several runs, as plain data for its template: results, and settings that differ."""

from __future__ import annotations

from collections.abc import Sequence
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

    # A table with a row for each run. Its columns are the cards of all runs, since not every run has each.
    cards_of_runs = []
    headings: dict[str, None] = {}
    damage = []
    for name, run in zip(names, runs, strict=True):
        shown = [*cards.cards(run), *cards.evaluation_loss(run)]
        by_label = {card.label: card for card in shown}
        for card in cards.judged_cards(run):
            # The same checkpoint's, with an interval.
            by_label.pop(f"Best {card.label}", None)
            by_label[card.label] = card
        cards_of_runs.append(by_label)
        headings |= dict.fromkeys(by_label)
        for problem in cards.damage(run):
            damage.append((name, problem))

    # Between different tasks no value is better than another.
    other_tasks = _other_tasks(runs, names)
    best: dict[str, float] = {}
    if not other_tasks:
        for heading in headings:
            of_column = [by_label[heading] for by_label in cards_of_runs if heading in by_label]
            value = _best(of_column)
            if value is not None:
                best[heading] = value

    different, common = differences([resolved(run.config) for run in runs])
    packages, _ = differences([run.report.get("versions") or {} for run in runs])
    return {
        "title": " · ".join(names),
        "runs": [_run(index, name, runs[index]) for index, name in enumerate(names)],
        "headings": list(headings),
        "cards": cards_of_runs,
        "best": best,
        "settings": different,
        "common": common,
        "packages": packages,
        "same_data": _same_data(runs, names),
        "damage": damage,
        "answers": _answers(runs),
        "other_tasks": other_tasks,
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


def _same_data(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    """Return a sentence on whether all runs were trained on the same rows."""
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
        return "The prepared data differ, so losses are not of the same rows."
    if unknown:
        return (
            "Whether the prepared data are the same is not known: no fingerprint is recorded in "
            f"{', '.join(unknown)}."
        )

    return "All have the same prepared data."


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
