"""Report on a run while it trains: log lines, the progress bar, metrics and timings, trackers. Only rank 0 reports.

The loop calls `step` and `evaluation` and nothing else; how they are shown is decided here.
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
from typing import Any

import torch

from kubetune.base import logs
from kubetune.base.progress_bar import Progress, is_wanted
from kubetune.batching.batch import Batch
from kubetune.batching.feed import Work
from kubetune.config.metric_names import TELLING, main_metric
from kubetune.config.schema import LoggingConfig, TrainingConfig
from kubetune.distributed.process_group import World
from kubetune.plan.plan import Plan, learning_rate_at
from kubetune.rundir import heartbeat, machine, metrics, trackers
from kubetune.rundir.checkpoints import State
from kubetune.rundir.totals import read_totals, runaway, runaway_line
from kubetune.training.start.rank_start import RankStart


def peak_memory_bytes(device: torch.device) -> int:
    """Return the highest memory so far: allocated on the GPU, or resident in RAM."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    # It never falls, so it covers what happened between two steps too.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak
    return peak * 1024  # Linux counts in KiB


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
        self._best_by = training.metric_for_best_model
        self._plan = plan
        self._run_dir = run_dir
        self._world = world
        self._numbers: metrics.MetricsLog | None = None
        self._tracker: trackers.Tracker | None = None
        self._bar: Progress | None = None
        # (loss, labels) of the steps of the epoch that is under way, and the measures that tell how it goes.
        self._epoch_losses: list[tuple[float, int]] = []
        self._epoch_measures: dict[str, list[float]] = {}
        # The last evaluation of that epoch: its step, and its main metrics in words.
        self._epoch_evaluation = (0, "")
        # The line of an epoch that is done, and waits for the evaluation of its last step.
        self._epoch_line = ""
        self._epoch_step = 0
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
        if self._numbers is None:
            return
        values = self._values(state, work, measured, norm)
        timing = self._timing(work, seconds, ranks)
        speed = timing["tokens_per_second"]
        self.last_step = state.step

        # To the files, of which one is the same in a resumed run, and one is of this machine.
        self._numbers.write(state.step, values)
        self._numbers.write_timing(state.step, timing)

        loss = measured["loss"]
        rate = values["learning_rate"]
        # To the screen, a tracker, and from time to time the log.
        if self._bar is not None:
            self._bar.update(
                state.step,
                loss=loss,
                measures={name: values[name] for name in TELLING if name in values},
                learning_rate=rate,
                tokens_per_second=speed,
            )

        if self._tracker is not None:
            self._tracker.log(state.step, {**values, "tokens_per_second": speed})
        if state.step % self._logging_steps == 0 or state.step == self._plan.num_steps:
            logs.TRAIN.info(
                "step %d/%d epoch %.2f loss %.4f%s lr %.3g grad_norm %.3f tokens/s %.0f",
                state.step, self._plan.num_steps, values["epoch"], loss, _besides_loss(measured), rate, norm, speed,
            )  # fmt: skip

        self._epoch_losses.append((loss, work.labels))
        self._note_measures(values)
        if state.step % self._plan.steps_per_epoch == 0:
            self._end_epoch(state)
            if not self._plan.eval_rows or not self._plan.is_eval_step(state.step):
                self._write_epoch()

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
        if "answers_seconds" in work.seconds:
            # The rest of a step that waited for its answers.
            timing["train_seconds"] = seconds - work.seconds["answers_seconds"]
        if 0 < work.computed < work.tokens:  # rows share prefixes
            timing["computed_tokens"] = work.computed
        return timing

    def _note_measures(self, values: Mapping[str, Any]) -> None:
        """Keep what tells how the epoch goes."""
        for name in TELLING:
            if metrics.is_number(values.get(name)):
                self._epoch_measures.setdefault(name, []).append(values[name])

    def _end_epoch(self, state: State) -> None:
        """Note the mean loss of an epoch, over its labels, and the means of what tells how it went, over its steps."""
        losses = []
        all_labels = 0
        for loss, labels in self._epoch_losses:
            # Steps differ in their labels, and each label counts once.
            losses.append(loss * labels)
            all_labels += labels

        mean = math.fsum(losses) / max(all_labels, 1)

        # A disk may have lost lines that earlier starts wrote.
        num_logged = len(self._epoch_losses)
        steps_per_epoch = self._plan.steps_per_epoch
        lost = ""
        if num_logged < steps_per_epoch:
            lost = f" of {num_logged} of its {steps_per_epoch} steps, as metrics.jsonl lacks the others"
        means = ""
        for name, values in self._epoch_measures.items():
            means += f", {name} {math.fsum(values) / len(values):.3g}"
        self._epoch_losses.clear()
        self._epoch_measures.clear()
        number = round(self.epoch(state.step))
        self._epoch_line = (
            f"epoch {number} done: mean loss {mean:.4f}{means}{lost}, step {state.step}"
        )
        self._epoch_step = state.step

    def _write_epoch(self) -> None:
        """Log the line of an epoch that is done, with what its last evaluation says of it, if it had any."""
        if not self._epoch_line:
            return
        step, evaluated = self._epoch_evaluation
        if evaluated:
            where = "" if step == self._epoch_step else f" at step {step}"
            evaluated = f"; {evaluated}{where}"
        logs.EPOCH.info("%s%s", self._epoch_line, evaluated)
        self._epoch_line = ""
        self._epoch_evaluation = (0, "")

    def _note_evaluation(self, step: int, values: Mapping[str, Any]) -> None:
        """Keep what an evaluation says of the epoch: the metric that its task is about, and F1 of classes."""
        texts = []
        # Accuracy says little where one class is rare.
        names = dict.fromkeys((main_metric(values, self._best_by) or "", "eval_f1_macro"))
        for name in names:
            if name in values:
                texts.append(f"{name} {values[name]:.4f}")
        if texts:
            self._epoch_evaluation = (step, ", ".join(texts))

    def remember(self, run_dir: Path, step: int) -> None:
        """Read the numbers of earlier starts in the epoch that is under way after `step` steps."""
        # Steps 7 and 8 of epochs of 3 steps are in the third epoch, which began after step 6.
        begun = step - step % self._plan.steps_per_epoch
        for line in metrics.stream_lines(run_dir / metrics.METRICS):
            if not begun < line["step"] <= step:
                continue
            self._note_evaluation(line["step"], line)
            if "loss" in line:
                self._epoch_losses.append((line["loss"], line["trained_tokens"]))
                self._note_measures(line)

    def evaluation(
        self,
        step: int,
        values: dict[str, float],
        best: bool,
        seconds: float,
    ) -> None:
        """Report an evaluation of the weights after `step` steps. `best`: it is the best so far."""
        if self._numbers is None:
            return
        metrics.record_event(
            self._run_dir,
            "evaluation",
            step=step,
            best=best,
            seconds=seconds,
            metrics=values,
        )
        self._numbers.write(step, {"epoch": self.epoch(step), **values})
        if self._tracker is not None:
            self._tracker.log(step, values)

        remark = " (best so far)" if best else ""
        whole, *parts = evaluation_lines(values)
        logs.EVAL.info("step %d %s%s", step, whole, remark)
        for part in parts:
            logs.EVAL.info("step %d %s", step, part)
        if step % self._plan.steps_per_epoch or self._epoch_line:
            # A resumed run may evaluate the last step of an epoch whose line an earlier start wrote.
            self._note_evaluation(step, values)
        self._write_epoch()

    def sync(self) -> None:
        """Make the numbers durable, before a checkpoint that must not be ahead of them."""
        if self._numbers is not None:
            self._numbers.sync()
            # Of an evaluation that was stopped.
            self._write_epoch()


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
    # Of dozens of measures, those that tell at a glance whether a run goes well.
    text = ""
    for name in (*TELLING, "completion_length", "expert_load_max"):
        # NaN is what this step does not measure.
        if name in measured and not math.isnan(measured[name]):
            text += f" {name} {measured[name]:.3g}"
    return text


@contextmanager
def open_run_log(start: RankStart, state: State) -> Iterator[RunLog]:
    """Yield the log of one start of a run, which continues from `state`."""
    config = start.config
    plan = start.plan
    run_dir = start.run_dir
    world = start.world
    # Other ranks get one too, so that the loop need not ask which rank it is on.
    run_log = RunLog(
        config.training,
        plan,
        run_dir,
        world,
        state,
    )
    if not world.is_main:
        yield run_log
        return
    with ExitStack() as alone, ExitStack() as stack:
        run_log._numbers = stack.enter_context(
            metrics.MetricsLog(run_dir, state.step, state.evaluated_step)
        )
        run_log.remember(run_dir, state.step)

        # Each is closed at the end, in the opposite order, also after an error.
        tracker = trackers.open_tracker(
            config,
            run_dir,
            state.step,
            write_page=partial(_write_page, run_dir),
        )
        run_log._tracker = stack.enter_context(tracker)
        stack.enter_context(machine.recorded(run_dir, lambda: run_log.last_step, tracker.note_load))
        run_log._bar = stack.enter_context(
            Progress(plan.num_steps, state.step, is_wanted(world.rank))
        )
        # Closed first: what trackers have still to send needs no other rank.
        stack.callback(alone.enter_context, heartbeat.busy_alone())
        yield run_log

        # Only after a run that came to its end.
        losses = runaway(read_totals(run_dir))
        if losses is not None:
            run_log._tracker.tell("loss_runaway", runaway_line(losses))


def _write_page(run_dir: Path, file: Path) -> None:
    from kubetune.reporting import write_report  # at the end, not before the first step

    write_report([run_dir], file)


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
