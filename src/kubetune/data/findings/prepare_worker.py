"""Prepare the data of a run before its ranks start: `python -m kubetune.data.findings.prepare_worker RUN_DIR`.

This is a process of its own, so that the agent stays small and can pass a stop on. The exit code is one of errors.py.
After a failure the reason lies where the rank named by RANK would leave it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kubetune import errors
from kubetune.base import faults, logs, processes
from kubetune.base.terminal import is_brief
from kubetune.config.naming import RESOLVED
from kubetune.config.resolved import load_resolved
from kubetune.data.prepared.identity import pinned
from kubetune.rundir import exit_status


def main(argv: Sequence[str]) -> int:
    """Prepare what RUN_DIR/resolved.json asks for, unless the cache has it. Return the exit code."""
    processes.die_with_parent()
    run_dir = Path(argv[0])
    rank = int(os.environ.get("RANK", "0"))
    config = load_resolved(run_dir / RESOLVED)
    level = config.logging.level
    logs.configure(level, run_dir, rank, brief=is_brief(level))
    logs.STEP.info("preparing data")
    try:
        processes.try_threads()
        from kubetune.data.findings.checked import prepare_start

        # The commit that the ranks will take too, even if the branch moves until then.
        model = pinned(config.model, run_dir)
        prepare_start(config.model_copy(update={"model": model}), run_dir)
    except Exception as error:
        fault = faults.known(error)
        if fault is None:
            raise
        reason = exit_status.reason_of(fault)
        logs.ERROR.error("%s", reason)
        with suppress(errors.EnvironmentFault):  # a full disk must not hide the exit code it caused
            status = exit_status.ExitStatus(fault.exit_code, reason, error=type(fault).__name__)
            exit_status.write_rank_exit_status(run_dir, rank, status)

        return fault.exit_code

    return errors.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
