"""Report on a run while it trains: log lines, the progress bar, metrics and timings, trackers. Only rank 0 reports.

The loop calls `step` and `evaluation` and nothing else; how they are shown is decided here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kubetune.base import logs
from kubetune.base.terminal.progress_bar import Progress
from kubetune.batching.batch import Batch
from kubetune.batching.feed import Work
from kubetune.config.metric_names import TELLING
from kubetune.config.schema import LoggingConfig, TrainingConfig
from kubetune.distributed.process_group import World
from kubetune.plan.plan import Plan, learning_rate_at
from kubetune.rundir import metrics
from kubetune.rundir.checkpoints import State
from kubetune.rundir.tracking import trackers
from kubetune.training.epochs.epoch_log import EpochLog
from kubetune.training.epochs.run_table import RunTable
from kubetune.training.peak_memory import peak_memory_bytes


class RunLog:
    """Reports on one start of a run. Open it with `open_run_log`. On ranks other than 0 it does nothing."""

    def __init__(
        self,
        training: TrainingConfig,
        plan: Plan,
        run_dir: Path,
        world: World,
        state: State,
    ) -> None:
        """`training`: how often a step gets a line in the log, and the metric that chooses the best checkpoint."""
        self._logging_steps = training.logging_steps
        self._plan = plan
        self._run_dir = run_dir
        self._world = world
        self.numbers: metrics.MetricsLog | None = None
        self.tracker: trackers.Tracker | None = None
        self.bar: Progress | None = None
        self.table: RunTable | None = None  # on a brief terminal
        self.epochs = EpochLog(plan.steps_per_epoch, training.metric_for_best_model)
        self.last_step = state.step

    def epoch(self, step: int) -> float:
        """Return how many epochs are completed after `step` steps, with a fraction."""
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
        """Report one completed optimizer step.

        `measured`: its loss, and what else the task measures, NaN for what this step has not. `norm`: the gradient's,
        before clipping. `ranks`: seconds that each rank computed, before it waited for the others.
        """
        if self.numbers is None:
            return
        values = self._values(state, work, measured, norm)
        timing = self._timing(work, seconds, ranks)
        speed = timing["tokens_per_second"]
        self.last_step = state.step

        # To the files, of which one is the same in a resumed run, and one is of this machine.
        self.numbers.write(state.step, values)
        self.numbers.write_timing(state.step, timing)

        loss = measured["loss"]
        rate = values["learning_rate"]
        # To the screen, a tracker, and from time to time the log.
        if self.bar is not None:
            self.bar.update(
                state.step,
                loss=loss,
                measures={name: values[name] for name in TELLING if name in values},
                learning_rate=rate,
                tokens_per_second=speed,
            )

        if self.tracker is not None:
            self.tracker.log(state.step, {**values, "tokens_per_second": speed})
        if state.step % self._logging_steps == 0 or state.step == self._plan.num_steps:
            logs.TRAIN.info(
                "step %d/%d epoch %.2f loss %.4f%s lr %.3g grad_norm %.3f tokens/s %.0f",
                state.step, self._plan.num_steps, values["epoch"], loss, _besides_loss(measured), rate, norm, speed,
            )  # fmt: skip

        is_evaluated = bool(self._plan.eval_rows) and self._plan.is_eval_step(state.step)
        self.epochs.step(state.step, values, is_evaluated=is_evaluated)
        if self.table is not None:
            self.table.step(state.step, values, is_evaluated=is_evaluated)

    def _values(
        self,
        state: State,
        work: Work,
        measured: Mapping[str, float],
        norm: float,
    ) -> dict[str, float]:
        """Return what depends on the data and the weights alone, and is the same in a resumed run."""
        values = {
            "epoch": self.epoch(state.step),
            "loss": measured["loss"],
            "learning_rate": learning_rate_at(self._plan, state.step - 1),
            "grad_norm": norm,
            "samples": work.samples,
            "tokens": work.tokens,
            "trained_tokens": work.labels,
        }
        # What this step does not measure is left out, not written as NaN, which is no JSON.
        for name, value in measured.items():
            if not math.isnan(value):
                values[name] = value
        return values

    def _timing(
        self,
        work: Work,
        seconds: float,
        ranks: Sequence[float],
    ) -> dict[str, Any]:
        """Return what depends on the machine."""
        timing = {
            "seconds": seconds,
            "tokens_per_second": work.tokens / seconds,
            "trained_tokens_per_second": work.labels / seconds,
            "peak_memory_bytes": peak_memory_bytes(self._world.device),
            "rank_seconds": list(ranks),
            **work.seconds,
        }
        if work.seconds:
            # The rest of a step that waited for its answers or for its teacher.
            waited = (work.seconds.get(f"{part}_seconds", 0.0) for part in ("answers", "teacher"))
            timing["train_seconds"] = seconds - sum(waited)
        if 0 < work.computed < work.tokens:  # rows share prefixes
            timing["computed_tokens"] = work.computed
        return timing

    def evaluation(
        self,
        step: int,
        values: dict[str, float],
        best: bool,
        seconds: float,
    ) -> None:
        """Report an evaluation of the weights after `step` steps. `best`: it is the best so far."""
        if self.numbers is None:
            return
        metrics.record_event(
            self._run_dir,
            "evaluation",
            step=step,
            best=best,
            seconds=seconds,
            metrics=values,
        )
        self.numbers.write(step, {"epoch": self.epoch(step), **values})
        if self.tracker is not None:
            self.tracker.log(step, values)

        remark = " (best so far)" if best else ""
        whole, *parts = evaluation_lines(values)
        logs.EVAL.info("step %d %s%s", step, whole, remark)
        for part in parts:
            logs.EVAL.info("step %d %s", step, part)
        self.epochs.evaluation(step, values)
        if self.table is not None:
            self.table.evaluation(step, values, is_best=best)

    def sync(self) -> None:
        """Make the numbers durable, before a checkpoint that must not be ahead of them."""
        if self.numbers is not None:
            self.numbers.sync()
            # The line of an epoch whose evaluation was stopped.
            self.epochs.write()


def evaluation_lines(values: Mapping[str, float]) -> list[str]:
    """Return the metrics of an evaluation as lines: first those of all rows, then parts of one metric.

    eval_loss 1.2000 eval_accuracy 0.5000
    eval_loss by source: a.jsonl 1.1000, b.jsonl 1.3000
    eval_reward by name: exact_match 0.4000, graded 0.7000
    """
    whole = []
    parts: dict[str, list[str]] = {}
    for name, value in values.items():
        text = f"{value:.4f}"
        # The perplexity of a model that was never trained may have hundreds of digits.
        if value >= 1e6:
            text = f"{value:.3g}"
        of, slash, part = name.partition("/")
        if slash:
            parts.setdefault(of, []).append(f"{part} {text}")
        else:
            whole.append(f"{name} {text}")
    lines = [" ".join(whole)]
    for name, texts in parts.items():
        kind = "name" if name == "eval_reward" else "source"
        lines.append(f"{name} by {kind}: {', '.join(texts)}")
    return lines


def _besides_loss(measured: Mapping[str, float]) -> str:
    """Return what a step's log line shows besides the loss."""
    # The few of dozens of measures that tell at a glance whether a run goes well.
    text = ""
    for name in (*TELLING, "completion_length", "expert_load_max"):
        # NaN is what this step does not measure.
        if name in measured and not math.isnan(measured[name]):
            text += f" {name} {measured[name]:.3g}"
    return text


def log_batch(
    logging: LoggingConfig,
    micro: int,
    count: int,
    batch: Batch,
    loss: float,
    began: float,
) -> None:
    """Log `[COLLATE]` and `[BATCH]` at DEBUG, as often as logging.batches says."""
    if logs.shows_batch(logging.batches, micro, count):
        sequences = len(batch.cu_seqlens) - 1
        if batch.tree is not None:
            # Shared prefixes are sequences of their own in `cu_seqlens`.
            sequences = len(batch.samples)
        logs.COLLATE.debug(
            "input_ids [%d], %d sequences, %d labels",
            batch.num_tokens,
            sequences,
            batch.num_labels,
        )
        logs.BATCH.debug(
            "micro-batch %d/%d: samples %s, loss share %.4f, %.3f s",
            micro + 1, count, list(batch.samples[:8]), loss, time.perf_counter() - began,
        )  # fmt: skip
