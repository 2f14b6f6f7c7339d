"""The plan of a run with all that is known before it starts: rows, tokens, memory, hours and price."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

from kubetune.base import cpu
from kubetune.base.gpus import gpu_use, visible_gpus
from kubetune.base.humanize import duration, size
from kubetune.config.schema import (
    Config,
    LoraConfig,
    ModelConfig,
    SourceConfig,
    TrainingConfig,
)
from kubetune.config.schema.cluster import ComputeConfig, quantity_bytes
from kubetune.data.findings.finding import Finding
from kubetune.data.inspect.estimate import (
    estimate_lengths,
    estimate_rows,
    is_upper_bound,
    load_here,
    makes_data,
    taken_by,
)
from kubetune.data.inspect.known_findings import known_findings
from kubetune.data.inspect.lengths import Lengths
from kubetune.data.spec import DataSpec
from kubetune.errors import ConfigError
from kubetune.library import plan_text
from kubetune.plan import earlier_runs, measured
from kubetune.plan.base_model import may_lack_targets, positions_of, require_kind
from kubetune.plan.cost import (
    Bill,
    bill,
    evaluation_hours,
    price_line,
    reference_hours,
    time_line,
)
from kubetune.plan.forecast import MIB, Forecast, forecast, remedies
from kubetune.plan.linears import (
    UNQUANTISED,
    Trainable,
    part_of,
    parts_line,
    shape_of,
    trained_by_part,
)
from kubetune.plan.model_shapes import Weights, read_weights
from kubetune.plan.plan import Plan, make_plan
from kubetune.plan.rank_work import RankWork, quantization_of
from kubetune.rundir.starts import day_of
from kubetune.scoring.own_functions import require_file

LabelledLines = Iterator[tuple[str, str]]
"""A label and a text for each line. A line with an empty label belongs to the one above it."""


@dataclass(frozen=True)
class PlanForecast:
    """A plan with all that is known about the run before it starts."""

    # With the values that measurements on this machine choose for keys that are `auto`.
    config: Config
    plan: Plan
    lengths: Lengths | None
    # Each of those choices, as a sentence.
    choices: Sequence[str]
    ahead: Ahead
    # About the data. None if some rows were not read.
    findings: tuple[Finding, ...] | None

    def describe(self) -> LabelledLines:
        """Yield everything as labelled lines."""
        yield from plan_text.describe(self.config, self.plan, self.lengths, self.findings)
        if self.config.kubernetes is not None:
            yield (
                "on the cluster",
                plan_text.output_on_cluster(self.config.name, self.config.model.path),
            )
        for text in self.choices:
            yield "measured here", text
        yield from describe(self.config, self.plan, self.ahead)
        for text in plan_text.on_data(self.lengths, self.findings):
            yield "data", text

    def to_json(self) -> dict[str, Any]:
        """Return the same facts as numbers."""
        findings = None
        if self.findings is not None:
            findings = [finding.to_json() for finding in self.findings]
        return {
            **self.plan.model_dump(mode="json"),
            "measured": self.choices,
            "rows_at_most": is_upper_bound(
                self.config.data.train, made_by_pod=makes_data(self.config.kubernetes)
            ),
            "findings": findings,
            **as_json(self.config, self.plan, self.ahead),
        }


def forecast_run(
    config: Config, environ: Mapping[str, str], *, builds: bool = True
) -> PlanForecast:
    """Plan a run. This reads data but no weights.

    `builds`: if it is not clear that the model has the target modules, build the model without weights
    to find out. This imports torch.

    Raises ConfigError for a run that cannot work, DataError for data that do not exist.
    """
    require_kind(config.task, config.model.path, environ)
    if config.evaluation.metrics is not None:
        require_file(config.evaluation.metrics)
    rows, eval_rows = estimate_rows(config.data, made_by_pod=makes_data(config.kubernetes))
    # Lengths and findings both need the tokenizer; it is loaded once.
    load_tokenizer = cache(partial(load_here, config.model, config.data, day_of(config.data)))
    lengths = estimate_lengths(
        DataSpec.of(config),
        config.training,
        environ,
        load_tokenizer,
        made_by_pod=makes_data(config.kubernetes),
    )
    positions = positions_of(config.task, config.model.path, environ)
    if positions is not None and lengths is not None:
        positions.require(lengths.longest)
    _require_experts(config.training, config.model.path)
    if builds:
        _require_targets(config.lora, config.model, config.task_name)
    tokens = None
    longest = None
    spared_share = 0.0
    if lengths is not None:
        tokens = lengths.tokens(rows)
        spared_share = lengths.spared
        rows = lengths.rows(rows)
        eval_rows = lengths.rows(eval_rows)
        longest = lengths.longest_of(rows)
    plan = make_plan(
        config, rows, eval_rows, visible_gpus(environ), tokens=tokens, spared_share=spared_share
    )
    config, choices = _with_measured_choices(config, plan, tokens)
    ahead = look_ahead(config, plan, tokens, environ, longest)
    findings = known_findings(config, environ, load_tokenizer)
    return PlanForecast(config, plan, lengths, choices, ahead, findings)


def _with_measured_choices(
    config: Config, plan: Plan, tokens: int | None
) -> tuple[Config, list[str]]:
    """Return the config with `auto` replaced where this machine has measured what is best.

    The list says each choice in a sentence.
    """
    weights = read_weights(config.model.path, os.environ)
    texts = []
    if plan.device == "cpu" and config.model.dtype == "auto" and config.kubernetes is None:
        shape = None if weights is None else shape_of(weights)
        dtype, reason = cpu.dtype_for(None if shape is None else shape.hidden)
        texts.append(f"model.dtype: auto -> {dtype}, because {reason}")
        model = config.model.model_copy(update={"dtype": dtype})
        config = config.model_copy(update={"model": model})
    gpu = gpu_here() if plan.device == "cuda" else None
    runs_elsewhere = config.kubernetes is not None or (plan.device == "cuda" and gpu is None)
    if weights is None or config.training.compile != "auto" or runs_elsewhere:
        return config, texts
    measurements = measured.read(gpu)
    total_tokens = float(tokens or 0) * plan.num_epochs
    compiles = measured.compiles(
        config.task, config.training, measurements, weights.parameters, total_tokens, plan.device
    )
    if compiles != "auto":
        texts.append(
            f"training.compile: auto -> {str(compiles).lower()}, because {measurements.why} "
            f"(measured on {measurements.time[:10]})"
        )
        training = config.training.model_copy(update={"compile": compiles})
        config = config.model_copy(update={"training": training})
    return config, texts


def _require_experts(training: TrainingConfig, model_path: str) -> None:
    """Raise ConfigError if a loss of routers is set for a model that has no experts."""
    weights = read_weights(model_path, os.environ)
    if weights is None or not weights.stated:
        return
    parts = {part_of(name) for name in weights.shapes}
    if "router" in parts or "experts" in parts:
        return
    for name in ("router_aux_loss_coef", "router_z_loss_coef"):
        value = getattr(training, name)
        if value:
            raise ConfigError(
                f"training.{name}: found {value:g}, but this model has no experts; leave it out"
            )


def _require_targets(lora: LoraConfig | None, model: ModelConfig, task: str) -> None:
    """Raise ConfigError for target modules that the model lacks.

    The model is built, without weights, only if the names of its weights leave that open.
    """
    weights = read_weights(model.path, os.environ)
    if lora is None or weights is None or model.trust_remote_code:
        return
    if not may_lack_targets(lora, weights):
        return
    import transformers

    from kubetune.models.adapters.lora import add_lora
    from kubetune.models.loading import skeleton
    from kubetune.tasks import task_of

    auto_class = getattr(transformers, task_of(task).auto_class)
    add_lora(skeleton(auto_class, model), lora, task_type="CAUSAL_LM", seed=0)


@dataclass(frozen=True)
class Ahead:
    """What is known about a run before it starts. None for what is not known."""

    weights: Weights | None
    memory: Forecast | None
    bill: Bill | None
    # Tokens of the longest row.
    longest: int | None = None
    forget_rows: int = 0


def look_ahead(
    config: Config,
    plan: Plan,
    tokens_per_epoch: int | None,
    environ: Mapping[str, str],
    longest: int | None = None,
) -> Ahead:
    """Forecast memory, time and price, as far as the model and the data are on this machine.

    `longest`: tokens of the longest row.
    """
    weights = read_weights(config.model.path, environ)
    memory = None
    if weights is not None:
        of_rows = RankWork.of(config, plan, longest)
        memory = forecast(of_rows, weights, device_bytes(config.compute, plan))
    tokens = None
    if tokens_per_epoch is not None and plan.steps_per_epoch:
        tokens = round(tokens_per_epoch * plan.num_steps / plan.steps_per_epoch)
    gpu = gpu_here() if plan.device == "cuda" else None
    of_run = bill(
        RankWork.of(config, plan),
        config.compute,
        plan,
        weights,
        tokens,
        gpu,
        earlier_runs.read(),
        plan.spared_share,
    )
    made_by_pod = makes_data(config.kubernetes)
    forget_rows = _rows_to_forget(config.sources["forget"], made_by_pod=made_by_pod)
    return Ahead(weights, memory, of_run, longest, forget_rows)


def _rows_to_forget(sources: Sequence[SourceConfig], *, made_by_pod: bool) -> int:
    rows = 0
    for source in sources:
        rows += taken_by(source, made_by_pod=made_by_pod) or 0
    return rows


def gpu_here() -> str | None:
    """Return the name of this machine's first GPU, or None where there is none."""
    for gpu in gpu_use():
        return str(gpu["name"])
    return None


def device_bytes(compute: ComputeConfig, plan: Plan) -> int | None:
    """Return the memory of one device, or None if it is not known.

    The config comes first. Without it, a GPU's memory is the least among the GPUs here.
    """
    if plan.device == "cpu":
        if compute.memory is None:
            return None
        return quantity_bytes(compute.memory) // plan.processes_per_node
    if compute.gpu_memory:
        return quantity_bytes(compute.gpu_memory)
    sizes = [gpu["memory_total_mib"] for gpu in gpu_use() if gpu.get("memory_total_mib")]
    return min((int(size_mib) * MIB for size_mib in sizes), default=None)


def describe(config: Config, plan: Plan, ahead: Ahead) -> LabelledLines:
    """Yield the facts as labelled lines."""
    if ahead.weights is not None:
        trainable = Trainable(config.lora, config.sight)
        base = quantization_of(config.quantization, config.lora, plan)
        yield from _trained_lines(trainable, base, ahead.weights)
    if ahead.weights is not None and ahead.memory is not None:
        yield from _memory_lines(config, plan, ahead.weights, ahead.memory, ahead.longest)
    else:
        yield (
            "memory",
            "unknown: the model is not on this machine, or its config.json does not name its sizes",
        )
    if ahead.bill is not None:
        yield from _time_lines(config, plan, ahead.bill, ahead.forget_rows)


def _trained_lines(trainable: Trainable, base: str, weights: Weights) -> LabelledLines:
    """Yield how much of each part of the model is trained. `base`: how the frozen base is quantised."""
    held = trained_by_part(Trainable(lora=None, vision=None), weights)
    yield "trained", parts_line(trained_by_part(trainable, weights), held)
    if held["experts"] and base != "none":
        share = held["experts"] / held.total()
        yield "", f"the experts, {share:.1%} of the model, do not become {base}: {UNQUANTISED}"


def _memory_lines(
    config: Config, plan: Plan, weights: Weights, memory: Forecast, longest: int | None
) -> LabelledLines:
    """Yield the peak memory of a device, part by part, and what would make the run fit."""
    device = "GPU" if plan.device == "cuda" else "process"
    peak = f"about {size(memory.peak_bytes)} at the peak of each {device}"
    if memory.device_bytes is not None:
        word = "fits into" if memory.fits else "does NOT fit into"
        peak += f": {word} {size(memory.device_bytes)}, 8 % of it left to the allocator"
    yield "memory", peak
    for name, part_bytes in memory.parts.items():
        yield "", f"{size(part_bytes):>10}  {name}"
    if plan.device == "cpu" and config.model.dtype == "auto":
        yield (
            "",
            "in float32; less where the processor has instructions for bfloat16 "
            "(model.dtype: auto)",
        )
    if not weights.stated:
        yield "", "from config.json alone: the weights are not on this machine"
    if memory.fits is not False or memory.device_bytes is None:
        return
    changes = remedies(config, plan, weights, memory.device_bytes, longest)
    for change, changed in changes:
        yield "would fit with", f"{change} (about {size(changed.peak_bytes)})"
    if not changes:
        yield "would fit with", "no single change; several together may do, or a larger device"


def _time_lines(config: Config, plan: Plan, bill: Bill, forget_rows: int) -> LabelledLines:
    """Yield how long the run takes, what is added to that, and the price."""
    yield "time", time_line(bill)
    hours = evaluation_hours(
        config.evaluation, config.lora, plan, bill.tokens_per_second, forget_rows
    )
    if hours:
        text = f"evaluations add about {duration(hours * 3600)}"
        if config.evaluation.generate is not None:
            text += ", if every answer is as long as it may be"
        yield "", text
    hours = reference_hours(
        config.task, config.preference, config.lora, plan, bill.tokens_per_second
    )
    if hours:
        yield (
            "",
            f"scoring every answer with the model before training adds about {duration(hours * 3600)}, once",
        )
    benchmarks = config.evaluation.benchmarks
    if benchmarks is not None:
        names = ", ".join(benchmarks.tasks)
        yield "", f"not counted: {names} at the end, on the base model and the tuned one"
    price = price_line(bill, config.compute.price_per_gpu_hour)
    if price:
        yield "price", price


def as_json(config: Config, plan: Plan, ahead: Ahead) -> dict[str, Any]:
    """Return the same facts as numbers."""
    memory = None
    if ahead.memory is not None:
        memory = {
            "peak_bytes": ahead.memory.peak_bytes,
            "parts": dict(ahead.memory.parts),
            "device_bytes": ahead.memory.device_bytes,
            "fits": ahead.memory.fits,
            "parameters": ahead.memory.parameters,
            "trained_parameters": ahead.memory.trained_parameters,
        }
    trained = None
    if ahead.weights is not None:
        trained = trained_by_part(Trainable(config.lora, config.sight), ahead.weights)
    rate = None
    bill_as_json = None
    if ahead.bill is not None:
        rate = ahead.bill.tokens_per_second
        bill_as_json = asdict(ahead.bill)
    return {
        "memory": memory,
        "trained_by_part": trained,
        "evaluation_hours": evaluation_hours(
            config.evaluation, config.lora, plan, rate, ahead.forget_rows
        ),
        "reference_hours": reference_hours(config.task, config.preference, config.lora, plan, rate),
        "bill": bill_as_json,
    }
