"""The run in MLflow that a run directory belongs to: a new one, or that of an earlier start."""

from __future__ import annotations

import json
import platform
import re
import uuid
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from kubetune import errors
from kubetune.base.files import write_atomic
from kubetune.base.logs import family_logger, scrub
from kubetune.config.resolved import dotted_values
from kubetune.config.schema.tracking import MlflowConfig
from kubetune.rundir import metrics, shapes
from kubetune.rundir.machine import git_commit
from kubetune.rundir.tracking.tracker_queue import TrackedRun

_log = family_logger("TRACKING")
# Limits of MLflow's API: characters of a setting, entries of a call.
_LONGEST_PARAM = 500
_PARAMS_PER_CALL = 100
# The tag by which a start finds the run that an earlier one made, and was killed before it knew the id.
CLAIM: Final = "kubetune.claim"
_CLAIM_FORM: Final = re.compile("[0-9a-f]{32}")
_LIBRARIES: Final = ("torch", "transformers", "peft", "kubetune")


class MlflowRun:
    """Finds or makes the run. tracking.json in the run directory knows its id."""

    def __init__(self, client: Any, uri: str, settings: MlflowConfig, run: TrackedRun) -> None:
        self._client = client
        self._uri = uri
        self._settings = settings
        self._run = run

    def open(self, artifacts: str | None) -> str:
        """Begin a run, or continue that of an earlier start, and return its id. `artifacts`: where files of it go."""
        return self._continue() or self._begin(artifacts)

    def _continue(self) -> str | None:
        """Set the MLflow run of an earlier start to running, and return its id. None if there is none to continue."""
        known = self._noted()
        # With another server in the config, or a damaged file, a new run begins.
        if known.get("uri") != self._uri or not isinstance(known.get("run_id"), str):
            return None
        run_id: str = known["run_id"]
        self._client.update_run(run_id, status="RUNNING")
        return run_id

    def _begin(self, artifacts: str | None) -> str:
        """Make a run with settings and tags, note it in tracking.json, and return its id."""
        from mlflow.entities import Param, RunTag

        # Runs of one experiment are compared with each other. It is made with the first of them.
        name = self._settings.experiment
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            experiment_id = experiment.experiment_id
        else:
            experiment_id = self._client.create_experiment(name, artifact_location=artifacts)
        run_id = self._claimed(experiment_id)

        # MLflow limits the length of a setting and the number of them in a call.
        params = []
        for key, value in dotted_values(self._run.settings):
            if value is not None:
                text = value
                if not isinstance(value, str):
                    text = json.dumps(value)
                params.append(Param(key, scrub(text)[:_LONGEST_PARAM]))
        for first in range(0, len(params), _PARAMS_PER_CALL):
            batch = params[first : first + _PARAMS_PER_CALL]
            self._client.log_batch(run_id, params=batch)

        # The user's tags win over ours.
        texts = {**dict(_tags(self._run)), **self._settings.tags}
        tags = [RunTag(key, scrub(text)) for key, text in texts.items()]
        self._client.log_batch(run_id, tags=tags)

        # The next start finds the run by its id.
        self._note({"uri": self._uri, "run_id": run_id})
        return run_id

    def _claimed(self, experiment_id: str) -> str:
        """Return the id of a run with a tag that was noted here before: of a new one, or of a start killed meanwhile."""
        known = self._noted()
        claim = known.get("claim")
        if (
            known.get("uri") == self._uri
            and isinstance(claim, str)
            and _CLAIM_FORM.fullmatch(claim)
        ):
            run_id = self._first_claimed(experiment_id, claim)
            if run_id is not None:
                return run_id
        claim = uuid.uuid4().hex
        self._note({"uri": self._uri, "claim": claim})
        tags = {CLAIM: claim}
        created = self._client.create_run(experiment_id, run_name=self._run.name, tags=tags)
        return self._first_claimed(experiment_id, claim) or str(created.info.run_id)

    def _first_claimed(self, experiment_id: str, claim: str) -> str | None:
        """Return the id of the first run with a claim, and delete the others. None without any.

        MLflow repeats a request whose answer is late, and each may have made a run.
        """
        wanted = f"tags.`{CLAIM}` = '{claim}'"
        order = ["attributes.start_time ASC"]
        ids = [
            str(run.info.run_id)
            for run in self._client.search_runs([experiment_id], wanted, order_by=order)
        ]
        for run_id in ids[1:]:
            self._client.delete_run(run_id)
        return next(iter(ids), None)

    def _note(self, known: dict[str, str]) -> None:
        text = json.dumps(known) + "\n"
        write_atomic(self._run.run_dir / metrics.TRACKING, text, within=self._run.run_dir)

    def _noted(self) -> dict[str, Any]:
        """Return what tracking.json holds. Empty if it is missing or damaged."""
        try:
            return shapes.read(self._run.run_dir / metrics.TRACKING)
        except FileNotFoundError:
            pass
        except errors.EnvironmentFault as error:
            _log.warning("%s; a new run begins in MLflow", error)
        return {}


def _tags(run: TrackedRun) -> Iterator[tuple[str, str]]:
    """Yield tags that tell runs apart beside their settings, under MLflow's own names where it has them."""
    yield "mlflow.source.name", "kubetune train"
    yield "mlflow.source.type", "LOCAL"

    commit = git_commit()
    if commit:
        yield "mlflow.source.git.commit", commit

    yield "kubetune.run_dir", str(run.run_dir.absolute())
    yield "kubetune.host", platform.node()
    yield "kubetune.task", run.task
    yield "kubetune.method", run.method
    yield "kubetune.model", run.model

    # A loss that differs between two runs of one config is often a library's.
    for name in _LIBRARIES:
        try:
            yield f"kubetune.version.{name}", version(name)
        except PackageNotFoundError:
            continue
