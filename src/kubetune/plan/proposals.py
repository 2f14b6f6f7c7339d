"""Ways to train a run on given GPUs: how the weights are held, the rows at a time, and the memory of each.

Worked example: Qwen3-8B with LoRA of rank 16 and 8 rows of 2,048 tokens at a time, on two GPUs of 24 GB. Each GPU would
hold 15.3 GiB of weights and has 20.6 GiB for everything, so `ddp` fits with few rows at a time, if at all; a way that
cuts the weights in two leaves room for more. A base of 4 bits fits with all rows, but gives another result, so it comes
after those that train what the run file says.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import ValidationError

from kubetune.config.resolved import problems_of, resolved
from kubetune.config.schema import Config, TrainingConfig
from kubetune.config.schema.quantities import quantity, quantity_bytes
from kubetune.errors import ConfigError
from kubetune.plan.costs import Costs
from kubetune.plan.forecast import Forecast
from kubetune.plan.memory import USABLE_SHARE
from kubetune.plan.plan import Plan

MOST_GPUS = 1024
GPUS_OF_A_NODE = 8

_POOL = re.compile(r"(?:(\d+)x)?(?:(\d+)x)?(\d+(?:\.\d+)?(?:Ki|Mi|Gi|Ti|k|M|G|T))B?")

# Values by dotted key, as in the run file. None for a key to leave out.
Changes = Mapping[str, Any]


@dataclass(frozen=True)
class GpuPool:
    """GPUs that a run may have, all alike."""

    nodes: int
    gpus_per_node: int
    gpu_bytes: int

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of all nodes."""
        return self.nodes * self.gpus_per_node

    @property
    def placement(self) -> Changes:
        """Return the changes of a run file by which a run is on these GPUs."""
        return {
            "compute.nodes": self.nodes,
            "compute.gpus_per_node": self.gpus_per_node,
            "compute.processes": None,
            "compute.gpu_memory": quantity(self.gpu_bytes),
        }

    @classmethod
    def parse(cls, text: str) -> GpuPool:
        """Read `24GB`, `2x24GB` (GPUs of one node) or `4x8x80GB` (nodes × GPUs of each). Raise ConfigError."""
        match = _POOL.fullmatch(text.replace(" ", ""))
        if match is not None:
            first, second, memory = match.groups()
            nodes = int(first) if second else 1
            pool = cls(nodes, int(second or first or 1), quantity_bytes(memory))
            if pool.gpus and pool.gpu_bytes:
                return pool
        raise ConfigError(
            f"--gpus: found {text!r}; expected GPUs and the memory of each, such as 2x24GB, or nodes too, such as "
            "4x8x80GB"
        )


@dataclass(frozen=True)
class Way:
    """One way to train a run on a pool of GPUs."""

    changes: Changes  # of the run file
    gives_same: bool  # it trains what the run file says; another way gives another result
    config: Config
    plan: Plan
    costs: Costs
    memory: Forecast  # that of `costs`

    @property
    def fits(self) -> bool:
        """True if its peak is within a GPU's memory."""
        return bool(self.memory.fits)


@dataclass(frozen=True)
class Proposals:
    """The ways that were looked at: those that fit come first, the best of them at the top."""

    pool: GpuPool
    ways: Sequence[Way]
    refused: Sequence[tuple[Changes, str]]  # ways that cannot be, and why

    @property
    def best(self) -> Way | None:
        """Return the first way if it fits."""
        if self.ways and self.ways[0].fits:
            return self.ways[0]
        return None


@dataclass(frozen=True)
class RunToPlace:
    """What is to be trained: a config, and how a changed config is planned on the same data."""

    config: Config
    plan_of: Callable[[Config], Plan]
    costs_of: Callable[[Config, Plan, int], Costs]  # the last: bytes of a GPU


def propose(run: RunToPlace, pool: GpuPool) -> Proposals:
    """Return the ways to train a run on a pool. There are none for a model whose sizes are not known."""
    ways = []
    refused = []
    base = _Base.of(run, pool)
    config = run.config
    for method in _methods(config.lora, config.quantization, config.training.optim):
        for parallelism in parallelisms(method.get("lora", config.lora)):
            if parallelism != "ddp" and pool.gpus == 1:
                continue
            changes = {**method, "training.parallelism": parallelism}
            if parallelism == "ddp":
                changes["training.fsdp_size"] = None
            try:
                way = _with_most_rows(base, changes)
            except ConfigError as error:
                refused.append((base.differing(changes), str(error)))
                continue
            if way is not None:
                ways.append(way)
    # Sorting keeps the order of methods and of parallelisms among equals.
    ways.sort(key=lambda way: (not way.fits, not way.gives_same))
    return Proposals(pool, ways, refused)


def parallelisms(lora: object) -> tuple[str, str]:
    """Return the ways to share the work of several GPUs, from the least that they have to send each other to the most."""
    return "ddp", "fsdp" if lora is None else "shard_base"


def _methods(lora: object, quantization: str, optim: str) -> Iterator[dict[str, Any]]:
    """Yield what may be trained: as the run file says, then less or in fewer bits."""
    yield {}
    if lora is None:
        if optim == "adamw":
            yield {"training.optim": "adamw_8bit"}
        yield {"lora": {"r": 16}}
        yield {"lora": {"r": 16}, "quantization": "4bit"}
    elif quantization not in ("4bit", "fp4"):
        yield {"quantization": "4bit"}


@dataclass(frozen=True)
class _Base:
    """A run on a pool as its file says, which each way changes."""

    run: RunToPlace
    pool: GpuPool
    training: TrainingConfig
    tree: Mapping[str, Any]  # its settings, with the GPUs of the pool
    global_batch_size: int

    @classmethod
    def of(cls, run: RunToPlace, pool: GpuPool) -> _Base:
        config = run.config
        tree = _with(resolved(config), pool.placement)
        # A batch that cannot be split on these GPUs is refused with each way.
        try:
            samples = run.plan_of(_config_of(tree)).global_batch_size
        except ConfigError:
            samples = config.training.global_batch_size or 0
        return cls(run, pool, config.training, tree, samples)

    def differing(self, changes: Changes) -> dict[str, Any]:
        """Return the changes that are not what the run file has anyway."""
        differing = {}
        for key, value in changes.items():
            section, _, name = key.partition(".")
            before = self.tree[section][name] if name else self.tree[section]
            if before != value:
                differing[key] = value
        return differing

    def way(self, changes: Changes, rows: int, samples: int | None = None) -> Way | None:
        """Return the way with so many rows at a time. None if the sizes of the model are not known.

        `samples`: those of a step, where they cannot stay as many as they are.
        """
        wanted = dict(changes)
        if rows != self.training.per_device_train_batch_size:
            wanted["training.per_device_train_batch_size"] = rows
            if samples is None and self.training.global_batch_tokens is None:
                samples = self.global_batch_size
        if samples is not None:
            wanted["training.global_batch_size"] = samples
            wanted["training.gradient_accumulation_steps"] = None
        to_write = self.differing(wanted)
        config = _config_of(_with(self.tree, to_write))
        plan = self.run.plan_of(config)
        costs = self.run.costs_of(config, plan, self.pool.gpu_bytes)
        if costs.memory is None:
            return None
        gives_same = not {"lora", "quantization", "training.optim"} & to_write.keys()
        return Way(to_write, gives_same, config, plan, costs, costs.memory)


def _with_most_rows(base: _Base, changes: Changes) -> Way | None:
    """Return the way with as many rows at a time as fit, at least one. The rows of a step stay the same.

    Return None if the sizes of the model are not known. Raise ConfigError if it is a run with no number of rows.
    """
    rows = base.training.per_device_train_batch_size
    problem = None
    way = None
    while rows:
        try:
            way = base.way(changes, rows)
        except ConfigError as error:
            problem = problem or error
        else:
            if way is None or way.fits:
                return way
        rows //= 2
    if way is None and problem is not None:
        raise problem
    return way


def _with(tree: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """Return settings with other values by dotted key."""
    changed = dict(tree)
    for key, value in changes.items():
        section, _, name = key.partition(".")
        changed[section] = {**changed[section], name: value} if name else value
    return changed


def _config_of(tree: Mapping[str, Any]) -> Config:
    """Return the config of settings. Raise ConfigError if they do not fit each other."""
    try:
        return Config.model_validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        raise ConfigError(problems_of(error)) from None


def least_gpu_bytes(run: RunToPlace, way: Way) -> int:
    """Return the memory of a GPU on which a way would fit, to a hundredth."""
    memory: Forecast | None = way.memory
    gpu_bytes = 0
    while memory is not None and not memory.fits:
        # A larger GPU makes larger chunks of logits, so what is needed grows a little with what there is.
        taken = memory.peak_bytes - memory.parts.get("allocator", 0)
        gpu_bytes = math.ceil(max(taken / USABLE_SHARE, 1.01 * gpu_bytes))
        memory = run.costs_of(way.config, way.plan, gpu_bytes).memory
    return gpu_bytes


class MoreGpus(NamedTuple):
    """How many GPUs a way would fit on."""

    gpus: int
    samples: int | None  # the fewest of a step, if those of the run file cannot be split on so many


def least_gpus(run: RunToPlace, way: Way, pool: GpuPool) -> MoreGpus | None:
    """Return how many GPUs of this size the way would fit on, None if sharing does not help."""
    training = way.config.training
    if training.parallelism == "ddp":
        return None
    gpus = pool.gpus
    rows = training.per_device_train_batch_size
    while gpus < MOST_GPUS:
        nodes = max(1, 2 * gpus // GPUS_OF_A_NODE)
        larger = GpuPool(nodes, min(GPUS_OF_A_NODE, 2 * gpus), pool.gpu_bytes)
        gpus = larger.gpus
        base = _Base.of(run, larger)
        samples = None
        try:
            on_more = base.way(way.changes, rows)
        except ConfigError:
            samples = rows * gpus
            try:
                on_more = base.way(way.changes, rows, samples)
            except ConfigError:
                return None
        if on_more is not None and on_more.fits:
            return MoreGpus(gpus, samples)
    return None
