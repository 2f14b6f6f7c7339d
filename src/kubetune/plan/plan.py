"""The arithmetic of a run: processes, batches, steps and schedule, from the config and a few numbers of the data.

It is pure and without torch: the same call on a laptop, in a pod and on every rank gives the same Plan. base/gpus looks
at the machine, and forecast.py computes memory.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal, assert_never

from pydantic import BaseModel, ConfigDict, ValidationError

from kubetune.base.files import read_inside
from kubetune.base.humanize import counted
from kubetune.config.naming import method_label
from kubetune.config.schema import ComputeConfig, Config, TrainingConfig
from kubetune.errors import ConfigError

# Time to save after a request to stop, unless the cluster config has another.
GRACE_SECONDS = 60


class Plan(BaseModel):
    """The arithmetic of a config on certain processes and data. Steps are optimizer steps.

    Example: 1,000 rows, 2 processes, batches of 4 rows, accumulation 2. A step takes 4 × 2 × 2 = 16 rows, an epoch has
    ceil(1,000 / 16) = 63 steps.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    nodes: int
    processes_per_node: int
    world_size: int  # processes of all nodes
    device: Literal["cuda", "cpu"]
    backend: Literal["nccl", "gloo"]
    # Rows of the data; None until they are read.
    rows: int | None
    eval_rows: int | None
    tokens_per_epoch: int | None = None
    # Samples of a step; with `global_batch_tokens` the mean, and 0 until the data are read.
    global_batch_size: int
    # About this many tokens a step, if steps are counted in tokens.
    global_batch_tokens: int | None = None
    per_device_train_batch_size: int
    per_device_eval_batch_size: int
    # Micro-batches of a step and rank. With packing, those in the mean step; of full length until lengths are read.
    accumulation: int
    micro_batch_tokens: int | None  # the most tokens of a micro-batch; None without packing
    # Steps; 0 until the data are read, if they depend on them.
    steps_per_epoch: int
    num_steps: int
    num_epochs: float
    warmup_steps: int
    eval_steps: int  # between evaluations
    save_steps: int  # between checkpoints
    learning_rate: float
    lr_scheduler_type: Literal["cosine", "linear", "constant"]
    method: str  # `lora-r16-a32` or `full`
    grace_seconds: int
    saved_share: float = 0.0  # share of the tokens that shared beginnings save

    def to_json(self) -> str:
        """Return the text of plan.json."""
        return self.model_dump_json(indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Return the plan that `to_json` wrote. Raise ConfigError."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            reason = problem["msg"]
            if problem["loc"]:
                reason = f"{'.'.join(map(str, problem['loc']))}: {reason}"
            raise ConfigError(
                f"not a plan written by this version of kubetune: {reason}; start the run again with its run file, "
                "which writes it anew"
            ) from None

    def is_eval_step(self, step: int) -> bool:
        """True if the weights are evaluated when `step` steps are completed."""
        return self._is_due(step, self.eval_steps)

    def is_save_step(self, step: int) -> bool:
        """True if a checkpoint is saved when `step` steps are completed."""
        return self._is_due(step, self.save_steps)

    def _is_due(self, step: int, interval: int) -> bool:
        if step == self.num_steps:
            return True
        return interval > 0 and step > 0 and step % interval == 0

    @property
    def tokens_per_step(self) -> int | None:
        """Return the mean number of tokens of a full step. None until the lengths are read."""
        if not self.tokens_per_epoch or not self.rows:
            return None
        if self.global_batch_tokens is not None:
            return round(self.tokens_per_epoch / self.steps_per_epoch)
        return round(self.tokens_per_epoch / self.rows * min(self.global_batch_size, self.rows))

    @property
    def may_accumulate(self) -> bool:
        """True if a step may need several micro-batches on a rank, even if only one with long sequences does."""
        if self.global_batch_tokens is not None:
            return True
        return self.global_batch_size > self.per_device_train_batch_size * self.world_size

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Return the plan in a file. Raise ConfigError for anything else, and FileNotFoundError."""
        try:
            return cls.from_json(read_inside(path))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def batch_text(self, task: str = "") -> str:
        """Return in words what the global batch of a run of this task consists of."""
        # A step of GRPO draws many answers to each of so many prompts.
        unit = "prompt" if task == "grpo" else "sample"
        samples = self.global_batch_size
        tokens = self.tokens_per_step
        # Without packing the batch is a product of three numbers.
        if self.micro_batch_tokens is None and self.global_batch_tokens is None:
            parts = f"{self.per_device_train_batch_size} × {self.accumulation} × {self.world_size}"
            return f"{samples} = batch × accumulation × world = {parts}"
        if self.global_batch_tokens is None:
            size = counted(samples, unit)
            if tokens:
                size += f", about {tokens:,} tokens"
        elif tokens:
            size = f"about {tokens:,} tokens, {counted(samples, unit)}"
        else:
            size = f"about {self.global_batch_tokens:,} tokens"
        number = f"{'about' if tokens else 'at most'} {counted(self.accumulation, 'micro-batch')}"
        if self.micro_batch_tokens is None:
            most = counted(self.per_device_train_batch_size, "sample")
        else:
            most = f"{self.micro_batch_tokens:,} tokens"
        return (
            f"{size}; {number} of at most {most} on each of {counted(self.world_size, 'process')}"
        )


def make_plan(
    config: Config,
    rows: int | None = None,
    eval_rows: int | None = None,
    gpus: int = 0,
    *,
    world_size: int | None = None,
    device: Literal["cuda", "cpu"] | None = None,
    tokens: int | None = None,
    saved_share: float = 0.0,
) -> Plan:
    """Return the plan of a run over `rows` training samples with `tokens` an epoch, on nodes with `gpus` visible GPUs.

    `compute.gpus_per_node` takes precedence over `gpus`. A rank that runs already passes its `world_size` and `device`,
    which take precedence over both. Raise ConfigError that names the possible splits.
    """
    training = config.training
    nodes, processes, on_gpu = _world(config.compute, gpus, world_size)
    world_size = nodes * processes
    if device is None:
        device = "cuda" if on_gpu else "cpu"
    global_batch_size, batch_tokens, accumulation = _batches(
        training, world_size, is_packed=config.data.packing, longest_row=config.longest_row
    )

    # If a step is a number of tokens, its samples follow.
    steps_per_epoch = _steps_per_epoch(rows, tokens, global_batch_size, batch_tokens)
    steps_per_epoch *= config.uses_of_row
    if batch_tokens is not None and rows and steps_per_epoch:
        global_batch_size = math.ceil(rows / steps_per_epoch)
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
        saved_share=saved_share,
    )
    return plan.model_copy(update={"accumulation": _micro_batches(plan)})


def _steps_per_epoch(
    rows: int | None, tokens: int | None, batch_size: int, batch_tokens: int | None
) -> int:
    """Return the steps of an epoch, each of `batch_size` samples or of `batch_tokens`. 0 until the data are read."""
    if not rows:
        return 0
    if batch_tokens is None:
        return math.ceil(rows / batch_size)
    if not tokens:
        return 0
    return min(rows, math.ceil(tokens / batch_tokens))


def _warmup_steps(training: TrainingConfig, num_steps: int) -> int:
    """Return the number of steps in which the learning rate rises: as the config says, or its share of all steps."""
    if training.warmup_steps is not None:
        return training.warmup_steps
    return math.ceil(training.warmup_ratio * num_steps)


def _micro_batches(plan: Plan) -> int:
    """Return the micro-batches of the mean step on a rank, by the lengths of rows if these decide."""
    tokens = plan.tokens_per_step
    if plan.micro_batch_tokens is not None and tokens is not None:
        computed = tokens * (1 - plan.saved_share)
        return math.ceil(computed / (plan.world_size * plan.micro_batch_tokens))
    if plan.global_batch_tokens is not None and plan.global_batch_size:
        unit = plan.world_size * plan.per_device_train_batch_size
        return math.ceil(plan.global_batch_size / unit)
    return plan.accumulation


def _interval(steps: int | Literal["epoch"], steps_per_epoch: int) -> int:
    return steps_per_epoch if steps == "epoch" else steps


def _world(compute: ComputeConfig, gpus: int, world_size: int | None) -> tuple[int, int, bool]:
    """Return nodes, processes on each, and whether each process has a GPU. A rank passes its `world_size`."""
    nodes = compute.nodes
    if world_size is None:
        return nodes, *_processes(compute, gpus)
    if world_size % nodes != 0:
        nodes = 1  # started by hand, with another number of processes than the config has
    return nodes, world_size // nodes, bool(compute.gpus_per_node or gpus)


def _processes(compute: ComputeConfig, gpus: int) -> tuple[int, bool]:
    """Return the processes on each node, and whether each has a GPU."""
    # One process for each GPU; one process without GPUs.
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
    """Return samples of a step, or tokens in their place, and micro-batches of a step and rank."""
    if world_size % training.ranks_of_copy(world_size):
        raise ConfigError(
            f"training.fsdp_size: found {training.fsdp_size} with {world_size} processes; expected a number that divides "
            "them, such as the GPUs of a node"
        )
    if training.global_batch_tokens is not None:
        whole = training.per_device_train_batch_size * longest_row * world_size
        return 0, *_token_batches(training, whole, is_packed=is_packed)
    batch = training.per_device_train_batch_size
    samples = training.global_batch_size
    accumulation = training.gradient_accumulation_steps
    if samples is None:
        accumulation = accumulation or 1
        return batch * accumulation * world_size, None, accumulation
    if accumulation is not None and batch * accumulation * world_size != samples:
        raise ConfigError(
            f"training.global_batch_size: found {samples}, but per_device_train_batch_size {batch} × "
            f"gradient_accumulation_steps {accumulation} × {world_size} processes = "
            f"{batch * accumulation * world_size}; leave out gradient_accumulation_steps, which follows from the "
            "others, or global_batch_size"
        )
    # Packed micro-batches hold any number of samples; others hold exactly `batch`.
    if not is_packed and samples % (batch * world_size):
        raise ConfigError(_impossible_split(samples, batch, world_size))
    if samples < world_size:
        raise ConfigError(
            f"training.global_batch_size: found {samples} samples for {world_size} processes; expected at least one "
            f"for each: a global batch of {world_size} or more, or {samples} processes or fewer"
        )
    return samples, None, math.ceil(samples / (batch * world_size))


def _token_batches(training: TrainingConfig, whole: int, *, is_packed: bool) -> tuple[int, int]:
    """Return tokens of a step, and full-length micro-batches of a step and rank.

    `whole`: tokens of one full-length micro-batch on each rank, all together.
    """
    setting = training.global_batch_tokens
    accumulation = training.gradient_accumulation_steps
    if training.global_batch_size is not None:
        raise ConfigError(
            f"training.global_batch_tokens: found {setting} beside global_batch_size {training.global_batch_size}; "
            "expected one of them: a step takes a number of tokens or of samples"
        )
    # `packed` counts like tools that pack first: full-length rows.
    if setting == "packed":
        if not is_packed:
            raise ConfigError(
                "training.global_batch_tokens: found packed with data.packing: false; expected a number of tokens, "
                "or data.packing: true"
            )
        return whole * (accumulation or 1), accumulation or 1
    if accumulation is not None:
        raise ConfigError(
            f"training.global_batch_tokens: found {setting} beside gradient_accumulation_steps {accumulation}; leave "
            "that out, it follows from the tokens; or set global_batch_tokens: packed"
        )
    tokens = int(setting or 0)
    return tokens, math.ceil(tokens / whole)


def _impossible_split(samples: int, batch: int, world_size: int) -> str:
    """Return the message about a global batch that cannot be split, with what is possible.

    12 samples in batches of 8 on 1 process: a global batch of 8 or 16, or batches of 1, 2, 3, 4, 6 or 12.
    """
    unit = batch * world_size
    lower = samples // unit * unit
    nearest = [lower, lower + unit] if lower else [unit]
    ways = [f"a global batch of {' or '.join(map(str, nearest))}"]
    if samples % world_size == 0:
        ways.append(f"per_device_train_batch_size {_listed(_divisors(samples // world_size))}")
    if samples % batch == 0:
        ways.append(f"{_listed(_divisors(samples // batch))} processes")
    return (
        f"training.global_batch_size: found {samples}, which is no multiple of per_device_train_batch_size {batch} × "
        f"{world_size} processes = {unit}; possible are {'; '.join(ways)}; or data.packing: true"
    )


def _divisors(number: int) -> list[int]:
    divisors = set()
    for divisor in range(1, math.isqrt(number) + 1):
        if number % divisor == 0:
            divisors |= {divisor, number // divisor}
    return sorted(divisors)


def _listed(numbers: list[int]) -> str:
    *rest, last = map(str, numbers)
    if not rest:
        return last
    return f"{', '.join(rest)} or {last}"


def learning_rate_at(plan: Plan, step: int) -> float:
    """Return the learning rate of the step that begins after `step` completed ones, `0 <= step < num_steps`.

    It rises linearly over the warm-up; then it falls to 0 at the end of the run (cosine, linear) or stays (constant).
    With a rate of 1 and 4 steps of warm-up: 0.25, 0.5, 0.75, 1, then the schedule.
    """
    if step < plan.warmup_steps:
        # The first step already learns, and the last one of the warm-up has the full rate.
        return plan.learning_rate * ((step + 1) / plan.warmup_steps)
    done = (step - plan.warmup_steps) / max(1, plan.num_steps - plan.warmup_steps)
    match plan.lr_scheduler_type:
        case "constant":
            factor = 1.0
        case "linear":
            factor = 1 - done
        case "cosine":
            factor = (1 + math.cos(math.pi * done)) / 2
        case unknown:
            assert_never(unknown)
    return plan.learning_rate * max(0.0, factor)
