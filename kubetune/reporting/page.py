"""The pages: what stands in them, as plain data for the templates. Writes one HTML file that asks for nothing else."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import BaseLoader, ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kubetune.base.files import write_atomic
from kubetune.base.humanize import counted, duration, number, place, share, short, size, unused_keys
from kubetune.base.logs import scrub
from kubetune.config.load import as_yaml, dotted_values, resolved
from kubetune.config.naming import prefers_greater
from kubetune.planning.forecast import quantization_of
from kubetune.reporting.charts import OF_SOURCE, Chart, charts_of, labels, letter, points_of
from kubetune.reporting.differences import differences
from kubetune.reporting.reading import RunRecord, read_run
from kubetune.reporting.search import SearchFacts, readable
from kubetune.reporting.verdict import verdict
from kubetune.rundir import exit_status
from kubetune.rundir.metrics import METRICS, mfu_sentence, now, versions

HERE = Path(__file__).parent
AXES = {"tokens": "tokens", "epoch": "epochs", "hours": "hours in steps"}
"""Axes that charts can be drawn over, other than steps."""
_EVALUATIONS = 24
_ANSWERS = 12
_CLASSES = 40
COLOURS = 12
"""Of lines and runs in the style sheet; runs beyond them are told apart by their letters alone."""


def write_report(run_dirs: Sequence[Path], output: Path, search: SearchFacts | None = None) -> Path:
    """The page of one run, or of several laid over each other, in `output`. Raises ConfigError for what is no run.

    `search`: what the runs are trials of; its page may have no run.
    """
    template, facts = page_of([read_run(folder, points_of(len(run_dirs))) for folder in run_dirs], search)
    write_atomic(output, scrub(render(template, **facts)))
    return output


def page_of(runs: Sequence[RunRecord], search: SearchFacts | None = None) -> tuple[str, dict[str, Any]]:
    """Template of the page of these runs, and what stands in it."""
    charts = charts_of(runs) if runs else []
    data = {"charts": [chart.to_json() for chart in charts], "axes": [run.numbers.axes for run in runs]}
    axes = [name for name in AXES if all(name in run.numbers.axes for run in runs)]
    common = {
        "charts": [_chart(chart) for chart in charts],
        "axes": {name: AXES[name] for name in axes},
        "data": Markup(json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")),
        "has_charts": bool(charts),
    }
    if search is not None and len(runs) < 2:
        return "search.html", {**common, "title": f"Search of {search.name}", "search": search}
    if len(runs) == 1:
        return "run.html", {**common, **_run_facts(runs[0])}
    return "compare.html", {**common, **_comparison(runs, search)}


@lru_cache(maxsize=1)
def environment(*first: BaseLoader) -> Environment:
    """Templates of this package, with those of `first` before them."""
    made = Environment(
        loader=ChoiceLoader([*first, PackageLoader("kubetune.reporting", "templates")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,  # a server that goes on over an upgrade keeps to its own
    )
    made.filters |= {
        function.__name__: function
        for function in (counted, duration, mfu_sentence, number, percent, place, readable, share, size)
    }
    return made


def style() -> str:
    """The style sheet of all pages; parts of bars are classes, since pages that are served have no inline styles."""
    parts = "".join(f".part-{n}{{--part:{n / 100:g}}}" for n in range(101))
    return (HERE / "templates" / "style.css").read_text("utf-8") + parts


def percent(part: float) -> int:
    """A part in whole per cent, as the classes `part-0` to `part-100` have it; what is not nothing has one."""
    return max(int(part > 0), min(100, round(100 * part)))


def render(template: str, **facts: Any) -> str:
    """A page from a template of this package, style and scripts inside."""
    parts = {
        "style": Markup(style()),
        "chart_style": Markup((HERE / "vendor" / "uPlot.min.css").read_text("utf-8")),
        "chart_library": Markup((HERE / "vendor" / "uPlot.iife.min.js").read_text("utf-8")),
        "chart_script": Markup((HERE / "templates" / "charts.js").read_text("utf-8")),
        "table_script": Markup((HERE / "templates" / "tables.js").read_text("utf-8")),
        "made": f"{now()[:16].replace('T', ' ')} UTC",
        "version": versions()["kubetune"],
    }
    return environment().get_template(template).render(**parts, **facts)


def _chart(chart: Chart) -> dict[str, Any]:
    heading, rows = chart.table()
    writers: dict[str, Callable[[Any], str]] = {"bytes": size, "percent": share}
    write = writers.get(chart.unit, number)
    return {
        "name": chart.name,
        "title": chart.title,
        "about": chart.about,
        "summary": _summary(chart, write),
        "heading": heading,
        "rows": [[number(step), *(write(value) for value in values)] for step, *values in rows],
        "markers": chart.markers,
        "scales": _scales(chart),
        "outliers": _outliers(chart, write),
    }


def _scales(chart: Chart) -> list[tuple[str, str]]:
    """The scales that a chart can be drawn with, the first at first."""
    return [
        *([("view", "without outliers")] if chart.view is not None else []),
        ("linear", "linear"),
        *([("logarithm", "logarithmic")] if chart.is_positive else []),
    ]


def _outliers(chart: Chart, write: Callable[[Any], str]) -> str:
    """The charts that are out of view at first, in a sentence; none is hidden without a word."""
    found = chart.outliers
    if not found:
        return ""
    shown = ", ".join(f"{write(value)} at step {step:,}" for value, step in found[:3])
    return f"Out of view: {shown}{f' and {len(found) - 3:,} more' if len(found) > 3 else ''}."


def _summary(chart: Chart, write: Callable[[Any], str]) -> str:
    """The chart in a sentence, for those who do not see it."""
    said = []
    for line in chart.lines:
        known = [(s, v) for s, v in zip(line.series.steps, line.shown(), strict=True) if v is not None]
        if line.kind not in ("raw", "rule") and known:
            low = min(known, key=lambda pair: pair[1])
            said.append(
                f"{line.label}: {write(known[0][1])} at step {known[0][0]:,}, {write(known[-1][1])} at step "
                f"{known[-1][0]:,}, lowest {write(low[1])} at step {low[0]:,}"
            )
    return "; ".join(said) + "."


def status(run: RunRecord) -> tuple[str, str]:
    """A word for how the run stands, and the reason."""
    if run.exit_status is None and run.report.get("finished"):
        return "done", ""  # by a rank that no agent watched
    if run.exit_status is None:
        return "unfinished", "it still runs, or was cut off before it could say why"
    return run.exit_status.state, run.exit_status.reason.removeprefix(exit_status.DONE).removeprefix(", ")


@dataclass(frozen=True)
class Card:
    """A number that a reader wants first, with a word on it. `order`: what runs are sorted by."""

    label: str
    value: str
    about: str = ""
    order: float | None = None


def _cards(run: RunRecord) -> list[Card]:
    report, known = run.report, run.numbers.totals
    best, steps = _best(run), _last_step(run)
    if report and report.get("steps") == steps:  # it counts what the disk has lost of the lines, too
        seconds, tokens, trained = (report.get(key) or 0 for key in ("seconds", "tokens", "trained_tokens"))
    else:
        seconds, tokens, trained = known.seconds, known.tokens, known.trained_tokens
    planned = run.plan.num_steps if run.plan else 0
    loss, first = known.last.get("loss"), f"{number(known.first.get('loss'))} at first" if known.steps else ""
    cards = [
        Card("Steps", number(steps), f"of {planned:,} planned" if planned else "", steps),
        Card("Training loss", number(loss), first, loss),
    ]
    if best is not None:
        name = run.config.training.metric_for_best_model
        what = name.removeprefix("eval_").replace("_", " ")
        cards.append(Card(f"Best {what}", number(best[name]), f"evaluation at step {best['step']:,}", best[name]))
    classifies = run.config.task == "sequence_classification"
    speed = tokens / seconds if seconds else None
    cards += [
        Card(
            "Tokens",
            short(tokens),
            f"{share(trained / tokens)} of them trained" if tokens and not classifies else "",
            tokens,
        ),
        Card("Time in steps", duration(seconds), "", seconds),
        Card("Tokens/s", number(speed), "without padding", speed),
    ]
    throughput = report.get("throughput") or {}
    if throughput.get("mfu") is not None:
        about = f"of {throughput['peak_tflops']:,.3g} TFLOP/s, {throughput['peak_source'].partition(':')[0]}"
        cards.append(Card("MFU", share(throughput["mfu"]), about, throughput["mfu"]))
    peak = report.get("peak_memory_bytes") or run.numbers.peak_memory_bytes
    cards.append(Card("Peak memory", size(peak), "highest of all ranks" if report else "rank 0", peak))
    return cards


def _last_step(run: RunRecord) -> int:
    """The last step that is known of, though its numbers may be lost."""
    known = [run.report.get("steps") or 0, *(found.step for found in run.checkpoints)]
    return max(*known, int(run.numbers.totals.last.get("step", 0)))


def _damage(run: RunRecord) -> list[str]:
    """Parts of the run that are not on the page, because a disk lost them."""
    last = _last_step(run)
    lost = last - run.numbers.totals.steps
    gap = f"{METRICS} lacks {lost:,} of {last:,} steps, and so do the curves"
    return [*run.damage, *([gap] if lost > 0 and not run.numbers.unread else [])]


def _best(run: RunRecord) -> dict[str, Any] | None:
    name = run.config.training.metric_for_best_model
    known = [line for line in run.evaluations if isinstance(line.get(name), (int, float))]
    if not known:
        return None
    return (max if prefers_greater(run.config.training) else min)(known, key=lambda line: line[name])


def _run_facts(run: RunRecord) -> dict[str, Any]:
    state, reason = status(run)
    best = _best(run)
    return {
        "run": run,
        "title": f"{run.name}: {run.model}, {run.plan.method if run.plan else 'fine-tuning'}",
        "state": state,
        "reason": reason,
        "damage": _damage(run),
        "cards": _cards(run),
        "sentence": _sentence(run),
        "evaluation": _evaluations(run),
        "best_step": best["step"] if best else None,
        "matrix": _matrix(run.evaluation),
        "verdict": verdict(run.verdict, run.benchmarks),
        "answers": run.answers[:_ANSWERS],
        "answer_count": len(run.answers),
        "splits": _splits(run),
        "ranks": _ranks(run),
        "config_text": as_yaml(run.config),
        "config_values": _values(run),
        "versions": run.report.get("versions") or {},
        "throughput": run.report.get("throughput") or {},
        "machine": _machine(run),
        "actuals": _actuals(run),
        "began": _moment(run.events[0]["time"]) if run.events else None,
        "ended": _moment(run.events[-1]["time"]) if run.events and run.exit_status else None,
    }


def _sentence(run: RunRecord) -> str:
    """Model, data and method of the run."""
    config, plan = run.config, run.plan
    how = f"LoRA of rank {config.lora.r}" if config.lora else "full fine-tuning"
    quantised = config.quantization if plan is None else quantization_of(config, plan)
    if quantised != "none":
        how += f" on a base in {quantised}"
    sources = ", ".join(Path(source.path).name for source in config.data.train)
    where = ""
    if plan is not None:
        device = "GPU" if plan.device == "cuda" else "CPU"
        processes = counted(plan.world_size, "process")
        about = "about " if plan.global_batch_tokens else ""
        where = f" {processes} on {device}, {about}{counted(plan.global_batch_size, 'sample')} a step."
    return f"{run.model}, {how}, on {sources}.{where}"


def _evaluations(run: RunRecord) -> dict[str, Any] | None:
    """The table of evaluations: all, or every n-th with the best and the last."""
    lines = run.evaluations
    if not lines:
        return None
    keys = [key for key in dict.fromkeys(key for line in lines for key in line) if key.startswith("eval_")]
    skipped, shown = 0, lines
    if len(lines) > _EVALUATIONS:
        best = _best(run)
        every = math.ceil(len(lines) / _EVALUATIONS)
        shown = [line for i, line in enumerate(lines) if i % every == 0 or line is best or line is lines[-1]]
        skipped = len(lines) - len(shown)
    return {
        "names": [_metric_name(key) for key in keys],
        "rows": [(line["step"], line.get("epoch"), [line.get(key) for key in keys]) for line in shown],
        "skipped": skipped,
    }


def _metric_name(key: str) -> str:
    """A metric as the page says it; the loss of one source by the source's name."""
    if key.startswith(OF_SOURCE):
        return f"loss of {key.removeprefix(OF_SOURCE)}"
    return key.removeprefix("eval_").replace("_", " ")


def _matrix(evaluation: Mapping[str, Any]) -> dict[str, Any] | None:
    """A confusion matrix with the share of each row, for shading."""
    counts, names = evaluation.get("confusion"), evaluation.get("names", [])
    if not counts or len(counts) > _CLASSES:
        return None
    rows = [
        (name, [(count, count / max(1, sum(row))) for count in row], row[i] / max(1, sum(row)))
        for i, (name, row) in enumerate(zip(names, counts, strict=True))
    ]
    right = sum(row[i] for i, row in enumerate(counts))
    total = sum(map(sum, counts))
    where = {name: evaluation.get(name) for name in ("checkpoint", "data")}
    return {"names": names, "rows": rows, "right": right, "total": total, **where}


def _splits(run: RunRecord) -> list[dict[str, Any]]:
    """Statistics and lengths of each split; bars as shares of the fullest."""
    found = []
    for split, stats in (run.data.get("splits") or {}).items():
        lengths = fold(stats.get("lengths") or [])
        most = max((count for _, _, count in lengths), default=1)
        found.append(
            {
                "name": split,
                "stats": stats,
                "files_not_read": unused_keys(stats.get("files_not_read", {}), "files not read"),
                "bars": [(low, high, count, count / max(1, most)) for low, high, count in lengths],
            }
        )
    return found


def fold(lengths: Sequence[Sequence[int]], limit: int | None = None) -> list[Sequence[int]]:
    """Bars of a histogram with every run of three or more empty ones as one; none reaches across `limit`."""
    folded: list[Sequence[int]] = []
    empty: list[Sequence[int]] = []
    for bar in [*lengths, None]:
        if bar is not None and not bar[2] and not (empty and limit is not None and empty[-1][1] == limit):
            empty.append(bar)
            continue
        folded += [[empty[0][0], empty[-1][1], 0]] if len(empty) > 2 else empty
        empty = [bar] if bar is not None and not bar[2] else []
        if bar is not None and bar[2]:
            folded.append(bar)
    return folded


def _actuals(run: RunRecord) -> list[tuple[str, str, str, float | None, str]]:
    """Forecast and actuals: label, both, the relative error, and a word on it."""
    found, preflight, rows = run.report.get("actuals") or {}, run.report.get("preflight") or {}, []
    if preflight.get("forecast_bytes"):
        expected, measured = preflight["forecast_bytes"], preflight["measured_bytes"]
        about = f"longest batch ({number(preflight['tokens'])} tokens), an evaluation and a save, before step 1"
        rows.append(("Peak memory, preflight", size(expected), size(measured), measured / expected - 1, about))
    if memory := found.get("memory"):
        values = size(memory["forecast_bytes"]), size(memory["measured_bytes"])
        rows.append(("Peak memory", *values, memory["relative_error"], "of the largest rank"))
    if hours := found.get("hours"):
        expected = None if hours["forecast"] is None else hours["forecast"] * 3600
        source = hours["source"]
        about = f"by {source}" if expected is not None else f"no forecast; {source.removeprefix('unknown: ')}"
        steps = duration(hours["step_hours"] * 3600)
        rows.append(("Time in steps", duration(expected), steps, hours["relative_error"], about))
        total = duration(hours["total_hours"] * 3600)
        rows.append(("Time in all", "–", total, None, "loading, evaluations and saves too"))
    if price := found.get("price"):
        about = f"for the steps, at {price['per_device_hour']:g} a device and hour; {price['total']:,.2f} in all"
        forecast = "–" if price["forecast"] is None else f"{price['forecast']:,.2f}"
        rows.append(("Price", forecast, f"{price['steps']:,.2f}", price["relative_error"], about))
    return rows


def _ranks(run: RunRecord) -> dict[str, Any] | None:
    """Table of how long each rank computed, and how often the others waited for it."""
    found = run.numbers.ranks
    if found is None:
        return None
    longest = max(*found.means, 1e-12)
    return {
        "rows": [
            (rank, mean, mean / longest, slowest)
            for rank, (mean, slowest) in enumerate(zip(found.means, found.slowest, strict=True))
        ],
        "lost": found.lost,
    }


def _machine(run: RunRecord) -> list[tuple[str, str]]:
    """Machine and command of the run, as the last start recorded it."""
    found = run.machine
    if not found:
        return []
    gpus = Counter(str(name) for name in found.get("gpus") or ())
    commit, dirty = found.get("git_commit"), found.get("git_dirty")
    rows = [
        ("host", found.get("host")),
        ("system", found.get("system")),
        ("CPU", f"{found.get('cpu')}, {counted(found.get('cores') or 0, 'usable core')}"),
        ("memory", size(found.get("memory_bytes"))),
        (
            "GPU",
            ", ".join(f"{count} × {name}" for name, count in gpus.items()) or "none: this machine has only its CPU",
        ),
        ("NVIDIA driver", found.get("driver")),
        ("versions", ", ".join(f"{name} {said}" for name, said in (found.get("versions") or {}).items())),
        ("git commit", commit and f"{commit}{', with changes that are not committed' if dirty else ''}"),
        ("started by", found.get("command")),
    ]
    return [(label, str(value)) for label, value in rows if value]


def _values(run: RunRecord) -> list[tuple[str, str]]:
    return [(key, json.dumps(value, ensure_ascii=False)) for key, value in dotted_values(resolved(run.config))]


def _moment(time: str) -> str:
    return datetime.fromisoformat(time).strftime("%Y-%m-%d %H:%M UTC")


def _comparison(runs: Sequence[RunRecord], search: SearchFacts | None) -> dict[str, Any]:
    """Runs side by side: results, and the settings in which they differ."""
    names = labels(runs)
    cards = [{card.label: card for card in (*_cards(run), *_judged(run))} for run in runs]
    different, common = differences([resolved(run.config) for run in runs])
    packages, _ = differences([run.report.get("versions") or {} for run in runs])
    return {
        "title": f"Search of {search.name}" if search is not None else " · ".join(names),
        "search": search,
        "runs": [
            {
                "name": name,
                "path": run.path,
                "state": status(run),
                "sentence": _sentence(run),
                "letter": letter(i),
                "colour": i % COLOURS,
            }
            for i, (name, run) in enumerate(zip(names, runs, strict=True))
        ],
        "headings": list(dict.fromkeys(label for found in cards for label in found)),
        "cards": cards,
        "settings": different,
        "common": common,
        "packages": packages,
        "same_data": _same_data(runs, names),
        "damage": [(name, line) for name, run in zip(names, runs, strict=True) for line in _damage(run)],
        "answers": _answers(runs),
    }


def _judged(run: RunRecord) -> list[Card]:
    """Measures of the answers of the best checkpoint, with their intervals."""
    found = verdict(run.verdict, run.benchmarks)
    rows = [row for row in found["rows"] if "after_interval" in row] if found else []
    return [
        Card(
            row["name"].removeprefix("eval_").replace("_", " "),
            number(row["best"]),
            "95 %: {:.3g}–{:.3g}".format(*row["after_interval"]),
            row["best"],
        )
        for row in rows
    ]


def _same_data(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    """Sameness of the rows that the runs were trained on, in a sentence; those that have not recorded it are named."""
    found = [run.report.get("data_fingerprint") or run.data.get("fingerprint") for run in runs]
    unknown = [name for name, fingerprint in zip(names, found, strict=True) if not fingerprint]
    if len({fingerprint for fingerprint in found if fingerprint}) > 1:
        return "The prepared data differ, so losses are not of the same rows."
    if unknown:
        return (
            f"Whether the prepared data are the same is not known: no fingerprint is recorded in {', '.join(unknown)}."
        )
    return "All have the same prepared data."


def _answers(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Requests, with what each run answers to them."""
    found: dict[str, dict[str, Any]] = {}
    for i, run in enumerate(runs):
        for line in run.answers:
            entry = found.setdefault(line["prompt"], {"request": line, "answers": [None] * len(runs)})
            entry["answers"][i] = line["after"]
    return sorted(found.values(), key=lambda entry: entry["answers"].count(None))[:_ANSWERS]
