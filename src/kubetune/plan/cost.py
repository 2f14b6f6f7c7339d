"""Hours and money that a run takes, by measured speeds: of earlier runs, or the speed in the config."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from kubetune.base.humanize import duration
from kubetune.config.schema import ComputeConfig, EvaluationConfig, LoraConfig, PreferenceConfig
from kubetune.plan import earlier_runs
from kubetune.plan.earlier_runs import Range, RunShape, Speed
from kubetune.plan.flops import causal_pairs, planned_cost
from kubetune.plan.linears import Trainable, shape_of
from kubetune.plan.model_shapes import Weights
from kubetune.plan.plan import Plan
from kubetune.plan.rank_work import RankWork

UNKNOWN_SPEED = "unknown: no run of such a shape has ended on this machine; give compute.tokens_per_second to know it now"


@dataclass(frozen=True)
class Bill:
    """Time and price of the steps of a run, None if unknown. `source` says where the speed comes from.

    With speeds of earlier runs, low and high come from the fastest and the slowest of them, with some spare.
    """

    tokens: int
    tokens_per_second: float | None  # of all devices together
    source: str
    hours: float | None = None
    low_hours: float | None = None
    high_hours: float | None = None
    price: float | None = None
    low_price: float | None = None
    high_price: float | None = None


def bill(
    shape: RunShape | None,
    compute: ComputeConfig,
    world_size: int,
    tokens: int | None,
    known: Iterable[Speed] = (),
) -> Bill | None:
    """Return hours and price of a run over `tokens` tokens, or None if the tokens are unknown.

    The speed was measured: it is `compute.tokens_per_second`, else the speed of the `known` runs of this shape or
    of a similar one. Without either, hours are unknown.
    """
    if tokens is None:
        return None
    speeds = _measured_speeds(shape, compute, world_size, known)
    if speeds is None:
        return Bill(tokens, None, UNKNOWN_SPEED)
    hours = tokens / speeds.middle / 3600
    low_hours = tokens / speeds.high / 3600
    high_hours = tokens / speeds.low / 3600
    priced = Bill(tokens, speeds.middle, speeds.source, hours, low_hours, high_hours)
    if compute.price_per_gpu_hour is None:
        return priced
    per_hour = compute.price_per_gpu_hour * world_size
    return replace(
        priced,
        price=hours * per_hour,
        low_price=low_hours * per_hour,
        high_price=high_hours * per_hour,
    )


def _measured_speeds(
    shape: RunShape | None, compute: ComputeConfig, world_size: int, known: Iterable[Speed]
) -> Range | None:
    """Return the speeds that the config or earlier runs state; None if there are none."""
    if compute.tokens_per_second is not None:
        rate = compute.tokens_per_second * world_size
        return Range(rate, rate, rate, "compute.tokens_per_second of each device")
    if shape is None:
        return None
    return earlier_runs.range_of(shape, known)


def evaluation_hours(
    evaluation: EvaluationConfig,
    lora: LoraConfig | None,
    plan: Plan,
    rate: float | None,
    forget_rows: int = 0,
    *,
    needs_base: bool,
) -> float | None:
    """Return the hours of all evaluations, or None if rows or steps are unknown.

    `needs_base`: the model before training is measured too.

    `rate`: tokens per second of training. Answers are counted as long as they may be, each token like one that is
    read, which generation with its small batches seldom reaches. Rows that must not be forgotten are counted as
    long as training rows.
    """
    if not rate or not plan.eval_rows or not plan.rows or not plan.tokens_per_epoch:
        return None
    if not plan.num_steps:
        return None
    # The tokens of one evaluation.
    row_tokens = plan.tokens_per_epoch / plan.rows
    tokens = (plan.eval_rows + forget_rows) * row_tokens
    generate = evaluation.generate
    if generate is not None:
        # Each question is read for each of its answers, and each answer is as long as it may be.
        questions = min(generate.rows or plan.eval_rows, plan.eval_rows)
        answers = questions * (1 + (generate.samples or 0))
        tokens += answers * (row_tokens + generate.max_new_tokens)
    # As Plan.is_eval_step has it: every so many steps, and at the end.
    times = math.ceil(plan.num_steps / (plan.eval_steps or plan.num_steps))
    if needs_base:
        times += 1
    return times * tokens / (rate * _reading_speed(lora)) / 3600


def reference_hours(
    task: str,
    preference: PreferenceConfig,
    lora: LoraConfig | None,
    plan: Plan,
    rate: float | None,
) -> float | None:
    """Return the hours to score every answer with the model before training; None if the loss needs no scores.

    Answers are read, as in an evaluation. With each judged answer goes another one, to the same question.
    """
    if task != "preference" or not preference.needs_reference:
        return None
    if not rate or not plan.rows or not plan.tokens_per_epoch:
        return None
    # KTO also scores the answer of another row for each row.
    sequences = 2 if preference.traits.judges else 1
    tokens = sequences * plan.tokens_per_epoch * (1 + (plan.eval_rows or 0) / plan.rows)
    return tokens / (rate * _reading_speed(lora)) / 3600


def teacher_hours(
    work: RankWork, weights: Weights | None, teacher: Weights | None, plan: Plan, rate: float | None
) -> float | None:
    """Return the hours to ask a teacher about all rows of training once; None if they are unknown."""
    if not rate or weights is None or not plan.rows or not plan.tokens_per_epoch:
        return None
    length = plan.tokens_per_epoch / plan.rows
    of_training = flops_per_token(work, weights, length, plan.saved_share)
    if not of_training:
        return None
    share = reading_flops(teacher, length) / of_training
    return plan.tokens_per_epoch * share / rate / 3600 or None


def _reading_speed(lora: LoraConfig | None) -> int:
    """How many times faster a token is read than trained on, with adapters or with all parameters."""
    return 2 if lora is not None else 3


def kind_of(
    work: RankWork, plan: Plan, weights: Weights | None, gpu: str | None
) -> RunShape | None:
    """Return the facts that the speed of this run depends on; None if some, or the device, are not known.

    `work`: the work on the longest rows that the config allows, by which runs on other data are compared. `gpu`: the
    device's name.
    """
    shape = None
    if weights is not None:
        shape = shape_of(weights)
    if weights is None or shape is None:
        return None
    if not plan.rows or not plan.tokens_per_epoch or not plan.tokens_per_step:
        return None
    if plan.device == "cuda" and gpu is None:
        return None
    parallelism = "fsdp" if work.is_sharded else "ddp"
    # Everything that makes two runs on one device differ in speed, besides sizes.
    method = f"{plan.method}, {work.quantization}, {parallelism}, recompute {work.recompute}, {work.task}"
    # On a CPU `auto` depends on the processor, so only the run knows its dtype.
    dtype: str | None = work.dtype
    if dtype == "auto":
        dtype = "bfloat16" if plan.device == "cuda" else None
    length = plan.tokens_per_epoch / plan.rows
    flops = flops_per_token(work, weights, length, plan.saved_share)
    if flops is None:
        return None
    return RunShape(
        parameters=weights.parameters,
        hidden=shape.hidden,
        layers=shape.layers,
        method=method,
        dtype=dtype,
        device=earlier_runs.device_name(gpu if plan.device == "cuda" else None),
        devices=plan.world_size if plan.device == "cuda" else plan.nodes,
        world=plan.world_size,
        length=length,
        batch=min(work.batch_tokens, plan.tokens_per_step / plan.world_size),
        flops=flops,
    )


def flops_per_token(
    work: RankWork, weights: Weights, length: float | None = None, saved_share: float = 0.0
) -> float | None:
    """Return the FLOPs of forward and backward of one token, a label, in a row of `length`, or of the longest kind.

    `saved_share`: share of all tokens that is in beginnings which other rows have computed.
    """
    cost = planned_cost(work.trainable, weights, has_vocabulary=not work.classifies)
    if cost is None:
        return None
    length = length or work.sequence_tokens
    flops = cost.without_share(saved_share).of(1, causal_pairs(length) / length, 1)
    return flops + reading_flops(work.teacher, length, saved_share)


def reading_flops(weights: Weights | None, length: float, saved_share: float = 0.0) -> float:
    """Return the FLOPs of reading a token by a model that does not learn; 0 without one, or if its sizes are unknown."""
    cost = None
    if weights is not None:
        cost = planned_cost(Trainable(None, None), weights, has_vocabulary=True)
    if cost is None:
        return 0.0
    # A forward is a third of what training all parameters takes.
    return cost.without_share(saved_share).of(1, causal_pairs(length) / length, 1) / 3


def time_line(estimate: Bill) -> str:
    """Return the hours in a line, with the source of the speed."""
    if estimate.hours is None or estimate.low_hours is None or estimate.high_hours is None:
        return estimate.source
    tokens = f"{estimate.tokens:,} tokens"
    if estimate.low_hours == estimate.high_hours:
        rate = f"{estimate.tokens_per_second:,.0f} tokens/s"
        return f"about {_duration(estimate.hours)} for {tokens} at {rate} ({estimate.source})"
    span = f"{_duration(estimate.low_hours)}–{_duration(estimate.high_hours)}"
    return f"{span} by {estimate.source} ({tokens})"


def price_line(estimate: Bill, device_hour: float | None) -> str:
    """Return the price in a line, at `device_hour` for a device and hour; "" if it is not known."""
    if device_hour is None or estimate.price is None:
        return ""
    price = f"about {estimate.price:,.2f}"
    if estimate.low_price != estimate.high_price:
        price = f"{estimate.low_price:,.2f}–{estimate.high_price:,.2f}"
    return f"{price} at {device_hour:g} for each device and hour"


def _duration(hours: float) -> str:
    return duration(3600 * hours)
