"""The plan of a run in words: labelled lines, as `kubetune plan`, `kubetune train` and the page show them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

from kubetune.base.humanize import counted
from kubetune.config.naming import default_output
from kubetune.config.schema import Config
from kubetune.config.schema.data import DataConfig
from kubetune.config.schema.model import LoraConfig
from kubetune.config.schema.training import TrainingConfig
from kubetune.config.starting_values import FEWEST_ROWS_OF_A_STEP
from kubetune.data.findings.finding import NOTHING_FOUND, Finding
from kubetune.data.findings.other_splits import lacking_parts, other_splits
from kubetune.data.findings.split_files import located_sources
from kubetune.data.inspect.estimate import is_upper_bound, makes_data
from kubetune.data.inspect.lengths import Lengths
from kubetune.k8s.run_names import OUTPUTS, run_name
from kubetune.plan.base_model import Positions
from kubetune.plan.plan import Plan
from kubetune.plan.rank_work import quantization_of

# A note on a number of rows.
_BEFORE_CHECKS = ", before checks leave any out"


class _Rows(NamedTuple):
    """How many rows there are."""

    text: str
    note: str  # how sure that is, with the sign before it


def on_data(
    lengths: Lengths | None, findings: Sequence[Finding] | None, data: DataConfig
) -> Iterator[str]:
    """Yield a line on each finding about the data, or on how many rows nobody has looked at."""
    # A plan looks at all rows only if there are few of them.
    if findings is None:
        # Names of files say this of any number of rows.
        train = located_sources(data.train)
        for finding in (*other_splits(train), *lacking_parts(train, "train")):
            yield f"warning: {finding.line}"
        looked = "not looked at"
        if lengths is not None:
            first = f"the first {counted(lengths.sampled, 'record')}"
            if lengths.lost_share > data.max_lost_share:
                yield (
                    f"warning: {lengths.lost_share:.0%} of {first} would be left out, and data.max_lost_share "
                    f"allows {data.max_lost_share:.0%} of all"
                )
            looked = f"not all looked at, only {first}"
        yield f"{looked}; `kubetune data check` looks at all"
        return
    # Errors are problems of the run, which whoever shows the plan says by themselves.
    for finding in findings:
        if finding.severity != "error":
            yield f"{finding.severity}: {finding.line}"
    if not findings:
        yield f"all rows looked at: {NOTHING_FOUND}"


def describe(
    config: Config,
    plan: Plan,
    lengths: Lengths | None,
    findings: Sequence[Finding] | None = None,
    positions: Positions | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield the facts of a plan as labelled lines. `on_data` says what the `findings` are.

    `positions`: of the model, if it is on this machine.
    """
    # What is trained, and on how many processes.
    yield "model", config.model.path
    yield "method", _method(config.quantization, config.lora, config.training, plan)
    processes = f"{counted(plan.nodes, 'node')} × {counted(plan.processes_per_node, 'process')}"
    yield "world", f"{plan.world_size} = {processes}"
    yield "effective batch", plan.batch_text(config.task)
    for warning in _warnings(config.task, plan):
        yield "", warning

    # The data, as far as they were read.
    made_by_pod = makes_data(config.kubernetes)
    rows = _rows(config.data, plan, lengths, made_by_pod=made_by_pod)
    yield "rows", f"{rows.text}{rows.note}"
    yield "tokens", _tokens(config.data, plan, lengths, findings)
    if lengths is not None and lengths.saved_share:
        tokens = f"about {lengths.saved_share:.0%} of the tokens"
        yield "shared beginnings", f"{tokens}, which are computed once"
    longest = 0 if lengths is None else lengths.longest
    if findings is None and positions is not None and longest > positions.limit:
        yield "positions", positions.say(longest)

    # What happens when, and where the results are.
    accuracy = _accuracy(config.data, plan, lengths, made_by_pod=made_by_pod)
    yield from _schedule(config.data, config.training, plan, accuracy)
    output = config.output
    if not output:
        length = config.data.max_length
        output = default_output(config.model.path, config.lora, length, datetime.now())
    yield "output", output


def opening(config: Config, plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the facts of a run that starts that a person wants to see first, in a few lines, with all warnings."""
    method = _method(config.quantization, config.lora, config.training, plan)
    yield "model", f"{config.model.path}, {method}"
    made_by_pod = makes_data(config.kubernetes)
    accuracy = _accuracy(config.data, plan, None, made_by_pod=made_by_pod)
    steps = _number_of_steps(config.training, plan, accuracy)
    rows = _rows(config.data, plan, None, made_by_pod=made_by_pod)
    # Which rows are left out is a warning of the run.
    note = "" if rows.note == _BEFORE_CHECKS else rows.note
    yield "steps", f"{steps}; rows: {rows.text}{note}"
    yield "output", f"{config.output}; its logs have every line, and -v shows them"
    for warning in _warnings(config.task, plan):
        yield "", warning
    unused = _unused_without_evaluations(config.training)
    if unused and not config.data.eval:
        yield "evaluation", f"none{unused}"


def _warnings(task: str, plan: Plan) -> Iterator[str]:
    """Yield what a run should rather have otherwise."""
    # A step of GRPO has many answers to each of its rows.
    if task != "grpo" and _is_noisy(plan):
        yield (
            f"warning: a step of fewer than {FEWEST_ROWS_OF_A_STEP} rows is noisy, and learns badly; "
            f"set training.global_batch_size: {FEWEST_ROWS_OF_A_STEP} or more"
        )


def _is_noisy(plan: Plan) -> bool:
    """True if an optimizer step has few rows though there are more of them."""
    # The rows of a batch in tokens are not known before they are packed.
    if plan.global_batch_tokens is not None:
        return False
    has_more = plan.rows is None or plan.rows > plan.global_batch_size
    return has_more and plan.global_batch_size < FEWEST_ROWS_OF_A_STEP


def _method(
    quantization: str, lora: LoraConfig | None, training: TrainingConfig, plan: Plan
) -> str:
    """Return how the model is trained."""
    base = quantization_of(quantization, lora, plan)
    text = plan.method
    if base != "none":
        text += f", {base} base"
    if quantization == "auto":
        text += f" (quantization: auto is {base} here)"
    return f"{text}, {training.parallelism} on {plan.device} ({plan.backend})"


def _accuracy(data: DataConfig, plan: Plan, lengths: Lengths | None, *, made_by_pod: bool) -> str:
    """Return the words before a number of steps that is not exact, or "" if it is exact."""
    # Texts that are split make more rows, missing files and batches of tokens make fewer, or other ones.
    if data.overlong == "split" and lengths is None:
        return "at least "  # no text was read, so each counts as one row
    if is_upper_bound(data.train, made_by_pod=made_by_pod):
        return "at most "
    if plan.global_batch_tokens:
        return "about "
    return ""


def _schedule(
    data: DataConfig, training: TrainingConfig, plan: Plan, accuracy: str
) -> Iterator[tuple[str, str]]:
    """Yield the number of steps, and what happens after how many of them."""
    yield "steps per epoch", _steps(plan.steps_per_epoch, accuracy)
    yield "steps", _number_of_steps(training, plan, accuracy)
    warmup = "warm-up"
    if plan.num_steps:
        # What the run file sets is exact, whatever the data are.
        is_set = training.max_steps or training.warmup_steps is not None
        warmup_accuracy = "" if is_set else accuracy
        warmup += f" {warmup_accuracy}{counted(plan.warmup_steps, 'step')}"
    yield "learning rate", f"{plan.learning_rate:g}, {plan.lr_scheduler_type}, {warmup}"
    if data.eval:
        interval = _every(plan.eval_steps, training.eval_steps, accuracy)
        yield "evaluation", f"{interval}, and at the end"
    else:
        yield "evaluation", f"none{_unused_without_evaluations(training)}"
    interval = _every(plan.save_steps, training.save_steps, accuracy)
    yield "checkpoints", f"{interval}, and at the end; {training.save_total_limit} kept"


def _number_of_steps(training: TrainingConfig, plan: Plan, accuracy: str) -> str:
    """Return the number of steps and epochs. Steps that the run file sets are exact, whatever the data are."""
    steps = _steps(plan.num_steps, "" if training.max_steps else accuracy)
    return f"{steps} ({_epochs(plan.num_epochs)})"


def _unused_without_evaluations(training: TrainingConfig) -> str:
    """Return which settings do nothing in a run without evaluations, or "" if none is set."""
    defaults = TrainingConfig()
    names = []
    for name in ("metric_for_best_model", "greater_is_better", "eval_steps"):
        if getattr(training, name) != getattr(defaults, name):
            names.append(f"training.{name}")
    if not names:
        return ""
    verb = "is" if len(names) == 1 else "are"
    return f": no data.eval, so {' and '.join(names)} {verb} not used"


def output_on_cluster(name: str | None, model_path: str) -> str:
    """Return the places of the run's files when it is submitted, and of their copy here."""
    name = run_name(name, model_path)
    return (
        f"submitted, its output is {OUTPUTS}/{name} in the pods; `kubetune cp {name}` copies it to "
        f"outputs/{name} here"
    )


def _steps(number: int, accuracy: str) -> str:
    """Return a number of steps: `1,200`, or `about 1,200`."""
    if not number:
        return "unknown until the data are read"
    return f"{accuracy}{number:,}"


def _every(steps: int, setting: int | str, accuracy: str) -> str:
    """Return an interval in words. An epoch without an exact number of steps is called an epoch."""
    if not steps or (setting == "epoch" and accuracy):
        return "every epoch"
    if steps == 1:
        return "every step"
    return f"every {counted(steps, 'step')}"


def _epochs(number: float) -> str:
    """Return a number of epochs, which may have a fraction."""
    if number == 1:
        return "1 epoch"
    return f"{number:.4g} epochs"


def _rows(data: DataConfig, plan: Plan, lengths: Lengths | None, *, made_by_pod: bool) -> _Rows:
    """Return how many rows are trained on and evaluated on, and how sure that is."""
    if plan.rows is None and made_by_pod:
        return _Rows(
            "unknown",
            ": the data are not on this machine; kubernetes.preprocess makes them on the cluster",
        )
    if plan.rows is None:
        return _Rows(
            "unknown",
            ": the data are no files on this machine; `kubetune data prepare` fetches and counts them",
        )

    # Sources that are not here count as many rows as their #N allows.
    evaluated_sources = data.eval if isinstance(data.eval, tuple) else data.train
    train_bounded = is_upper_bound(data.train, made_by_pod=made_by_pod)
    eval_bounded = is_upper_bound(evaluated_sources, made_by_pod=made_by_pod)
    accuracy = ""
    if lengths is not None and lengths.rows_per_record > 1:
        accuracy = "about "  # long texts are split, of which only the first ones were read
    text = f"{'at most ' if train_bounded else accuracy}{plan.rows:,}"
    if plan.eval_rows:
        text += f", {'at most ' if eval_bounded else accuracy}{plan.eval_rows:,} for evaluation"

    if train_bounded or (eval_bounded and plan.eval_rows):
        note = ": data that are not on this machine count as at most #N rows; `kubetune data prepare` counts them"
        return _Rows(text, note)
    if data.overlong == "split" and lengths is None:
        note = f": texts of more than {data.max_length:,} tokens are split into several"
        return _Rows(f"at least {text}", note)
    return _Rows(text, _BEFORE_CHECKS)


def _tokens(
    data: DataConfig, plan: Plan, lengths: Lengths | None, findings: Sequence[Finding] | None
) -> str:
    """Return how many tokens an epoch has, and which rows of the sample cannot be used as they are."""
    if plan.rows is None:
        return "unknown, as the rows are"
    if plan.tokens_per_epoch is None or lengths is None:
        return (
            "unknown: the tokenizer is not on this machine, or none of the first rows can be read"
        )
    noun = "record" if lengths.rows_per_record > 1 else "row"
    sampled = counted(lengths.sampled, noun)
    per_row = f"{lengths.tokens_per_row:,.0f} a row (from {sampled})"
    text = f"about {plan.tokens_per_epoch:,} an epoch, {per_row}"
    if findings is not None:
        return text  # the findings say the rest

    # Shares of the sample.
    if lengths.overlong_share:
        text += f"; {lengths.overlong_share:.1%} longer than {lengths.limit:,}: {data.overlong}"
    if lengths.bad_share:
        text += f"; {lengths.bad_share:.1%} unreadable, see `kubetune data check`"
    return text
