"""The plan of a run with all that is known before it starts: rows, tokens, memory, hours and price."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from kubetune.base import cpu
from kubetune.base.gpus import gpu_use, visible_gpus
from kubetune.base.humanize import counted, duration, size
from kubetune.config.load import read_config
from kubetune.config.naming import RESOLVED
from kubetune.config.schema import (
    Config,
    LoraConfig,
    ModelConfig,
    RewardConfig,
    SourceConfig,
)
from kubetune.config.schema.cluster import ComputeConfig, quantity_bytes
from kubetune.config.schema.evaluation import EvaluationConfig
from kubetune.data.findings.finding import Finding
from kubetune.data.inspect.estimate import is_upper_bound, load_here, makes_data, taken_by
from kubetune.data.inspect.known_findings import known_findings
from kubetune.data.inspect.lengths import Lengths
from kubetune.errors import ConfigError, DataError, KubetuneError, ModelError
from kubetune.library import plan_text, verdict
from kubetune.library.plans import measure_data
from kubetune.plan import earlier_runs, measured
from kubetune.plan.base_model import may_lack_targets
from kubetune.plan.cost import (
    Bill,
    bill,
    evaluation_hours,
    kind_of,
    price_line,
    reference_hours,
    time_line,
)
from kubetune.plan.drawing import (
    Drawing,
    Hours,
    cache_bytes,
    drawing_of,
    drawn_by_servers,
    drawn_here,
    hours_by_part,
)
from kubetune.plan.drawing import facts as drawing_facts
from kubetune.plan.drawing import lines as drawing_lines
from kubetune.plan.earlier_runs import Kind, Speed, waiting_share
from kubetune.plan.forecast import MIB, Forecast, forecast, remedies
from kubetune.plan.linears import (
    UNQUANTISED,
    Trainable,
    parts_line,
    shape_of,
    trained_by_part,
)
from kubetune.plan.model_shapes import Weights, read_weights
from kubetune.plan.plan import Plan, make_plan
from kubetune.plan.rank_work import RankWork, element_bytes, quantization_of
from kubetune.rundir.starts import day_of

# A label and a text for each line. A line with an empty label belongs to the one above it.
LabelledLines = Iterator[tuple[str, str]]


@dataclass(frozen=True)
class PlanForecast:
    """A plan with all that is known about the run before it starts."""

    config: Config  # with the values that this machine chooses for keys that are `auto`
    plan: Plan
    lengths: Lengths | None
    choices: Sequence[str]  # each of those values, as a sentence
    costs: Costs
    findings: tuple[Finding, ...] | None  # about the data; None if some rows were not read
    problems: tuple[str, ...]  # what keeps the run from training, as far as it shows before

    @property
    def trainable(self) -> Trainable:
        """Which parameters learn."""
        return Trainable(self.config.lora, self.config.sight)

    def require_ready(self) -> None:
        """Raise ConfigError for a run that cannot train, with all its problems."""
        if self.problems:
            raise ConfigError(list(self.problems))

    def headline(self) -> str:
        """Return the three things that most people look for: `34 steps · 457 MiB a process · 2 min`."""
        if self.problems:
            return f"not ready to train: {counted(len(self.problems), 'problem')}"
        # As `describe` has it: `at most 34 (1 epoch)`.
        steps = "steps unknown"
        if self.plan.num_steps:
            steps = dict(self.describe())["steps"].partition(" (")[0] + " steps"
        memory = "memory unknown"
        if self.costs.memory is not None:
            memory = f"{size(self.costs.memory.peak_bytes)} a {_holder(self.plan.device)}"
            if self.costs.memory.fits is False:
                memory += ", which does not fit"
        time = "time unknown"
        if self.costs.bill is not None and self.costs.bill.hours is not None:
            time = f"about {duration(self.costs.bill.hours * 3600)}"
        return f"{steps} · {memory} · {time}"

    def describe(self) -> LabelledLines:
        """Yield everything as labelled lines."""
        yield from plan_text.describe(self.config, self.plan, self.lengths, self.findings)
        if self.config.kubernetes is not None:
            place = plan_text.output_on_cluster(self.config.name, self.config.model.path)
            yield "on the cluster", place
        for text in self.choices:
            yield "measured here", text
        base = quantization_of(self.config.quantization, self.config.lora, self.plan)
        yield from _trained_lines(self.trainable, base, self.costs.weights)
        yield from _memory_lines(self.config.model.dtype, self.plan.device, self.costs)
        yield from _time_lines(self.config.evaluation, self.config.compute, self.costs)
        drawing = self.costs.drawing
        if drawing is not None:
            drawer = _drawer(self.config, drawing, self.costs.cache_bytes)
            yield from drawing_lines(self.config.grpo, drawing, drawer, self.costs.drawing_hours)
        for text in plan_text.on_data(self.lengths, self.findings):
            yield "data", text

    def to_json(self) -> dict[str, Any]:
        """Return the same facts as numbers."""
        findings = None
        if self.findings is not None:
            findings = [finding.to_json() for finding in self.findings]
        rows_at_most = is_upper_bound(
            self.config.data.train, made_by_pod=makes_data(self.config.kubernetes)
        )
        return {
            **self.plan.model_dump(mode="json"),
            "problems": list(self.problems),
            "measured": self.choices,
            "rows_at_most": rows_at_most,
            "findings": findings,
            **self.costs.to_json(self.trainable),
        }


def forecast_run(
    config: Config, environ: Mapping[str, str], *, builds: bool = True
) -> PlanForecast:
    """Plan a run. This reads data but no weights.

    `builds`: if it is not clear that the model has the target modules, build the model without weights here to find
    out, which imports torch; false: another process builds it.

    Raise ConfigError, DataError or ModelError for a run of which no plan can be made. What else keeps it from
    training is in the forecast's `problems`.
    """
    here = config.kubernetes is None
    problems = verdict.problems_of(config, environ, here=here)
    # Lengths and findings both need the tokenizer; it is loaded once.
    load_tokenizer = cache(partial(load_here, config.model, config.data, day_of(config.data)))
    refused: list[KubetuneError] = list(problems)
    try:
        # Where all rows are looked at, what is wrong with them is said in the words of `data check`.
        findings = known_findings(config, environ, load_tokenizer)
        errors = [finding.line for finding in findings or () if finding.severity == "error"]
        if errors:
            refused.append(DataError(errors))
        data = measure_data(config, environ, load_tokenizer)
        if not refused:
            _require_targets(config.lora, config.model, config.task_name, builds=builds)
    except (ConfigError, DataError, ModelError) as error:
        # Without these there is no plan, so all problems are said at once.
        if not any(isinstance(known, DataError) for known in refused):
            refused.append(error)
        verdict.require_none(refused)

    longest = None
    saved_share = 0.0
    if data.lengths is not None:
        saved_share = data.lengths.saved_share
        longest = data.lengths.longest_of(data.rows)
    plan = make_plan(
        config,
        data.rows,
        data.eval_rows,
        visible_gpus(environ),
        tokens=data.tokens,
        saved_share=saved_share,
    )

    # The choices come after the plan, which says on what device the run is, and before the forecast of memory.
    config, choices = _with_measured_choices(config, plan, data.tokens)
    costs = forecast_costs(config, plan, data.tokens, environ, longest)
    return PlanForecast(
        config, plan, data.lengths, choices, costs, findings, tuple(verdict.sentences(refused))
    )


def _with_dtype(config: Config, width: int | None) -> tuple[Config, list[str]]:
    """Return the config with the dtype that `auto` means on this processor, and what is to be said of it."""
    if config.model.dtype != "auto":
        remark = cpu.slow_dtype(config.model.dtype, width)
        return config, [remark] if remark is not None else []
    dtype, reason = cpu.dtype_for(width)
    model = config.model.model_copy(update={"dtype": dtype})
    text = f"model.dtype: auto -> {dtype}, because {reason}"
    return config.model_copy(update={"model": model}), [text]


def _with_measured_choices(
    config: Config, plan: Plan, tokens: int | None
) -> tuple[Config, list[str]]:
    """Return the config with `auto` replaced where this machine has measured what is best.

    The list says each choice in a sentence.
    """
    weights = read_weights(config.model.path, os.environ)
    texts = []

    # The processors of a cluster are not known here.
    if plan.device == "cpu" and config.kubernetes is None:
        shape = None
        if weights is not None:
            shape = shape_of(weights)
        width = None if shape is None else shape.hidden
        config, text = _with_dtype(config, width)
        texts += text
    if plan.device == "cpu" and config.training.async_save is True:
        texts.append(
            "training.async_save: true keeps a copy of what a checkpoint holds in memory; auto does so only on a GPU"
        )

    # torch.compile pays only if what it saves in all steps is more than what it takes at the start.
    gpu = gpu_here(plan.device)
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


def _require_targets(
    lora: LoraConfig | None, model: ModelConfig, task: str, *, builds: bool
) -> None:
    """Raise ConfigError for target modules that the model lacks.

    The model is built, without weights, only if the names of its weights leave that open.
    """
    weights = read_weights(model.path, os.environ)
    # Code of the model itself is not run for a plan.
    if lora is None or weights is None or model.trust_remote_code:
        return
    if not may_lack_targets(lora, weights):
        return

    # torch takes seconds to import, and most plans do not need it.
    from kubetune.library.built_targets import require_built_targets, require_targets_elsewhere

    if builds:
        require_built_targets(lora, model, task)
    else:
        require_targets_elsewhere(lora, model, task)


@dataclass(frozen=True)
class Costs:
    """Memory, time and price of a run before it starts. None for what is not known."""

    weights: Weights | None
    memory: Forecast | None  # of one device
    # Changes of the config of which each alone makes the run fit, with the forecast then.
    remedies: Sequence[tuple[str, Forecast]]
    bill: Bill | None  # time and price of the steps
    evaluation_hours: float | None  # of all evaluations
    reference_hours: float | None  # of scoring every answer with the model before training
    # Of a run by reward: what it draws, the most bytes of a process's key-value cache, and its hours by part.
    drawing: Drawing | None = None
    cache_bytes: int | None = None
    drawing_hours: Hours | None = None

    def to_json(self, trainable: Trainable) -> dict[str, Any]:
        """Return the same facts as numbers, and how much is trained of each part of the model."""
        memory = None
        if self.memory is not None:
            memory = {
                "peak_bytes": self.memory.peak_bytes,
                "parts": dict(self.memory.parts),
                "device_bytes": self.memory.device_bytes,
                "fits": self.memory.fits,
                "parameters": self.memory.parameters,
                "trained_parameters": self.memory.trained_parameters,
            }
        trained = None
        if self.weights is not None:
            trained = trained_by_part(trainable, self.weights)
        drawing = None
        if self.drawing is not None:
            drawing = drawing_facts(self.drawing, self.cache_bytes, self.drawing_hours)
        bill_as_json = None
        if self.bill is not None:
            bill_as_json = asdict(self.bill)
        return {
            "memory": memory,
            "trained_by_part": trained,
            "evaluation_hours": self.evaluation_hours,
            "reference_hours": self.reference_hours,
            "bill": bill_as_json,
            "drawing": drawing,
        }


def forecast_costs(
    config: Config,
    plan: Plan,
    tokens_per_epoch: int | None,
    environ: Mapping[str, str],
    longest: int | None = None,
) -> Costs:
    """Forecast memory, time and price, as far as the model and the data are on this machine.

    `longest`: tokens of the longest row.
    """
    # Memory depends on the longest row, time on the mean one.
    weights = read_weights(config.model.path, environ)
    memory = None
    changes: Sequence[tuple[str, Forecast]] = ()
    if weights is not None:
        of_rows = RankWork.of(config, plan, longest)
        memory = forecast(of_rows, weights, device_bytes(config.compute, plan))
        if memory is not None:
            memory = _with_reward_models(memory, config.rewards, plan.device, environ)
        # Where the memory of the device is unknown, so is whether the run fits.
        if memory is not None and memory.device_bytes is not None and not memory.fits:
            changes = remedies(config, plan, weights, memory.device_bytes, longest)

    drawing = None
    if config.task == "grpo":
        drawing = drawing_of(config.grpo, plan)
    tokens = _tokens_of_steps(plan, tokens_per_epoch, drawing)
    gpu = gpu_here(plan.device)
    known = earlier_runs.read()
    work = RankWork.of(config, plan)
    of_run = bill(
        work,
        config.compute,
        plan,
        weights,
        tokens,
        gpu,
        known,
        plan.saved_share,
    )

    rate = None
    if of_run is not None:
        rate = of_run.tokens_per_second
    return Costs(
        weights,
        memory,
        changes,
        of_run,
        _evaluation_hours(config, plan, rate),
        reference_hours(config.task, config.preference, config.lora, plan, rate),
        drawing,
        None if weights is None else _cache_bytes(RankWork.of(config, plan, longest), weights),
        None
        if of_run is None
        else _drawing_hours(of_run, kind_of(work, plan, weights, gpu), known),
    )


def _evaluation_hours(config: Config, plan: Plan, rate: float | None) -> float | None:
    """Return the hours of all evaluations, or None if they are unknown."""
    # Evaluations also read what must not be forgotten.
    forget_rows = _rows_of(config.sources["forget"], made_by_pod=makes_data(config.kubernetes))
    return evaluation_hours(
        config.evaluation,
        config.lora,
        plan,
        rate,
        forget_rows,
        needs_base=config.needs_base,
    )


def _drawer(config: Config, drawing: Drawing, cache: int | None) -> str:
    """Return who draws the answers of a run by reward. `cache`: bytes of the key-value cache of a process."""
    servers = config.grpo.servers
    if servers is None or config.lora is None:
        return drawn_here(drawing, cache)
    number = len(servers.urls)
    if config.kubernetes is not None and config.kubernetes.samplers is not None:
        number = config.kubernetes.samplers.replicas
    return drawn_by_servers(drawing, number, config.lora.r, servers.lag)


def _cache_bytes(work: RankWork, weights: Weights) -> int | None:
    """Return the most bytes of the key-value cache of a process; None if it draws nothing, or sizes are unknown."""
    shape = shape_of(weights)
    if shape is None or not work.draws_answers:
        return None
    return cache_bytes(weights.text_config, shape, work.drawn_rows, work.drawn_tokens, work.element)


def _drawing_hours(of_run: Bill, kind: Kind | None, known: Sequence[Speed]) -> Hours | None:
    """Return the hours by part of a run by reward; None where no run of this shape has ended here."""
    if kind is None:
        return None
    return hours_by_part(of_run.hours, waiting_share(kind, known))


def _rows_of(sources: Sequence[SourceConfig], *, made_by_pod: bool) -> int:
    """Return how many rows of these sources are known to be taken."""
    rows = 0
    for source in sources:
        rows += taken_by(source, made_by_pod=made_by_pod) or 0
    return rows


def _tokens_of_steps(
    plan: Plan, tokens_per_epoch: int | None, drawing: Drawing | None
) -> int | None:
    """Return the tokens of all steps, with the answers that a run by reward draws; None while they are not known."""
    if drawing is not None:
        return drawing.learnt_tokens
    if tokens_per_epoch is None or not plan.steps_per_epoch:
        return None
    return round(tokens_per_epoch * plan.num_steps / plan.steps_per_epoch)


def _with_reward_models(
    memory: Forecast,
    rewards: Sequence[RewardConfig],
    device: str,
    environ: Mapping[str, str],
) -> Forecast:
    """Return the memory of a device that also holds the models which reward answers, as far as these are here."""
    parameters = 0
    for reward in rewards:
        path = reward.reward_model or reward.teacher
        if path is None:
            continue
        if (Path(path) / RESOLVED).is_file():
            path = read_config(Path(path)).model.path
        weights = read_weights(path, environ)
        if weights is not None:
            parameters += weights.parameters
    if not parameters:
        return memory
    held = {"models that reward answers": parameters * element_bytes("auto", device)}
    return replace(memory, parts={**memory.parts, **held})


def gpu_here(device: str) -> str | None:
    """Return the name of this machine's first GPU; None where there is none, or the run is on a CPU."""
    if device != "cuda":
        return None
    for gpu in gpu_use():
        return str(gpu["name"])
    return None


def device_bytes(compute: ComputeConfig, plan: Plan) -> int | None:
    """Return the memory of one device, or None if it is not known.

    The config comes first. Without it, a GPU's memory is the least among the GPUs here.
    """
    if plan.device == "cpu":
        # The processes of a node share its memory.
        if compute.memory is None:
            return None
        return quantity_bytes(compute.memory) // plan.processes_per_node
    if compute.gpu_memory:
        return quantity_bytes(compute.gpu_memory)
    # A GPU that does not tell its memory is left out.
    sizes = []
    for gpu in gpu_use():
        if gpu.get("memory_total_mib"):
            sizes.append(int(gpu["memory_total_mib"]) * MIB)
    return min(sizes, default=None)


def _trained_lines(trainable: Trainable, base: str, weights: Weights | None) -> LabelledLines:
    """Yield how much of each part of the model is trained. `base`: how the frozen base is quantised."""
    if weights is None:
        return
    held = trained_by_part(Trainable(lora=None, vision=None), weights)
    yield "trained", parts_line(trained_by_part(trainable, weights), held)
    if held["experts"] and base != "none":
        share = held["experts"] / held.total()
        yield "", f"the experts, {share:.1%} of the model, do not become {base}: {UNQUANTISED}"


def _holder(device: str) -> str:
    """Return the word for what has the memory."""
    return "GPU" if device == "cuda" else "process"


def _memory_lines(dtype: str, device: str, costs: Costs) -> LabelledLines:
    """Yield the peak memory of a device, part by part, and what would make the run fit.

    `dtype`: model.dtype. `device`: cuda or cpu.
    """
    weights = costs.weights
    memory = costs.memory
    if weights is None or memory is None:
        reason = "the model is not on this machine, or its config.json does not name its sizes"
        yield "memory", f"unknown: {reason}"
        return

    peak = f"about {size(memory.peak_bytes)} at the peak of each {_holder(device)}"
    if memory.device_bytes is not None:
        word = "fits into" if memory.fits else "does NOT fit into"
        peak += f": {word} {size(memory.device_bytes)}, 8 % of it left to the allocator"
    yield "memory", peak
    for name, part_bytes in memory.parts.items():
        yield "", f"{size(part_bytes):>10}  {name}"
    if device == "cpu" and dtype == "auto":
        condition = "where the processor has instructions for bfloat16 (model.dtype: auto)"
        yield "", f"in float32; less {condition}"
    if not weights.stated:
        yield "", "from config.json alone: the weights are not on this machine"

    for change, changed in costs.remedies:
        yield "would fit with", f"{change} (about {size(changed.peak_bytes)})"
    if memory.fits is False and not costs.remedies:
        yield "would fit with", "no single change; several together may do, or a larger device"


def _time_lines(
    evaluation: EvaluationConfig, compute: ComputeConfig, costs: Costs
) -> LabelledLines:
    """Yield how long the run takes, what is added to that, and the price."""
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
        yield "", f"scoring every answer with the model before training adds about {hours}, once"
    if evaluation.benchmarks is not None:
        names = ", ".join(evaluation.benchmarks.tasks)
        yield "", f"not counted: {names} at the end, on the base model and the tuned one"
    price = price_line(costs.bill, compute.price_per_gpu_hour)
    if price:
        yield "price", price
