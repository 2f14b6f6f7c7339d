"""Memory, time and price of a run in words: labelled lines, as `kubetune plan` and the page show them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kubetune.base.humanize import counted, duration, size
from kubetune.config.schema import Config, DistillConfig, EvaluationConfig
from kubetune.config.schema.cluster import KubernetesConfig
from kubetune.config.schema.distill import MOST_KEPT_BYTES
from kubetune.plan.cost import price_line, time_line
from kubetune.plan.costs import Costs
from kubetune.plan.drawing import drawn_by_servers, drawn_here
from kubetune.plan.drawing import lines as drawing_lines
from kubetune.plan.fitting import Remedies
from kubetune.plan.forecast import Forecast
from kubetune.plan.linears import UNQUANTISED, Trainable, parts_line, trained_by_part
from kubetune.plan.model_shapes import Weights
from kubetune.plan.plan import Plan
from kubetune.plan.rank_work import quantization_of

# A label and a text for each line. A line with an empty label belongs to the one above it.
LabelledLines = Iterator[tuple[str, str]]


def lines(
    config: Config,
    plan: Plan,
    weights: Weights | None,
    costs: Costs,
    changes: Remedies,
) -> LabelledLines:
    """Yield all of it. `changes`: each alone would make the run fit."""
    base = quantization_of(config.quantization, config.lora, plan)
    if weights is not None:
        yield from _trained_lines(Trainable(config.lora, config.sight), base, weights)
    yield from _memory_lines(config.model.dtype, plan.device, weights, costs.memory, changes)
    yield from _time_lines(config.task, config.evaluation, config.compute.price_per_gpu_hour, costs)
    if config.has_served_teacher:
        number = _servers(config.kubernetes, config.distill.urls)
        yield "teacher", _teacher(config.distill, number)
    if config.task == "distill" and config.distill.keeps_teacher and plan.tokens_per_epoch:
        number = _compared_tokens(config.distill.top_k, weights)
        yield "teacher's numbers", _kept_numbers(number, plan.tokens_per_epoch)
    if costs.drawing is not None:
        servers = config.drawing.servers
        if servers is None or config.lora is None:
            drawer = drawn_here(costs.drawing, costs.cache_bytes)
        else:
            number = _servers(config.kubernetes, servers.urls)
            drawer = drawn_by_servers(costs.drawing, number, config.lora.r, servers.lag)
        yield from drawing_lines(config.drawing, costs.drawing, drawer, costs.drawing_hours)


def memory_word(device: str, memory: Forecast | None) -> str:
    """Return the memory in a headline: `457 MiB a process`."""
    if memory is None:
        return "memory unknown"
    word = f"{size(memory.peak_bytes)} a {_holder(device)}"
    if memory.fits is False:
        word += ", which does not fit"
    return word


def time_word(costs: Costs) -> str:
    """Return the time in a headline: `about 2 min`."""
    if costs.bill is None or costs.bill.hours is None:
        return "time unknown"
    return f"about {duration(costs.bill.hours * 3600)}"


def _trained_lines(trainable: Trainable, base: str, weights: Weights) -> LabelledLines:
    """Yield how much of each part of the model is trained. `base`: how the frozen base is quantised."""
    held = trained_by_part(Trainable(lora=None, vision=None), weights)
    yield "trained", parts_line(trained_by_part(trainable, weights), held)
    if held["experts"] and base != "none":
        share = held["experts"] / held.total()
        yield "", f"the experts, {share:.1%} of the model, do not become {base}: {UNQUANTISED}"


def _holder(device: str) -> str:
    """Return the word for what has the memory."""
    return "GPU" if device == "cuda" else "process"


def _memory_lines(
    dtype: str,
    device: str,
    weights: Weights | None,
    memory: Forecast | None,
    changes: Remedies,
) -> LabelledLines:
    """Yield the peak memory of a device, part by part, and what would make the run fit.

    `dtype`: model.dtype. `device`: cuda or cpu.
    """
    if weights is None or memory is None:
        reason = "the model is not on this machine, or its config.json does not name its sizes"
        yield "memory", f"unknown: {reason}"
        return

    peak = f"about {size(memory.peak_bytes)} at the peak of each {_holder(device)}"
    if memory.device_bytes is not None:
        word = "fits into" if memory.fits else "does not fit into"
        peak += f": {word} {size(memory.device_bytes)}, 8 % of it left to the allocator"
    yield "memory", peak
    for name, part_bytes in memory.parts.items():
        yield "", f"{size(part_bytes):>10}  {name}"
    if device == "cpu" and dtype == "auto":
        yield (
            "",
            "in float32; less if the processor has instructions for bfloat16 (model.dtype: auto)",
        )
    if not weights.stated:
        yield "", "only from config.json: the weights are not on this machine"

    for change, changed in changes:
        yield "would fit with", f"{change} (about {size(changed.peak_bytes)})"
    if memory.fits is False and not changes:
        yield "would fit with", "no single change; several together may do, or a larger device"


def _time_lines(
    task: str, evaluation: EvaluationConfig, device_hour: float | None, costs: Costs
) -> LabelledLines:
    """Yield how long the run takes, what is added to that, and the price. `device_hour`: of a device and hour."""
    if costs.bill is None:
        return
    yield "time", time_line(costs.bill)
    if costs.evaluation_hours:
        text = f"evaluations add about {duration(costs.evaluation_hours * 3600)}"
        if evaluation.generate is not None:
            text += ", if every answer is as long as it may be"
        yield "", text
    if costs.reference_hours:
        hours = duration(costs.reference_hours * 3600)
        asked = "scoring every answer with the model before training"
        if task == "distill":
            asked = "asking the teacher about every answer"
        yield "", f"{asked} adds about {hours}, once"
    if evaluation.benchmarks is not None:
        names = ", ".join(evaluation.benchmarks.tasks)
        yield "", f"not counted: {names} at the end, on the base model and the tuned one"
    price = price_line(costs.bill, device_hour)
    if price:
        yield "price", price


def _teacher(distill: DistillConfig, servers: int) -> str:
    """Return who is the teacher of a run whose teacher is on so many servers."""
    whose = "its own" if distill.support == "teacher_k" else "the model's"
    text = (
        f"{counted(servers, 'vLLM server')}, asked for {distill.top_k} of {whose} likeliest tokens"
    )
    if distill.keeps_teacher:
        return f"{text} once, before the first step"
    return f"{text} at each step"


def _compared_tokens(top_k: int, weights: Weights | None) -> int:
    """Return how many tokens are compared: a vocabulary may have fewer than `top_k`."""
    vocabulary = 0 if weights is None else int(weights.text_config.get("vocab_size") or 0)
    return min(top_k, vocabulary) if vocabulary else top_k


def _kept_numbers(number: int, tokens: int) -> str:
    """Return what is kept of a teacher that is asked once: `number` tokens for each label, which all tokens may be."""
    # Ids and log-probabilities, and that of all others, of 4 bytes each.
    most = 4 * (2 * number + 1) * tokens
    text = f"at most {size(most)}, beside the prepared data and in the memory of each process, which is not counted"
    if most > MOST_KEPT_BYTES:
        text += f"; above {size(MOST_KEPT_BYTES)} nothing is kept, and the teacher is asked at each step"
    return text


def _servers(kubernetes: KubernetesConfig | None, urls: Sequence[str]) -> int:
    """Return how many servers a run has: those of these addresses, or pods."""
    if kubernetes is None or kubernetes.samplers is None:
        return len(urls)
    return kubernetes.samplers.replicas
