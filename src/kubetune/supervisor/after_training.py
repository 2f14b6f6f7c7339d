"""What follows the last step of a run, each in a process of its own: benchmarks, answers before and after, the push."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from kubetune import errors
from kubetune.base import files, processes
from kubetune.base.humanize import shell_word
from kubetune.base.signals import Relay
from kubetune.config.consent import STARTED
from kubetune.config.naming import RESOLVED
from kubetune.rundir import metrics
from kubetune.rundir.exit_status import ExitStatus

BENCHMARKS = "kubetune.result.inference.benchmarks"
BEFORE_AFTER = "kubetune.result.inference.before_after"

_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def benchmarked(run_dir: Path, relay: Relay, status: ExitStatus) -> ExitStatus:
    """Run the benchmarks that the config names, and return how the run ends then.

    A run without its benchmarks ends as well, unless its gate waits for one of them.
    """
    evaluation = files.read_object(run_dir / RESOLVED).get("evaluation", {})
    if not evaluation.get("benchmarks"):
        return status

    code = errors.PREEMPTED
    if not relay.stopping:
        environ = _with_network() | _as_started(run_dir)
        code = relay.run(processes.module(BENCHMARKS, run_dir), environ)
    if code == errors.OK:
        return status

    # Their process has judged the gate anew, with what it measured. No gate, or one that holds without them: all is well.
    gate = metrics.read_verdict(run_dir).get("gate") or {"passed": True}
    if code != errors.GATE and gate["passed"]:
        again = f"python -m {BENCHMARKS} {run_dir}"
        print(
            f"kubetune: no benchmarks; the run is done all the same. Again: {again}",
            file=sys.stderr,
        )
        return status

    # What the run ends with, else: the next start may still pass the gate, or it failed, or nobody knows.
    failed_checks = [check["message"] for check in gate.get("checks", ()) if not check["holds"]]
    missed = "; ".join(failed_checks)
    if relay.stopping:
        reason = f"stopped before the benchmarks were done: {missed}"
        return replace(status, code=errors.PREEMPTED, reason=reason)
    if code == errors.GATE:
        reason = f"the gate failed: {missed}. The checkpoint is saved"
        return replace(status, code=code, reason=reason, error="GateFailed")

    cause = None
    for event in metrics.read_events(run_dir):
        if event["event"] == "benchmarks":
            cause = event.get("reason")
    if code not in (errors.USER, errors.ENVIRONMENT):
        code = errors.ENVIRONMENT
    reason = f"no benchmarks for the gate: {cause or 'their process died'}"
    return replace(status, code=code, reason=reason)


def ask_before_after(run_dir: Path, relay: Relay) -> None:
    """Have prompts answered before and after training, if the config has some.

    That is a process of its own, which begins when the ranks have freed their memory.
    """
    from kubetune.config.resolved import read_config

    if relay.stopping or not read_config(run_dir).logging.before_after:
        return
    command = processes.module(BEFORE_AFTER, run_dir)
    environ = {**os.environ, **_as_started(run_dir)}
    if relay.run(command, environ) != errors.OK:
        again = f"python -m {BEFORE_AFTER} {run_dir}"
        print(
            f"kubetune: no answers before and after; the run is done all the same. Again: {again}",
            file=sys.stderr,
        )


def push(run_dir: Path, relay: Relay) -> None:
    """Push the result, if the config says so. The run is done even if that fails.

    That is a process of its own, which begins when the ranks have freed their memory.
    """
    if relay.stopping or not files.read_object(run_dir / RESOLVED).get("push"):
        return
    command = processes.module("kubetune", "push", run_dir)
    if relay.run(command, _with_network() | _as_started(run_dir)) != errors.OK:
        print(
            f"kubetune: not pushed; the run is done all the same. Again: kubetune push {shell_word(run_dir)}",
            file=sys.stderr,
        )


def _with_network() -> dict[str, str]:
    """Return the environment without what keeps a run offline: pods train from fetched files."""
    return {name: value for name, value in os.environ.items() if name not in _OFFLINE}


def _as_started(run_dir: Path) -> dict[str, str]:
    """Return the variable by which a process knows that the user has started this run and its code."""
    return {STARTED: os.path.realpath(run_dir)}
