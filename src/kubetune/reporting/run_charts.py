"""Charts of the steps of runs: loss, measures of tasks, learning rate, speed, memory, load of the machine."""

from __future__ import annotations

import os.path
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from string import ascii_uppercase
from types import NoneType
from typing import Any

from kubetune.config.metric_names import SECONDS_OF_PARTS
from kubetune.reporting.chart import Chart, Line
from kubetune.reporting.numbers import OF_REWARD, SKEW
from kubetune.reporting.reading import POINTS, Lines, RunRecord
from kubetune.reporting.series import Series, shorten

# The runs of a page. Several are laid over each other.
Runs = Sequence[RunRecord]


def points_of(runs: int) -> int:
    """Return how many points each curve has if so many runs are laid over each other."""
    return max(100, POINTS // max(1, runs))


def column(lines: Lines, key: str, points: int) -> Series | None:
    """Return one key of all lines if it is a number, or None if no line has a value."""
    # An evaluation has no training loss, and a line of a step no evaluation loss. None: it was not finite.
    having = [line for line in lines if isinstance(line.get(key, ""), int | float | NoneType)]
    steps = [line["step"] for line in having]
    values = [line[key] for line in having]
    return shorten(steps, values, points)


def labels(runs: Runs) -> list[str]:
    """Return names that tell runs apart: their own, or as much of their paths as is needed.

    a/b/run, a/c/run  →  b/run, c/run
    """
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    paths = [run.path.absolute() for run in runs]
    # The common beginning of all paths says nothing.
    common = os.path.commonpath({path.parent for path in paths})
    return [os.path.relpath(path, common) for path in paths]


def letter(number: int) -> str:
    """Return the letter of a run among several: A, B, …, Z, A1, B1, …"""
    turn, place = divmod(number, 26)
    return ascii_uppercase[place] + str(turn or "")


def line_of(runs: Runs, run: int, name: str, series: Series, metric: int = 0, **look: Any) -> Line:
    """Return a line of one run. `run` is its index, `metric` the index of the measure in its chart.

    A lone run's measures differ by colour; training and evaluation of one have the same. Each of several runs has a colour
    and a letter, and its lines differ by their dashes. The page says once which run a letter is.
    """
    if len(runs) == 1:
        return Line(name, series, metric, dash=metric, **look)
    mark = letter(run)
    return Line(f"{mark} {name}", series, run, dash=metric, run=run, mark=mark, **look)


@dataclass(frozen=True)
class Curves:
    """A chart of what a run records of each step."""

    name: str
    title: str
    keys: tuple[str, ...]  # of `Numbers.curves`, one for each line
    about: str = ""
    smoothed: bool = False
    unit: str = "fixed"
    axis: str = ""
    label: str = ""  # of a lone line; the title if it is empty


# In the order of the page. Smoothed ones are what a task learns, the others how the run goes.
CURVES = (
    Curves("loss", "Loss", ("loss",), smoothed=True, label="training loss"),
    Curves(
        "accuracy",
        "Accuracy",
        ("accuracy",),
        "Share of the rows, or pairs, that the model gets right.",
        smoothed=True,
        unit="percent",
    ),
    Curves(
        "margin",
        "Margin",
        ("margin",),
        "Reward of the chosen answer over that of the rejected one.",
        smoothed=True,
    ),
    Curves("rewards", "Rewards", ("reward_chosen", "reward_rejected"), smoothed=True),
    Curves(
        "logp",
        "Log-probabilities of answers",
        ("logp_chosen", "logp_rejected"),
        smoothed=True,
    ),
    Curves(
        "divergence",
        "Divergence from the teacher",
        ("divergence",),
        "Mean over the tokens of a step.",
        smoothed=True,
    ),
    # Many times the divergence, whose curve it would make flat.
    Curves("cross-entropy", "Cross-entropy of the tokens", ("cross_entropy",), smoothed=True),
    Curves(
        "agreement",
        "Agreement with the teacher",
        ("agreement", "overlap", "teacher_mass", "student_mass"),
        "Share of tokens of which both have the same likeliest one; of compared tokens that are likely in both; and the "
        "probability of those compared.",
        smoothed=True,
        unit="percent",
    ),
    Curves("reward", "Reward", ("reward",), "Mean over the answers of a step.", smoothed=True),
    Curves(
        "functions",
        "Reward by function",
        (),
        "Mean of what each function gave, before its weight.",
        smoothed=True,
    ),
    Curves(
        "groups",
        "Shares of prompts and answers",
        ("solved", "zero_variance", "truncated"),
        "Prompts with a right answer; groups whose rewards are all alike, from which nothing is learnt; and answers "
        "that were cut off.",
        smoothed=True,
        unit="percent",
    ),
    Curves(
        "length",
        "Length of answers",
        ("completion_length",),
        "Mean number of tokens.",
        smoothed=True,
    ),
    Curves(
        "entropy", "Entropy", ("entropy",), "In nats, of what tokens are drawn from.", smoothed=True
    ),
    Curves(
        "clipped",
        "Clipped tokens",
        ("clip_low", "clip_high"),
        "Shares of the tokens of bad and of good answers.",
        smoothed=True,
    ),
    Curves(
        "sampling",
        "Sampling against training",
        ("sampling_difference",),
        "Mean absolute difference between their log-probabilities.",
        unit="exponent",
    ),
    Curves(
        "experts",
        "Load of the experts",
        ("expert_load_max", "expert_load_cv"),
        "Load of the fullest, as a multiple of the mean, in the worst layer; and standard deviation over mean.",
        smoothed=True,
    ),
    Curves(
        "aux",
        "Balance loss of the routers",
        ("router_aux_loss",),
        "Number of experts a token visits, if all are equal.",
        smoothed=True,
    ),
    Curves(
        "z",
        "z-loss of the routers",
        ("router_z_loss",),
        "Square of the logarithm of their logits' summed exponentials.",
        smoothed=True,
    ),
    Curves(
        "kl",
        "KL",
        ("kl",),
        "How far the model has moved from what it was.",
        smoothed=True,
    ),
    Curves(
        "parts",
        "Seconds of a step",
        SECONDS_OF_PARTS,
        "Servers may draw while the step trains.",
        smoothed=True,
    ),
    Curves("rate", "Learning rate", ("learning_rate",), unit="exponent"),
    Curves("norm", "Gradient norm", ("grad_norm",), "Before clipping."),
    Curves(
        "speed",
        "Tokens per second",
        ("tokens_per_second",),
        "Tokens of the data, without padding.",
        unit="short",
    ),
    Curves(
        "memory",
        "Peak memory",
        ("peak_memory_bytes",),
        "Highest so far on rank 0: allocated on the GPU, or resident in memory without one.",
        unit="bytes",
    ),
    Curves(
        "skew",
        "Skew between ranks",
        (SKEW,),
        "How much shorter the fastest rank computed than the slowest, for which all others wait.",
        unit="percent",
        axis="share of the step",
    ),
)


def curve_charts(runs: Runs) -> list[Chart]:
    """Return the charts of CURVES for which some run has numbers."""
    charts = []
    for curves in _curves_of(runs):
        lines: list[Line] = []
        for number in range(len(curves.keys)):
            for index in range(len(runs)):
                lines += _lines_of(runs, index, curves, number)

        # No run of this page has the numbers of this chart.
        if not lines:
            continue

        axis = curves.axis
        if curves.name == "loss":
            axis = loss_axis(runs)
        charts.append(Chart(curves.name, curves.title, curves.unit, lines, curves.about, axis))

    return charts


def _curves_of(runs: Runs) -> list[Curves]:
    """Return CURVES, with the functions of a reward, of which each run may have others."""
    functions: dict[str, None] = {}  # an ordered set
    for run in runs:
        for key in run.numbers.curves:
            if key.startswith(OF_REWARD):
                functions[key] = None
    charts = []
    for curves in CURVES:
        if curves.name == "functions":
            curves = replace(curves, keys=tuple(functions))
        charts.append(curves)
    return charts


def _label(key: str) -> str:
    """Return what a line is called: `reward chosen` for `reward_chosen`, a function by its own name."""
    if key.startswith(OF_REWARD):
        return key.removeprefix(OF_REWARD)
    return key.removesuffix("_seconds").replace("_", " ")


def _lines_of(runs: Runs, index: int, curves: Curves, number: int) -> list[Line]:
    """Return the lines that one run adds to a chart for the key of this number; none without numbers.

    A smoothed key has a line of the training, and points of the evaluations.
    """
    key = curves.keys[number]
    series = runs[index].numbers.curves.get(key)
    if series is None:
        return []

    # reward_chosen → "reward chosen"; a lone line is called as its chart.
    label = _label(key)
    is_lone = len(curves.keys) == 1
    if is_lone and not key.startswith(OF_REWARD):
        label = curves.label or curves.title.lower()
    # The band of one run would cover the line of another.
    if not curves.smoothed:
        return [line_of(runs, index, label, series, band=len(runs) == 1)]

    # A band would cover other lines.
    has_band = is_lone and len(runs) == 1
    lines = [line_of(runs, index, label, series, number, kind="smooth", band=has_band)]
    key_of_evaluation = evaluated_as(runs[index], key)
    if key_of_evaluation is None:
        return lines
    evaluated = column(runs[index].measurements, key_of_evaluation, points_of(len(runs)))
    if evaluated is not None:
        label = f"held-out {_label(key)}"
        line = line_of(runs, index, label, evaluated, number, kind="points")
        # Of several runs, lines of training are plain and points of evaluations hollow.
        lines.append(replace(line, dash=line.dash + 1) if len(runs) > 1 else line)
    return lines


# What these learn from is another quantity than the loss of the data's own answers, which their evaluations measure.
_OTHER_LOSS = ("distill", "grpo")


def evaluated_as(run: RunRecord, key: str) -> str | None:
    """Return the key of evaluations for what steps measure as `key`, None if none measures the same quantity."""
    if key == "loss" and run.config.task in _OTHER_LOSS:
        return None
    return "eval_loss" if key == "cross_entropy" else f"eval_{key}"


def has_own_loss(run: RunRecord) -> bool:
    """True if the loss of a run's evaluations is on no chart of its steps."""
    return run.config.task in _OTHER_LOSS and "cross_entropy" not in run.numbers.curves


# The unit of one loss, by kind of record. For all other kinds it is a token.
_LOSS_PER = {
    "labelled": "a sample",
    "pair": "a pair",
    "graded": "a pair",
    "judged": "an answer",
}


def loss_axis(runs: Runs) -> str:
    """Return the label of the axis of losses."""
    # A pair of answers has one loss, and losses of different tasks cannot be compared.
    units = {_LOSS_PER.get(run.config.record_kind, "a token") for run in runs}
    if len(units) == 1:
        return f"loss {units.pop()}"
    return "loss"


def machine_charts(runs: Runs) -> list[Chart]:
    """Return the load of a lone run's machine: processors and memory."""
    if len(runs) > 1:
        return []
    # Loads of several machines over each other would compare nothing.
    about = "For the whole machine of rank 0, other work on it included."
    charts = []
    busy = _machine_lines(runs[0], "CPU", "cpu_percent", "percent", scale=0.01)
    if busy:
        charts.append(Chart("busy", "Processors in use", "percent", busy, about, "in use"))
    memory = _machine_lines(runs[0], "machine", "memory_bytes", "memory_bytes")
    if memory:
        title = "Memory of the machine in use"
        charts.append(Chart("machine-memory", title, "bytes", memory, about, "in use"))
    return charts


def _machine_lines(
    run: RunRecord,
    label: str,
    key: str,
    gpu_key: str,
    scale: float = 1.0,
) -> list[Line]:
    """Return one number of a run's machine over the steps, and a line for each of its GPUs.

    The load is sampled by time, so several samples may share a step: a line has their mean.
    """
    # {"CPU": {1: [0.51, 0.55], 3: [0.53]}, "GPU 0": {1: [0.8], …}}
    samples: dict[str, defaultdict[int, list[float]]] = {}  # by label, then by step
    for sample in run.load:
        values = {label: sample.get(key)}
        for gpu in sample.get("gpus", ()):
            values[f"GPU {gpu['index']}"] = gpu.get(gpu_key)

        # A sensor that gave nothing has no value in the sample.
        for name, value in values.items():
            if isinstance(value, int | float):
                by_step = samples.setdefault(name, defaultdict(list))
                by_step[sample["step"]].append(value * scale)

    lines = []
    for index, (name, by_step) in enumerate(samples.items()):
        means = [fmean(values) for values in by_step.values()]
        series = shorten(list(by_step), means, POINTS)
        if series is not None:
            lines.append(Line(name, series, index, dash=index))

    return lines
