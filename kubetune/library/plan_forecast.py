"""The plan of a run with all that is known before it: rows, tokens, memory and whether it fits, hours, price."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

from kubetune.base.gpus import gpu_use, visible_gpus
from kubetune.base.humanize import duration, size
from kubetune.config.schema import Config
from kubetune.config.schema.cluster import quantity_bytes
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
from kubetune.plan.forecast import MIB, Forecast, forecast, quantization_of, remedies
from kubetune.plan.linears import UNQUANTISED, part_of, parts_line, shape_of, trained_by_part
from kubetune.plan.model_shapes import Weights, read_weights
from kubetune.plan.plan import Plan, make_plan
from kubetune.rundir.starts import day_of
from kubetune.scoring.own_functions import require_file


@dataclass(frozen=True)
class PlanForecast:
    """A plan with what is known beforehand. `config`: with what this machine's measurements choose; `chosen`: that in
    words."""

    config: Config
    plan: Plan
    lengths: Lengths | None
    chosen: Sequence[str]
    ahead: Ahead
    findings: tuple[Finding, ...] | None  # about the data; None where not all rows were looked at

    def describe(self) -> Iterator[tuple[str, str]]:
        """All of it as labelled lines."""
        yield from plan_text.describe(self.config, self.plan, self.lengths, self.findings)
        if self.config.kubernetes is not None:
            yield "on the cluster", plan_text.output_on_cluster(self.config)
        for text in self.chosen:
            yield "measured here", text
        yield from describe(self.config, self.plan, self.ahead)
        for text in plan_text.on_data(self.lengths, self.findings):
            yield "data", text

    def to_json(self) -> dict[str, Any]:
        """The same as numbers."""
        facts: dict[str, Any] = {
            "measured": self.chosen,
            "rows_at_most": is_upper_bound(
                self.config.data.train, made_by_pod=makes_data(self.config.kubernetes)
            ),
            "findings": None,
        }
        if self.findings is not None:
            facts["findings"] = [finding.to_json() for finding in self.findings]
        return (
            self.plan.model_dump(mode="json") | facts | as_json(self.config, self.plan, self.ahead)
        )


def forecast_run(
    config: Config, environ: Mapping[str, str], *, builds: bool = True
) -> PlanForecast:
    """Plan a run, reading data but no weights. `builds`: a model whose target modules are in doubt is built without
    weights, which imports torch.

    Raises ConfigError for an impossible run, DataError for data that are nowhere.
    """
    require_kind(config, environ)
    if config.evaluation.metrics is not None:
        require_file(config.evaluation.metrics)
    rows, eval_rows = estimate_rows(config.data, made_by_pod=makes_data(config.kubernetes))
    load = cache(
        partial(load_here, config.model, config.data, day_of(config))
    )  # once for both that tokenise
    lengths = estimate_lengths(config, environ, load)
    positions = positions_of(config, environ)
    if positions is not None and lengths is not None:
        positions.require(lengths.longest)
    _require_routers(config)
    if builds:
        _require_targets(config)
    tokens = lengths.tokens(rows) if lengths is not None else None
    spared = lengths.spared if lengths is not None else 0.0
    if lengths is not None:
        rows, eval_rows = lengths.rows(rows), lengths.rows(eval_rows)
    plan = make_plan(
        config, rows, eval_rows, visible_gpus(environ), tokens=tokens, spared_share=spared
    )
    config, chosen = _as_measured(config, plan, tokens)
    longest = lengths.longest_of(rows) if lengths is not None else None
    ahead = look_ahead(config, plan, tokens, environ, longest)
    findings = known_findings(config, environ, load)
    return PlanForecast(config, plan, lengths, chosen, ahead, findings)


def _as_measured(config: Config, plan: Plan, tokens: int | None) -> tuple[Config, list[str]]:
    """The config with what this machine's measurements choose for a run here, and each choice in words."""
    weights, said = read_weights(config.model.path, os.environ), []
    shape = shape_of(weights) if weights is not None else None
    if plan.device == "cpu" and config.model.dtype == "auto" and config.kubernetes is None:
        found = measured.cpu_dtype(shape.hidden if shape is not None else None)
        dtype, why = found or ("float32 or bfloat16", "a run measures which is faster")
        said.append(f"model.dtype: auto -> {dtype}, because {why}")
        if found is not None:
            config = config.model_copy(
                update={"model": config.model.model_copy(update={"dtype": found[0]})}
            )
    gpu = gpu_here() if plan.device == "cuda" else None
    is_elsewhere = config.kubernetes is not None or (plan.device == "cuda" and gpu is None)
    known = measured.Choices() if is_elsewhere else measured.read(gpu)
    total = float(tokens or 0) * plan.num_epochs
    compiles = (
        measured.compiles(config, known, weights.parameters, total, plan.device)
        if weights is not None and config.training.compile == "auto"
        else config.training.compile
    )
    if compiles != config.training.compile:
        said.append(
            f"training.compile: auto -> {str(compiles).lower()}, because {known.why} (measured on {known.time[:10]})"
        )
        config = config.model_copy(
            update={"training": config.training.model_copy(update={"compile": compiles})}
        )
    return config, said


def _require_routers(config: Config) -> None:
    """Raise ConfigError for losses of routers that a model without any could not have."""
    weights = read_weights(config.model.path, os.environ)
    if (
        weights is None
        or not weights.stated
        or {"router", "experts"} & {*map(part_of, weights.shapes)}
    ):
        return
    for name in ("router_aux_loss_coef", "router_z_loss_coef"):
        if value := getattr(config.training, name):
            raise ConfigError(
                f"training.{name}: found {value:g}, but this model has no experts; leave it out"
            )


def _require_targets(config: Config) -> None:
    """Raise ConfigError for target modules that the model lacks. It is built, without weights, only where in doubt."""
    lora, weights = config.lora, read_weights(config.model.path, os.environ)
    if (
        lora is None
        or weights is None
        or config.model.trust_remote_code
        or not may_lack_targets(config, weights)
    ):
        return
    import transformers

    from kubetune.models.adapters.lora import add_lora
    from kubetune.models.loading import skeleton
    from kubetune.tasks import task_of

    auto_class = getattr(transformers, task_of(config).auto_class)
    add_lora(skeleton(auto_class, config.model), lora, task_type="CAUSAL_LM", seed=0)


@dataclass(frozen=True)
class Ahead:
    """Facts that are known beforehand; None for others."""

    weights: Weights | None
    memory: Forecast | None
    bill: Bill | None
    longest: int | None = None
    forget_rows: int = 0


def look_ahead(
    config: Config,
    plan: Plan,
    tokens_per_epoch: int | None,
    environ: Mapping[str, str],
    longest: int | None = None,
) -> Ahead:
    """Forecast memory, time and price, as far as the model and the data are on this machine. `longest`: of its rows."""
    weights = read_weights(config.model.path, environ)
    memory = (
        forecast(config, plan, weights, device_bytes(config, plan), longest) if weights else None
    )
    tokens = None
    if tokens_per_epoch is not None and plan.steps_per_epoch:
        tokens = round(tokens_per_epoch * plan.num_steps / plan.steps_per_epoch)
    gpu = gpu_here() if plan.device == "cuda" else None
    found = bill(config, plan, weights, tokens, gpu, earlier_runs.read(), plan.spared_share)
    return Ahead(weights, memory, found, longest, _rows_of_forget(config))


def _rows_of_forget(config: Config) -> int:
    made_by_pod = makes_data(config.kubernetes)
    sources = config.sources["forget"]
    return sum(taken_by(source, made_by_pod=made_by_pod) or 0 for source in sources)


def gpu_here() -> str | None:
    """Name of the first GPU here."""
    return next((str(found["name"]) for found in gpu_use()), None)


def device_bytes(config: Config, plan: Plan) -> int | None:
    """Memory of one device: as stated, else that of the GPUs here, else one process's part of the node's memory."""
    compute = config.compute
    if plan.device == "cuda":
        if compute.gpu_memory:
            return quantity_bytes(compute.gpu_memory)
        here = [
            int(gpu["memory_total_mib"]) * MIB for gpu in gpu_use() if gpu.get("memory_total_mib")
        ]
        return min(here, default=None)
    return quantity_bytes(compute.memory) // plan.processes_per_node if compute.memory else None


def describe(config: Config, plan: Plan, ahead: Ahead) -> Iterator[tuple[str, str]]:
    """The facts as labelled lines."""
    memory, benchmarks = ahead.memory, config.evaluation.benchmarks
    if ahead.weights is not None:
        held = trained_by_part(
            config.model_copy(update={"lora": None, "task": "causal_lm"}), ahead.weights
        )
        yield "trained", parts_line(trained_by_part(config, ahead.weights), held)
        if held["experts"] and (base := quantization_of(config, plan)) != "none":
            share = held["experts"] / held.total()
            yield "", f"the experts, {share:.1%} of the model, do not become {base}: {UNQUANTISED}"
    if memory is None or ahead.weights is None:
        yield (
            "memory",
            "unknown: the model is not on this machine, or names its sizes in a way of its own",
        )
    else:
        yield (
            "memory",
            f"about {size(memory.peak_bytes)} at the peak of each {_device(plan)}{_verdict(memory)}",
        )
        for name, bytes_ in memory.parts.items():
            yield "", f"{size(bytes_):>10}  {name}"
        if plan.device == "cpu" and config.model.dtype == "auto":
            yield (
                "",
                "in float32; the run itself measures whether this CPU is faster in bfloat16 (model.dtype: auto)",
            )
        if not ahead.weights.stated:
            yield "", "from config.json alone: the weights are not on this machine"
        if memory.fits is False and memory.device_bytes is not None:
            yield from _advice(config, plan, ahead.weights, memory.device_bytes, ahead.longest)
    if (found := ahead.bill) is not None:
        yield "time", time_line(found)
        if hours := evaluation_hours(config, plan, found.tokens_per_second, ahead.forget_rows):
            long = (
                ", with answers as long as they may be"
                if config.evaluation.generate is not None
                else ""
            )
            yield "", f"evaluations add about {duration(hours * 3600)}{long}"
        if hours := reference_hours(config, plan, found.tokens_per_second):
            yield (
                "",
                f"asking the model before training of every answer adds about {duration(hours * 3600)}, once",
            )
        if benchmarks is not None:
            yield (
                "",
                f"not counted: {', '.join(benchmarks.tasks)} at the end, on the base model and the tuned one",
            )
        if price := price_line(found, config.compute.price_per_gpu_hour):
            yield "price", price


def _advice(
    config: Config, plan: Plan, weights: Weights, device: int, longest: int | None
) -> Iterator[tuple[str, str]]:
    fitting = remedies(config, plan, weights, device, longest)
    for text, then in fitting:
        yield "would fit with", f"{text} (about {size(then.peak_bytes)})"
    if not fitting:
        yield "would fit with", "no single change; several together may do, or a larger device"


def _verdict(memory: Forecast) -> str:
    if memory.device_bytes is None:
        return ""
    word = "fits into" if memory.fits else "does NOT fit into"
    return f": {word} {size(memory.device_bytes)}, 8 % of it left to the allocator"


def _device(plan: Plan) -> str:
    return "GPU" if plan.device == "cuda" else "process"


def as_json(config: Config, plan: Plan, ahead: Ahead) -> dict[str, Any]:
    """The same facts as numbers."""
    memory = ahead.memory
    rate = ahead.bill.tokens_per_second if ahead.bill is not None else None
    return {
        "memory": None
        if memory is None
        else {
            "peak_bytes": memory.peak_bytes,
            "parts": dict(memory.parts),
            "device_bytes": memory.device_bytes,
            "fits": memory.fits,
            "parameters": memory.parameters,
            "trained_parameters": memory.trained_parameters,
        },
        "trained_by_part": ahead.weights and trained_by_part(config, ahead.weights),
        "evaluation_hours": evaluation_hours(config, plan, rate, ahead.forget_rows),
        "reference_hours": reference_hours(config, plan, rate),
        "bill": None if ahead.bill is None else asdict(ahead.bill),
    }
