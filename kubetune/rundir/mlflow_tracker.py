"""One run in MLflow: settings, numbers, data set, tags, files, the machine's load and, where asked for, the model.

Everything is sent by one thread, some seconds' worth at a time, so that no step waits for a server, and no end of a run
for one that never answers. What MLflow's own
pages look for is given under the names they know: `mlflow.*` tags, `system/*` metrics, data set inputs.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from kubetune import errors
from kubetune.base.files import read_object, write_atomic
from kubetune.base.logs import family_logger, scrub
from kubetune.config.load import dotted_values, resolved
from kubetune.config.naming import RESOLVED, method_label
from kubetune.config.schema import Config
from kubetune.config.schema.tracking import MlflowConfig
from kubetune.rundir import metrics
from kubetune.rundir.machine import git_commit

_log = family_logger("TRACKING")
_SECONDS_TO_BEGIN = 60.0
_SECONDS_BETWEEN_SENDS = 5.0
_SECONDS_TO_SEND_THE_REST = 10.0
_SECONDS_FOR_FILES = 120.0
_LONGEST_PARAM = 500
_PARAMS_PER_CALL = 100
_NUMBERS_PER_CALL = 1000
_LONGEST_REASON = 300
_LONGEST_DIGEST = 36
_FILES: Final = (metrics.CONFIG, RESOLVED, metrics.PLAN, metrics.REPORT, metrics.DATA)
_LIBRARIES: Final = ("torch", "transformers", "peft", "kubetune")


WritePage = Callable[[Path], object]


def said_by(error: Exception) -> str:
    """Words of a store's library, in a line: some of them quote whole pages."""
    said = next(iter(str(error).splitlines()), "") or type(error).__name__
    return scrub(said if len(said) <= _LONGEST_REASON else said[:_LONGEST_REASON] + " …")


class _Sender:
    """A thread that does one thing after the other. Unlike an executor's, it keeps no process from ending."""

    def __init__(self) -> None:
        self._wanted: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="mlflow", daemon=True).start()

    def submit(self, do: Callable[[], Any]) -> Future[Any]:
        """Have it done when all before is."""
        future: Future[Any] = Future()
        self._wanted.put((future, do))
        return future

    def do(self, what: Callable[[], Any], seconds: float) -> Any:
        """Have it done and wait; returns what it does. Raises TimeoutError, in words, after `seconds`."""
        return wait_for(self.submit(what), seconds)

    def _work(self) -> None:
        while True:
            future, do = self._wanted.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(do())
                except BaseException as error:
                    future.set_exception(error)


def wait_for(future: Future[Any], seconds: float) -> Any:
    """The result of a future. Raises TimeoutError, in words, after `seconds`."""
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():
            raise
        raise TimeoutError(f"no answer within {seconds:g} s") from None


class MlflowSink:
    """One MLflow run, begun or gone on with. `close` ends it."""

    def __init__(self, settings: MlflowConfig, config: Config, run_dir: Path, write_page: WritePage | None) -> None:
        """`write_page`: writes the report of the run to a file, which is sent at the end."""
        # Before the import, which reads them: no report to MLflow's makers, and no minutes of retries.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER", "false")  # which may be hours
        from mlflow import MlflowClient

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        uri, artifacts = find_store(os.environ.get("MLFLOW_TRACKING_URI") or settings.uri)
        self._settings, self._config, self._run_dir, self._write_page = settings, config, run_dir, write_page
        self._client = MlflowClient(tracking_uri=uri)
        self._sender = _Sender()
        self._run_id = self._sender.do(lambda: self._go_on(uri) or self._begin(artifacts, uri), _SECONDS_TO_BEGIN)
        self._waiting: list[Any] = []
        self._last_send = time.monotonic()
        self._sending: Future[Any] | None = None
        self._in_flight: list[Any] = []
        self._sent_files = False
        self._step = 0
        shown = f"; open it with: mlflow ui --backend-store-uri {uri}" if artifacts is not None else ""
        _log.info("MLflow run %s at %s%s", self._run_id, uri, shown)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keep numbers to be sent; send what waits where it is time to."""
        self._step = step
        self._waiting += _numbers(step, values)
        if time.monotonic() - self._last_send >= _SECONDS_BETWEEN_SENDS:
            self._send()

    def tell(self, name: str, text: str) -> None:
        """A tag of the run."""

        def send() -> None:
            with _going_without("a word"):
                self._client.set_tag(self._run_id, f"kubetune.{name}", text)

        self._sender.submit(send)  # training does not wait for it

    def note_load(self, load: Mapping[str, Any]) -> None:
        """Keep the machine's load to be sent with the next numbers; in the thread that looks at the machine."""
        self._waiting.extend(_numbers(self._step, machine_load(load)))

    def close(self, status: str) -> None:
        """Send the rest, and the run's files. Raises TimeoutError where an answer takes too long."""
        self._send(wait=True)
        for what, send in (("data set", self._send_data_set), ("files", self._send_files)):
            self._in_time(what, send)
        if status == "FINISHED" and self._settings.log_model:
            self._in_time("model", self._send_model)
        self._sender.do(lambda: self._client.set_terminated(self._run_id, status), _SECONDS_TO_SEND_THE_REST)

    def abandon(self) -> int:
        """Stop; returns how many numbers were not sent, or not known to be."""
        return len(self._waiting) + len(self._in_flight)

    def _in_time(self, what: str, send: Callable[[], None]) -> None:
        """Send something beside the numbers. That it is not taken is no reason to end the run as failed."""

        def try_to() -> None:
            with _going_without(f"the {what}"):
                send()

        self._sender.do(try_to, _SECONDS_FOR_FILES)

    def _send(self, *, wait: bool = False) -> None:
        if self._sending is not None and (wait or self._sending.done()):
            wait_for(self._sending, _SECONDS_TO_SEND_THE_REST)
            self._sending, self._in_flight = None, []
        if self._sending is None and self._waiting:
            numbers, self._waiting = self._waiting, []
            self._in_flight = numbers
            self._sending = self._sender.submit(lambda: self._send_numbers(numbers))
            self._last_send = time.monotonic()
        if wait and self._sending is not None:
            wait_for(self._sending, _SECONDS_TO_SEND_THE_REST)
            self._in_flight = []

    def _send_numbers(self, numbers: list[Any]) -> None:
        for first in range(0, len(numbers), _NUMBERS_PER_CALL):
            self._client.log_batch(self._run_id, metrics=numbers[first : first + _NUMBERS_PER_CALL])

    def _send_files(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for name in _FILES:
                if (self._run_dir / name).is_file():
                    (Path(folder) / name).write_text(scrub((self._run_dir / name).read_text("utf-8")), "utf-8")
            if self._write_page is not None:
                self._write_page(Path(folder) / "report.html")
            self._client.log_artifacts(self._run_id, folder)

    def _send_data_set(self) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        data = self._run_dir / metrics.DATA
        if not data.is_file():
            return
        facts = read_object(data)
        inputs = []
        for split, stats in (facts.get("splits") or {}).items():
            sources = [scrub(str(source["path"])) for source in stats.get("sources", ())]
            profile = {key: stats[key] for key in ("records", "rows", "tokens", "trained_tokens") if key in stats}
            dataset = Dataset(
                name=Path(sources[0]).name if len(sources) == 1 else f"{len(sources)} sources",
                digest=str(facts["fingerprint"])[:_LONGEST_DIGEST],
                source_type="local",
                source=json.dumps({"uri": sources[0] if len(sources) == 1 else sources}),
                profile=json.dumps(profile),
            )
            inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", split)]))
        self._client.log_inputs(self._run_id, datasets=inputs)

    def _send_model(self) -> None:
        """The best checkpoint as it is: a PEFT adapter, or whole weights; registered where a name is given."""
        self._client.log_artifacts(self._run_id, str(self._run_dir / "checkpoints" / "best"), "model")
        if name := self._settings.registered_model_name:
            from mlflow.exceptions import MlflowException

            try:
                self._client.create_registered_model(name)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            source = f"{self._client.get_run(self._run_id).info.artifact_uri}/model"
            made = self._client.create_model_version(name, source, self._run_id)
            _log.info("MLflow has the model as %s, version %s", name, made.version)

    def _go_on(self, uri: str) -> str | None:
        """The MLflow run of an earlier start, set to running again; None when there is none to go on with."""
        path = self._run_dir / metrics.TRACKING
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

    def _begin(self, artifacts: str | None, uri: str) -> str:
        from mlflow.entities import Param, RunTag

        name = self._settings.experiment
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = (
            experiment.experiment_id
            if experiment is not None
            else self._client.create_experiment(name, artifact_location=artifacts)
        )
        run_name = self._config.name or self._run_dir.name
        run_id = self._client.create_run(experiment_id, run_name=run_name).info.run_id
        params = [
            Param(key, scrub(value if isinstance(value, str) else json.dumps(value))[:_LONGEST_PARAM])
            for key, value in dotted_values(resolved(self._config))
            if value is not None
        ]
        for first in range(0, len(params), _PARAMS_PER_CALL):
            self._client.log_batch(run_id, params=params[first : first + _PARAMS_PER_CALL])
        tags = {**dict(_tags(self._config, self._run_dir)), **self._settings.tags}
        self._client.log_batch(run_id, tags=[RunTag(key, scrub(value)) for key, value in tags.items()])
        write_atomic(
            self._run_dir / metrics.TRACKING, json.dumps({"uri": uri, "run_id": run_id}) + "\n", within=self._run_dir
        )
        return str(run_id)


@contextmanager
def _going_without(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a store's own errors, of many kinds
        _log.warning("MLflow did not take %s; it goes without: %s", what, said_by(error))


def _numbers(step: int, values: Mapping[str, float]) -> list[Any]:
    from mlflow.entities import Metric

    moment = int(time.time() * 1000)
    return [Metric(name, value, moment, step) for name, value in values.items()]


def _tags(config: Config, run_dir: Path) -> Iterator[tuple[str, str]]:
    """Tags that tell runs apart beside their settings, under MLflow's own names where it has them."""
    yield "mlflow.source.name", "kubetune train"
    yield "mlflow.source.type", "LOCAL"
    if commit := git_commit():
        yield "mlflow.source.git.commit", commit
    yield "kubetune.run_dir", str(run_dir.absolute())
    yield "kubetune.host", platform.node()
    yield "kubetune.task", config.task
    yield "kubetune.method", method_label(config)
    yield "kubetune.model", config.model.path
    for name in _LIBRARIES:
        try:
            yield f"kubetune.version.{name}", version(name)
        except PackageNotFoundError:
            continue


def machine_load(found: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of a look at the machine, under the names that MLflow's page of system metrics knows."""
    names = {"cpu_percent": "cpu_utilization_percentage", "memory_percent": "system_memory_usage_percentage"}
    said = {f"system/{name}": found[key] for key, name in names.items()}
    said["system/system_memory_usage_megabytes"] = found["memory_bytes"] / 1e6
    if "disk_free_bytes" in found:
        said["system/disk_available_megabytes"] = found["disk_free_bytes"] / 1e6
    for gpu in found["gpus"]:
        name = f"system/gpu_{gpu['index']}"
        if "percent" in gpu:
            said[f"{name}_utilization_percentage"] = gpu["percent"]
        if "memory_bytes" in gpu:
            said[f"{name}_memory_usage_megabytes"] = gpu["memory_bytes"] / 1e6
        if "watts" in gpu:
            said[f"{name}_power_usage_watts"] = gpu["watts"]
    return said


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
