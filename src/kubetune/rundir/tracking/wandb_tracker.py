"""One run in Weights & Biases, online or in files: settings, numbers, tags and, if the config says so, the model.

wandb observes the machine by itself. By default it would also send code, git state, command line and installed packages;
that is switched off.
"""

from __future__ import annotations

import hashlib
import netrc
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kubetune.base.logs import family_logger, scrub
from kubetune.config.schema.tracking import WandbConfig
from kubetune.rundir.tracking.tracker_queue import (
    SECONDS_FOR_FILES,
    SECONDS_TO_SEND_THE_REST,
    Numbers,
    Sink,
    TrackedRun,
    curve,
)

_log = family_logger("TRACKING")


def lacks_key(settings: WandbConfig) -> str | None:
    """Return why wandb would ask for a key, a question that nobody can answer in a run. None if it has one."""
    if _mode(settings) != "online":
        return None
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return None
    # `wandb login` writes to netrc. Any entry will do: which host is wandb's depends on its version.
    place = os.environ.get("NETRC")
    file = None
    if place:
        file = os.path.expanduser(place)
    try:
        if netrc.netrc(file).hosts:
            return None
    except (OSError, netrc.NetrcParseError):
        pass
    return "there is no WANDB_API_KEY, nor a `wandb login` before; set it, or mode: offline"


def _mode(settings: WandbConfig) -> Any:
    return os.environ.get("WANDB_MODE") or settings.mode


class WandbSink(Sink):
    """A run whose id follows from its directory, so that every start continues the same one."""

    def __init__(self, settings: WandbConfig, run: TrackedRun) -> None:
        # Its process would send reports of its own errors, also from a run that only writes files.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._wandb = wandb
        self._settings = settings
        self._tracked = run
        self._run_dir = run.run_dir
        self._run: Any = None

    def begin(self) -> None:
        """Begin the run, or continue it."""
        section = self._settings
        quiet = self._wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            x_disable_meta=True,
            x_save_requirements=False,
            init_timeout=60,
        )
        self._run = self._wandb.init(
            project=section.project,
            entity=section.entity,
            group=section.group,
            tags=[self._tracked.task, self._tracked.method, *section.tags],
            id=run_id(self._run_dir),
            resume="allow",
            name=self._tracked.name,
            dir=str(self._run_dir),
            mode=_mode(section),
            config=_scrubbed(self._tracked.settings),
            settings=quiet,
        )

        self._run.define_metric("step", hidden=True)
        # wandb's own counter would drop the steps that a resumed run repeats.
        self._run.define_metric("*", step_metric="step")

        where = self._run.url
        if self._run.offline:
            # Each start has its own folder. The command sends all of them, in their order.
            folder = Path(self._run.dir).parent
            where = f"{folder}; send it with: wandb sync {folder.parent}/offline-run-*"
        _log.info("W&B run %s at %s", self._run.id, where)

    def send(self, numbers: Sequence[Numbers]) -> None:
        """Pass numbers to wandb's process."""
        for step, moment, values in numbers:
            curves = {curve(name): value for name, value in values.items()}
            self._run.log({"step": step, "_timestamp": moment, **curves})

    def tell(self, name: str, text: str) -> None:
        """Write a value into the run's summary."""
        self._run.summary[f"kubetune/{name}"] = text

    def closing(self, status: str) -> Iterator[tuple[float, Callable[[], object]]]:
        """Yield what is left to send: the model, and the run's end."""
        if status == "FINISHED" and self._settings.log_model:
            yield SECONDS_FOR_FILES, self._send_model
        seconds = SECONDS_FOR_FILES
        if status == "KILLED":
            seconds = SECONDS_TO_SEND_THE_REST
            yield seconds, self._run.mark_preempting

        exit_code = 1
        if status == "FINISHED":
            exit_code = 0
        yield seconds, lambda: self._run.finish(exit_code=exit_code)
        # wandb's process writes a moment longer, and would be killed with this one.
        yield SECONDS_TO_SEND_THE_REST, self._wandb.teardown

    def _send_model(self) -> None:
        artifact = self._wandb.Artifact(f"{self._run.name}-model", type="model")
        # `best` is a link to the folder of a step.
        best = (self._run_dir / "checkpoints" / "best").resolve()
        artifact.add_dir(str(best))
        self._run.log_artifact(artifact)


def run_id(run_dir: Path) -> str:
    """Return the id that the run of a directory has in W&B."""
    return hashlib.sha256(str(run_dir.absolute()).encode()).hexdigest()[:16]


def _scrubbed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _scrubbed(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_scrubbed(inner) for inner in value]
    if isinstance(value, str):
        return scrub(value)
    return value
