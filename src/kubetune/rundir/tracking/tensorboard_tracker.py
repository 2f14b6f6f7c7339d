"""TensorBoard as a tracker: event files in the run directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kubetune.base.logs import family_logger, scrub
from kubetune.config.resolved import dotted_values
from kubetune.rundir.tracking.tracker_queue import (
    SECONDS_TO_SEND_THE_REST,
    Numbers,
    Sink,
    TrackedRun,
    curve,
)

_log = family_logger("TRACKING")


class TensorBoardSink(Sink):
    """Event files in `RUN_DIR/tensorboard`, with the config as text and in the hparams tab."""

    def __init__(self, run: TrackedRun, run_file: str, resume_step: int) -> None:
        """`run_file`: the config as YAML."""
        from torch.utils.tensorboard import SummaryWriter

        self._open = SummaryWriter
        self._run = run
        self._run_file = run_file
        self._folder = run.run_dir / "tensorboard"
        self._step = resume_step

    def begin(self) -> None:
        """Open the file. Hide what an earlier start wrote after the checkpoint, or curves would run back."""
        # Continued after step 40: TensorBoard hides what the earlier start wrote from step 41 on.
        purge = None
        if self._step:
            purge = self._step + 1
        self._writer: Any = self._open(str(self._folder), purge_step=purge, flush_secs=10)

        self._disk = _watched_disk(self._writer)

        # A run that is continued has its description already.
        if not self._step:
            self._describe()

    def _describe(self) -> None:
        """Write the config as text, and the settings for the hparams tab."""
        from torch.utils.tensorboard.summary import hparams

        # In Markdown, lines that are indented by four spaces are code.
        lines = [f"    {line}" for line in scrub(self._run_file).splitlines()]
        self._writer.add_text("config", "\n".join(lines), 0)

        settings = {}
        for key, value in dotted_values(self._run.settings):
            if _is_tried(key, value):
                settings[key] = value

        # The three summaries that make a row of the hparams tab, in this run and not in one of their own.
        for summary in hparams(settings, {"train/loss": 0.0, "eval/loss": 0.0}):
            self._writer.file_writer.add_summary(summary)

    def send(self, numbers: Sequence[Numbers]) -> None:
        """Write numbers. Raise what the disk refuses."""
        for step, moment, values in numbers:
            for name, value in values.items():
                self._writer.add_scalar(curve(name), value, step, moment)
            self._step = step
        self._writer.flush()
        if self._disk is not None:
            self._disk.require()

    def tell(self, name: str, text: str) -> None:
        """Write a text."""
        self._writer.add_text(name, text, self._step)

    def closing(self, status: str) -> Iterator[tuple[float, Callable[[], object]]]:
        """Yield the writing of the last records."""
        yield SECONDS_TO_SEND_THE_REST, self._writer.close
        if self._disk is not None:
            yield SECONDS_TO_SEND_THE_REST, self._disk.require


def _watched_disk(writer: Any) -> _Disk | None:
    """Return what the disk refuses of a SummaryWriter; None if this release of tensorboard has other private names."""
    # Records are written by a thread that would die of a full disk unseen, so its writer is wrapped.
    try:
        events = writer.file_writer.event_writer._async_writer
        worker = events._worker
        disk = _Disk(worker._record_writer)
    except AttributeError as error:
        _log.info("this release of tensorboard does not tell of a full disk: %s", error)
        return None
    events._writer = worker._record_writer = disk
    return disk


class _Disk:
    """Wraps TensorBoard's writer of records, and keeps the disk's error. Its thread would die of it with a traceback."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._refusal: OSError | None = None

    def write(self, record: bytes) -> None:
        self._try(lambda: self._writer.write(record))

    def flush(self) -> None:
        self._try(self._writer.flush)

    def close(self) -> None:
        self._try(self._writer.close)

    def require(self) -> None:
        """Raise what the disk refused."""
        if self._refusal is not None:
            raise self._refusal

    def _try(self, do: Callable[[], object]) -> None:
        if self._refusal is None:  # after a gap no record is of use
            try:
                do()
            except OSError as error:
                self._refusal = error


def _is_tried(key: str, value: Any) -> bool:
    """True if people try values of a setting, and the tab can show that kind of value."""
    sections = (
        "training.",
        "lora.",
        "data.max_length",
        "data.packing",
        "model.path",
        "quantization",
        "task",
    )
    return key.startswith(sections) and isinstance(value, bool | int | float | str)
