"""One run in Weights & Biases, online or in files of its own: settings, numbers, tags and, where asked for, the model.

wandb itself looks at the machine. What it would take along of the surroundings (code, git, command line, installed
packages) is left out: nothing but what is said here is sent.
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
from kubetune.rundir.tracker_queue import (
    SECONDS_FOR_FILES,
    SECONDS_TO_SEND_THE_REST,
    Numbers,
    Sink,
    TrackedRun,
    curve,
)

_log = family_logger("TRACKING")


def lacks_key(settings: WandbConfig) -> str | None:
    """Reason for which wandb would ask for a key, which nobody can answer in a run; None where it will not."""
    if _mode(settings) != "online" or any(
        map(os.environ.get, ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"))
    ):
        return None
    place = os.environ.get("NETRC")
    try:
        if netrc.netrc(
            place and os.path.expanduser(place)
        ).hosts:  # which of them is wandb's, its version knows
            return None
    except (OSError, netrc.NetrcParseError):
        pass
    return "there is no WANDB_API_KEY, nor a `wandb login` before; set it, or mode: offline"


def _mode(settings: WandbConfig) -> Any:
    return os.environ.get("WANDB_MODE") or settings.mode


class WandbSink(Sink):
    """The run whose id follows from its directory, so that every start goes on with it."""

    def __init__(self, settings: WandbConfig, run: TrackedRun) -> None:
        import wandb

        self._wandb = wandb
        self._settings = settings
        self._tracked = run
        self._run_dir = run.run_dir
        self._run: Any = None

    def begin(self) -> None:
        """Begin the run, or go on with it."""
        wanted = self._settings
        quiet = self._wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, x_disable_meta=True,
            x_save_requirements=False, init_timeout=60,
        )  # fmt: skip
        self._run = self._wandb.init(
            project=wanted.project,
            entity=wanted.entity,
            group=wanted.group,
            tags=[self._tracked.task, self._tracked.method, *wanted.tags],
            id=run_id(self._run_dir),
            resume="allow",
            name=self._tracked.name,
            dir=str(self._run_dir),
            mode=_mode(wanted),
            config=_scrubbed(self._tracked.settings),
            settings=quiet,
        )
        self._run.define_metric("step", hidden=True)
        # wandb's own count drops what a resumed run repeats.
        self._run.define_metric("*", step_metric="step")
        folder = Path(self._run.dir).parent
        # Each start has a folder of its own, and they are sent in their order.
        sent = f"wandb sync {folder.parent}/offline-run-*"
        where = f"{folder}; send it with: {sent}" if self._run.offline else self._run.url
        _log.info("W&B run %s at %s", self._run.id, where)

    def send(self, numbers: Sequence[Numbers]) -> None:
        """Hand numbers to wandb's own process."""
        for step, moment, values in numbers:
            curves = {curve(name): value for name, value in values.items()}
            self._run.log({"step": step, "_timestamp": moment, **curves})

    def tell(self, name: str, text: str) -> None:
        """A value of the run's summary."""
        self._run.summary[f"kubetune/{name}"] = text

    def closing(self, status: str) -> Iterator[tuple[float, Callable[[], object]]]:
        """The model where it is wanted, and the run's end."""
        if status == "FINISHED" and self._settings.log_model:
            yield SECONDS_FOR_FILES, self._send_model
        if status == "KILLED":
            yield SECONDS_TO_SEND_THE_REST, self._run.mark_preempting
        last = SECONDS_TO_SEND_THE_REST if status == "KILLED" else SECONDS_FOR_FILES
        yield last, lambda: self._run.finish(exit_code=0 if status == "FINISHED" else 1)
        # Its process writes on a moment longer, and would be ended with this one.
        yield SECONDS_TO_SEND_THE_REST, self._wandb.teardown

    def _send_model(self) -> None:
        artifact = self._wandb.Artifact(f"{self._run.name}-model", type="model")
        artifact.add_dir(str((self._run_dir / "checkpoints" / "best").resolve()))
        self._run.log_artifact(artifact)


def run_id(run_dir: Path) -> str:
    """Identity of the run of a directory in W&B."""
    return hashlib.sha256(str(run_dir.absolute()).encode()).hexdigest()[:16]


def _scrubbed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _scrubbed(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_scrubbed(inner) for inner in value]
    return scrub(value) if isinstance(value, str) else value
