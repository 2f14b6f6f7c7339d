"""Voice of a run while it trains: log lines, the progress bar, metrics and timings, trackers. Rank 0 speaks.

The loop calls `step`, `evaluation` and nothing else; how it is shown is decided here.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch

from kubetune.base import logs
from kubetune.base.progress_bar import Progress, is_wanted
from kubetune.batching.batch import Batch
from kubetune.batching.feed import Work
from kubetune.config.schema import Config, LoggingConfig
from kubetune.distributed.process_group import World
from kubetune.plan.plan import Plan, learning_rate_at
from kubetune.rundir import machine, metrics, trackers
from kubetune.rundir.checkpoints import State
from kubetune.rundir.totals import read_totals, runaway, runaway_line


def peak_memory_bytes(device: torch.device) -> int:
    """Highest memory so far: allocated on the GPU, or resident in RAM."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class RunLog:
    """Open one with `open_run_log`; on ranks other than 0 it stays silent."""

    def __init__(
        self, logging_steps: int, plan: Plan, run_dir: Path, world: World, state: State
    ) -> None:
        """`logging_steps`: every so many steps one is logged."""
        self._logging_steps = logging_steps
        self._plan = plan
        self._run_dir = run_dir
        self._world = world
        self._numbers: metrics.MetricsLog | None = None
        self._tracker: trackers.Tracker | None = None
        self._bar: Progress | None = None
        self._epoch_losses: list[tuple[float, int]] = []
        self.last_step = state.step

    def epoch(self, step: int) -> float:
        """Return the epochs completed after `step` steps, a fraction within one."""
        return step / self._plan.steps_per_epoch

    def step(
        self,
        state: State,
        work: Work,
        measured: dict[str, float],
        norm: float,
        seconds: float,
        ranks: Sequence[float],
    ) -> None:
        """Log one optimizer step that is done.

        `measured`: its loss, and what else the task measures, NaN where there is nothing of it. `ranks`: seconds each
        rank computed, before waiting for the others.
        """
        if self._numbers is None:
            return
        loss = measured["loss"]
        rate = learning_rate_at(self._plan, state.step - 1)
        values = {
            "epoch": self.epoch(state.step),
            "loss": loss,
            "learning_rate": rate,
            "grad_norm": norm,
            "samples": work.samples,
            "tokens": work.tokens,
            "trained_tokens": work.labels,
            **{name: value for name, value in measured.items() if not math.isnan(value)},
        }
        speed = work.tokens / seconds
        timing = {
            "seconds": seconds,
            "tokens_per_second": speed,
            "trained_tokens_per_second": work.labels / seconds,
            "peak_memory_bytes": peak_memory_bytes(self._world.device),
            "rank_seconds": list(ranks),
        }
        if 0 < work.computed < work.tokens:
            timing["computed_tokens"] = work.computed
        self.last_step = state.step
        self._numbers.write(state.step, values)
        self._numbers.write_timing(state.step, timing)
        if self._bar is not None:
            self._bar.update(state.step, loss=loss, learning_rate=rate, tokens_per_second=speed)
        if self._tracker is not None:
            self._tracker.log(state.step, {**values, "tokens_per_second": speed})
        self._epoch_losses.append((loss, work.labels))
        if state.step % self._logging_steps == 0 or state.step == self._plan.num_steps:
            logs.TRAIN.info(
                "step %d/%d epoch %.2f loss %.4f%s lr %.3g grad_norm %.3f tokens/s %.0f",
                state.step, self._plan.num_steps, values["epoch"], loss, _compared(measured), rate, norm, speed,
            )  # fmt: skip
        if state.step % self._plan.steps_per_epoch == 0:
            self._end_epoch(state)

    def _end_epoch(self, state: State) -> None:
        labels = sum(n for _, n in self._epoch_losses)
        mean = math.fsum(loss * n for loss, n in self._epoch_losses) / max(labels, 1)
        num_logged = len(self._epoch_losses)
        steps_per_epoch = self._plan.steps_per_epoch
        lost = ""
        if num_logged < steps_per_epoch:
            lost = f" of {num_logged} of its {steps_per_epoch} steps, as metrics.jsonl lacks the others"
        self._epoch_losses.clear()
        logs.EPOCH.info(
            "epoch %d done: mean loss %.4f%s, step %d",
            round(self.epoch(state.step)),
            mean,
            lost,
            state.step,
        )

    def remember(self, run_dir: Path, step: int) -> None:
        """Take up the losses that earlier starts had in the epoch which is under way after `step` steps."""
        begun = step - step % self._plan.steps_per_epoch
        for line in metrics.stream_lines(run_dir / metrics.METRICS):
            if begun < line["step"] <= step and "loss" in line:
                self._epoch_losses.append((line["loss"], line["trained_tokens"]))

    def evaluation(self, step: int, values: dict[str, float], best: bool, seconds: float) -> None:
        """Log an evaluation of the weights after `step` steps."""
        if self._numbers is None:
            return
        metrics.record_event(
            self._run_dir, "evaluation", step=step, best=best, seconds=seconds, metrics=values
        )
        self._numbers.write(step, {"epoch": self.epoch(step), **values})
        if self._tracker is not None:
            self._tracker.log(step, values)
        # A perplexity of a model that was never trained has hundreds of digits.
        texts = {
            name: f"{value:.4f}" if value < 1e6 else f"{value:.3g}"
            for name, value in values.items()
        }
        shown = " ".join(f"{name} {text}" for name, text in texts.items() if "/" not in name)
        logs.EVAL.info("step %d %s%s", step, shown, " (best so far)" if best else "")
        of_sources = [
            f"{name.partition('/')[2]} {text}" for name, text in texts.items() if "/" in name
        ]
        if of_sources:
            logs.EVAL.info("step %d eval_loss by source: %s", step, ", ".join(of_sources))

    def sync(self) -> None:
        """Make the numbers durable before a checkpoint that must not be ahead of them."""
        if self._numbers is not None:
            self._numbers.sync()


def _compared(measured: Mapping[str, float]) -> str:
    """Return the measures of a step beside its loss, for its line of the log."""
    names = [name for name in ("accuracy", "margin", "expert_load_max") if name in measured]
    return "".join(f" {name} {measured[name]:.3g}" for name in names)


@contextmanager
def open_run_log(
    config: Config, plan: Plan, run_dir: Path, world: World, state: State
) -> Iterator[RunLog]:
    """Yield the log of one start of a run, going on after `state`."""
    run_log = RunLog(config.training.logging_steps, plan, run_dir, world, state)
    if not world.is_main:
        yield run_log
        return
    with ExitStack() as stack:
        run_log._numbers = stack.enter_context(
            metrics.MetricsLog(run_dir, state.step, state.evaluated_step)
        )
        run_log.remember(run_dir, state.step)
        tracker = trackers.open_tracker(
            config, run_dir, state.step, write_page=partial(_write_page, run_dir)
        )
        run_log._tracker = stack.enter_context(tracker)
        stack.enter_context(machine.recorded(run_dir, lambda: run_log.last_step, tracker.note_load))
        run_log._bar = stack.enter_context(
            Progress(plan.num_steps, state.step, is_wanted(world.rank))
        )
        yield run_log
        losses = runaway(read_totals(run_dir))
        if losses is not None:
            run_log._tracker.tell("loss_runaway", runaway_line(losses))


def _write_page(run_dir: Path, file: Path) -> None:
    from kubetune.reporting import write_report  # at the end, not before the first step

    write_report([run_dir], file)


def log_batch(
    logging: LoggingConfig, micro: int, count: int, batch: Batch, loss: float, began: float
) -> None:
    """Log `[COLLATE]` and `[BATCH]` at DEBUG, as often as logging.batches says."""
    if logs.shows_batch(logging.batches, micro, count):
        sequences = len(batch.cu_seqlens) - 1 if batch.tree is None else len(batch.samples)
        logs.COLLATE.debug(
            "input_ids [%d], %d sequences, %d labels", batch.num_tokens, sequences, batch.num_labels
        )
        logs.BATCH.debug(
            "micro-batch %d/%d: samples %s, loss share %.4f, %.3f s",
            micro + 1, count, list(batch.samples[:8]), loss, time.perf_counter() - began,
        )  # fmt: skip
