"""Plays one rank as roles.json of the run directory says: `python -m tests.run.actor RUN_DIR`.

A real process under the real agent and the real torchrun; only what a rank computes is left out. Roles:
{"end": CODE} says so and ends · {"status": N} ends without a word · {"kill": SIGNAL} dies of it ·
{"wait": true} ends with 143 on SIGTERM, with "deaf" not even then · {"fill": BYTES} takes so much memory first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from kubetune.base import processes
from kubetune.rundir import exit_status

_held: list[bytes] = []


def play(run_dir: Path, rank: int, role: dict[str, int]) -> int:
    """Take the role; returns the exit code."""
    processes.die_with_parent()
    # Blocked instead of handled: a signal that comes before sigwait is kept for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    (run_dir / f"environ-{rank}.json").write_text(json.dumps(dict(os.environ)))
    os.write(
        1, f"started {rank} {os.getpid()}\n".encode()
    )  # at once: under torchrun print writes word by word
    _held.extend(b"x" * (1 << 20) for _ in range(role.get("fill", 0) >> 20))
    if "status" in role:
        os._exit(role["status"])
    if "kill" in role:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.kill(os.getpid(), role["kill"])
    code = role.get("end", 0)
    if "wait" in role:
        signal.sigwait({signal.SIGUSR1 if "deaf" in role else signal.SIGTERM})
        code = 143
    exit_status.write_rank_exit_status(
        run_dir, rank, exit_status.ExitStatus(code, f"told to end with {code}", 7)
    )
    return code


def read_role(run_dir: Path, name: str) -> dict[str, int]:
    """Return what roles.json says of `name`; nothing means: end well."""
    role: dict[str, int] = json.loads((run_dir / "roles.json").read_text()).get(name, {})
    return role


if __name__ == "__main__":
    where = Path(sys.argv[1])
    number = int(os.environ["RANK"])
    sys.exit(play(where, number, read_role(where, str(number))))
