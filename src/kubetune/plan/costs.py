"""The costs of a run: one function of the config, the plan, the weights and the facts of data and device.

`kubetune plan` and the page call it with what the first rows let them estimate, a rank once with what the prepared data
have. The event of a start keeps the result, with what it follows from: the next start of the run takes it from there as
long as nothing of that differs, and the report compares it with what came.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from kubetune.config.naming import RESOLVED
from kubetune.config.resolved import read_config, resolved
from kubetune.config.schema import Config
from kubetune.config.schema.distill import ITSELF
from kubetune.plan import cost, drawing, earlier_runs
from kubetune.plan.cost import Bill
from kubetune.plan.drawing import Drawing, Hours
from kubetune.plan.earlier_runs import RunShape
from kubetune.plan.forecast import Forecast, forecast
from kubetune.plan.linears import shape_of
from kubetune.plan.model_shapes import Weights, read_weights
from kubetune.plan.plan import Plan
from kubetune.plan.rank_work import RankWork, element_bytes
from kubetune.rundir.throughput import last_start


@dataclass(frozen=True)
class DataTotals:
    """The facts of the data that costs depend on. None for what is unknown."""

    tokens: int | None  # of all steps
    longest: int | None  # tokens of the longest row
    forget_rows: int = 0  # rows that evaluations read so that they are not forgotten


@dataclass(frozen=True)
class RunWeights:
    """The weights of the models that a run holds, as far as they are on this machine."""

    model: Weights | None
    teacher: Weights | None = None
    judges: tuple[Weights, ...] = ()  # of models that reward answers

    @classmethod
    def of(
        cls, config: Config, environ: Mapping[str, str], model: Weights | None = None
    ) -> RunWeights:
        """Read the headers of their files. `model`: that of the model, if it was read before."""
        judges = []
        for reward in config.rewards:
            judge = _weights_of(reward.reward_model or reward.teacher, environ)
            if judge is not None:
                judges.append(judge)
        return cls(
            model=model or read_weights(config.model.path, environ),
            teacher=_weights_of(config.teacher_path, environ),
            judges=tuple(judges),
        )


@dataclass(frozen=True)
class DeviceFacts:
    """The facts of a device that costs depend on. None for what is unknown."""

    gpu: str | None  # its name; None for a CPU
    memory_bytes: int | None  # as much as one process may take


@dataclass(frozen=True)
class Facts:
    """The facts that a forecast follows from, besides the files of models and the speeds of earlier runs."""

    settings: str  # a digest of the sections of the config that count
    plan: Plan
    data: DataTotals
    device: DeviceFacts

    def differing(self, others: Facts) -> list[str]:
        """Return the names of the facts that are not the same."""
        names = ("settings", "plan", "data", "device")
        return [name for name in names if getattr(self, name) != getattr(others, name)]


# Sections that say where results go and who is told, and nothing of what the steps do.
_WITHOUT_COSTS: Final = frozenset(
    ("name", "output", "logging", "tracking", "hooks", "mirror", "push", "kubernetes")
)


@dataclass(frozen=True)
class Costs:
    """Memory, time and price of a run before it starts, and what they follow from. None for what is not known."""

    facts: Facts
    memory: Forecast | None  # of one device
    bill: Bill | None  # time and price of the steps
    shape: RunShape | None  # what its speed depends on
    evaluation_hours: float | None  # of all evaluations
    # Cost of asking the model before training, or a teacher, about every answer once.
    reference_hours: float | None
    # Of a run by reward: what it draws, the most bytes of a process's key-value cache, and its hours by part.
    drawing: Drawing | None
    cache_bytes: int | None
    drawing_hours: Hours | None

    def kept(self) -> dict[str, Any]:
        """Return what the event of a start keeps: all of it, as data for JSON. `read_kept` reads it."""
        data: dict[str, Any] = _kept_costs().dump_python(self, mode="json")
        return data

    def to_json(self) -> dict[str, Any]:
        """Return memory, time and price as `kubetune plan --json` has them."""
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
        drawn = None
        if self.drawing is not None:
            drawn = drawing.facts(self.drawing, self.cache_bytes, self.drawing_hours)
        bill = None
        if self.bill is not None:
            bill = asdict(self.bill)
        return {
            "memory": memory,
            "evaluation_hours": self.evaluation_hours,
            "reference_hours": self.reference_hours,
            "bill": bill,
            "drawing": drawn,
        }


def costs_of(
    config: Config, plan: Plan, data: DataTotals, device: DeviceFacts, models: RunWeights
) -> Costs:
    """Forecast memory, time and price, as far as the files of the models are on this machine."""
    drawn = None
    tokens = data.tokens
    if config.draws_answers:
        drawn = drawing.drawing_of(config.drawing, plan)
    if drawn is not None:
        tokens = drawn.learnt_tokens

    cache_bytes = None
    if models.model is not None:
        cache_bytes = _cache_bytes(RankWork.of(config, plan, data.longest), models.model)
    # Memory depends on the longest row. Speeds of runs are compared by rows as long as the config lets them be, with
    # the teacher that is asked in each step.
    work = RankWork.of(config, plan)
    asks_once = config.task == "distill" and config.distill.keeps_teacher
    if not asks_once:
        work = replace(work, teacher=models.teacher)
    known = earlier_runs.read()
    shape = cost.kind_of(work, plan, models.model, device.gpu)
    bill = cost.bill(shape, config.compute, plan.world_size, tokens, known)
    drawing_hours = None
    if bill is not None and shape is not None:
        waiting_share = earlier_runs.waiting_share(shape, known)
        drawing_hours = drawing.hours_by_part(bill.hours, waiting_share)
    rate = None if bill is None else bill.tokens_per_second
    reference_hours = cost.reference_hours(config.task, config.preference, config.lora, plan, rate)
    if asks_once:
        reference_hours = cost.teacher_hours(work, models.model, models.teacher, plan, rate)
    return Costs(
        facts=Facts(digest(resolved(config)), plan, data, device),
        memory=memory_of(config, plan, models, device.memory_bytes, data.longest),
        bill=bill,
        shape=shape,
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


def memory_of(
    config: Config,
    plan: Plan,
    models: RunWeights,
    device_bytes: int | None,
    longest: int | None,
) -> Forecast | None:
    """Forecast the memory of a device, with all models that it holds; None if the model's sizes are not known.

    `longest`: tokens of the longest row, None while the data are unread.
    """
    work = RankWork.of(config, plan, longest)
    memory = None
    if models.model is not None:
        memory = forecast(work, models.model, device_bytes)
    if memory is None:
        return None
    element = element_bytes("auto", plan.device)
    judges = sum(weights.parameters for weights in models.judges)
    teacher = 0
    # A teacher that is the model itself is the model with its adapter off.
    if models.teacher is not None and not (config.distill.model == ITSELF and config.lora):
        ranks = config.training.ranks_of_copy(plan.world_size) if work.is_sharded else 1
        teacher = _part_of_teacher(models.teacher, ranks)
    parts = dict(memory.parts)
    if judges:
        parts["models that reward answers"] = judges * element
    if teacher:
        parts["teacher"] = teacher * element
    return replace(memory, parts=parts)


def _part_of_teacher(weights: Weights, ranks: int) -> int:
    """Return the parameters of a teacher that each of so many ranks holds, and the two layers that it borrows."""
    # The teacher of a sharded model is cut as a frozen base is.
    held = weights.parameters // ranks
    shape = shape_of(weights)
    if ranks > 1 and shape is not None:
        held += 2 * weights.parameters // shape.layers
    return held


def read_kept(events: Sequence[Mapping[str, Any]]) -> Costs | None:
    """Return the forecast that the event of a run's last start keeps; None if it has none that can be read."""
    try:
        return _kept_costs().validate_python(last_start(events).get("forecast"))
    except ValidationError:
        return None


@cache
def _kept_costs() -> TypeAdapter[Costs]:
    return TypeAdapter(Costs)


def digest(settings: Mapping[str, Any]) -> str:
    """Return a digest of the sections that count for the costs of a run. `settings`: its config, resolved."""
    counted = {name: value for name, value in settings.items() if name not in _WITHOUT_COSTS}
    return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()[:16]


def _cache_bytes(work: RankWork, weights: Weights) -> int | None:
    """Return the most bytes of the key-value cache of a process; None if it draws nothing, or sizes are unknown."""
    shape = shape_of(weights)
    if shape is None or not work.draws_answers:
        return None
    return drawing.cache_bytes(
        weights.text_config, shape, work.drawn_rows, work.drawn_tokens, work.element
    )


def _weights_of(path: str | None, environ: Mapping[str, str]) -> Weights | None:
    """Return the weights of a model, or of the base of a run directory; None if they are not here."""
    if path is None:
        return None
    if (Path(path) / RESOLVED).is_file():
        path = read_config(Path(path)).model.path
    return read_weights(path, environ)
