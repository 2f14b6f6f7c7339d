"""The plan of a run in words: labelled lines, as `kubetune plan`, `kubetune train` and the page show them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import datetime

from kubetune.base.humanize import counted
from kubetune.config.naming import default_output
from kubetune.config.schema import Config
from kubetune.config.schema.training import TrainingConfig
from kubetune.data.findings.finding import NOTHING_FOUND, Finding
from kubetune.data.inspect.estimate import is_upper_bound, makes_data
from kubetune.data.inspect.lengths import Lengths
from kubetune.k8s.run_names import OUTPUTS, run_name
from kubetune.plan.base_model import positions_of
from kubetune.plan.forecast import quantization_of
from kubetune.plan.plan import Plan


def on_data(lengths: Lengths | None, findings: Sequence[Finding] | None) -> Iterator[str]:
    """Yield a line on each finding about the data, or on how many rows nobody has looked at."""
    if findings is None:
        looked = "not looked at"
        if lengths is not None:
            looked = f"not all looked at, only the first {counted(lengths.sampled, 'record')}"
        yield f"{looked}; `kubetune data check` looks at all"
        return
    for finding in findings:
        yield f"{finding.severity}: {finding.line}"
    if not findings:
        yield f"all rows looked at: {NOTHING_FOUND}"


def _without(training: TrainingConfig) -> str:
    """Settings that a run without evaluations makes no use of, in words."""
    defaults = TrainingConfig()
    names = [
        f"training.{name}"
        for name in ("metric_for_best_model", "greater_is_better", "eval_steps")
        if getattr(training, name) != getattr(defaults, name)
    ]
    return (
        f": no data.eval, so {' and '.join(names)} {'is' if len(names) == 1 else 'are'} not used"
        if names
        else ""
    )


def describe(
    config: Config,
    plan: Plan,
    lengths: Lengths | None,
    findings: Sequence[Finding] | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield the facts of a plan as labelled lines. What the `findings` say is left to `on_data`."""
    training = config.training
    yield "model", config.model.path
    base = quantization_of(config, plan)
    quantised = f", {base} base" if base != "none" else ""
    if config.quantization == "auto":
        quantised += f" (quantization: auto is {base} here)"
    yield (
        "method",
        f"{plan.method}{quantised}, {training.parallelism} on {plan.device} ({plan.backend})",
    )
    processes = f"{counted(plan.nodes, 'node')} × {counted(plan.processes_per_node, 'process')}"
    yield "world", f"{plan.world_size} = {processes}"
    label, _, text = plan.batch_line().partition(" batch ")
    yield f"{label} batch", text
    yield "rows", _rows(config, plan, lengths)
    yield "tokens", _tokens(config, plan, lengths, findings)
    if lengths is not None and lengths.spared:
        yield (
            "shared beginnings",
            f"about {lengths.spared:.0%} of the tokens, which are computed once",
        )
    positions = positions_of(config, os.environ) if findings is None else None
    if positions is not None and lengths is not None and lengths.longest > positions.limit:
        yield "positions", positions.say(lengths.longest)
    about = (
        "at most "
        if is_upper_bound(config.data.train, made_by_pod=makes_data(config.kubernetes))
        else "about "
        if plan.global_batch_tokens
        else ""
    )
    if (
        config.data.overlong == "split" and lengths is None
    ):  # as many rows as texts, while no text is read
        about = "at least "
    yield "steps per epoch", _steps(plan.steps_per_epoch, about)
    yield (
        "steps",
        f"{_steps(plan.num_steps, '' if config.training.max_steps else about)} ({_epochs(plan.num_epochs)})",
    )
    bound = "" if training.warmup_steps is not None or training.max_steps else about
    warmup = f"warm-up {bound}{counted(plan.warmup_steps, 'step')}" if plan.num_steps else "warm-up"
    yield "learning rate", f"{plan.learning_rate:g}, {plan.lr_scheduler_type}, {warmup}"
    # An epoch of so many steps at most has no number of steps.
    save, evaluate = (
        0 if about and asked == "epoch" else steps
        for asked, steps in (
            (training.save_steps, plan.save_steps),
            (training.eval_steps, plan.eval_steps),
        )
    )
    yield (
        "evaluation",
        f"{_every(evaluate)}, and at the end" if config.data.eval else f"none{_without(training)}",
    )
    yield "checkpoints", f"{_every(save)}, and at the end; {training.save_total_limit} kept"
    yield "output", config.output or default_output(config, datetime.now())


def output_on_cluster(config: Config) -> str:
    """Return where the same run has its files when it is submitted, and where a copy of them goes here."""
    name = run_name(config)
    return (
        f"submitted, its output is {OUTPUTS}/{name} in the pods; `kubetune cp {name}` copies it to "
        f"outputs/{name} here"
    )


def _steps(number: int, about: str) -> str:
    return f"{about}{number:,}" if number else "unknown until the data are read"


def _every(steps: int) -> str:
    """An interval in words; one of an epoch has no number before the data are read."""
    if steps == 1:
        return "every step"
    return f"every {counted(steps, 'step')}" if steps else "every epoch"


def _epochs(number: float) -> str:
    return f"{number:.4g} epoch{'' if number == 1 else 's'}"


def _rows(config: Config, plan: Plan, lengths: Lengths | None) -> str:
    if plan.rows is None and makes_data(config.kubernetes):
        return "unknown: the data are not on this machine; kubernetes.preprocess makes them on the cluster"
    if plan.rows is None:
        return "unknown: the data are no files on this machine; `kubetune data prepare` fetches and counts them"
    tested = config.data.eval if isinstance(config.data.eval, tuple) else config.data.train
    made_by_pod = makes_data(config.kubernetes)
    bounded = [
        is_upper_bound(sources, made_by_pod=made_by_pod) for sources in (config.data.train, tested)
    ]
    splits = lengths is not None and lengths.rows_per_record > 1
    rows, eval_rows = (
        f"{'at most ' if bound else 'about ' if splits else ''}{number or 0:,}"
        for bound, number in zip(bounded, (plan.rows, plan.eval_rows), strict=True)
    )
    evaluated = f", {eval_rows} for evaluation" if plan.eval_rows else ""
    if any(bounded[: 2 if plan.eval_rows else 1]):
        return f"{rows}{evaluated}: of data that are not here no more than #N; `kubetune data prepare` counts them"
    if config.data.overlong == "split" and lengths is None:
        return f"at least {rows}{evaluated}: texts of more than {config.data.max_length:,} tokens are split into several"
    return f"{rows}{evaluated}, before checks leave any out"


def _tokens(
    config: Config, plan: Plan, lengths: Lengths | None, findings: Sequence[Finding] | None
) -> str:
    tokens = plan.tokens_per_epoch
    if plan.rows is None:
        return "unknown, as the rows are"
    if tokens is None or lengths is None:
        return (
            "unknown: the tokenizer is not on this machine, or none of the first rows can be read"
        )
    sampled = counted(lengths.sampled, "record" if lengths.rows_per_record > 1 else "row")
    text = f"about {tokens:,} an epoch, {lengths.tokens_per_row:,.0f} a row (from {sampled})"
    if findings is not None:
        return text
    if lengths.overlong_share:
        text += (
            f"; {lengths.overlong_share:.1%} longer than {lengths.limit:,}: {config.data.overlong}"
        )
    if lengths.bad_share:
        text += f"; {lengths.bad_share:.1%} unreadable, see `kubetune data check`"
    return text
