"""The process that reports a run to others. It reads the run directory, so the run never waits for it.

    python -m kubetune.supervisor.observers.observer_process RUN_DIR NODE OFFSET

It runs until its standard input ends, whose content is the number of seconds that are left then. OFFSET: where in
events.jsonl this start of the run begins, in bytes. Each observer has a thread:

    agent ──starts──────────────▶ this process ──▶ hooks, Prometheus, Kubeflow, OpenTelemetry
          ──"20.0", end of input▶ they report the end, and it ends
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
from kubetune.config.naming import RESOLVED
from kubetune.config.resolved import read_config
from kubetune.config.schema.tracking import HooksConfig, PrometheusConfig

# How long observers may take to report the end of a run. A node that is shut down gives less time.
_SECONDS_AT_THE_END = 20.0
_SECONDS_WHEN_STOPPED = 5.0
# How much longer the agent waits for the process to end.
_MARGIN_SECONDS = 2.0
# Each is a module with `is_wanted(settings, environ, node)`, which imports nothing, and `observe(run)`.
OBSERVERS = {
    "hooks": "kubetune.supervisor.observers.hooks",
    "Prometheus": "kubetune.supervisor.observers.prometheus",
    "Kubeflow": "kubetune.supervisor.observers.kubeflow",
    "OpenTelemetry": "kubetune.supervisor.observers.traces",
}


@dataclass
class Observed:
    """What an observer knows about the run, on one node."""

    run_dir: Path
    name: str  # of the run
    task: str
    model: str  # hub id or folder
    hooks: HooksConfig
    prometheus: PrometheusConfig | None
    node: int
    # Where in events.jsonl this start begins, in bytes.
    offset: int
    # Set when nothing more will come.
    ended: threading.Event = field(default_factory=threading.Event)
    # When everything must be reported, on the monotonic clock.
    deadline: float = float("inf")

    @classmethod
    def read(cls, run_dir: Path, node: int, offset: int) -> Observed:
        """Read it from a run directory."""
        config = read_config(run_dir)
        name = config.name or run_dir.name
        model = config.model.path
        prometheus = config.tracking.prometheus
        return cls(run_dir, name, config.task, model, config.hooks, prometheus, node, offset)


def wanted(settings: Mapping[str, Any], environ: Mapping[str, str], node: int) -> list[str]:
    """Return the names of the observers that settings and environment ask for on a node."""
    names = []
    for name, module in OBSERVERS.items():
        if import_module(module).is_wanted(settings, environ, node):
            names.append(name)
    return names


@contextmanager
def observed(run_dir: Path, node: int, offset: int, relay: Relay) -> Iterator[None]:
    """Report the run to others while the block runs, and then for some seconds its end."""
    if not wanted(files.read_object(run_dir / RESOLVED), os.environ, node):
        yield
        return
    # No process if nothing is configured: it would take memory on every node.
    process = processes.start_companion(
        "kubetune.supervisor.observers.observer_process", run_dir, node, offset
    )
    assert process.stdin is not None
    try:
        yield
    finally:
        seconds = _SECONDS_AT_THE_END
        if relay.stopping:
            seconds = _SECONDS_WHEN_STOPPED
        # What is left to do must not keep the pod longer than its grace period.
        try:
            process.stdin.write(str(seconds).encode())
            process.stdin.close()
        except OSError:
            pass  # it has ended by itself, and printed why
        try:
            process.wait(seconds + _MARGIN_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            print(
                f"kubetune: some observers of the run did not finish within {seconds:g} s",
                file=sys.stderr,
            )


def main(argv: Sequence[str]) -> int:
    """Report a run until the standard input ends, and then its end."""
    processes.die_with_parent()
    # A stop goes to all processes of a pod, but this one still has to report it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logs.configure("INFO")
    logs.scrub_tracebacks()
    run_dir = Path(argv[0])
    node = int(argv[1])
    run = Observed.read(run_dir, node, offset=int(argv[2]))
    settings = files.read_object(run_dir / RESOLVED)

    # One thread each: a server that does not answer must not keep the others waiting.
    threads = []
    for name in wanted(settings, os.environ, node):
        observe = import_module(OBSERVERS[name]).observe
        thread = threading.Thread(target=_guarded, args=(name, observe, run), daemon=True)
        thread.start()
        threads.append(thread)

    # Waits until the agent closes it; empty if the agent was killed.
    seconds_left = sys.stdin.read()
    run.deadline = time.monotonic() + float(seconds_left or 0.0)
    run.ended.set()
    for thread in threads:
        thread.join(max(0.0, run.deadline - time.monotonic()))
    return errors.OK


def _guarded(name: str, observe: Callable[[Observed], None], run: Observed) -> None:
    try:
        observe(run)
    except Exception as error:  # anything that a server or its library may raise
        line = f"kubetune: {name} does not work; the run goes on: {errors.first_line(error)}"
        print(logs.scrub(line), file=sys.stderr)


if __name__ == "__main__":
    processes.leave(main(sys.argv[1:]))  # without waiting for requests that were given up
