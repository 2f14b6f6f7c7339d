"""Hours and money that a run takes: FLOPs by arithmetic, speed by config, earlier runs or what a device can do."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kubetune.base.humanize import duration
from kubetune.config.schema import ComputeConfig, EvaluationConfig, LoraConfig, PreferenceConfig
from kubetune.plan import earlier_runs
from kubetune.plan.earlier_runs import Kind, Range, Speed
from kubetune.plan.flops import causal_pairs, planned_cost
from kubetune.plan.gpu_specs import stated_tflops
from kubetune.plan.linears import shape_of
from kubetune.plan.model_shapes import Weights
from kubetune.plan.plan import Plan
from kubetune.plan.rank_work import RankWork

# Share of the peak that is assumed of wide models, and the hidden size that has half of it: fitted to published
# speeds of other trainers (benchmarks/published_speeds.py). Narrow models wait for launches and memory.
WIDE_SHARE, NARROW_HALF = 0.46, 1550


@dataclass(frozen=True)
class Span:
    """Hours, and the price where one is given, between which earlier runs let a run end. `source`: which runs."""

    low_hours: float
    high_hours: float
    low_price: float | None
    high_price: float | None
    source: str


@dataclass(frozen=True)
class Bill:
    """Time and cost of a run. `source` says where the rate comes from; parts are None where unknown.

    `spans`: what earlier runs say, those of the same shape first.
    """

    tokens: int
    flops: float | None
    tokens_per_second: float | None
    source: str
    hours: float | None
    price: float | None
    spans: tuple[Span, ...] = ()


def bill(
    work: RankWork,
    compute: ComputeConfig,
    plan: Plan,
    weights: Weights | None,
    tokens: int | None,
    gpu: str | None = None,
    known: Iterable[Speed] = (),
    saved_share: float = 0.0,
) -> Bill | None:
    """Return hours and price of a run over `tokens` tokens, or None where tokens are unknown.

    `work`: of rows as long as the config lets them, since runs on other data are compared by it. `saved_share`: share of the
    tokens that is not computed again.

    The rate is `compute.tokens_per_second`, else that of the `known` runs of this shape, else a share of
    `compute.peak_tflops` or of what the data sheet says of a device named `gpu`.
    """
    if tokens is None:
        return None
    flops = None
    if weights is not None:
        flops = flops_per_token(work, weights, saved_share=saved_share)
    # Speeds of earlier runs on this device, if there are any.
    kind = kind_of(work, plan, weights, gpu, saved_share)
    earlier = [] if kind is None else earlier_runs.ranges(kind, known)
    if compute.tokens_per_second is None and earlier:
        # Runs of the same shape come first.
        rate = Rate(earlier[0].middle, earlier[0].source)
    else:
        rate = _stated_rate(compute, work, plan, weights, flops, gpu)
    price_per_hour = None
    if compute.price_per_gpu_hour is not None:
        price_per_hour = compute.price_per_gpu_hour * plan.world_size
    hours = tokens / rate.tokens_per_second / 3600 if rate.tokens_per_second else None
    return Bill(
        tokens=tokens,
        flops=flops and flops * tokens,
        tokens_per_second=rate.tokens_per_second,
        source=rate.source,
        hours=hours,
        price=_price(hours, price_per_hour),
        spans=tuple(_span(speeds, tokens, price_per_hour) for speeds in earlier),
    )


class Rate(NamedTuple):
    """Tokens per second of all devices together, None where unknown, and where the number comes from."""

    tokens_per_second: float | None
    source: str


def _stated_rate(
    compute: ComputeConfig,
    work: RankWork,
    plan: Plan,
    weights: Weights | None,
    flops: float | None,
    gpu: str | None,
) -> Rate:
    """Return the rate by the config, or by the peak of the device. `flops`: of one token."""
    if compute.tokens_per_second is not None:
        rate = compute.tokens_per_second * plan.world_size
        return Rate(rate, "compute.tokens_per_second of each device")
    # No run to go by: a share of what the device can do at best.
    peak = compute.peak_tflops
    peak_source = "compute.peak_tflops"
    # Data sheets state the peak of 16-bit products.
    if peak is None and gpu is not None and work.element == 2:
        peak = stated_tflops(gpu)
        peak_source = f"what is stated for {gpu}"
    if peak is not None and flops:
        share = _assumed_share(weights)
        rate = peak * 1e12 * share / flops * plan.world_size
        return Rate(
            rate,
            f"{share:.0%} of {peak_source}, an assumption by other trainers; a run's own report "
            "says better",
        )
    if plan.device == "cpu":
        return Rate(
            None,
            "unknown: no run of such a shape has ended on this machine; give "
            "compute.tokens_per_second to know it now",
        )
    return Rate(None, "unknown: give compute.tokens_per_second, or compute.peak_tflops")


def _span(speeds: Range, tokens: int, price_per_hour: float | None) -> Span:
    """Return between which hours and prices the slowest and the fastest earlier run let this one end."""
    low_hours = tokens / speeds.high / 3600
    high_hours = tokens / speeds.low / 3600
    return Span(
        low_hours,
        high_hours,
        _price(low_hours, price_per_hour),
        _price(high_hours, price_per_hour),
        speeds.source,
    )


def _price(hours: float | None, per_hour: float | None) -> float | None:
    if hours is None or per_hour is None:
        return None
    return hours * per_hour


def _assumed_share(weights: Weights | None) -> float:
    """Return the share of a device's peak that a model of this width is assumed to reach."""
    shape = None if weights is None else shape_of(weights)
    if shape is None:
        return WIDE_SHARE
    # Hidden size 1,550 reaches 0.23, 4,096 reaches 0.33, 8,192 reaches 0.39.
    return WIDE_SHARE * shape.hidden / (shape.hidden + NARROW_HALF)


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
    read, which generation with its small batches seldom reaches. Rows that must not be forgotten are counted as long as
    those of training.
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
    """Return the hours to score every answer with the model before training; None where the loss needs no scores.

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


def _reading_speed(lora: LoraConfig | None) -> int:
    """Factor by which a token is read faster than trained on, by adapters or by all parameters."""
    return 2 if lora is not None else 3


def kind_of(
    work: RankWork, plan: Plan, weights: Weights | None, gpu: str | None, saved_share: float = 0.0
) -> Kind | None:
    """Return the facts that the speed of this run depends on; None if some, or the device, are not known.

    `gpu`: the device's name.
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
    # Everything by which two runs on one device differ in speed, besides sizes.
    method = f"{plan.method}, {work.quantization}, {parallelism}, recompute {work.recompute}, {work.task}"
    # On a CPU `auto` depends on the processor, so only the run knows its dtype.
    dtype: str | None = work.dtype
    if dtype == "auto":
        dtype = "bfloat16" if plan.device == "cuda" else None
    length = plan.tokens_per_epoch / plan.rows
    flops = flops_per_token(work, weights, length, saved_share)
    if flops is None:
        return None
    return Kind(
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
    return cost.without_share(saved_share).of(1, causal_pairs(length) / length, 1)


def time_line(estimate: Bill) -> str:
    """Return the hours in a line, with the source of the speed that they follow from."""
    spans = [f"{_between(span)} by {span.source}" for span in estimate.spans]
    if estimate.hours is None or estimate.tokens_per_second is None:
        return estimate.source
    if estimate.spans and estimate.source == estimate.spans[0].source:
        return f"{'; '.join(spans)} ({estimate.tokens:,} tokens)"
    rate = f"{estimate.tokens:,} tokens at {estimate.tokens_per_second:,.0f} tokens/s ({estimate.source})"
    return "; ".join((f"about {duration(estimate.hours * 3600)} for {rate}", *spans))


def price_line(estimate: Bill, device_hour: float | None) -> str:
    """Return the price in a line, at `device_hour` for a device and hour. Return "" if it is not known."""
    if device_hour is None or estimate.price is None:
        return ""
    about = f"about {estimate.price:,.2f}"
    if estimate.spans and estimate.source == estimate.spans[0].source:
        about = f"{estimate.spans[0].low_price:,.2f}–{estimate.spans[0].high_price:,.2f}"
    return f"{about} at {device_hour:g} for each device and hour"


def _between(span: Span) -> str:
    return f"{duration(span.low_hours * 3600)}–{duration(span.high_hours * 3600)}"
