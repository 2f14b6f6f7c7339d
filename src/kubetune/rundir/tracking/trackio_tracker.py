"""One run in Trackio: in files on this machine, in a Space on the hub, or on a server of the user's."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from kubetune.base.logs import family_logger, scrub
from kubetune.config.resolved import dotted_values
from kubetune.config.schema.tracking import TrackioConfig
from kubetune.rundir.tracking.tracker_queue import (
    SECONDS_FOR_FILES,
    SECONDS_TO_SEND_THE_REST,
    Numbers,
    Sink,
    TrackedRun,
    curve,
)

_log = family_logger("TRACKING")
# Variables by which Trackio sends somewhere, whatever the run file says.
_NAME_PLACES: Final = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL")


def _nobody() -> None:
    """Return the name of no account, as Trackio does without one."""


class TrackioSink(Sink):
    """A run of Trackio with the name of our run. Trackio identifies runs by name."""

    def __init__(self, settings: TrackioConfig, run: TrackedRun) -> None:
        if settings.dir is not None:
            # Importing trackio reads it.
            os.environ.setdefault("TRACKIO_DIR", str(Path(settings.dir).absolute()))
        for name in _NAME_PLACES:
            if os.environ.pop(name, ""):
                _log.warning(
                    "%s is not used: Trackio sends only to the space_id or server_url of tracking.trackio",
                    name,
                )
        import trackio

        self._trackio = trackio
        self._settings = settings
        self._tracked = run
        self._run: Any = None

    def begin(self) -> None:
        """Begin the run, or continue it."""
        section = self._settings
        name = self._tracked.name
        # Flat, since Trackio's table shows no nested settings.
        settings = {}
        for key, value in dotted_values(self._tracked.settings):
            if value is not None:
                if isinstance(value, str):
                    value = scrub(value)
                settings[key] = value

        module: Any = sys.modules.get("trackio.run")
        if module is not None and section.space_id is None:
            # It would ask the hub whose token this is, also for files on this machine or a server of the user's.
            module._get_default_namespace = _nobody

        with contextlib.redirect_stdout(io.StringIO()):  # trackio prints six lines of advice
            self._run = self._trackio.init(
                project=section.project,
                name=name,
                group=section.group,
                space_id=section.space_id,
                server_url=section.server_url,
                private=section.private,
                resume="allow",
                config=settings,
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

        address = section.space_id or section.server_url
        if address:
            place = f" at {address}"
        else:
            command = f"trackio show --project {section.project}"
            folder = os.environ.get("TRACKIO_DIR")
            if folder:
                command = f"TRACKIO_DIR={folder} {command}"
            place = f"; open it with: {command}"
        _log.info("Trackio run %s of project %s%s", name, section.project, place)

    def send(self, numbers: Sequence[Numbers]) -> None:
        """Pass numbers to trackio's thread."""
        for step, _, values in numbers:
            curves = {curve(name): value for name, value in values.items()}
            self._run.log(curves, step=step)

    def tell(self, name: str, text: str) -> None:
        """Send an alert."""
        self._run.alert(name, text)

    def closing(self, status: str) -> Iterator[tuple[float, Callable[[], object]]]:
        """Yield the end of the run, which sends the rest of the numbers."""

        def finish() -> None:
            with contextlib.redirect_stdout(io.StringIO()):
                self._run.finish()

        # A run that must make way for others ends soon.
        seconds = SECONDS_FOR_FILES
        if status == "KILLED":
            seconds = SECONDS_TO_SEND_THE_REST
        yield seconds, finish
