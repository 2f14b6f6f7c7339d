"""The process in which `train` has a run done: planned by its caller, whose process keeps its signals and children.

    python -m kubetune.library.child FD

The request is read from standard input, the answer goes to a file descriptor, both JSON. SIGTERM, and the end of the
caller, stop the run with a checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from kubetune.base import files, logs, processes
from kubetune.base.signals import Relay
from kubetune.config.load import load_resolved
from kubetune.plan.plan import Plan
from kubetune.supervisor.local import launch_run


def main(argv: Sequence[str]) -> int:
    """Run to the end; returns the exit code. The answer has it too, and what was raised before the run began."""
    answer_to = int(argv[0])
    os.set_inheritable(answer_to, False)
    processes.die_with_parent(signal.SIGTERM)
    with Relay() as relay:
        logs.scrub_tracebacks()
        answer = _launch(json.load(sys.stdin), relay)
    with open(answer_to, "w", encoding="utf-8") as file:
        json.dump(answer, file)
    return int(answer["code"])


def _launch(request: Mapping[str, Any], relay: Relay) -> dict[str, Any]:
    """The answer: an exit code, and the class and text of an error that is not in the run's own exit.json."""
    try:
        config, plan = load_resolved(request["config"]), Plan.from_json(request["plan"])
        return {
            "code": launch_run(
                config, plan, request["run_dir"], source=request["source"], relay=relay
            )
        }
    except Exception as error:
        if (told := files.known(error)) is None:
            raise
        return {
            "code": told.exit_code,
            "error": type(told).__name__,
            "reason": logs.scrub(str(told)),
        }


if __name__ == "__main__":
    processes.leave(main(sys.argv[1:]))
