"""The point of a run: the number that its task is about, before and after, how sure that is, and its curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kubetune.base.humanize import counted, duration, number, share, short
from kubetune.config.metric_names import full_name, is_greater_better
from kubetune.reporting import cards
from kubetune.reporting.chart import Chart
from kubetune.reporting.look.metric_values import label_of
from kubetune.reporting.point import Measured, before_and_after, measure, point, sureness
from kubetune.reporting.point_details.classes import Classes, classes_of
from kubetune.reporting.point_details.kept_answers import answers_so_far
from kubetune.reporting.point_details.point_curve import STEP_MEASURES, curve, curve_of_point
from kubetune.reporting.point_details.teacher import of_teacher
from kubetune.reporting.point_details.underway import Fact, underway
from kubetune.reporting.reading import RunRecord
from kubetune.reporting.rendering import turns

# Metrics that are shown next to the point if an evaluation has them.
_FURTHER = (
    "reward_std", "reward", "exact_match", "divergence", "margin", "f1_macro", "accuracy", "loss"
)  # fmt: skip
_MOST_FURTHER = 2
TRAINING_LOSS = "training loss"
_FURTHER_OF_STEPS = {"divergence": ("agreement",), "accuracy": ("margin",)}


@dataclass(frozen=True)
class Value:
    """A number, with what it was before."""

    label: str
    before: str  # "" if it is not known
    after: str
    is_worse: bool = False
    sure: str = ""  # its interval, if it has one


@dataclass(frozen=True)
class Hero:
    """The first part of a run's page."""

    value: Value
    sure: str  # how sure the difference is, and where it was measured
    is_worse: bool
    further: Sequence[Value]
    curve: Chart | None
    # Of an answer that got better: what was asked, before, after.
    example: Sequence[tuple[str, str]] = ()
    scale: Mapping[str, int] | None = None  # the places of a share before and after, from 0 to 100
    # A mark to compare the share with, such as guessing: its place on the scale in per cent, and its label.
    guess: tuple[int, str] | None = None
    classes: Classes | None = None
    underway: Sequence[Fact] = ()  # of a run that is not done


def hero(run: RunRecord) -> Hero | None:
    """Return the point of a run, or None if it has neither an evaluation nor a step."""
    shown = _measured(run)
    facts = underway(run)
    if shown is None or not facts:
        return shown
    # A verdict comes at the end: before it, what was answered last shows how far the model is.
    return replace(shown, underway=facts, example=shown.example or answers_so_far(run))


def _measured(run: RunRecord) -> Hero | None:
    """Return the point of a run by its evaluations; by its steps if only the model before training was evaluated."""
    measured = point(run)
    if measured is not None and measured.step:
        return _by_evaluation(run, measured)
    by_steps = _by_steps(run, measured)
    if by_steps is None and measured is not None:
        return _by_evaluation(run, measured)
    return by_steps


def _by_evaluation(run: RunRecord, shown: Measured) -> Hero:
    """Return the point of a run as its evaluations measured it."""
    before, after = shown.texts
    taught = of_teacher(run, shown.name)
    yardstick = None
    if shown.on_scale:
        yardstick = _yardstick(run, shown.name, taught)
    return Hero(
        value=Value(_label(run, shown), before, after),
        sure=sureness(run, shown),
        is_worse=shown.is_worse,
        further=_further(run, shown),
        curve=curve_of_point(run, shown, taught),
        example=_example(run, shown.name),
        scale=shown.on_scale,
        guess=yardstick,
        classes=classes_of(run),
    )


def _further(run: RunRecord, shown: Measured) -> list[Value]:
    """Return the first other metrics of the evaluation that the point is of."""
    further: list[Value] = []
    for name, label in _further_names(run):
        other = measure(run, run.of_best or run.base, name)
        # A reward that is the metric itself is not shown twice.
        if other is None or shown.name in (other.name, f"eval_{label}"):
            continue
        before, after = other.texts
        further.append(Value(label or other.label, before, after, other.is_worse, other.confidence))
    return further[:_MOST_FURTHER]


def _yardstick(run: RunRecord, name: str, taught: float | None) -> tuple[int, str] | None:
    """Return the mark to compare a share with: the teacher's share, else the share that needs no learning."""
    if taught is not None:
        return round(100 * taught), f"teacher {share(taught)}"
    return _guess(run, name)


def _guess(run: RunRecord, name: str) -> tuple[int, str] | None:
    """Return the share that needs no learning: half of the pairs, or the commonest class as the answer to every row."""
    if name == "eval_accuracy" and run.config.record_kind in ("pair", "graded"):
        return 50, "guessing 50 %"
    held_out = (run.data.get("splits") or {}).get("eval") or {}
    classes: dict[str, int] = held_out.get("classes") or {}
    rows = held_out.get("rows")
    # Rows with several labels, or none, are no draw of one class.
    if not classes or sum(classes.values()) != rows:
        return None
    answer = max(classes, key=lambda label: classes[label])
    if name == "eval_f1":
        answer = list(classes)[-1]
    part = classes[answer] / rows
    f1 = 2 * part / (1 + part)
    # All other classes have an F1 of 0; those without rows are in no mean.
    present = sum(count > 0 for count in classes.values())
    shares = {"eval_accuracy": part, "eval_f1": f1, "eval_f1_macro": f1 / present}
    if name not in shares:
        return None
    return round(100 * shares[name]), f"always “{answer}” {share(shares[name])}"


def _further_names(run: RunRecord) -> list[tuple[str, str]]:
    """Return metrics that may be shown with the point, and their labels if they have their own.

    A reward that is a sum has its parts first.
    """
    parts = [(f"eval_reward/{reward.title}", reward.title) for reward in run.config.rewards]
    if len(parts) == 1:
        parts = []
    return parts + [(f"eval_{name}", "") for name in _FURTHER]


def _label(run: RunRecord, shown: Measured) -> str:
    """Return what the point of a run is called. With two classes, F1 is the one of the second."""
    if run.config.task == "reward_model" and shown.name == "eval_accuracy":
        return "agreement with the preferred answers"
    labels = (run.data.get("facts") or {}).get("labels") or {}
    names = list(labels.get("names") or ())
    if shown.name == "eval_f1" and len(names) == 2:
        return f"F1 of the class {names[1]}"
    return shown.label


def _by_steps(run: RunRecord, before: Measured | None) -> Hero | None:
    """Return the point of a run by its steps: reward, divergence, accuracy or loss in the first and the last of them.

    `before`: what was measured before training.
    """
    for key in STEP_MEASURES:
        ends = _ends(run, key)
        if ends is None:
            continue
        first, last = ends
        value = _value(key, first, last)
        if key == "loss":
            value = replace(value, label=TRAINING_LOSS)
        sure = "mean of the first and of the last steps"
        is_worse = False
        if first is None:
            sure = "of the only step"
        else:
            is_worse = last < first if is_greater_better(key) else last > first
        if not run.evaluations:
            sure += "; " + _why_not_evaluated(run)
        return Hero(value, sure, is_worse, _further_of_steps(run, key, before), curve(run, key))
    return None


def _further_of_steps(run: RunRecord, key: str, before: Measured | None) -> list[Value]:
    """Return the values that are shown with a measure of steps. `before`: what was measured before training."""
    further = []
    if before is not None:
        further.append(Value(f"{before.label} before training", "", before.texts[1]))
    for other in _FURTHER_OF_STEPS.get(key, ()):
        ends = _ends(run, other)
        if ends is not None:
            further.append(_value(other, *ends))
    # What was held out says something else of the same model.
    held_out = measure(run, run.of_best or {}, "eval_token_accuracy")
    if held_out is not None:
        further.append(Value("held-out token accuracy", *held_out.texts))
    return further


def _why_not_evaluated(run: RunRecord) -> str:
    """Return why a run without evaluations has none."""
    if run.base:
        return "not evaluated since it began"
    if run.plan and run.plan.eval_rows:
        return "not evaluated"
    return "nothing was held out to measure it"


def _ends(run: RunRecord, key: str) -> tuple[float | None, float] | None:
    """Return a measure's mean in the first steps and in the last ones; None without steps.

    With a single step there is no mean of the first ones: (None, its value).
    """
    series = run.numbers.curves.get(key)
    if series is None:
        return None
    values = [value for value in series.values if value is not None]
    if not values:
        return None
    if len(values) == 1:
        return None, values[0]
    # A step is noisy, so that a tenth of them stands for the beginning and for the end.
    some = max(1, len(values) // 10)
    return sum(values[:some]) / some, sum(values[-some:]) / some


def _value(name: str, before: float | None, after: float) -> Value:
    """Return a measure's number as the page writes it, such as 0 → 92 %."""
    return Value(label_of(name), *before_and_after(name, before, after))


def _example(run: RunRecord, name: str) -> list[tuple[str, str]]:
    """Return an answer that got better, by this metric if one did, else by another."""
    turned = run.verdict.get("turned") or {}
    for _, sides in sorted(turned.items(), key=lambda item: full_name(item[0]) != name):
        for line in sides.get("gained") or ():
            if isinstance(line.get("before"), str) and isinstance(line.get("answer"), str):
                spoken = turns(str(line["prompt"]))
                asked = spoken[-1]["content"] if spoken else str(line["prompt"])
                return [("asked", asked), ("before", line["before"]), ("after", line["answer"])]
    return []


def facts_line(run: RunRecord, shown: Hero | None) -> list[str]:
    """Return everything else that one wants to know first, as short texts for one line. `shown`: what is above it."""
    totals = run.numbers.totals
    steps = cards.last_step(run)
    planned = run.plan.num_steps if run.plan else 0
    facts = [f"{steps:,} of {planned:,} steps" if planned else counted(steps, "step")]
    # What GRPO and a distillation lower says nothing of how good they are.
    is_telling = run.config.task not in ("grpo", "distill")
    is_shown = shown is not None and shown.value.label == TRAINING_LOSS
    if totals.last.get("loss") is not None and is_telling and not is_shown:
        facts.append(
            f"training loss {number(totals.first.get('loss'))} → {number(totals.last['loss'])}"
        )
    seconds, tokens, trained = cards.work_done(run)
    if tokens:
        facts.append(f"{short(tokens)} tokens")
        if run.config.task != "sequence_classification":
            facts.append(f"{share(trained / tokens)} of them trained")
    if seconds:
        facts += [f"{duration(seconds)} in steps", f"{number(tokens / seconds)} tokens/s"]
    return facts
