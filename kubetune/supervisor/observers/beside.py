"""The process that tells others of a run: it reads the run directory, so that nothing that hangs there is in the way.

python -m kubetune.supervisor.observers.beside RUN_DIR NODE OFFSET
    until its standard input ends, which says how many seconds there are left; OFFSET: where in events.jsonl this
    start of the run begins
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from kubetune import errors
from kubetune.base import files, logs, processes
from kubetune.base.signals import Relay
from kubetune.config.load import read_config
from kubetune.config.naming import RESOLVED
from kubetune.config.schema import Config

_SECONDS_AT_THE_END, _SECONDS_WHEN_STOPPED, _MARGIN_SECONDS = 20.0, 5.0, 2.0
OBSERVERS = {
    "hooks": "kubetune.supervisor.observers.hooks",
    "Prometheus": "kubetune.supervisor.observers.prometheus",
    "Kubeflow": "kubetune.supervisor.observers.kubeflow",
    "OpenTelemetry": "kubetune.supervisor.observers.traces",
}
"""Each a module with `is_wanted(settings, environ, node)`, which imports nothing, and `observe(run)`."""


@dataclass
class Observed:
    """A node's part of a run that goes on. `ended`: nothing more will come; `deadline`, on the monotonic clock: by then
    all must be told."""

    run_dir: Path
    config: Config
    node: int
    offset: int
    ended: threading.Event = field(default_factory=threading.Event)
    deadline: float = float("inf")


def wanted(settings: Mapping[str, Any], environ: Mapping[str, str], node: int) -> list[str]:
    """Names of the observers that a run's settings and the environment ask for on a node."""
    return [
        name
        for name, module in OBSERVERS.items()
        if import_module(module).is_wanted(settings, environ, node)
    ]


@contextmanager
def observed(run_dir: Path, node: int, offset: int, relay: Relay) -> Iterator[None]:
    """While the block runs, others are told of the run, if anybody wants to be; then of its end, for some seconds."""
    if not wanted(files.read_object(run_dir / RESOLVED), os.environ, node):
        yield
        return
    process = processes.start_companion(
        "kubetune.supervisor.observers.beside", run_dir, node, offset
    )
    assert process.stdin is not None
    try:
        yield
    finally:
        seconds = _SECONDS_WHEN_STOPPED if relay.stopping else _SECONDS_AT_THE_END
        try:
            process.stdin.write(str(seconds).encode())
            process.stdin.close()
        except OSError:
            pass  # it has ended by itself, and said why
        try:
            process.wait(seconds + _MARGIN_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            print(
                f"kubetune: not all that follow the run were told of its end within {seconds:g} s",
                file=sys.stderr,
            )


def main(argv: Sequence[str]) -> int:
    """Tell of a run until the standard input ends, and of its end."""
    processes.die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logs.configure("INFO")
    logs.scrub_tracebacks()
    run_dir, node, offset = Path(argv[0]), int(argv[1]), int(argv[2])
    run = Observed(run_dir, read_config(run_dir), node, offset)
    settings = files.read_object(run_dir / RESOLVED)
    threads = [
        threading.Thread(
            target=_guarded, args=(name, import_module(OBSERVERS[name]).observe, run), daemon=True
        )
        for name in wanted(settings, os.environ, node)
    ]
    for thread in threads:
        thread.start()
    left = sys.stdin.read()
    run.deadline = time.monotonic() + float(left or 0.0)
    run.ended.set()
    for thread in threads:
        thread.join(max(0.0, run.deadline - time.monotonic()))
    return errors.OK


def _guarded(name: str, observe: Callable[[Observed], None], run: Observed) -> None:
    try:
        observe(run)
    except Exception as error:  # whatever those outside, or their libraries, come up with
        said = errors.first_line(error)
        print(
            logs.scrub(f"kubetune: {name} does not work; the run goes on: {said}"), file=sys.stderr
        )


if __name__ == "__main__":
    processes.leave(main(sys.argv[1:]))  # waiting for no request that was given up
