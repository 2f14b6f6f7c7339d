"""The rehearsal of a run before its first step (`training.preflight`): its longest batch, an evaluation and a save.

What would fail after hours fails now: memory, a metric that the task does not have, a folder that cannot be written.
Nothing of it stays: no weight moves, the gradient is cleared, the loop seeds every micro-batch anew, and the checkpoint
lies where the next start would clear it away as well.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from kubetune import errors
from kubetune.base import logs
from kubetune.base.humanize import counted, size
from kubetune.config.schema.cluster import quantity_bytes
from kubetune.distributed import process_group
from kubetune.models import acceleration, fsdp
from kubetune.plan.forecast import Forecast, forecast, remedies
from kubetune.plan.memory import USABLE_SHARE
from kubetune.plan.model_shapes import Weights, read_weights
from kubetune.rundir import heartbeat, metrics
from kubetune.scoring import judge
from kubetune.training import evaluation
from kubetune.training.run_log import peak_memory_bytes
from kubetune.training.start import warm_up

if TYPE_CHECKING:
    from kubetune.batching.batch import Batch
    from kubetune.batching.feed import Work
    from kubetune.config.schema import Config
    from kubetune.distributed.process_group import World
    from kubetune.plan.plan import Plan
    from kubetune.rundir.checkpoints import State
    from kubetune.training.run import Run

UNSURE_SHARE = 0.9
"""Of the device, what advice counts on after memory ran out where the forecast had said that it would do."""


def require_metric(name: str, values: Collection[str]) -> None:
    """Raise ConfigError unless the metric that chooses the best checkpoint is one that the task gives."""
    if name not in values:
        raise errors.ConfigError(
            f"training.metric_for_best_model is {name}; this task gives {', '.join(values)}"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Memory ran out, on a GPU or, where the kernel refuses more, on a CPU."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


@contextmanager
def explaining_shortage(config: Config, plan: Plan, world: World) -> Iterator[None]:
    """Turn memory that ran out anywhere within into an error that says what would help."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        budget = MemoryBudget(config, plan, world.device)
        raise errors.OutOfMemory(
            f"rank {world.rank} ran out of memory ({errors.first_line(error)}); there are {size(budget.device_bytes)} "
            f"({budget.whose}); {budget.advice(UNSURE_SHARE)}. What was saved is good: after such a change the same "
            "command goes on. training.preflight tries the longest batch before step 1"
        ) from error


def rehearse(run: Run, state: State) -> None:
    """Try what the run will do, and tell what memory it took; all ranks call it.

    Raises EnvironmentFault where it does not fit, with the changes that would make it fit.
    """
    if state.step:
        logs.STEP.info(
            "no preflight: this start goes on from step %d, and what was tried then has worked",
            state.step,
        )
        return
    device, world = run.world.device, run.world
    budget = MemoryBudget(run.config, run.plan, device, run.data.longest)
    work = warm_up.largest(run)
    batch = work.batches[0]
    content = f"{counted(len(batch.cu_seqlens) - 1, 'row')}, {batch.num_tokens:,} tokens"
    logs.STEP.info(
        "preflight: the longest batch (%s), an evaluation, a save; forecast: %s",
        content,
        budget.outlook(),
    )
    seconds = dict[str, float]()
    with (
        _timed(seconds, "batch"),
        _noticing_shortage(run, budget, f"the longest batch ({content})"),
    ):
        _learn(run, state, batch, work)
    run.optimizer.reduce_gradient(
        world
    )  # what ranks talk through takes memory from its first use on
    run.optimizer.clear_gradient()
    if run.data.eval is not None:
        with (
            _timed(seconds, "evaluation"),
            _noticing_shortage(run, budget, "the longest batch of an evaluation"),
        ):
            values = evaluation.rehearse(run.task, run.learner, run.data.eval, run.plan, world)
        if run.judge is not None:
            answers = (
                f"{run.judge.wanted.max_new_tokens} new tokens for each of the longest questions"
            )
            with _timed(seconds, "answers"), _noticing_shortage(run, budget, answers):
                judge.rehearse(run.judge, run.learner, world)
        require_metric(
            run.config.training.metric_for_best_model, {*values, *run.config.evaluation.names}
        )
    heartbeat.beat("preflight of a save")
    with _timed(seconds, "save"), _noticing_shortage(run, budget, "a save"):
        written = run.checkpointer.rehearse(state)
    peak = max(process_group.gather(peak_memory_bytes(device), world))
    reserved = (
        max(process_group.gather(torch.cuda.max_memory_reserved(device), world))
        if device.type == "cuda"
        else None
    )
    budget.require(peak, content)
    if world.is_main:
        logs.RESULT.info("preflight: %s", budget.verdict(peak, reserved))
        took = ", ".join(f"{what} {time:.2g} s" for what, time in seconds.items())
        logs.RESULT.info(
            "preflight: %s; a checkpoint has %s; nothing of it was kept", took, size(written)
        )
        metrics.record_event(
            run.checkpointer.run_dir,
            "preflight",
            rows=len(batch.cu_seqlens) - 1,
            tokens=batch.num_tokens,
            forecast_bytes=budget.forecast_bytes,
            measured_bytes=peak,
            reserved_bytes=reserved,
            device_bytes=budget.device_bytes,
            checkpoint_bytes=written,
            seconds=seconds,
        )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # the run's own peak may be lower


def _learn(run: Run, state: State, batch: Batch, work: Work) -> None:
    """The gradient of a batch, twice where a step has several: the second finds the first one's still there."""
    heartbeat.beat("preflight of a batch")
    times = 2 if run.plan.may_accumulate else 1
    for micro in range(times):
        run.learner.expect_backward(is_last=micro == times - 1)
        warm_up.learn(run, state, batch, work)


class MemoryBudget:
    """A device's memory, the forecast for it, and what would make a run fit that does not."""

    def __init__(
        self, config: Config, plan: Plan, device: torch.device, longest: int | None = None
    ) -> None:
        self._config, self._plan, self._longest = config, plan, longest
        self.device_bytes, self.whose = _device_bytes(config, plan, device)
        self._weights: Weights | None = read_weights(config.model.path, os.environ)
        found = None
        if self._weights is not None:
            found = forecast(config, plan, self._weights, self.device_bytes, longest)
        self._forecast: Forecast | None = found
        self.forecast_bytes = found.allocated_bytes if found is not None else None

    def outlook(self) -> str:
        """Before anything is tried: on CPUs nobody may be left to speak afterwards."""
        if self._forecast is None:
            return "unknown"
        said = f"{size(self.forecast_bytes or 0)} of {size(self.device_bytes)} ({self.whose})"
        return said if self._forecast.fits else f"{said}, which is not enough: {self.advice(1.0)}"

    def verdict(self, peak: int, reserved: int | None) -> str:
        """The measured peak beside the forecast one."""
        said = f"peak memory {size(peak)}"
        if reserved is not None:
            said += f" allocated, {size(reserved)} reserved"
        if self.forecast_bytes:
            said += (
                f", forecast {size(self.forecast_bytes)} ({peak / self.forecast_bytes - 1:+z.0%})"
            )
        share = (reserved or peak) / self.device_bytes
        said += f"; {share:.0%} of {size(self.device_bytes)} ({self.whose})"
        return (
            said
            if share <= USABLE_SHARE
            else f"{said}, which leaves little for surprises; {self.advice(1.0, peak)}"
        )

    def require(self, peak: int, content: str) -> None:
        """Raise EnvironmentFault where more was taken than is stated to be there; alike on every rank."""
        if peak > self.device_bytes:
            raise self.fault(
                f"the longest batch ({content}), an evaluation and a save",
                f"take {size(peak)}",
                peak,
            )

    def fault(self, what: str, found: str, peak: int | None = None) -> errors.OutOfMemory:
        """The error for what does not fit, with what would help."""
        return errors.OutOfMemory(
            f"preflight: {what} {found}, there are {size(self.device_bytes)} ({self.whose}); "
            f"{self.advice(UNSURE_SHARE, peak)}. Nothing was trained or saved."
        )

    def advice(self, share: float, peak: int | None = None) -> str:
        """Changes that would make it fit, by the forecast, corrected by what was measured where something was."""
        if self._weights is None or self._forecast is None:
            return "lower training.per_device_train_batch_size or data.max_length, or recompute activations"
        wrong_by = (
            max(1.0, peak / self.forecast_bytes) if peak and self.forecast_bytes else 1 / share
        )
        found = remedies(
            self._config,
            self._plan,
            self._weights,
            int(self.device_bytes / wrong_by),
            self._longest,
        )
        if not found:
            return "no single change would make it fit; several together may, or a larger device"
        return "it would fit with " + ", or ".join(
            f"{text} (about {size(then.peak_bytes)})" for text, then in found
        )


@contextmanager
def _noticing_shortage(run: Run, budget: MemoryBudget, what: str) -> Iterator[None]:
    """Turn memory that ran out into an error that says what would help."""
    said = ""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        said = errors.first_line(error)
    # Outside of the handler, whose traceback would keep the tensors alive.
    told = [said] if fsdp.is_sharded(run.learner.model) else process_group.gather(said, run.world)
    if short := next((text for text in told if text), None):
        raise budget.fault(what, f"ran out of memory ({short})")


@contextmanager
def _timed(seconds: dict[str, float], what: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[what] = time.perf_counter() - began


def _device_bytes(config: Config, plan: Plan, device: torch.device) -> tuple[int, str]:
    """Memory that a rank may take, and who says so."""
    if device.type == "cuda":
        return acceleration.device_bytes(device), torch.cuda.get_device_name(device)
    if config.compute.memory:
        return quantity_bytes(
            config.compute.memory
        ) // plan.processes_per_node, "compute.memory of each process"
    return acceleration.device_bytes(device), "this machine's, of each process"
