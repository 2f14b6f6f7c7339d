"""Charts of what is measured besides the loss: measures of steps, losses of sources, scores of evaluations."""

from __future__ import annotations

from types import NoneType
from typing import NamedTuple

from kubetune.reporting.chart import Chart, Line
from kubetune.reporting.reading import OF_SOURCE, RunRecord, metric_keys
from kubetune.reporting.run_charts import Runs, column, line_of, loss_axis, points_of
from kubetune.reporting.series import Series

_MOST_LINES = 8
"""Lines that one chart can hold and still be read. More go to charts of their own."""


class Measures(NamedTuple):
    """Measures of steps and evaluations that share a chart."""

    keys: tuple[str, ...]
    title: str
    about: str = ""


MEASURES = (
    Measures(("accuracy",), "Accuracy", "Share of the answers that are told apart rightly."),
    Measures(
        ("margin", "reward_chosen", "reward_rejected"),
        "Rewards",
        "The margin is that of the chosen over the rejected.",
    ),
    Measures(("logp_chosen", "logp_rejected"), "Log-probabilities of answers"),
    Measures(
        ("expert_load_max", "expert_load_cv"),
        "Load of the experts",
        "Of the fullest, as a multiple of the mean, in the worst layer; and standard deviation over mean.",
    ),
    Measures(
        ("router_aux_loss",),
        "Balance loss of the routers",
        "Number of experts a token visits, where all are equal.",
    ),
    Measures(
        ("router_z_loss",),
        "z-loss of the routers",
        "Square of the logarithm of their logits' summed exponentials.",
    ),
    Measures(
        ("kl",),
        "KL",
        "How far the model has moved from what it was, by answers to other questions.",
    ),
)


def measure_charts(runs: Runs) -> list[Chart]:
    """Return the charts of MEASURES: of training smoothed, of evaluations as points."""
    charts = []
    for measures in MEASURES:
        lines: list[Line] = []
        for number, key in enumerate(measures.keys):
            for index in range(len(runs)):
                lines += _measure_lines(runs, index, key, number)
        if lines:
            about = f"{measures.about} Training smoothed.".strip()
            charts.append(Chart(measures.keys[-1], measures.title, "fixed", lines, about))
    return charts


def _measure_lines(runs: Runs, index: int, key: str, number: int) -> list[Line]:
    run = runs[index]
    steps = run.numbers.curves.get(key)
    if steps is None:
        return []
    name = key.replace("_", " ")
    lines = [line_of(runs, index, name, steps, 2 * number, kind="smooth", band=False)]
    evaluated = column(run.evaluations, f"eval_{key}", points_of(len(runs)))
    if evaluated is not None:
        label = f"evaluation {name}"
        lines.append(line_of(runs, index, label, evaluated, 2 * number + 1, kind="points"))
    return lines


SeriesOfRuns = list[tuple[int, Series]]
"""Index of a run, with its series of one metric."""


def score_charts(runs: Runs) -> list[Chart]:
    """Return charts of the metrics of evaluations other than the loss.

    Shares are drawn in one chart where they are few, each other metric in its own. A lone run is drawn
    from three evaluations on, as its table has them all; several runs are compared from the first.
    """
    most = max(len(run.evaluations) for run in runs)
    if most < (3 if len(runs) == 1 else 1):
        return []
    metrics: dict[str, SeriesOfRuns] = {}
    for index, run in enumerate(runs):
        for key in metric_keys(run.evaluations):
            if not _is_score(run, key):
                continue
            numbers = [
                line
                for line in run.evaluations
                if isinstance(line.get(key), (int, float, NoneType))
            ]
            series = column(numbers, key, points_of(len(runs)))
            if series is not None:
                metrics.setdefault(key, []).append((index, series))
    shares = [key for key, parts in metrics.items() if _are_shares(parts)]
    if sum(len(metrics[key]) for key in shares) > _MOST_LINES:
        shares = []
    groups = [shares] if shares else []
    groups += [[key] for key in metrics if key not in shares]
    return [_score_chart(runs, {key: metrics[key] for key in keys}) for keys in groups]


def _is_score(run: RunRecord, key: str) -> bool:
    """True if no other chart shows this metric."""
    if key in ("eval_loss", "eval_perplexity") or key.startswith(OF_SOURCE):
        return False
    return key.removeprefix("eval_") not in run.numbers.curves


def _are_shares(parts: SeriesOfRuns) -> bool:
    for _, series in parts:
        if any(value is not None and not -1 <= value <= 1 for value in series.values):
            return False
    return True


def _score_chart(runs: Runs, metrics: dict[str, SeriesOfRuns]) -> Chart:
    lines = []
    names = []
    for number, (key, parts) in enumerate(metrics.items()):
        name = key.removeprefix("eval_").replace("_", " ")
        names.append(name)
        for index, series in parts:
            lines.append(line_of(runs, index, name, series, number, kind="points"))
    unit = "percent" if all(_are_shares(parts) for parts in metrics.values()) else "fixed"
    axis = ", ".join(names) if len(names) < 3 else ""
    if len(metrics) > 1:
        return Chart("scores", "Evaluation scores", unit, lines, axis=axis)
    (key,) = metrics
    return Chart(f"score-{key}", f"Evaluation: {names[0]}", unit, lines, axis=axis)


def source_charts(runs: Runs) -> list[Chart]:
    """Return the evaluation loss of each source, in charts of as many lines as can be read."""
    sources: dict[str, SeriesOfRuns] = {}
    for index, run in enumerate(runs):
        for key in metric_keys(run.evaluations):
            series = column(run.evaluations, key, points_of(len(runs)))
            if key.startswith(OF_SOURCE) and series is not None:
                sources.setdefault(key, []).append((index, series))
    keys = list(sources)
    keys_of_a_chart = max(1, _MOST_LINES // len(runs))
    charts = []
    for part, start in enumerate(range(0, len(keys), keys_of_a_chart), 1):
        lines = []
        for number, key in enumerate(keys[start : start + keys_of_a_chart]):
            name = key.removeprefix(OF_SOURCE)
            for index, series in sources[key]:
                lines.append(line_of(runs, index, name, series, number, kind="points"))
        title = "Evaluation loss by source"
        if len(keys) > keys_of_a_chart:
            title += f", part {part}"
        charts.append(Chart(f"sources-{part}", title, "fixed", lines, axis=loss_axis(runs)))
    return charts
