"""Disks that are full, or would be: said before hours are spent, and in our words where safetensors finds out."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from kubetune import errors
from kubetune.base import files


def require_free(run_dir: Path, checkpoints: int, each_bytes: int, free: int | None = None) -> None:
    """Raise EnvironmentFault unless so many checkpoints fit into what is free."""
    free, needed = files.free_bytes(run_dir) if free is None else free, checkpoints * each_bytes
    if free < needed:
        what = f"{checkpoints} checkpoints" if checkpoints > 1 else "a checkpoint"
        raise errors.EnvironmentFault(
            f"{run_dir}: {what} of {each_bytes:,} bytes need {needed:,} bytes, {free:,} are free; free some "
            "space, or lower training.save_total_limit, and run the same command again"
        )


@contextmanager
def explained_full_disk(folder: Path) -> Iterator[None]:
    """safetensors tells of a full disk in words of its own: "… I/O error: No space left on device (os error 28)"."""
    try:
        yield
    except SafetensorError as error:
        if found := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(found[1]), os.strerror(int(found[1])), str(folder)) from error
        raise
