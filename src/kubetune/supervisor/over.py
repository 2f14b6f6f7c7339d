"""Tell from its directory alone whether a run is over, before any other node is met.

A pod may be killed between the last checkpoint and the end of its process. What is left to do then needs no other node,
and other nodes may never come again: an index of a Job that has ended well is complete.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from kubetune import errors
from kubetune.base import files
from kubetune.config.naming import RESOLVED
from kubetune.rundir import checkpoints, metrics, status


def last_step(run_dir: Path) -> int | None:
    """Return the last step of a run whose training is over, None if there is something left to train.

    Names and sizes decide whether the checkpoint is whole, since agents ask this before each start.
    """
    step = checkpoints.newest_step(run_dir)
    if not step:
        return None
    with suppress(errors.KubetuneError, OSError, ValueError, KeyError):
        state = checkpoints.load_state(checkpoints.folder_of(run_dir, step))
        config = files.read_object(run_dir / RESOLVED)
        evaluates = bool(config["data"].get("eval"))
        patience = config["training"].get("early_stopping_patience")
        num_steps = status.planned_steps(run_dir, metrics.read_events(run_dir))
        if state.is_last(num_steps, evaluates=evaluates, patience=patience):
            return step
    return None
