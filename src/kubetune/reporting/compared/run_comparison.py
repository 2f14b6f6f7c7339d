"""Contents of the page of several runs, as plain data for its template: results, and settings that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kubetune.config.resolved import resolved
from kubetune.reporting import cards
from kubetune.reporting.compared.differences import differences
from kubetune.reporting.compared.same_questions import SameQuestions, same_questions
from kubetune.reporting.look.metric_values import label_of
from kubetune.reporting.look.style import COLOURS
from kubetune.reporting.point import point, sureness
from kubetune.reporting.reading import RunRecord
from kubetune.reporting.run_charts import labels, letter
from kubetune.reporting.run_page import MOST_ANSWERS
from kubetune.reporting.run_sentence import kind, sentence


@dataclass(frozen=True)
class Row:
    """A measure of all runs."""

    label: str
    values: Sequence[cards.Card | None]  # of each run
    best: int | None = None  # index of the run that is better than all others
    remark: str = ""  # why none is
    is_judged: bool = False  # True of the measure by which runs are told better or worse
    # Of two runs that were asked the same, in place of their intervals.
    test: SameQuestions | None = None

    @property
    def better(self) -> int:
        """1 if more is better, -1 if less is, 0 for what says nothing of quality."""
        return next((card.better for card in self.values if card), 0)

    @property
    def has_intervals(self) -> bool:
        """True if any value has an interval."""
        return any(card.interval for card in self.values if card)

    @property
    def about(self) -> str:
        """What is remarked of every value in the same words, so that it is said once."""
        remarks = [card.about for card in self.values if card]
        return remarks[0] if len(remarks) > 1 and len(set(remarks)) == 1 else ""


def comparison_facts(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Return what the template `compare.html` needs, but for the charts."""
    names = labels(runs)
    damaged = zip(names, map(cards.damage, runs), strict=True)
    cautions = _cautions(runs, names)
    # Values are better than others only if they measure the same thing on the same rows.
    obstacle = _obstacle(cautions)
    of_runs = [cards.measured_cards(run) for run in runs]
    asked = same_questions(runs)
    test = asked if len(runs) == 2 else None
    rows = _rows(of_runs, are_comparable=not obstacle, apart=_unlike_rewards(runs), test=test)
    shown, alike = _differing(rows)
    shared, alone = _shared(shown, only=bool(cautions["tasks"]))
    work, alike_work = _differing(_rows([cards.cards(run) for run in runs], are_comparable=False))
    sentences = {_in_a_line(run) for run in runs}

    unlike = _unlike(runs, only=bool(cautions["tasks"]))
    differing = [] if obstacle else _short(unlike["settings"])[:_MOST_TOLD]
    return {
        "title": " · ".join(names),
        "runs": [_run(index, name, runs[index], differing) for index, name in enumerate(names)],
        "sentence": sentences.pop() if len(sentences) == 1 else "",
        # No line breaks before a sign.
        "verdict": _in_words(rows, names, obstacle).replace(" %", "\u00a0%"),
        "results": shared,
        "of_one_run": alone,
        "alike": alike,
        "work": work,
        "alike_work": alike_work,
        **unlike,
        "same_data": _same_data(runs, names)[1],
        "damage": [(name, problem) for name, problems in damaged for problem in problems],
        "asked": asked,
        "groups": asked.groups(names) if asked else [],
        "answers": [] if asked else _answers(runs),
        "cautions": [cautions[name] for name in ("tasks", "data") if cautions[name]],
        "lengths": cautions["lengths"],
        "first_axis": "share" if cautions["lengths"] else "step",
    }


# Settings that a line of a run tells, and those that the table of differences shows unasked.
_MOST_TOLD = 4
_LONGEST_TOLD = 40  # characters of a value
_MOST_OPEN = 8


def _rows(
    cards_of_runs: Sequence[Sequence[cards.Card]],
    *,
    are_comparable: bool,
    apart: str = "",
    test: SameQuestions | None = None,
) -> list[Row]:
    """Return a row for each label, in the order in which they come: not every run has each card.

    `apart`: the label of what is another quantity in each run. `test`: of the answers of two runs.
    """
    by_label = [{card.label: card for card in of_run} for of_run in cards_of_runs]
    headings: dict[str, None] = {}  # an ordered set
    for of_run in by_label:
        headings |= dict.fromkeys(of_run)
    rows: list[Row] = []
    for label in headings:
        values = [of_run.get(label) for of_run in by_label]
        # A measure beside the one that runs are judged by would praise another run for as little as chance gives.
        is_judged = (
            are_comparable
            and label != apart
            and None not in values
            and not any(row.is_judged for row in rows)
        )
        of_label = test if is_judged and test and test.label == label else None
        best, remark = _best(values, of_label) if is_judged else (None, "")
        if label == apart:
            remark = "of other functions in each"
        row = Row(label, values, best, remark, is_judged, of_label)
        if row.has_intervals and not remark:
            row = replace(row, remark="with its 95 % interval")
        rows.append(row)
    return rows


def _unlike(runs: Sequence[RunRecord], *, only: bool) -> dict[str, Any]:
    """Return the settings and packages in which runs differ, and the settings that they share.

    `only`: of different tasks, some of whose settings one of the tasks alone reads.
    """
    different, common = differences([resolved(run.config) for run in runs])
    settings, of_tasks = _by_task(different, only=only)
    packages, _ = differences([run.report.get("versions") or {} for run in runs])
    return {
        "settings": settings,
        "are_settings_folded": len(settings) > _MOST_OPEN,
        "of_tasks": of_tasks,
        "common": common,
        "packages": packages,
    }


def _short(settings: Sequence[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    """Return the settings whose values fit into the line of a run."""
    return [row for row in settings if max(map(len, row[1])) <= _LONGEST_TOLD]


def _unlike_rewards(runs: Sequence[RunRecord]) -> str:
    """Return the label of the reward if it is the sum of other functions, or of other weights, in each run; else ""."""
    rewards = [run.config.rewards for run in runs]
    return "" if all(other == rewards[0] for other in rewards) else label_of("eval_reward")


def _differing(rows: Sequence[Row]) -> tuple[list[Row], list[tuple[str, str]]]:
    """Return the rows whose values differ between runs, and label and value of the others."""
    shown = []
    alike = []
    for row in rows:
        values = {card.value if card else None for card in row.values}
        only = next(iter(values))
        if len(values) > 1 or only is None:
            shown.append(row)
        else:
            alike.append((row.label, only))
    return shown, alike


def _shared(rows: Sequence[Row], *, only: bool) -> tuple[list[Row], list[str]]:
    """Return the rows that compare runs, and the labels of those that one run alone has.

    `only`: of different tasks. What one of them alone measures is no comparison, and is on the page of its run.
    """
    shared = []
    alone = []
    for row in rows:
        if only and sum(card is not None for card in row.values) < 2:
            alone.append(row.label)
        else:
            shared.append(row)
    return shared, alone


def _by_task(
    different: Sequence[tuple[str, list[str]]], *, only: bool
) -> tuple[list[tuple[str, list[str]]], list[tuple[str, list[str]]]]:
    """Return the settings that differ, and apart from them those that one of the tasks alone reads (`only`: of several)."""
    of_tasks = [row for row in different if only and _is_of_task(row[0])]
    return [row for row in different if row not in of_tasks], of_tasks


def _best(
    of_row: Sequence[cards.Card | None], test: SameQuestions | None
) -> tuple[int | None, str]:
    """Return the index of the run that is better than all others, and why there is none, if the reason is chance.

    Two runs that were asked the same are tested in pairs; else a difference inside of the 95 % intervals of both may be
    chance.
    """
    measured = [card for card in of_row if card is not None and card.order is not None]
    if len(measured) < len(of_row) or not measured[0].better:
        return None, ""
    better = measured[0].better
    ranked = sorted(measured, key=lambda card: better * (card.order or 0), reverse=True)
    first = ranked[0]
    if first.order == ranked[1].order:
        return None, ""
    if test is not None:
        return (measured.index(first) if test.is_certain else None), test.test
    intervals = [card.interval for card in ranked]
    if any(intervals):
        for other in ranked[1:]:
            if first.interval is None or other.interval is None:
                return None, "not all have an interval"
            if _overlap(first, other):
                return None, "the 95 % intervals overlap"
    return measured.index(first), ""


def _obstacle(cautions: Mapping[str, str]) -> str:
    """Return why no run can be called better than another, "" if nothing is in the way."""
    if cautions["tasks"]:
        return "they learn different tasks"
    if cautions["data"]:
        return "their data differ"
    return ""


def _in_words(rows: Sequence[Row], names: Sequence[str], obstacle: str) -> str:
    """Return in a sentence which run is the best, or why none is."""
    if obstacle:
        return f"None can be called the best: {obstacle}."
    judged = [row for row in rows if row.is_judged]
    if not judged:
        return "None can be called the best: no evaluation is recorded in all of them."
    row = judged[0]
    measured = [card for card in row.values if card is not None]
    if len({card.value for card in measured}) == 1:
        return f"All are equally good: {row.label} {measured[0].value}."
    ranked = sorted(
        zip(measured, names, strict=True), key=lambda pair: row.better * (pair[0].order or 0)
    )
    first, name = ranked.pop()
    best = "highest" if row.better > 0 else "lowest"
    leads = f"{name} has the {best} {row.label}, {first.value}"
    if row.test is not None and row.best is None:
        return f"{leads}, but that may be chance: {row.test.test}."
    if row.test is not None:
        return f"{leads} against {_spread([card for card, _ in ranked])}: {row.test.test}."
    if row.best is None:
        return f"{leads}, but that may be chance: {_doubt(first, ranked)}."
    certain = "; its 95 % interval is apart from the others" if row.has_intervals else ""
    return f"{leads} against {_spread([card for card, _ in ranked])}{certain}."


def _doubt(first: cards.Card, others: Sequence[tuple[cards.Card, str]]) -> str:
    """Return the runs that may be as good as the first, and those that are not."""
    if first.interval is None or any(card.interval is None for card, _ in others):
        return "the best two are equal, or not all have an interval"
    near = [f"{name} ({card.value})" for card, name in others[::-1] if _overlap(first, card)]
    far = [f"{name} ({card.value})" for card, name in others[::-1] if not _overlap(first, card)]
    text = f"the 95 % interval of {' and '.join(near)} overlaps"
    if far:
        text += f". {' and '.join(far)} {'is' if len(far) == 1 else 'are'} behind for certain"
    return text


def _overlap(one: cards.Card, other: cards.Card) -> bool:
    """True if a difference of both may be chance."""
    if one.interval is None or other.interval is None:
        return True
    return one.interval[0] <= other.interval[1] and other.interval[0] <= one.interval[1]


def _spread(measured: Sequence[cards.Card]) -> str:
    """Return the lowest and the highest of these values."""
    ordered = sorted(measured, key=lambda card: card.order or 0)
    low, high = ordered[0].value, ordered[-1].value
    return low if low == high else f"{low} to {high}"


# Sections and keys that only some tasks read.
_OF_TASKS = ("classification", "preference", "grpo", "distill", "rewards")


def _is_of_task(key: str) -> bool:
    return key.partition(".")[0] in _OF_TASKS


# Runs of lengths that differ by this factor are laid over each other by their share, not by their steps.
_OTHER_LENGTH = 1.5


def _cautions(runs: Sequence[RunRecord], names: Sequence[str]) -> dict[str, str]:
    """Return sentences on what cannot be compared: tasks, data, lengths; "" for each that is the same."""
    lengths = [cards.last_step(run) for run in runs]
    shortest = min(lengths)
    longest = max(lengths)
    text = ""
    if longest > _OTHER_LENGTH * max(1, shortest):
        text = (
            f"Of {shortest:,} to {longest:,} steps, so that curves lie over the share of each run."
        )
    differ, about = _same_data(runs, names)
    return {
        "tasks": _other_tasks(runs),
        "data": about if differ else "",
        "lengths": text,
    }


def _run(
    index: int, name: str, run: RunRecord, differing: Sequence[tuple[str, list[str]]]
) -> dict[str, Any]:
    """Return what the page shows of one of the runs above its charts. `differing`: settings in which the runs differ."""
    shown = point(run)
    return {
        "name": name,
        "path": run.path,
        "state": cards.status(run),
        "sentence": _in_a_line(run),
        "letter": letter(index),
        "colour": index % COLOURS,
        "point": shown,
        "sure": sureness(run, shown) if shown else "",
        "cautions": cards.cautions_of(run),
        "told": [(_in_short(key), values[index]) for key, values in differing],
    }


def _in_a_line(run: RunRecord) -> str:
    """Return what a run learns, and how."""
    return f"{kind(run)} · {sentence(run)}"


def _in_short(key: str) -> str:
    """Return the last part of a setting's key, which says enough unless it is a letter: learning_rate, lora.r."""
    name = key.rpartition(".")[2]
    return name if len(name) > 2 else key


def _other_tasks(runs: Sequence[RunRecord]) -> str:
    """Return a warning that the runs learn different things, "" if they do not."""
    if len({run.config.task for run in runs}) < 2:
        return ""
    return (
        "Their losses and scores measure different things: each is shown against its own beginning."
    )


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
