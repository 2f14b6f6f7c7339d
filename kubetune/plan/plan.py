"""The arithmetic of a run: processes, batches, steps and schedule, from the config and a few numbers of the data.

Pure and without torch: the same call on a laptop, in a pod and on every rank gives the same Plan. Looking at the
machine is base/gpus; memory is not reckoned here.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from kubetune.base.files import read_inside
from kubetune.base.humanize import counted
from kubetune.config.naming import method_label
from kubetune.config.schema import ComputeConfig, Config, TrainingConfig
from kubetune.errors import ConfigError

GRACE_SECONDS = 60
"""Time to save after being asked to stop, where no cluster config says otherwise."""


class Plan(BaseModel):
    """Arithmetic of a config on given processes and data. Steps are optimizer steps.

    `rows`, `eval_rows` and `tokens_per_epoch` are samples per epoch and per evaluation and tokens, None while the data
    are unread; the counts of steps that follow from them are 0 until then. With `global_batch_tokens` a step takes
    about so many tokens, and `global_batch_size` is how many samples that is on average, 0 while the data are unread.
    Without packing `accumulation` is exact; with it, the micro-batches of at most `micro_batch_tokens` that the mean
    step needs, or full-length rows would while lengths are unread. `spared_share`: of the tokens in shared beginnings.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    nodes: int
    processes_per_node: int
    world_size: int
    device: Literal["cuda", "cpu"]
    backend: Literal["nccl", "gloo"]
    rows: int | None
    eval_rows: int | None
    tokens_per_epoch: int | None = None
    global_batch_size: int
    global_batch_tokens: int | None = None
    per_device_train_batch_size: int
    per_device_eval_batch_size: int
    accumulation: int
    micro_batch_tokens: int | None
    steps_per_epoch: int
    num_steps: int
    num_epochs: float
    warmup_steps: int
    eval_steps: int
    save_steps: int
    learning_rate: float
    lr_scheduler_type: Literal["cosine", "linear", "constant"]
    method: str
    grace_seconds: int
    spared_share: float = 0.0

    def to_json(self) -> str:
        """The text of plan.json."""
        return self.model_dump_json(indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """The plan that `to_json` wrote. Raises ConfigError."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            where = ".".join(map(str, problem["loc"]))
            raise ConfigError(
                f"not a plan written by this version of kubetune: {f'{where}: ' if where else ''}{problem['msg']}; start "
                "the run again with its run file, which writes it anew"
            ) from None

    def is_eval_step(self, step: int) -> bool:
        """The weights are evaluated once `step` steps are completed."""
        return step == self.num_steps or bool(
            self.eval_steps and step and step % self.eval_steps == 0
        )

    def is_save_step(self, step: int) -> bool:
        """A checkpoint is due once `step` steps are completed."""
        return step == self.num_steps or bool(
            self.save_steps and step and step % self.save_steps == 0
        )

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens of the mean step that is whole; None while the lengths are unread."""
        if not self.tokens_per_epoch or not self.rows:
            return None
        if self.global_batch_tokens is not None:
            return round(self.tokens_per_epoch / self.steps_per_epoch)
        return round(self.tokens_per_epoch / self.rows * min(self.global_batch_size, self.rows))

    @property
    def may_accumulate(self) -> bool:
        """Some step may need several micro-batches on a rank, be it only one whose sequences are long."""
        if self.global_batch_tokens is not None:
            return True
        return self.global_batch_size > self.per_device_train_batch_size * self.world_size

    @classmethod
    def read(cls, path: Path) -> Plan:
        """The plan in a file. Raises ConfigError for what is none, FileNotFoundError where there is no file."""
        try:
            return cls.from_json(read_inside(path))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def batch_line(self) -> str:
        """Origin of the global batch, in one line."""
        samples, tokens = self.global_batch_size, self.tokens_per_step
        if self.micro_batch_tokens is None and self.global_batch_tokens is None:
            parts = f"{self.per_device_train_batch_size} × {self.accumulation} × {self.world_size}"
            return f"effective batch {samples} = batch × accumulation × world = {parts}"
        if self.global_batch_tokens is None:
            size = counted(samples, "sample") + (f", about {tokens:,} tokens" if tokens else "")
        elif tokens:
            size = f"about {tokens:,} tokens, {counted(samples, 'sample')}"
        else:
            size = f"about {self.global_batch_tokens:,} tokens"
        number = f"{'about' if tokens else 'at most'} {counted(self.accumulation, 'micro-batch')}"
        if self.micro_batch_tokens is None:
            most = counted(self.per_device_train_batch_size, "sample")
        else:
            most = f"{self.micro_batch_tokens:,} tokens"
        return f"effective batch {size}; {number} of at most {most} on each of {counted(self.world_size, 'process')}"


def make_plan(
    config: Config,
    rows: int | None = None,
    eval_rows: int | None = None,
    gpus: int = 0,
    *,
    world_size: int | None = None,
    device: Literal["cuda", "cpu"] | None = None,
    tokens: int | None = None,
    spared_share: float = 0.0,
) -> Plan:
    """The plan of a run over `rows` training samples of `tokens` an epoch, on nodes where `gpus` GPUs are visible.

    `compute.gpus_per_node` takes precedence over `gpus`. A rank that already runs gives the `world_size` and `device`
    it found itself in, which take precedence over both. Raises ConfigError naming the splits that are possible.
    """
    training = config.training
    nodes, processes, on_gpu = _world(config.compute, gpus, world_size)
    world_size, device = nodes * processes, device or ("cuda" if on_gpu else "cpu")
    global_batch_size, batch_tokens, accumulation = _batches(
        training, world_size, is_packed=config.data.packing, longest_row=config.longest_row
    )
    if batch_tokens is None:
        steps_per_epoch = math.ceil(rows / global_batch_size) if rows else 0
    else:
        steps_per_epoch = min(rows, math.ceil(tokens / batch_tokens)) if rows and tokens else 0
        global_batch_size = math.ceil(rows / steps_per_epoch) if rows and steps_per_epoch else 0
    num_steps = training.max_steps or math.ceil(training.num_train_epochs * steps_per_epoch)
    batch = training.per_device_train_batch_size
    plan = Plan(
        nodes=nodes,
        processes_per_node=processes,
        world_size=world_size,
        device=device,
        backend="nccl" if device == "cuda" else "gloo",
        rows=rows,
        eval_rows=eval_rows,
        tokens_per_epoch=tokens,
        global_batch_size=global_batch_size,
        global_batch_tokens=batch_tokens,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=training.per_device_eval_batch_size or batch,
        accumulation=accumulation,
        micro_batch_tokens=batch * config.longest_row if config.data.packing else None,
        steps_per_epoch=steps_per_epoch,
        num_steps=num_steps,
        num_epochs=num_steps / steps_per_epoch if steps_per_epoch else training.num_train_epochs,
        warmup_steps=_warmup_steps(training, num_steps),
        eval_steps=_interval(training.eval_steps, steps_per_epoch) if config.data.eval else 0,
        save_steps=_interval(training.save_steps, steps_per_epoch),
        learning_rate=config.learning_rate,
        lr_scheduler_type=training.lr_scheduler_type,
        method=method_label(config.lora),
        grace_seconds=config.kubernetes.grace_seconds if config.kubernetes else GRACE_SECONDS,
        spared_share=spared_share,
    )
    return plan.model_copy(update={"accumulation": _micro_batches(plan)})


def _warmup_steps(training: TrainingConfig, num_steps: int) -> int:
    """Return the steps in which the learning rate rises: as stated, or a share of all steps."""
    if training.warmup_steps is not None:
        return training.warmup_steps
    return math.ceil(training.warmup_ratio * num_steps)


def _micro_batches(plan: Plan) -> int:
    """Micro-batches that the mean step takes on a rank; those of the plan where it is not the lengths that decide."""
    if plan.micro_batch_tokens is not None and (tokens := plan.tokens_per_step) is not None:
        return math.ceil(
            tokens * (1 - plan.spared_share) / (plan.world_size * plan.micro_batch_tokens)
        )
    if plan.global_batch_tokens is not None and plan.global_batch_size:
        return math.ceil(
            plan.global_batch_size / (plan.world_size * plan.per_device_train_batch_size)
        )
    return plan.accumulation


def _interval(steps: int | Literal["epoch"], steps_per_epoch: int) -> int:
    return steps_per_epoch if steps == "epoch" else steps


def _world(compute: ComputeConfig, gpus: int, world_size: int | None) -> tuple[int, int, bool]:
    """Nodes, processes on each, and whether each process has a GPU; as planned, or as a rank found it."""
    nodes = compute.nodes
    if world_size is None:
        return nodes, *_processes(compute, gpus)
    nodes = nodes if world_size % nodes == 0 else 1
    return nodes, world_size // nodes, bool(compute.gpus_per_node or gpus)


def _processes(compute: ComputeConfig, gpus: int) -> tuple[int, bool]:
    """Processes on each node, and whether each has a GPU."""
    available = gpus if compute.gpus_per_node is None else compute.gpus_per_node
    processes = compute.processes or available or 1
    if 0 < available < processes:
        raise ConfigError(
            f"compute.processes: found {processes} with {available} GPUs on each node; expected at most one process "
            f"per GPU: 1 to {available}, or compute.gpus_per_node: 0 to train on the CPU"
        )
    return processes, available > 0


def _batches(
    training: TrainingConfig, world_size: int, *, is_packed: bool, longest_row: int
) -> tuple[int, int | None, int]:
    """Return samples of an optimizer step, or tokens instead, and micro-batches of a step and rank."""
    if training.global_batch_tokens is not None:
        whole = training.per_device_train_batch_size * longest_row * world_size
        return 0, *_token_batches(training, whole, is_packed=is_packed)
    batch = training.per_device_train_batch_size
    wanted = training.global_batch_size
    accumulation = training.gradient_accumulation_steps
    if wanted is None:
        accumulation = accumulation or 1
        return batch * accumulation * world_size, None, accumulation
    if accumulation is not None and batch * accumulation * world_size != wanted:
        raise ConfigError(
            f"training.global_batch_size: found {wanted}, but per_device_train_batch_size {batch} × "
            f"gradient_accumulation_steps {accumulation} × {world_size} processes = "
            f"{batch * accumulation * world_size}; leave out gradient_accumulation_steps, which follows from the "
            "others, or global_batch_size"
        )
    if not is_packed and wanted % (batch * world_size):
        raise ConfigError(_impossible_split(wanted, batch, world_size))
    if wanted < world_size:
        raise ConfigError(
            f"training.global_batch_size: found {wanted} samples for {world_size} processes; expected at least one "
            f"for each: a global batch of {world_size} or more, or {wanted} processes or fewer"
        )
    return wanted, None, math.ceil(wanted / (batch * world_size))


def _token_batches(training: TrainingConfig, whole: int, *, is_packed: bool) -> tuple[int, int]:
    """Return tokens of an optimizer step, and full-length micro-batches of a step and rank.

    `whole`: tokens of one full-length micro-batch of each rank, all together.
    """
    wanted = training.global_batch_tokens
    accumulation = training.gradient_accumulation_steps
    if training.global_batch_size is not None:
        raise ConfigError(
            f"training.global_batch_tokens: found {wanted} beside global_batch_size {training.global_batch_size}; "
            "expected one of them: a step takes a number of tokens or of samples"
        )
    if wanted == "packed":
        if not is_packed:
            raise ConfigError(
                "training.global_batch_tokens: found packed with data.packing: false; expected a number of tokens, "
                "or data.packing: true"
            )
        return whole * (accumulation or 1), accumulation or 1
    if accumulation is not None:
        raise ConfigError(
            f"training.global_batch_tokens: found {wanted} beside gradient_accumulation_steps {accumulation}; leave "
            "that out, it follows from the tokens; or set global_batch_tokens: packed"
        )
    tokens = int(wanted or 0)
    return tokens, math.ceil(tokens / whole)


def _impossible_split(wanted: int, batch: int, world_size: int) -> str:
    unit = batch * world_size
    nearest = [n for n in (wanted // unit * unit, (wanted // unit + 1) * unit) if n]
    ways = [f"a global batch of {' or '.join(map(str, nearest))}"]
    if wanted % world_size == 0:
        ways.append(f"per_device_train_batch_size {_listed(_divisors(wanted // world_size))}")
    if wanted % batch == 0:
        ways.append(f"{_listed(_divisors(wanted // batch))} processes")
    return (
        f"training.global_batch_size: found {wanted}, which is no multiple of per_device_train_batch_size {batch} × "
        f"{world_size} processes = {unit}; possible are {'; '.join(ways)}; or data.packing: true"
    )


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _listed(numbers: list[int]) -> str:
    *rest, last = map(str, numbers)
    return f"{', '.join(rest)} or {last}" if rest else last


def learning_rate_at(plan: Plan, step: int) -> float:
    """The learning rate of the step that begins after `step` completed ones, `0 <= step < num_steps`.

    It rises linearly over the warm-up, whose first step already learns and whose last has the full rate, and then
    falls to 0 as the run ends (cosine, linear) or stays (constant).
    """
    if step < plan.warmup_steps:
        return plan.learning_rate * ((step + 1) / plan.warmup_steps)
    if plan.lr_scheduler_type == "constant":
        return plan.learning_rate
    done = (step - plan.warmup_steps) / max(1, plan.num_steps - plan.warmup_steps)
    left = 1 - done if plan.lr_scheduler_type == "linear" else (1 + math.cos(math.pi * done)) / 2
    return plan.learning_rate * max(0.0, left)
