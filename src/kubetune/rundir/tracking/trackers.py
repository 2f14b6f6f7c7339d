"""Copies the numbers of a run to TensorBoard, MLflow, Weights & Biases and Trackio. metrics.jsonl stays the original.

A tracker never stops training, and training never waits for one: tracker_queue.py. One that fails is warned of once
and gets no more numbers; at the end a line says how many it lacks. A run that continues after a stop continues the
same run in each tracker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from kubetune import errors, extras
from kubetune.base.humanize import counted
from kubetune.base.logs import family_logger, scrub
from kubetune.config.naming import method_label
from kubetune.config.resolved import as_yaml, resolved
from kubetune.config.schema import Config
from kubetune.config.schema.tracking import MODULES, TrackingConfig
from kubetune.rundir.tracking import wandb_tracker
from kubetune.rundir.tracking.mlflow_tracker import MlflowSink, WritePage
from kubetune.rundir.tracking.tensorboard_tracker import TensorBoardSink
from kubetune.rundir.tracking.tracker_queue import (
    Lack,
    Sink,
    TrackedRun,
    TrackerQueue,
    reason_of,
)
from kubetune.rundir.tracking.trackio_tracker import TrackioSink

_log = family_logger("TRACKING")
_NO_CURVES = ("epoch", "samples")  # numbers that follow from the step


class Tracker:
    """All trackers of one start of a run; a context manager, which tells them how the run ended."""

    def __init__(self, sinks: Mapping[str, Callable[[], Sink]]) -> None:
        self._sinks: dict[str, TrackerQueue] = {}
        self._lacking: dict[str, Lack] = {}
        for name, open_sink in sinks.items():
            try:
                self._sinks[name] = TrackerQueue(name, open_sink())
            except Exception as error:
                self._give_up(name, error)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record the numbers among `values` for `step` completed steps."""
        # metrics.jsonl holds texts and lists too, of which there are no curves.
        numbers = {}
        for name, value in values.items():
            if isinstance(value, int | float) and name not in _NO_CURVES:
                numbers[name] = float(value)

        # A tracker that was given up lacks these numbers too.
        for lack in self._lacking.values():
            lack.add(step, len(numbers))

        # A copy of the list, since one that fails is taken out.
        for name, sink in list(self._sinks.items()):
            try:
                sink.log(step, numbers)
            except Exception as error:
                self._give_up(name, error, step)

    def note_load(self, load: Mapping[str, Any]) -> None:
        """Pass on how busy the machine is, from the thread that looks at it."""
        for sink in list(self._sinks.values()):
            sink.note_load(load)

    def tell(self, name: str, text: str) -> None:
        """Attach a text to the run in each tracker: a tag in MLflow, a text in TensorBoard."""
        for sink in list(self._sinks.values()):
            sink.tell(name, scrub(text))

    def close(self, status: str) -> None:
        """End with `FINISHED`, `FAILED`, or `KILLED` for a run that is to go on later."""
        for name, sink in list(self._sinks.items()):
            try:
                # Ends the tracker, or raises TimeoutError if it does not answer.
                sink.close(status)
                if sink.dropped.numbers:
                    self._lacking[name] = sink.dropped
            except Exception as error:
                self._give_up(name, error)
        self._sinks.clear()

        # Each tracker that lacks numbers is named once, at the end, when it is known how many.
        for name, lack in self._lacking.items():
            if not lack.numbers:
                continue

            steps = ""
            if lack.first is not None:
                steps = f", among them of steps {lack.first} to {lack.last}"
            _log.warning(
                "%s lacks %s%s; metrics.jsonl has them",
                name,
                counted(lack.numbers, "number"),
                steps,
            )
        self._lacking.clear()

    def _give_up(self, name: str, error: Exception, step: int | None = None) -> None:
        """Drop a tracker that failed, and count what it lacks from now on."""
        # One that could not even be opened has no sink. What was still waiting for another one is lost with it.
        lack = Lack()
        sink = self._sinks.pop(name, None)
        if sink is not None:
            lack = sink.dropped
            lack.numbers += sink.abandon()
        self._lacking[name] = replace(lack, first=lack.first or step, last=step or lack.last)
        _log.warning(
            "%s does not work and gets no more numbers; training goes on: %s",
            name,
            reason_of(error),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # The reason of a failure belongs to the run. A preempted run goes on later, so it has not failed.
        if isinstance(error, errors.KubetuneError) and not isinstance(error, errors.Preempted):
            self.tell("ended", str(error))

        status = "FINISHED"
        if error is not None:
            status = "FAILED"
        if isinstance(error, errors.Preempted):
            status = "KILLED"
        self.close(status)


def check_installed(tracking: TrackingConfig) -> None:
    """Raise ConfigError if a tracker that the config names is not installed, or has no key. Import none."""
    problems = []
    for name, module in MODULES.items():
        if getattr(tracking, name) and not extras.is_installed(module):
            problems.append(extras.sentence(f"tracking.{name}", module))

    # Without a key W&B would ask for one on the terminal, and wait.
    if tracking.wandb is not None:
        problem = wandb_tracker.lacks_key(tracking.wandb)
        if problem:
            problems.append(f"tracking.wandb: {problem}")
    if problems:
        raise errors.ConfigError(problems)


def open_tracker(
    config: Config, run_dir: Path, resume_step: int = 0, *, write_page: WritePage | None = None
) -> Tracker:
    """Return the trackers that `config.tracking` asks for, going on after `resume_step`. Raise as `check_installed` does.

    `write_page` writes the run's report to a file, for trackers that keep files.
    """
    tracking = config.tracking
    check_installed(tracking)
    run = TrackedRun(
        name=config.name or run_dir.name,
        run_dir=run_dir,
        task=config.task,
        method=method_label(config.lora),
        model=config.model.path,
        settings=resolved(config),
    )
    # Opened by Tracker, so that one that cannot be opened costs no run.
    sinks: dict[str, Callable[[], Sink]] = {}
    if tracking.tensorboard:
        sinks["TensorBoard"] = partial(TensorBoardSink, run, as_yaml(config), resume_step)
    if tracking.mlflow is not None:
        sinks["MLflow"] = partial(MlflowSink, tracking.mlflow, run, write_page)
    if tracking.wandb is not None:
        sinks["W&B"] = partial(wandb_tracker.WandbSink, tracking.wandb, run)
    if tracking.trackio is not None:
        sinks["Trackio"] = partial(TrackioSink, tracking.trackio, run)
    return Tracker(sinks)
