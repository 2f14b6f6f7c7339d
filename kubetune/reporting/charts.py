"""The charts of a page as data: what each shows, its columns, and its numbers as words and a short table.

Drawing is charts.js's; colours are the style sheet's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any

from kubetune.reporting.numbers import SKEW
from kubetune.reporting.reading import POINTS, Incident, Lines, RunRecord
from kubetune.reporting.series import Number, Series, merge, shorten, smooth

OF_SOURCE = "eval_loss/"
"""Beginning of the key of the evaluation loss of one source."""
_TABLE_ROWS = 10
_LINES = 8
"""As many as one chart of scores can hold and still be read; more are drawn in charts of their own."""


@dataclass(frozen=True)
class Line:
    """One line of a chart. `colour` and `dash`: their numbers; `mark`: the letter of its run, drawn on it, where there
    are several; `kind`: `line`, `raw`, `smooth` (charts.js smooths it), `points` or `rule`; `band`: the lowest and
    highest behind a mean."""

    label: str
    series: Series
    colour: int = 0
    kind: str = "line"
    band: bool = True
    dash: int = 0
    run: int = 0
    mark: str = ""

    def shown(self) -> Sequence[Number]:
        """The values as they are drawn at first."""
        return smooth(self.series.values, span_of(self.series)) if self.kind == "smooth" else self.series.values


def span_of(series: Series) -> float:
    """Number of values that a smoothed line looks back."""
    return max(1.0, len(series.steps) / 80)


@dataclass(frozen=True)
class Chart:
    """`unit` is how values are written: `fixed`, `short`, `exponent`, `bytes` or `percent`; `axis`: what they are."""

    name: str
    title: str
    unit: str
    lines: Sequence[Line]
    about: str = ""
    axis: str = ""
    markers: Sequence[dict[str, Any]] = field(default_factory=tuple)

    def to_json(self) -> dict[str, Any]:
        """The chart as charts.js draws it."""
        parts: list[Series] = []
        columns: list[Sequence[Number]] = []
        drawn: list[dict[str, Any]] = []
        bands: list[list[int]] = []
        for line in self.lines:
            series = line.series
            parts.append(series)
            columns.append(series.values)
            look = {"colour": line.colour, "run": line.run}
            drawn.append({"label": line.label, "kind": line.kind, "dash": line.dash, "mark": line.mark, **look})
            if line.band and series.low is not None and series.high is not None:
                at = len(drawn)
                parts += [series, series]
                columns += [series.high, series.low]
                drawn += [{"label": f"{line.label}, highest", "kind": "edge", **look},
                          {"label": f"{line.label}, lowest", "kind": "edge", **look}]  # fmt: skip
                bands.append([at + 1, at + 2])
        return {
            "name": self.name,
            "title": self.title,
            "unit": self.unit,
            "axis": self.axis or self.title,
            "lines": drawn,
            "bands": bands,
            "data": merge(parts, columns),
            "markers": list(self.markers),
            "view": self.view,
        }

    @property
    def extremes(self) -> list[tuple[float, int]]:
        """All values that are drawn, with their steps; the edges of bands instead of the means between them."""
        found: list[tuple[float, int]] = []
        for line in self.lines:
            series = line.series
            banded = line.band and series.low is not None and series.high is not None
            if line.kind in ("rule", "smooth") and any(other.kind == "raw" for other in self.lines):
                continue
            for values in (series.low, series.high) if banded else (series.values,):
                found += [(v, s) for v, s in zip(values or (), series.steps, strict=True) if v is not None]
        return found

    @property
    def view(self) -> list[float] | None:
        """The range of the values without outliers; None where there are none."""
        found = sorted(value for value, _ in self.extremes)
        if len(found) < 20:
            return None
        low, high = found[len(found) // 50], found[-1 - len(found) // 50]
        reach = 3 * (high - low) or abs(high)
        if found[-1] <= high + reach and found[0] >= low - reach:
            return None
        inside = [value for value in found if low - reach <= value <= high + reach]
        return [inside[0], inside[-1]]

    @property
    def outliers(self) -> list[tuple[float, int]]:
        """Values out of `view`, with their steps, the highest first."""
        view = self.view
        if view is None:
            return []
        return sorted({pair for pair in self.extremes if not view[0] <= pair[0] <= view[1]}, reverse=True)

    @property
    def is_positive(self) -> bool:
        """A logarithmic scale can show all of it."""
        return all(value > 0 for value, _ in self.extremes)

    def table(self) -> tuple[list[str], list[list[Any]]]:
        """A few rows that say what the lines look like: heading and rows, the first column is the step."""
        shown = [line for line in self.lines if line.kind != "rule"]
        heading = ["step", *(line.label for line in shown)]
        axis = sorted({step for line in shown for step in line.series.steps})
        if len(axis) > _TABLE_ROWS:
            axis = [axis[round(i * (len(axis) - 1) / (_TABLE_ROWS - 1))] for i in range(_TABLE_ROWS)]
        lookups = [dict(zip(line.series.steps, line.shown(), strict=True)) for line in shown]
        return heading, [[step, *(found.get(step) for found in lookups)] for step in axis]


def charts_of(runs: Sequence[RunRecord]) -> list[Chart]:
    """The charts of one run, or the same of several on top of each other."""
    marks = markers(runs[0].incidents) if len(runs) == 1 else []
    makers: list[Callable[[Sequence[RunRecord]], Chart | None]] = [
        _loss,
        _rate,
        _norm,
        _speed,
        _memory,
        _skew,
        _busy,
        _machine_memory,
        _disk,
    ]
    found = [chart for make in makers if (chart := make(runs)) is not None]
    return [
        replace(_naming_those_without(chart, runs), markers=marks)
        for chart in (*found[:1], *_comparisons(runs), *found[1:], *_source_losses(runs), *_scores(runs))
    ]


def _naming_those_without(chart: Chart, runs: Sequence[RunRecord]) -> Chart:
    """The chart with a word on runs that have nothing to draw in it."""
    names = labels(runs)
    lacking = [names[i] for i in range(len(runs)) if i not in {line.run for line in chart.lines}]
    if not lacking or len(runs) == 1:
        return chart
    said = f"Not recorded: {', '.join(lacking)}."
    return replace(chart, about=f"{chart.about} {said}".strip())


def points_of(runs: int) -> int:
    """Points of each curve where so many runs are laid over each other."""
    return max(100, POINTS // runs)


def markers(incidents: Iterable[Incident]) -> list[dict[str, Any]]:
    """Vertical lines at the steps where something happened; what shares a step shares a line."""
    by_step: dict[int, list[Incident]] = {}
    for incident in incidents:
        if incident.step is not None:
            by_step.setdefault(incident.step, []).append(incident)
    return [
        {
            "step": step,
            "text": "; ".join(f"{i.what}: {i.detail}" for i in found),
            "error": any(i.is_error for i in found),
        }
        for step, found in sorted(by_step.items())
    ]


def column(lines: Lines, key: str, points: int, scale: float = 1.0) -> Series | None:
    """One key of all lines that have it; None where none does."""
    having = [(line["step"], line[key]) for line in lines if key in line]
    if not any(value is not None for _, value in having):
        return None
    return shorten(
        [step for step, _ in having], [None if value is None else value * scale for _, value in having], points
    )


def labels(runs: Sequence[RunRecord]) -> list[str]:
    """Names that tell runs apart: their own, or as much of their paths as is needed."""
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    for depth in range(1, 8):
        names = [str(Path(*run.path.absolute().parts[-depth:])) for run in runs]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(names, 1)]


def letter(number: int) -> str:
    """A run among several in a sign or two: A, B, …, Z, AA, AB, …"""
    return (letter(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


def _line(runs: Sequence[RunRecord], run: int, what: str, series: Series, metric: int = 0, **more: Any) -> Line:
    """A line of one of several runs has the colour and the letter of its run; metrics differ by dash."""
    if len(runs) == 1:
        return Line(what, series, metric, dash=metric, **more)
    return Line(
        f"{letter(run)} {labels(runs)[run]}: {what}", series, run, dash=metric, run=run, mark=letter(run), **more
    )


def _loss(runs: Sequence[RunRecord]) -> Chart | None:
    lines = []
    for run, record in enumerate(runs):
        raw = record.numbers.curves.get("loss")
        if raw is not None and len(runs) == 1:
            lines.append(Line("training loss", raw, kind="raw"))
            lines.append(Line("smoothed", raw, kind="smooth", band=False))
        elif raw is not None:
            lines.append(_line(runs, run, "training loss", raw, kind="smooth", band=False))
        evaluated = column(record.evaluations, "eval_loss", points_of(len(runs)))
        if evaluated is not None:
            lines.append(_line(runs, run, "evaluation loss", evaluated, 1, kind="points"))
    about = "Training loss smoothed." if len(runs) > 1 and lines else ""
    return Chart("loss", "Loss", "fixed", lines, about, _loss_axis(runs)) if lines else None


def _loss_axis(runs: Sequence[RunRecord]) -> str:
    """Label of the axis of losses: of a token of a text that is written, or of a whole sample that is told apart."""
    named = {"labelled": "a sample", "pair": "a pair", "graded": "a pair", "judged": "an answer"}
    found = {named.get(run.config.record_kind, "a token") for run in runs}
    return f"loss {found.pop()}" if len(found) == 1 else "loss"


def _of_steps(
    name: str, title: str, unit: str, key: str, *, about: str = ""
) -> Callable[[Sequence[RunRecord]], Chart | None]:
    def make(runs: Sequence[RunRecord]) -> Chart | None:
        lines = [
            _line(runs, run, title.lower(), found, band=len(runs) == 1)
            for run, record in enumerate(runs)
            if (found := record.numbers.curves.get(key)) is not None
        ]
        return Chart(name, title, unit, lines, about) if lines else None

    return make


_rate = _of_steps("rate", "Learning rate", "exponent", "learning_rate")
_memory = _of_steps(
    "memory", "Peak memory", "bytes", "peak_memory_bytes",
    about="Highest so far on rank 0: allocated on the GPU, or resident in memory without one.",
)  # fmt: skip


def _norm(runs: Sequence[RunRecord]) -> Chart | None:
    chart = _of_steps("norm", "Gradient norm", "fixed", "grad_norm", about="Before clipping.")(runs)
    limit = runs[0].config.training.max_grad_norm
    if chart is None or len(runs) > 1 or not limit:
        return chart
    steps = chart.lines[0].series.steps
    rule = Line(f"clipped to {limit:g}", Series([steps[0], steps[-1]], [limit, limit]), 2, "rule")
    return replace(chart, lines=[*chart.lines, rule])


def _speed(runs: Sequence[RunRecord]) -> Chart | None:
    lines = []
    for run, record in enumerate(runs):
        for metric, (key, what) in enumerate(
            [("tokens_per_second", "tokens/s"), ("trained_tokens_per_second", "trained tokens/s")]
        ):
            found = record.numbers.curves.get(key)
            if metric and (len(runs) > 1 or record.config.task == "sequence_classification"):
                continue
            if found is not None:
                lines.append(_line(runs, run, what, found, metric, band=len(runs) == 1 and not metric))
    about = "Tokens of the data, without padding"
    about += "; trained ones are those with a loss." if any("trained" in line.label for line in lines) else "."
    return Chart("speed", "Tokens per second", "short", lines, about, "tokens/s") if lines else None


def _skew(runs: Sequence[RunRecord]) -> Chart | None:
    if len(runs) > 1:
        return None
    series = runs[0].numbers.curves.get(SKEW)
    if series is None:
        return None
    about = "How much shorter the fastest rank computed than the slowest, for which all others wait."
    return Chart("skew", "Skew between ranks", "percent", [Line("skew", series)], about, "share of the step")


_COMPARED = {
    ("accuracy",): ("Accuracy", "Share of the answers that are told apart rightly."),
    ("margin", "reward_chosen", "reward_rejected"): ("Rewards", "The margin is that of the chosen over the rejected."),
    ("logp_chosen", "logp_rejected"): ("Log-probabilities of answers", ""),
    ("expert_load_max", "expert_load_cv"): (
        "Load of the experts",
        "Of the fullest, as a multiple of the mean, in the worst layer; and standard deviation over mean.",
    ),
    ("router_aux_loss",): ("Balance loss of the routers", "Number of experts a token visits, where all are equal."),
    ("router_z_loss",): ("z-loss of the routers", "Square of the logarithm of their logits' summed exponentials."),
    ("kl",): ("KL", "How far the model has moved from what it was, by answers to other questions."),
}
"""Measures of steps and evaluations beside the loss, chart by chart, with titles and what to say of them."""


def _comparisons(runs: Sequence[RunRecord]) -> list[Chart]:
    """Measures of how answers are told apart, of training smoothed, and of evaluations."""
    charts = []
    for names, (title, about) in _COMPARED.items():
        lines = []
        for metric, name in enumerate(names):
            for run, record in enumerate(runs):
                if (steps := record.numbers.curves.get(name)) is None:
                    continue
                what = name.replace("_", " ")
                lines.append(_line(runs, run, what, steps, 2 * metric, kind="smooth", band=False))
                evaluated = column(record.evaluations, f"eval_{name}", points_of(len(runs)))
                if evaluated is not None:
                    lines.append(_line(runs, run, f"evaluation {what}", evaluated, 2 * metric + 1, kind="points"))
        if lines:
            charts.append(Chart(names[-1], title, "fixed", lines, f"{about} Training smoothed.".strip()))
    return charts


def _scores(runs: Sequence[RunRecord]) -> list[Chart]:
    """Metrics of evaluations other than the loss: shares in one chart, where they are few, and each other in its own.

    One run is drawn from three evaluations on, as its table has them all; several are compared from the first.
    """
    most = max(len(record.evaluations) for record in runs)
    if most < (3 if len(runs) == 1 else 1):
        return []
    found: dict[str, list[tuple[int, Series]]] = {}
    for run, record in enumerate(runs):
        for key in dict.fromkeys(key for line in record.evaluations for key in line if key.startswith("eval_")):
            is_drawn = key.removeprefix("eval_") in record.numbers.curves
            if key not in ("eval_loss", "eval_perplexity") and not is_drawn and not key.startswith(OF_SOURCE):
                numbers = [line for line in record.evaluations if isinstance(line.get(key), (int, float, NoneType))]
                if (series := column(numbers, key, points_of(len(runs)))) is not None:
                    found.setdefault(key, []).append((run, series))
    together: list[str] = [key for key, parts in found.items() if all(_is_share(series) for _, series in parts)]
    if sum(len(found[key]) for key in together) > _LINES:
        together = []
    groups = [*([together] if together else []), *([key] for key in found if key not in together)]
    return [_scores_chart(runs, keys, found) for keys in groups]


def _source_losses(runs: Sequence[RunRecord]) -> list[Chart]:
    """The evaluation loss of each source, in charts of as many lines as can be read."""
    found: dict[str, list[tuple[int, Series]]] = {}
    for run, record in enumerate(runs):
        for key in dict.fromkeys(key for line in record.evaluations for key in line if key.startswith(OF_SOURCE)):
            if (series := column(record.evaluations, key, points_of(len(runs)))) is not None:
                found.setdefault(key, []).append((run, series))
    names, size = list(found), max(1, _LINES // len(runs))
    charts = []
    for number, start in enumerate(range(0, len(names), size), 1):
        lines = [
            _line(runs, run, key.removeprefix(OF_SOURCE), series, metric, kind="points")
            for metric, key in enumerate(names[start : start + size])
            for run, series in found[key]
        ]
        title = "Evaluation loss by source" + (f", part {number}" if len(names) > size else "")
        charts.append(Chart(f"sources-{number}", title, "fixed", lines, axis=_loss_axis(runs)))
    return charts


def _is_share(series: Series) -> bool:
    return all(value is None or -1 <= value <= 1 for value in series.values)


def _scores_chart(
    runs: Sequence[RunRecord], keys: Sequence[str], found: Mapping[str, list[tuple[int, Series]]]
) -> Chart:
    names = [key.removeprefix("eval_").replace("_", " ") for key in keys]
    lines = [
        _line(runs, run, what, series, metric, kind="points")
        for metric, (key, what) in enumerate(zip(keys, names, strict=True))
        for run, series in found[key]
    ]
    is_share = all(_is_share(series) for key in keys for _, series in found[key])
    name, title = ("scores", "Evaluation scores") if len(keys) > 1 else (f"score-{keys[0]}", f"Evaluation: {names[0]}")
    return Chart(
        name, title, "percent" if is_share else "fixed", lines, axis=", ".join(names) if len(names) < 3 else ""
    )


def _busy(runs: Sequence[RunRecord]) -> Chart | None:
    lines = _of_machine(runs, "CPU", "cpu_percent", "percent", scale=0.01)
    title = "CPU and GPU in use" if len(lines) > 1 else "CPU in use"
    return Chart("busy", title, "percent", lines, _OF_RANK_0, "in use") if lines else None


def _machine_memory(runs: Sequence[RunRecord]) -> Chart | None:
    lines = _of_machine(runs, "machine", "memory_bytes", "memory_bytes")
    return (
        Chart("machine-memory", "Memory of the machine in use", "bytes", lines, _OF_RANK_0, "in use") if lines else None
    )


def _disk(runs: Sequence[RunRecord]) -> Chart | None:
    lines = _of_machine(runs, "read and written", "disk_bytes_per_second")
    return Chart("disk", "Disk traffic", "bytes", lines, _OF_RANK_0, "a second") if lines else None


_OF_RANK_0 = "Of the whole machine of rank 0, other work on it included."


def _of_machine(
    runs: Sequence[RunRecord], label: str, key: str, of_gpus: str | None = None, scale: float = 1.0
) -> list[Line]:
    """Load of a lone run's machine, with a line for each of its GPUs; means where looks share a step."""
    columns: dict[str, dict[int, list[float]]] = {}
    for look in runs[0].load if len(runs) == 1 else ():
        gpus = look.get("gpus", ()) if of_gpus is not None else ()
        for name, value in [(label, look.get(key)), *((f"GPU {gpu['index']}", gpu.get(of_gpus)) for gpu in gpus)]:
            if isinstance(value, int | float):
                columns.setdefault(name, {}).setdefault(look["step"], []).append(value * scale)
    return [
        Line(name, shorten(list(found), [sum(part) / len(part) for part in found.values()], POINTS), i, dash=i)
        for i, (name, found) in enumerate(columns.items())
    ]
