"""One run in MLflow: settings, numbers, data set, tags, files, the machine's load and, if the config says so, the model.

MLflow's pages look for certain names, so these are used: `mlflow.*` tags, `system/*` metrics, data set inputs.
tracker_queue.py decides when something is sent.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kubetune.base.logs import family_logger, scrub
from kubetune.config.naming import RESOLVED
from kubetune.config.schema.tracking import MlflowConfig
from kubetune.rundir import metrics, shapes
from kubetune.rundir.tracking.mlflow_run import CLAIM, MlflowRun
from kubetune.rundir.tracking.tracker_queue import (
    SECONDS_FOR_FILES,
    SECONDS_TO_SEND_THE_REST,
    Numbers,
    Sink,
    TrackedRun,
    reason_of,
)

_log = family_logger("TRACKING")
# Limits of MLflow's API: entries of a call, characters of a data set's digest.
_NUMBERS_PER_CALL = 1000
_LONGEST_DIGEST = 36
_FILES: Final = (metrics.CONFIG, RESOLVED, metrics.PLAN, metrics.REPORT, metrics.DATA)


WritePage = Callable[[Path], object]


class MlflowSink(Sink):
    """One MLflow run, a new one or that of an earlier start."""

    def __init__(
        self, settings: MlflowConfig, run: TrackedRun, write_page: WritePage | None
    ) -> None:
        """Prepare the client. `write_page` writes the report of the run to a file, which is sent at the end."""
        # Importing MLflow reads these: no telemetry, and seconds of retries instead of minutes or (Retry-After) hours.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER", "false")

        from mlflow import MlflowClient

        # Both write a line for each table that they make in a new SQLite file.
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)

        # The variable wins over the config, as with MLflow's own commands.
        address = os.environ.get("MLFLOW_TRACKING_URI") or settings.uri
        uri, artifacts = find_store(address)
        self._settings = settings
        self._run = run
        self._run_dir = run.run_dir
        self._write_page = write_page
        self._uri = uri
        self._artifacts = artifacts
        self._client = MlflowClient(tracking_uri=uri)
        self._run_id = ""

    def begin(self) -> None:
        """Begin a run, or continue that of an earlier start."""
        run = MlflowRun(self._client, self._uri, self._settings, self._run)
        self._run_id = run.open(self._artifacts)

        # A store of files has no page of its own. A server's address is enough.
        advice = ""
        if self._artifacts is not None:
            advice = f"; open it with: mlflow ui --backend-store-uri {self._uri}"
        _log.info("MLflow run %s at %s%s", self._run_id, self._uri, advice)

    def send(self, numbers: Sequence[Numbers]) -> None:
        """Send numbers, at most a thousand in a call."""
        values: list[Any] = []
        for of_step in numbers:
            values += _metrics(of_step)

        for first in range(0, len(values), _NUMBERS_PER_CALL):
            batch = values[first : first + _NUMBERS_PER_CALL]
            self._client.log_batch(self._run_id, metrics=batch)

    def tell(self, name: str, text: str) -> None:
        """Set a tag of the run."""
        self._client.set_tag(self._run_id, f"kubetune.{name}", text)

    def load_of(self, load: Mapping[str, Any]) -> Mapping[str, float]:
        """Return the machine's load for MLflow's page of system metrics."""
        return machine_load(load)

    def closing(self, status: str) -> Iterator[tuple[float, Callable[[], object]]]:
        """Yield what is left to send: the run's files, the model, and its end."""
        # A stopped run (KILLED) has no time for files, and the next start sends them.
        if status != "KILLED":
            yield SECONDS_FOR_FILES, _tolerant("data set", self._send_data_set)
            yield SECONDS_FOR_FILES, _tolerant("files", self._send_files)

        # A run that failed has no result to register.
        if status == "FINISHED" and self._settings.log_model:
            yield SECONDS_FOR_FILES, _tolerant("model", self._send_model)

        # The end comes last: MLflow shows the run's time up to it.
        yield SECONDS_TO_SEND_THE_REST, lambda: self._client.set_terminated(self._run_id, status)

    def _send_files(self) -> None:
        # Copies are sent, since secrets are taken out of their text. MLflow sends a folder in one call.
        with tempfile.TemporaryDirectory() as folder:
            for name in _FILES:
                file = self._run_dir / name
                if file.is_file():
                    text = scrub(file.read_text("utf-8"))
                    (Path(folder) / name).write_text(text, "utf-8")
            if self._write_page is not None:
                self._write_page(Path(folder) / "report.html")
            self._client.log_artifacts(self._run_id, folder)

    def _send_data_set(self) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        data = self._run_dir / metrics.DATA
        if not data.is_file():
            return

        facts = shapes.read(data)
        inputs = []
        for split, stats in (facts.get("splits") or {}).items():
            sources = [scrub(str(source["path"])) for source in stats.get("sources", ())]
            # One source has a name and an address, several have a number and a list.
            name = f"{len(sources)} sources"
            address: str | list[str] = sources
            if len(sources) == 1:
                name = Path(sources[0]).name
                address = sources[0]

            # What MLflow's page shows of a data set.
            counts = {}
            for key in ("records", "rows", "tokens", "trained_tokens"):
                if key in stats:
                    counts[key] = stats[key]

            dataset = Dataset(
                name=name,
                digest=str(facts.get("fingerprint", ""))[:_LONGEST_DIGEST],
                source_type="local",
                source=json.dumps({"uri": address}),
                profile=json.dumps(counts),
            )
            # MLflow calls the split of a data set its context.
            context = InputTag("mlflow.data.context", split)
            inputs.append(DatasetInput(dataset, [context]))
        self._client.log_inputs(self._run_id, datasets=inputs)

    def _send_model(self) -> None:
        """Send the best checkpoint as it is, a PEFT adapter or whole weights, and register it if the config says so."""
        folder = str(self._run_dir / "checkpoints" / "best")
        self._client.log_artifacts(self._run_id, folder, "model")
        name = self._settings.registered_model_name
        if name is None:
            return

        from mlflow.exceptions import MlflowException

        try:
            self._client.create_registered_model(name)
        except MlflowException as error:
            # An earlier run has registered the name. This one becomes the next version of it.
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

        # A start that was killed may have registered it already.
        versions = self._client.search_model_versions(f"run_id = '{self._run_id}'")
        if any(version.name == name for version in versions):
            return
        source = f"{self._client.get_run(self._run_id).info.artifact_uri}/model"
        claim = uuid.uuid4().hex
        model = self._client.create_model_version(name, source, self._run_id, tags={CLAIM: claim})
        # MLflow repeats a request whose answer is late. Each may have made a version.
        for made in self._client.search_model_versions(f"run_id = '{self._run_id}'"):
            if made.tags.get(CLAIM) == claim and made.version != model.version:
                self._client.delete_model_version(name, made.version)
        _log.info("MLflow has the model as %s, version %s", name, model.version)


def _tolerant(what: str, send: Callable[[], None]) -> Callable[[], None]:
    """Return `send`, changed to warn if it fails: a run must not end as failed because MLflow refuses a file."""

    def send_or_warn() -> None:
        try:
            send()
        except Exception as error:  # each store has its own errors
            _log.warning("MLflow did not take the %s; it goes without: %s", what, reason_of(error))

    return send_or_warn


def _metrics(numbers: Numbers) -> list[Any]:
    from mlflow.entities import Metric

    milliseconds = int(numbers.moment * 1000)
    entities = []
    for name, value in numbers.values.items():
        entities.append(Metric(name, value, milliseconds, numbers.step))
    return entities


def machine_load(load: Mapping[str, Any]) -> dict[str, float]:
    """Return how busy the machine is, under the names that MLflow's page of system metrics knows."""
    names = {
        "cpu_percent": "cpu_utilization_percentage",
        "memory_percent": "system_memory_usage_percentage",
    }
    values = {}
    for key, name in names.items():
        values[f"system/{name}"] = load[key]
    values["system/system_memory_usage_megabytes"] = load["memory_bytes"] / 1e6
    if "disk_free_bytes" in load:
        values["system/disk_available_megabytes"] = load["disk_free_bytes"] / 1e6

    # A GPU shows what its driver lets it: a MIG slice has no load, and some have no power.
    for gpu in load["gpus"]:
        name = f"system/gpu_{gpu['index']}"
        if "percent" in gpu:
            values[f"{name}_utilization_percentage"] = gpu["percent"]
        if "memory_bytes" in gpu:
            values[f"{name}_memory_usage_megabytes"] = gpu["memory_bytes"] / 1e6
        if "watts" in gpu:
            values[f"{name}_power_usage_watts"] = gpu["watts"]
    return values


def find_store(uri: str) -> tuple[str, str | None]:
    """Return MLflow's address for a `tracking.mlflow.uri`, and where artifacts go if MLflow's default does not fit.

    A folder means a SQLite file in it. MLflow no longer develops its store of plain files, which is used only if the
    folder holds one already.
    """
    # Servers and databases are taken as they are.
    if "://" in uri.removeprefix("file://") or uri.startswith("databricks"):
        return uri, None

    folder = Path(uri.removeprefix("file://")).absolute()
    if any(folder.glob("*/meta.yaml")):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        return folder.as_uri(), None

    # Left to itself, MLflow would put artifacts into the working directory.
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()
