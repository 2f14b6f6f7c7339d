"""The process in which `train` runs, so that the caller keeps its own signal handlers and children.

    python -m kubetune.library.child FD

The request is read from standard input, the answer goes to a file descriptor, both JSON. SIGTERM, or
the end of the caller, stop the run with a checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from kubetune.base import faults, logs, processes
from kubetune.base.signals import Relay
from kubetune.config.resolved import load_resolved
from kubetune.plan.plan import Plan
from kubetune.supervisor.launch import launch_run


def main(argv: Sequence[str]) -> int:
    """Run to the end. Return the exit code; the answer has it too, and errors from before the start."""
    answer_fd = int(argv[0])
    # The caller waits for the end of this pipe. Ranks that outlive this process must not hold it open.
    os.set_inheritable(answer_fd, False)
    processes.die_with_parent(signal.SIGTERM)
    with Relay() as relay:
        logs.scrub_tracebacks()
        answer = _launch(json.load(sys.stdin), relay)
    with open(answer_fd, "w", encoding="utf-8") as file:
        json.dump(answer, file)
    return int(answer["code"])


def _launch(request: Mapping[str, Any], relay: Relay) -> dict[str, Any]:
    """Return the answer: an exit code, and the error if it is not in the run's exit.json."""
    try:
        config = load_resolved(request["config"])
        plan = Plan.from_json(request["plan"])
        code = launch_run(config, plan, request["run_dir"], source=request["source"], relay=relay)
    except Exception as error:
        # A bug is raised, so that its traceback is printed.
        known_error = faults.known(error)
        if known_error is None:
            raise
        return {
            "code": known_error.exit_code,
            "error": type(known_error).__name__,
            "reason": logs.scrub(str(known_error)),
        }
    return {"code": code}


if __name__ == "__main__":
    processes.leave(main(sys.argv[1:]))
