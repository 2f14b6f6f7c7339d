"""Copies the numbers of a run to TensorBoard and MLflow. metrics.jsonl stays the original.

A tracker never stops training: what fails is warned of once and then left alone. A run that goes on after a stop goes
on in the same MLflow run, whose id is kept in `tracking.json`.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from kubetune import errors
from kubetune.config.load import dotted_values, resolved
from kubetune.config.outlets import MlflowConfig, TrackingConfig
from kubetune.config.schema import Config
from kubetune.files import read_object, write_atomic
from kubetune.logs import family_logger, scrub

IDENTITY = "tracking.json"

_log = family_logger("TRACKING")
_SECONDS_BETWEEN_SENDS = 5.0
_SECONDS_TO_SEND_THE_REST = 10.0
_LONGEST_PARAM = 500
_PARAMS_PER_CALL = 100


class _Sink(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self, status: str) -> None: ...


class Tracker:
    """All trackers of one start of a run; a context manager, which tells them how the run ended."""

    def __init__(self, sinks: Mapping[str, Callable[[], _Sink]]) -> None:
        self._sinks: dict[str, _Sink] = {}
        for name, open_sink in sinks.items():
            try:
                self._sinks[name] = open_sink()
            except Exception as error:
                self._give_up(name, error)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record the numbers among `values` for `step` completed steps."""
        numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
        for name, sink in list(self._sinks.items()):
            try:
                sink.log(step, numbers)
            except Exception as error:
                self._give_up(name, error)

    def close(self, status: str) -> None:
        """End with `FINISHED`, `FAILED`, or `KILLED` for a run that is to go on later."""
        for name, sink in list(self._sinks.items()):
            try:
                sink.close(status)
            except Exception as error:
                self._give_up(name, error)
        self._sinks.clear()

    def _give_up(self, name: str, error: Exception) -> None:
        self._sinks.pop(name, None)
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        _log.warning("%s does not work and gets no more numbers; training goes on: %s", name, reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close("FINISHED")
        else:
            self.close("KILLED" if issubclass(kind, errors.Preempted) else "FAILED")


def check_installed(tracking: TrackingConfig) -> None:
    """Raise ConfigError when a tracker that the config asks for is not installed. Imports none of them."""
    wanted = {"tensorboard": tracking.tensorboard, "mlflow": tracking.mlflow is not None}
    missing = [name for name, is_wanted in wanted.items() if is_wanted and find_spec(name) is None]
    if missing:
        raise errors.ConfigError(
            [f"tracking.{name}: {name} is not installed; `pip install 'kubetune[tracking]'`" for name in missing]
        )


def open_tracker(config: Config, run_dir: Path, resume_step: int = 0) -> Tracker:
    """The trackers that `config.tracking` asks for, going on after `resume_step`. Raises as `check_installed` does."""
    check_installed(config.tracking)
    sinks: dict[str, Callable[[], _Sink]] = {}
    if config.tracking.tensorboard:
        sinks["TensorBoard"] = lambda: _TensorBoard(run_dir / "tensorboard", resume_step)
    if (mlflow := config.tracking.mlflow) is not None:
        sinks["MLflow"] = lambda: _Mlflow(mlflow, config, run_dir)
    return Tracker(sinks)


class _TensorBoard:
    """Event files in `RUN_DIR/tensorboard`: `tensorboard --logdir RUN_DIR`."""

    def __init__(self, folder: Path, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What an earlier start wrote beyond the checkpoint is hidden, or the curves would run back and forth.
        purge = resume_step + 1 if resume_step else None
        self._writer = SummaryWriter(str(folder), purge_step=purge, flush_secs=10)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            group = "eval" if name.startswith("eval_") else "train"
            self._writer.add_scalar(f"{group}/{name}", value, step)

    def close(self, status: str) -> None:
        self._writer.close()


class _Mlflow:
    """One MLflow run. A thread sends the numbers, some seconds' worth at a time, so that no step waits for a server."""

    def __init__(self, settings: MlflowConfig, config: Config, run_dir: Path) -> None:
        # Before the import, which reads them: no report to MLflow's makers, and no minutes of retries.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        from mlflow import MlflowClient

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        uri, artifacts = find_store(os.environ.get("MLFLOW_TRACKING_URI") or settings.uri)
        self._client = MlflowClient(tracking_uri=uri)
        self._run_id = self._go_on(run_dir, uri) or self._begin(settings, artifacts, config, run_dir, uri)
        self._waiting: list[Any] = []
        self._last_send = time.monotonic()
        self._sender = ThreadPoolExecutor(1, "mlflow")
        self._sending: Future[Any] | None = None
        _log.info("MLflow run %s at %s", self._run_id, uri)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        moment = int(time.time() * 1000)
        self._waiting += [Metric(name, value, moment, step) for name, value in values.items()]
        if time.monotonic() - self._last_send >= _SECONDS_BETWEEN_SENDS:
            self._send()

    def close(self, status: str) -> None:
        try:
            self._send(wait=True)
            end = self._sender.submit(self._client.set_terminated, self._run_id, status)
            end.result(_SECONDS_TO_SEND_THE_REST)
        finally:
            self._sender.shutdown(wait=False, cancel_futures=True)

    def _send(self, *, wait: bool = False) -> None:
        if self._sending is not None and (wait or self._sending.done()):
            self._sending.result(_SECONDS_TO_SEND_THE_REST)
            self._sending = None
        if self._sending is None and self._waiting:
            numbers, self._waiting = self._waiting, []
            self._sending = self._sender.submit(self._client.log_batch, self._run_id, metrics=numbers)
            self._last_send = time.monotonic()
        if wait and self._sending is not None:
            self._sending.result(_SECONDS_TO_SEND_THE_REST)

    def _go_on(self, run_dir: Path, uri: str) -> str | None:
        """The MLflow run of an earlier start, set to running again; None when there is none to go on with."""
        path = run_dir / IDENTITY
        try:
            known = read_object(path)
        except FileNotFoundError:
            return None
        except errors.EnvironmentFault as error:
            _log.warning("%s; a new run begins in MLflow", error)
            return None
        if known.get("uri") != uri or not isinstance(known.get("run_id"), str):
            return None
        run_id: str = known["run_id"]
        self._client.update_run(run_id, status="RUNNING")
        return run_id

    def _begin(self, settings: MlflowConfig, artifacts: str | None, config: Config, run_dir: Path, uri: str) -> str:
        from mlflow.entities import Param

        experiment = self._client.get_experiment_by_name(settings.experiment)
        experiment_id = (
            experiment.experiment_id
            if experiment is not None
            else self._client.create_experiment(settings.experiment, artifact_location=artifacts)
        )
        run_id = self._client.create_run(experiment_id, run_name=config.name or run_dir.name).info.run_id
        params = [
            Param(key, scrub(value if isinstance(value, str) else json.dumps(value))[:_LONGEST_PARAM])
            for key, value in dotted_values(resolved(config))
            if value is not None
        ]
        for first in range(0, len(params), _PARAMS_PER_CALL):
            self._client.log_batch(run_id, params=params[first : first + _PARAMS_PER_CALL])
        write_atomic(run_dir / IDENTITY, json.dumps({"uri": uri, "run_id": run_id}) + "\n")
        return str(run_id)


def find_store(uri: str) -> tuple[str, str | None]:
    """MLflow's address for a `tracking.mlflow.uri`, and where artifacts go if MLflow's own choice does not fit.

    A folder means a SQLite file in it: MLflow no longer develops its plain-file store, which is used only where a
    folder holds one already.
    """
    if "://" in uri.removeprefix("file://") or uri.startswith("databricks"):
        return uri, None
    folder = Path(uri.removeprefix("file://")).absolute()
    if any(folder.glob("*/meta.yaml")):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        return folder.as_uri(), None
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()
