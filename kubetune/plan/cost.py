"""Hours and money that a run takes: FLOPs by arithmetic, speed by config, earlier runs or what a device can do."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kubetune.base.humanize import duration
from kubetune.config.schema import ComputeConfig, Config, EvaluationConfig, LoraConfig
from kubetune.plan import earlier_runs
from kubetune.plan.earlier_runs import Kind, Range, Speed
from kubetune.plan.flops import causal_pairs, planned_cost
from kubetune.plan.gpu_specs import stated_tflops
from kubetune.plan.linears import Trainable, shape_of
from kubetune.plan.model_shapes import Weights
from kubetune.plan.plan import Plan
from kubetune.plan.rank_work import RankWork, element_bytes, quantization_of

WIDE_SHARE, NARROW_HALF = 0.46, 1550
"""Share of the peak that is assumed of wide models, and the hidden size that has half of it: fitted to published
speeds of other trainers (benchmarks/hindcast.py). Narrow models wait for launches and memory."""


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
    config: Config,
    plan: Plan,
    weights: Weights | None,
    tokens: int | None,
    gpu: str | None = None,
    known: Iterable[Speed] = (),
    spared: float = 0.0,
) -> Bill | None:
    """Return hours and price of a run over `tokens` tokens, or None where tokens are unknown.

    The rate is `compute.tokens_per_second`, else that of the `known` runs of this shape, else a share of
    `compute.peak_tflops` or of what the data sheet says of a device named `gpu`. `spared` is the share
    of the tokens that is not computed again.
    """
    if tokens is None:
        return None
    flops = None if weights is None else flops_per_token(config, weights, spared=spared)
    kind = kind_of(config, plan, weights, gpu, spared)
    earlier = [] if kind is None else earlier_runs.ranges(kind, known)
    if config.compute.tokens_per_second is None and earlier:
        rate = Rate(earlier[0].middle, earlier[0].source)
    else:
        rate = _stated_rate(config.compute, config.model.dtype, plan, weights, flops, gpu)
    price_per_hour = None
    if config.compute.price_per_gpu_hour is not None:
        price_per_hour = config.compute.price_per_gpu_hour * plan.world_size
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
    dtype: str,
    plan: Plan,
    weights: Weights | None,
    flops: float | None,
    gpu: str | None,
) -> Rate:
    """Return the rate by the config, or by the peak of the device. `flops`: of one token."""
    if compute.tokens_per_second is not None:
        rate = compute.tokens_per_second * plan.world_size
        return Rate(rate, "compute.tokens_per_second of each device")
    peak, peak_source = compute.peak_tflops, "compute.peak_tflops"
    if peak is None and gpu is not None and element_bytes(dtype, plan.device) == 2:
        peak, peak_source = stated_tflops(gpu), f"what is stated for {gpu}"
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
) -> float | None:
    """Return the hours of all evaluations, or None if rows or steps are unknown.

    `rate`: tokens per second of training. Answers are counted as long as they may be, each token like one that is
    read, which generation with its small batches seldom reaches. Rows that must not be forgotten are counted as long as
    those of training.
    """
    if not rate or not plan.eval_rows or not plan.rows or not plan.tokens_per_epoch:
        return None
    if not plan.num_steps:
        return None
    row_tokens = plan.tokens_per_epoch / plan.rows
    tokens = (plan.eval_rows + forget_rows) * row_tokens
    generate = evaluation.generate
    if generate is not None:
        questions = min(generate.rows or plan.eval_rows, plan.eval_rows)
        tokens += questions * (row_tokens + generate.max_new_tokens)
    # As Plan.is_eval_step has it: every so many steps, and at the end.
    times = math.ceil(plan.num_steps / (plan.eval_steps or plan.num_steps))
    if evaluation.needs_base:
        times += 1
    return times * tokens / (rate * _reading_speed(lora)) / 3600


def reference_hours(config: Config, plan: Plan, rate: float | None) -> float | None:
    """Hours until the model has said, before training, what it thinks of every answer; None where nobody asks.

    That is read, as in an evaluation. With each judged answer goes another one, to the same question.
    """
    if config.task != "preference" or not config.preference.needs_reference:
        return None
    if not rate or not plan.rows or not plan.tokens_per_epoch:
        return None
    sequences = 2 if config.record_kind == "judged" else 1
    tokens = sequences * plan.tokens_per_epoch * (1 + (plan.eval_rows or 0) / plan.rows)
    return tokens / (rate * _reading_speed(config.lora)) / 3600


def _reading_speed(lora: LoraConfig | None) -> int:
    """Factor by which a token is read faster than trained on, by adapters or by all parameters."""
    return 2 if lora is not None else 3


def kind_of(
    config: Config, plan: Plan, weights: Weights | None, gpu: str | None, spared: float = 0.0
) -> Kind | None:
    """Facts that the speed of this run depends on; None where that is not known, or not the device. `gpu`: its name."""
    shape = shape_of(weights) if weights is not None else None
    if (
        weights is None
        or shape is None
        or not plan.rows
        or not plan.tokens_per_epoch
        or not plan.tokens_per_step
    ):
        return None
    if plan.device == "cuda" and gpu is None:
        return None
    training, length = config.training, plan.tokens_per_epoch / plan.rows
    base = quantization_of(config.quantization, config.lora, plan)
    method = f"{plan.method}, {base}, {training.parallelism}, recompute {training.gradient_checkpointing}, {config.task}"
    dtype: str | None = config.model.dtype
    if dtype == "auto":
        dtype = "bfloat16" if plan.device == "cuda" else None
    flops = flops_per_token(config, weights, length, spared)
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
        batch=min(RankWork.of(config, plan).batch_tokens, plan.tokens_per_step / plan.world_size),
        flops=flops,
    )


def flops_per_token(
    config: Config, weights: Weights, length: float | None = None, spared: float = 0.0
) -> float | None:
    """Forward and backward of one token, a label, in a row of `length`, or of the longest kind.

    `spared`: share of all tokens that stands in beginnings which other rows have computed.
    """
    cost = planned_cost(Trainable.of(config), weights, has_vocabulary=not config.classifies)
    if cost is None:
        return None
    length = length or config.data.max_length
    return cost.sparing(spared).of(1, causal_pairs(length) / length, 1)


def time_line(estimate: Bill) -> str:
    """Return the hours in a line, with the source of the speed that they follow from."""
    spans = [f"{_between(span)} by {span.source}" for span in estimate.spans]
    if estimate.hours is None or estimate.tokens_per_second is None:
        return estimate.source
    if estimate.spans and estimate.source == estimate.spans[0].source:
        return f"{'; '.join(spans)} ({estimate.tokens:,} tokens)"
    rate = f"{estimate.tokens:,} tokens at {estimate.tokens_per_second:,.0f} tokens/s ({estimate.source})"
    return "; ".join((f"about {duration(estimate.hours * 3600)} for {rate}", *spans))


def price_line(estimate: Bill, each: float | None) -> str:
    """Return the price in a line, at `each` for a device and hour. Return "" if it is not known."""
    if each is None or estimate.price is None:
        return ""
    about = f"about {estimate.price:,.2f}"
    if estimate.spans and estimate.source == estimate.spans[0].source:
        about = f"{estimate.spans[0].low_price:,.2f}–{estimate.spans[0].high_price:,.2f}"
    return f"{about} at {each:g} for each device and hour"


def _between(span: Span) -> str:
    return f"{duration(span.low_hours * 3600)}–{duration(span.high_hours * 3600)}"
