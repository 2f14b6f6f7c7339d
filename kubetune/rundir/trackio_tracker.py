"""One run in Trackio: a file on this machine, a Space on the hub, or a server of one's own."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kubetune.base.logs import family_logger, scrub
from kubetune.config.load import dotted_values
from kubetune.config.schema.tracking import TrackioConfig
from kubetune.rundir.tracker_queue import (
    SECONDS_FOR_FILES,
    SECONDS_TO_SEND_THE_REST,
    Numbers,
    Sink,
    TrackedRun,
    curve,
)

_log = family_logger("TRACKING")


class TrackioSink(Sink):
    """The run of this run directory's name; trackio knows runs by their names."""

    def __init__(self, settings: TrackioConfig, run: TrackedRun) -> None:
        if settings.dir is not None:
            # It is read when trackio is imported.
            os.environ.setdefault("TRACKIO_DIR", str(Path(settings.dir).absolute()))
        import trackio

        self._trackio = trackio
        self._settings = settings
        self._tracked = run
        self._run: Any = None

    def begin(self) -> None:
        """Begin the run, or go on with it."""
        wanted = self._settings
        name = self._tracked.name
        settings = {}
        for key, value in dotted_values(self._tracked.settings):
            if value is not None:
                settings[key] = scrub(value) if isinstance(value, str) else value
        with contextlib.redirect_stdout(io.StringIO()):  # six lines of advice
            self._run = self._trackio.init(
                project=wanted.project,
                name=name,
                group=wanted.group,
                space_id=wanted.space_id,
                server_url=wanted.server_url,
                resume="allow",
                config=settings,
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        where = wanted.space_id or wanted.server_url
        folder = os.environ.get("TRACKIO_DIR")
        show = f"trackio show --project {wanted.project}"
        if folder:
            show = f"TRACKIO_DIR={folder} {show}"
        shown = f" at {where}" if where else f"; open it with: {show}"
        _log.info("Trackio run %s of project %s%s", name, wanted.project, shown)

    def send(self, numbers: Sequence[Numbers]) -> None:
        """Hand numbers to trackio's own thread."""
        for step, _, values in numbers:
            self._run.log({curve(name): value for name, value in values.items()}, step=step)

    def tell(self, name: str, text: str) -> None:
        """An alert."""
        self._run.alert(name, text)

    def closing(self, status: str) -> Iterator[tuple[float, Callable[[], object]]]:
        """The rest of the numbers."""

        def finish() -> None:
            with contextlib.redirect_stdout(io.StringIO()):
                self._run.finish()

        yield SECONDS_TO_SEND_THE_REST if status == "KILLED" else SECONDS_FOR_FILES, finish
