"""Report disks that are full, or will be: before hours are spent, and with a clear error when safetensors fails."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from kubetune import errors
from kubetune.base import files


@dataclass(frozen=True)
class CheckpointRoom:
    """The room on the disk that each checkpoint of a run takes."""

    run_dir: Path
    num_bytes: int

    def require(self, run_dir: Path) -> None:
        """Raise EnvironmentFault if there is no room for a checkpoint. Make the folder of a rehearsal.

        The run directory is not made: somebody who has removed it does not want it back.
        """
        require_free(run_dir, 1, self.num_bytes)
        if run_dir != self.run_dir:
            with files.explained_writes(run_dir):
                run_dir.parent.mkdir(exist_ok=True)
                run_dir.mkdir()

    def explained(self, error: errors.KubetuneError) -> errors.KubetuneError:
        """Return an error of saving. How large a checkpoint is helps somebody whose disk is full."""
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in files.DISK_FULL:
            return errors.EnvironmentFault(f"{error}; a checkpoint takes {self.num_bytes:,} bytes")
        return error


def require_free(
    run_dir: Path,
    checkpoints: int,
    each_bytes: int,
    free: int | None = None,
) -> None:
    """Raise EnvironmentFault unless so many checkpoints fit. `free`: bytes on the disk; by default, look."""
    if free is None:
        free = files.free_bytes(run_dir)
    needed = checkpoints * each_bytes
    if free < needed:
        what = "a checkpoint"
        if checkpoints > 1:
            what = f"{checkpoints} checkpoints"
        raise errors.EnvironmentFault(
            f"{run_dir}: {what} of {each_bytes:,} bytes need {needed:,} bytes, {free:,} are free; free some "
            "space, or lower training.save_total_limit, and run the same command again"
        )


@contextmanager
def explained_full_disk(folder: Path) -> Iterator[None]:
    """Raise OSError in place of safetensors' error about the operating system, so that callers see a full disk."""
    try:
        yield
    except SafetensorError as error:
        # Only its text says so: "… I/O error: No space left on device (os error 28)".
        match = re.search(r"\(os error (\d+)\)", str(error))
        if match is None:
            raise

        # The number of the system is what callers know a full disk by.
        code = int(match[1])
        raise OSError(code, os.strerror(code), str(folder)) from error
