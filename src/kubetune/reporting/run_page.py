"""Contents of the page of one run, as plain data for its template."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from kubetune.base.humanize import counted, duration, number, size
from kubetune.config.resolved import as_yaml, dotted_values, resolved
from kubetune.reporting import cards
from kubetune.reporting.answers_over_time import (
    SECTION,
    ShownAnswer,
    ShownRollouts,
    shown_rollouts,
)
from kubetune.reporting.hero import facts_line, hero
from kubetune.reporting.histogram import DrawnBar, shared_bars
from kubetune.reporting.look.metric_values import label_of
from kubetune.reporting.point import chosen_by, measure, point, test_in_words
from kubetune.reporting.point_details.kept_answers import weakest
from kubetune.reporting.reading import OF_SOURCE, RunRecord, metric_keys
from kubetune.reporting.run_sentence import kind, sentence
from kubetune.reporting.verdict_lines import ShownVerdict, verdict

# Limits of a page, so that it can still be read.
MOST_EVALUATIONS = 24  # rows of the table of evaluations
MOST_ANSWERS = 12  # answers before and after training
MOST_CLASSES = 40  # rows of a confusion matrix
MOST_CONFUSIONS = 8  # of one class with another, told in words

# Forecast and actual of one quantity: label, both as text, relative error, a remark.
Row = tuple[str, str, str, float | None, str]


def run_facts(run: RunRecord) -> dict[str, Any]:
    """Return what the template `run.html` needs, but for the charts."""
    state, reason = cards.status(run)
    best = run.of_best
    method = run.plan.method if run.plan else "fine-tuning"

    began = None
    if run.events:
        began = _moment(run.events[0]["time"])
    ended = None
    if run.ended:
        ended = _moment(run.ended)

    evaluation = _evaluations(run)
    shown = hero(run)
    facts = facts_line(run, shown)
    rollouts = None
    config = run.config
    if config.draws_answers:
        rollouts = shown_rollouts(run.path, config.rewards, SECTION)
        drawn = [answer.reward for answer in _answers(rollouts) if answer.reward is not None]
        if drawn:
            facts.append(f"reward of the best answer shown {number(max(drawn))}")

    return {
        "run": run,
        "rollouts": rollouts,
        "title": f"{run.name}: {run.model}, {method}",
        "state": state,
        "reason": reason,
        "damage": cards.damage(run),
        "cautions": cards.cautions_of(run),
        "hero": shown,
        "facts_line": facts,
        "more_cards": cards.cards(run),
        "kind": kind(run),
        "sentence": sentence(run),
        "evaluation": evaluation,
        "best_step": best["step"] if best else None,
        "best_by": chosen_by(run) if best else "",
        "matrix": _confusion_matrix(run.evaluation),
        "weakest": weakest(run),
        "verdict": _without_repeats(verdict(run.verdict, run.benchmarks), evaluation),
        "answers": run.answers[:MOST_ANSWERS],
        "answer_count": len(run.answers),
        **_data_facts(run),
        "ranks": _ranks(run),
        "config_text": as_yaml(config),
        "config_values": _config_values(resolved(config)),
        "versions": run.report.get("versions") or {},
        "throughput": run.report.get("throughput") or {},
        "machine": _machine(run),
        "actuals": _actuals(run),
        "began": began,
        "ended": ended,
    }


def _answers(rollouts: ShownRollouts) -> Iterator[ShownAnswer]:
    """Yield each answer that the page shows."""
    for prompt in rollouts.prompts:
        for step in prompt.steps:
            yield from step.answers


def _evaluations(run: RunRecord) -> dict[str, Any] | None:
    """Return the table of evaluations: all, or every n-th with the best and the last."""
    lines = run.measurements
    if not lines:
        return None

    shown = lines
    if len(lines) > MOST_EVALUATIONS:
        best = run.of_best["step"] if run.of_best else None
        # With 60 evaluations, every third is shown.
        every = math.ceil(len(lines) / MOST_EVALUATIONS)
        shown = []
        for index, line in enumerate(lines):
            if index % every == 0 or line["step"] == best or line is lines[-1]:
                shown.append(line)

    keys = _ordered_keys(run)
    rows = []
    for line in shown:
        values = [line.get(key) for key in keys]
        rows.append((line["step"], line.get("epoch"), values))
    return {
        "metrics": keys,
        "names": [_metric_name(key) for key in keys],
        "rows": rows,
        "certainty": _certainty(run, keys),
        "skipped": len(lines) - len(shown),
    }


def _ordered_keys(run: RunRecord) -> list[str]:
    """Return the metrics of a run's evaluations, that which it is about first."""
    about = point(run)
    keys = metric_keys(run.measurements)
    if about and about.name in keys:
        keys.remove(about.name)
        keys.insert(0, about.name)
    return keys


def _certainty(run: RunRecord, keys: Sequence[str]) -> list[tuple[str, str, str, str]]:
    """Return how sure each metric of the best checkpoint is: interval, rows better and worse, test against step 0.

    Metrics of which nothing of that is known are left out.
    """
    shown = []
    for key in keys:
        value = measure(run, run.of_best or {}, key)
        if value is None:
            continue
        test = value.test or {}
        change = f"+{test['gained']:,} −{test['lost']:,}" if "gained" in test else "–"
        if value.interval_text or test:
            texts = (value.interval_text or "–", change, test_in_words(test) or "–")
            shown.append((_metric_name(key), *texts))
    return shown


def _without_repeats(
    judged: ShownVerdict | None, evaluation: Mapping[str, Any] | None
) -> ShownVerdict | None:
    """Return the verdict without what the table of evaluations says: it has the same checkpoint and step 0."""
    steps = [step for step, _, _ in evaluation["rows"]] if evaluation else []
    if judged is None or evaluation is None or 0 not in steps or judged.step not in steps:
        return judged
    rows = [row for row in judged.rows if row["name"] not in evaluation["metrics"]]
    return replace(judged, rows=rows)


def _metric_name(key: str) -> str:
    """Return a metric's name for the page; the loss of one source has the source's name."""
    if key.startswith(OF_SOURCE):
        return f"loss of {key.removeprefix(OF_SOURCE)}"
    return label_of(key)


def _confusion_matrix(evaluation: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the confusion matrix with each count's share of its row, for shading.

    A row is a true class, a column a predicted one:

        counts      rows
        8 2         (8, 0.8) (2, 0.2)   8 of 10 are right
        1 3         (1, 0.25) (3, 0.75) 3 of 4 are right
    """
    counts = evaluation.get("confusion")
    names = evaluation.get("names", [])
    if not counts or len(counts) > MOST_CLASSES:
        return None

    rows = []
    wrong = []
    right = 0
    total = 0
    for index, (name, row) in enumerate(zip(names, counts, strict=True)):
        of_class = max(1, sum(row))  # a class may have no samples
        shaded = [(count, count / of_class) for count in row]
        rows.append((name, shaded, row[index] / of_class if sum(row) else None))
        right += row[index]
        total += sum(row)
        for predicted, (count, part) in zip(names, shaded, strict=True):
            if predicted != name and count:
                wrong.append((name, predicted, count, part))

    wrong.sort(key=lambda confusion: -confusion[2])
    return {
        "names": names,
        "rows": rows,
        "wrong": wrong[:MOST_CONFUSIONS],
        "right": right,
        "total": total,
        "checkpoint": evaluation.get("checkpoint"),
        "data": evaluation.get("data"),
    }


def _data_facts(run: RunRecord) -> dict[str, Any]:
    """Return what became of the records, how long the rows are, and what is to be known about them."""
    splits = run.data.get("splits") or {}
    return {
        "splits": [{"name": name, "stats": stats} for name, stats in splits.items()],
        "lengths": _lengths(run),
        # A row has two sequences.
        "is_paired": run.config.record_kind in ("pair", "graded"),
        "findings": run.data.get("findings"),
    }


def _lengths(run: RunRecord) -> list[tuple[list[str], list[tuple[int, int, list[DrawnBar]]]]]:
    """Return how long the rows are: the names of splits whose bars are of one width, and their bars."""
    # Nothing, before the data were prepared.
    histograms = {}
    for name, stats in (run.data.get("splits") or {}).items():
        if stats.get("lengths"):
            histograms[name] = stats["lengths"]

    widths = {high - low for bars in histograms.values() for low, high, _ in bars}
    if len(widths) > 1:
        return [([name], shared_bars(bars)) for name, bars in histograms.items()]
    return [(list(histograms), shared_bars(*histograms.values()))] if histograms else []


def _actuals(run: RunRecord) -> list[Row]:
    """Return forecast and actual of memory, hours and price."""
    # Each may be missing: a run that was cut off has no report, one that was not forecast no forecast.
    rows: list[Row] = []
    actuals = run.report.get("actuals") or {}
    preflight = run.report.get("preflight") or {}
    if preflight.get("forecast_bytes"):
        rows.append(_preflight_row(preflight))
    if actuals.get("memory"):
        rows.append(_memory_row(actuals["memory"]))
    if actuals.get("hours"):
        rows += _hours_rows(actuals["hours"])
    if actuals.get("price"):
        rows.append(_price_row(actuals["price"]))
    return rows


def _memory_row(memory: Mapping[str, Any]) -> Row:
    """Return the highest memory of the training."""
    forecast = size(memory["forecast_bytes"])
    measured = size(memory["measured_bytes"])
    return "Peak memory", forecast, measured, memory["relative_error"], "of the largest rank"


def _preflight_row(preflight: Mapping[str, Any]) -> Row:
    """Return the memory of the trial before the first step."""
    forecast = preflight["forecast_bytes"]
    measured = preflight["measured_bytes"]
    tokens = number(preflight["tokens"])
    about = f"longest batch ({tokens} tokens), an evaluation and a save, before step 1"
    error = measured / forecast - 1
    return "Peak memory, preflight", size(forecast), size(measured), error, about


def _hours_rows(hours: Mapping[str, Any]) -> list[Row]:
    """Return the hours of steps, which are forecast, and of the whole run, which are not."""
    source = hours["source"]
    steps = duration(hours["step_hours"] * 3600)
    total = duration(hours["total_hours"] * 3600)
    if hours["forecast"] is None:
        forecast = duration(None)
        about = f"no forecast; {source.removeprefix('unknown: ')}"
    else:
        forecast = duration(hours["forecast"] * 3600)
        about = f"by {source}"

    return [
        ("Time in steps", forecast, steps, hours["relative_error"], about),
        ("Time in all", "–", total, None, "loading, evaluations and saves too"),
    ]


def _price_row(price: Mapping[str, Any]) -> Row:
    """Return the price of the steps, and in the remark the price of the whole run."""
    rate = f"{price['per_device_hour']:g} a device and hour"
    about = f"for the steps, at {rate}; {price['total']:,.2f} in all"
    forecast = "–" if price["forecast"] is None else f"{price['forecast']:,.2f}"
    return "Price", forecast, f"{price['steps']:,.2f}", price["relative_error"], about


def _ranks(run: RunRecord) -> dict[str, Any] | None:
    """Return how long each rank computed, and how often the others waited for it."""
    ranks = run.numbers.ranks
    if ranks is None:
        return None
    # The length of a rank's bar is its share of the slowest rank's.
    longest = max(*ranks.means, 1e-12)
    rows = []
    for rank, (mean, slowest) in enumerate(zip(ranks.means, ranks.slowest, strict=True)):
        rows.append((rank, mean, mean / longest, slowest))
    return {"rows": rows, "lost": ranks.lost}


def _machine(run: RunRecord) -> list[tuple[str, str]]:
    """Return machine and command of the run, as its last start recorded them."""
    # A run that never started has none.
    machine = run.machine
    if not machine:
        return []

    # Eight GPUs of one kind are a line "8 × NVIDIA H100".
    gpu_counts = Counter(str(name) for name in machine.get("gpus") or ())
    gpus = ", ".join(f"{count} × {name}" for name, count in gpu_counts.items())
    cores = counted(machine.get("cores") or 0, "usable core")
    packages = (machine.get("versions") or {}).items()

    commit = machine.get("git_commit")
    if commit and machine.get("git_dirty"):
        commit += ", with changes that are not committed"

    rows = [
        ("host", machine.get("host")),
        ("system", machine.get("system")),
        ("CPU", f"{machine.get('cpu')}, {cores}"),
        ("memory", size(machine.get("memory_bytes"))),
        ("GPU", gpus or "none: this machine has only its CPU"),
        ("NVIDIA driver", machine.get("driver")),
        ("versions", ", ".join(f"{name} {version}" for name, version in packages)),
        ("git commit", commit),
        ("started by", machine.get("command")),
    ]
    # A value that a machine does not tell has no row.
    return [(label, str(value)) for label, value in rows if value]


def _config_values(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return every setting with its value as JSON. `settings`: the config with its defaults filled in."""
    values = dotted_values(settings)
    return [(key, json.dumps(value, ensure_ascii=False)) for key, value in values]


def _moment(time: str) -> str:
    return datetime.fromisoformat(time).strftime("%Y-%m-%d %H:%M UTC")
