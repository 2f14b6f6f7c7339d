"""The user's command for events of a run: called for each, with the event as JSON on its standard input.

One after the other, each with a time limit and without a shell. That one fails is counted and told, and ends nothing.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetune.base import logs, processes
from kubetune.config.schema.tracking import HooksConfig
from kubetune.errors import ConfigError
from kubetune.rundir import events, metrics

if TYPE_CHECKING:
    from kubetune.observers.beside import Observed

LOG = "hooks.log"


def is_wanted(settings: Mapping[str, Any], environ: Mapping[str, str], node: int) -> bool:
    """The config has a command, and this is the node that calls it."""
    return node == 0 and bool((settings.get("hooks") or {}).get("on_event"))


def check(wanted: HooksConfig) -> None:
    """Raise ConfigError, before anything starts, where the command cannot be called."""
    if wanted.on_event is not None:
        try:
            words = shlex.split(wanted.on_event)
        except ValueError as error:
            raise ConfigError(f"hooks.on_event: {error}: {wanted.on_event}. Nothing was written.") from None
        if not words or shutil.which(words[0]) is None:
            raise ConfigError(
                f"hooks.on_event: there is no command {words[0] if words else wanted.on_event!r}. Nothing was written."
            )
    elif wanted.events:
        raise ConfigError("hooks.events: there is no hooks.on_event to call for them. Nothing was written.")
    if unknown := sorted(set(wanted.events) - events.KINDS.keys()):
        raise ConfigError(
            f"hooks.events: there is no event {', '.join(unknown)}; expected {', '.join(events.KINDS)}. "
            "Nothing was written."
        )


def observe(run: Observed) -> None:
    """Call the command for the events of a run."""
    wanted = run.config.hooks
    assert wanted.on_event is not None
    command = shlex.split(wanted.on_event)
    about = {"KUBETUNE_RUN_DIR": str(run.run_dir.absolute()), "KUBETUNE_RUN": run.config.name or run.run_dir.name}
    ran = failed = left_out = 0
    reason = ""
    for event in events.follow(run.run_dir, run.offset, run.ended):
        if event is None or (wanted.events and event["event"] not in wanted.events):
            continue
        seconds = min(wanted.timeout_seconds, run.deadline - time.monotonic())
        if seconds <= 0:
            left_out += 1
            continue
        ran += 1
        if why := _call(command, event, about | {"KUBETUNE_EVENT": event["event"]}, run.run_dir, seconds):
            failed += 1
            reason = f"{event['event']}: {why}"
            if failed == 1:
                print(logs.scrub(f"kubetune: hooks.on_event failed; the run goes on: {reason}"), file=sys.stderr)
    if failed or left_out:
        reason = reason or "no time was left"
        total = f"hooks.on_event failed for {failed} of {ran} events, {left_out} were left out; last: {reason}"
        print(logs.scrub(f"kubetune: {total}; see {run.run_dir / 'logs' / LOG}"), file=sys.stderr)
        metrics.record_event(run.run_dir, "hooks", ran=ran, failed=failed, left_out=left_out, reason=reason)


def _call(
    command: list[str], event: Mapping[str, Any], about: Mapping[str, str], run_dir: Path, seconds: float
) -> str | None:
    """Reason for which the command failed, None where it did not. What it prints goes to a log."""
    with (run_dir / "logs" / LOG).open("ab") as log:
        try:
            process = subprocess.Popen(
                command,
                env={**os.environ, **about},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=processes.die_with_parent,
            )
        except OSError as error:
            return f"{command[0]}: {error.strerror}"
        try:
            process.communicate(json.dumps(event).encode() + b"\n", seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return f"not done after {seconds:.3g} s"
        except OSError as error:
            process.wait()
            return f"takes no input: {error.strerror}"
    return f"exit code {process.returncode}" if process.returncode else None
