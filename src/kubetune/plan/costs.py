"""The costs of a run: one function of the config, the shape of the model and the facts of the data.

`kubetune plan` and the page call it with what the first rows let them estimate, a rank with what the prepared data
have. The rank keeps the result in the event of its start, and the report compares that with what came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kubetune.config.naming import RESOLVED
from kubetune.config.resolved import read_config
from kubetune.config.schema import Config
from kubetune.config.schema.distill import ITSELF
from kubetune.plan import cost, drawing, earlier_runs
from kubetune.plan.cost import Bill
from kubetune.plan.drawing import Drawing, Hours
from kubetune.plan.forecast import Forecast, forecast, remedies
from kubetune.plan.linears import Trainable, shape_of, trained_by_part
from kubetune.plan.model_shapes import Weights, read_weights
from kubetune.plan.plan import Plan
from kubetune.plan.rank_work import RankWork, element_bytes


@dataclass(frozen=True)
class DataTotals:
    """The facts of the data that costs depend on. None for what is unknown."""

    tokens: int | None  # of all steps
    longest: int | None  # tokens of the longest row
    forget_rows: int = 0  # rows that evaluations read so that they are not forgotten


@dataclass(frozen=True)
class DeviceFacts:
    """The facts of a device that costs depend on. None for what is unknown."""

    gpu: str | None  # its name; None for a CPU
    memory_bytes: int | None  # as much as one process may take


@dataclass(frozen=True)
class Costs:
    """Memory, time and price of a run before it starts. None for what is not known."""

    weights: Weights | None
    memory: Forecast | None  # of one device
    bill: Bill | None  # time and price of the steps
    evaluation_hours: float | None  # of all evaluations
    # Cost of asking the model before training, or a teacher, about every answer once.
    reference_hours: float | None
    # Of a run by reward: what it draws, the most bytes of a process's key-value cache, and its hours by part.
    drawing: Drawing | None
    cache_bytes: int | None
    drawing_hours: Hours | None

    def kept(self) -> dict[str, Any]:
        """Return what the event of a start keeps, to be compared with what comes."""
        facts: dict[str, Any] = {"memory_bytes": None}
        if self.memory is not None:
            facts["memory_bytes"] = self.memory.allocated_bytes
        if self.bill is not None:
            facts |= asdict(self.bill)
        return facts

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
        drawn = None
        if self.drawing is not None:
            drawn = drawing.facts(self.drawing, self.cache_bytes, self.drawing_hours)
        bill = None
        if self.bill is not None:
            bill = asdict(self.bill)
        return {
            "memory": memory,
            "trained_by_part": trained,
            "evaluation_hours": self.evaluation_hours,
            "reference_hours": self.reference_hours,
            "bill": bill,
            "drawing": drawn,
        }


def costs_of(
    config: Config,
    plan: Plan,
    data: DataTotals,
    device: DeviceFacts,
    environ: Mapping[str, str],
    weights: Weights | None,
) -> Costs:
    """Forecast memory, time and price, as far as the files of the model are on this machine.

    `weights`: those of the model, as far as they are known.
    """
    drawn = None
    tokens = data.tokens
    if config.draws_answers:
        drawn = drawing.drawing_of(config.drawing, plan)
    if drawn is not None:
        tokens = drawn.learnt_tokens

    # Memory depends on the longest row. Speeds of runs are compared by rows as long as the config lets them be.
    longest_work = RankWork.of(config, plan, data.longest)
    work = work_of(config, plan, environ)
    memory = None
    cache_bytes = None
    if weights is not None:
        memory = forecast(longest_work, weights, device.memory_bytes)
        cache_bytes = _cache_bytes(longest_work, weights)
    if memory is not None:
        memory = _with_other_models(memory, config, plan, longest_work.is_sharded, environ)

    known = earlier_runs.read()
    bill = cost.bill(work, config.compute, plan, weights, tokens, device.gpu, known)
    drawing_hours = None
    kind = cost.kind_of(work, plan, weights, device.gpu)
    if bill is not None and kind is not None:
        waiting_share = earlier_runs.waiting_share(kind, known)
        drawing_hours = drawing.hours_by_part(bill.hours, waiting_share)
    rate = None if bill is None else bill.tokens_per_second
    reference_hours = cost.reference_hours(config.task, config.preference, config.lora, plan, rate)
    if config.task == "distill" and config.distill.keeps_teacher:
        teacher = _weights_of(config.teacher_path, environ)
        reference_hours = cost.teacher_hours(work, weights, teacher, plan, rate)
    return Costs(
        weights=weights,
        memory=memory,
        bill=bill,
        evaluation_hours=cost.evaluation_hours(
            config.evaluation,
            config.lora,
            plan,
            rate,
            data.forget_rows,
            needs_base=config.needs_base,
        ),
        reference_hours=reference_hours,
        drawing=drawn,
        cache_bytes=cache_bytes,
        drawing_hours=drawing_hours,
    )


def work_of(config: Config, plan: Plan, environ: Mapping[str, str]) -> RankWork:
    """Return the work of a rank on the longest rows that are allowed, with the teacher that its steps ask."""
    teacher = None
    if config.task == "distill" and not config.distill.keeps_teacher:
        teacher = _weights_of(config.teacher_path, environ)
    return replace(RankWork.of(config, plan), teacher=teacher)


def changes_that_fit(
    config: Config, plan: Plan, costs: Costs, longest: int | None
) -> Sequence[tuple[str, Forecast]]:
    """Return changes of the config, each of which is enough to make the run fit, with the forecast after it.

    There are none for a run that fits, or if nobody knows whether it does.
    """
    memory = costs.memory
    if memory is None or costs.weights is None or memory.device_bytes is None or memory.fits:
        return ()
    return remedies(config, plan, costs.weights, memory.device_bytes, longest)


def _cache_bytes(work: RankWork, weights: Weights) -> int | None:
    """Return the most bytes of the key-value cache of a process; None if it draws nothing, or sizes are unknown."""
    shape = shape_of(weights)
    if shape is None or not work.draws_answers:
        return None
    return drawing.cache_bytes(
        weights.text_config, shape, work.drawn_rows, work.drawn_tokens, work.element
    )


def _with_other_models(
    memory: Forecast, config: Config, plan: Plan, is_sharded: bool, environ: Mapping[str, str]
) -> Forecast:
    """Return the memory of a device that also holds the models of rewards and the teacher of a run.

    The teacher of a sharded model is cut as a frozen base is, of which a rank borrows two layers.
    """
    paths = [reward.reward_model or reward.teacher for reward in config.rewards]
    memory = _with_others(memory, "models that reward answers", paths, plan.device, environ)
    teacher = config.teacher_path
    if config.distill.model == ITSELF and config.lora:
        # The same model with its adapter off.
        teacher = None
    ranks = config.training.ranks_of_copy(plan.world_size) if is_sharded else 1
    return _with_others(memory, "teacher", [teacher], plan.device, environ, ranks)


def _with_others(
    memory: Forecast,
    name: str,
    paths: Sequence[str | None],
    device: str,
    environ: Mapping[str, str],
    ranks: int = 1,
) -> Forecast:
    """Return the memory of a device that also holds other models, as far as these are here.

    `name`: what they are. `ranks`: those that each hold a part.
    """
    parameters = 0
    for path in paths:
        weights = _weights_of(path, environ)
        if weights is not None:
            parameters += weights.parameters // ranks
            shape = shape_of(weights)
            if ranks > 1 and shape is not None:
                parameters += 2 * weights.parameters // shape.layers
    if not parameters:
        return memory
    held = {name: parameters * element_bytes("auto", device)}
    return replace(memory, parts={**memory.parts, **held})


def _weights_of(path: str | None, environ: Mapping[str, str]) -> Weights | None:
    """Return the weights of a model, or of the base of a run directory; None if they are not here."""
    if path is None:
        return None
    if (Path(path) / RESOLVED).is_file():
        path = read_config(Path(path)).model.path
    return read_weights(path, environ)
