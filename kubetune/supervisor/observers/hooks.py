"""The user's command for events of a run: called for each, with the event as JSON on its standard input.

Calls run one after the other, each with a time limit and without a shell. A call that fails is counted
and reported, and does not end the run.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kubetune.base import logs, processes
from kubetune.config.schema.tracking import HooksConfig
from kubetune.errors import ConfigError
from kubetune.rundir import events, metrics

if TYPE_CHECKING:
    from kubetune.supervisor.observers.beside import Observed

LOG = "hooks.log"

_PIECE_BYTES: Final = 1 << 16
_MOST_PENDING_BYTES: Final = 1 << 20
# Time for the last of an output to arrive. What the command left running may print more later.
_LAST_WORDS_SECONDS: Final = 1.0


def is_wanted(settings: Mapping[str, Any], environ: Mapping[str, str], node: int) -> bool:
    """True if the config has a command and this is the node that calls it."""
    return node == 0 and bool((settings.get("hooks") or {}).get("on_event"))


def check(config: HooksConfig) -> None:
    """Raise ConfigError, before anything starts, if the command cannot be called."""
    if config.on_event is not None:
        try:
            words = shlex.split(config.on_event)
        except ValueError as error:
            raise ConfigError(
                f"hooks.on_event: {error}: {config.on_event}. Nothing was written."
            ) from None
        if not words or shutil.which(words[0]) is None:
            command = words[0] if words else config.on_event
            raise ConfigError(
                f"hooks.on_event: there is no command {command!r}. Nothing was written."
            )
    elif config.events:
        raise ConfigError(
            "hooks.events: there is no hooks.on_event to call for them. Nothing was written."
        )
    unknown = sorted(set(config.events) - events.KINDS.keys())
    if unknown:
        raise ConfigError(
            f"hooks.events: there is no event {', '.join(unknown)}; expected {', '.join(events.KINDS)}. "
            "Nothing was written."
        )


def observe(run: Observed) -> None:
    """Call the command for the events of a run."""
    config = run.config.hooks
    assert config.on_event is not None
    command = shlex.split(config.on_event)
    variables = {
        "KUBETUNE_RUN_DIR": str(run.run_dir.absolute()),
        "KUBETUNE_RUN": run.config.name or run.run_dir.name,
    }
    ran = failed = left_out = 0
    reason = ""
    for event in events.follow(run.run_dir, run.offset, run.ended):
        if event is None or (config.events and event["event"] not in config.events):
            continue
        seconds = min(config.timeout_seconds, run.deadline - time.monotonic())
        if seconds <= 0:
            left_out += 1
            continue
        ran += 1
        variables["KUBETUNE_EVENT"] = event["event"]
        failure = _call(command, event, variables, run.run_dir, seconds)
        if failure is not None:
            failed += 1
            reason = f"{event['event']}: {failure}"
            if failed == 1:
                line = f"kubetune: hooks.on_event failed; the run goes on: {reason}"
                print(logs.scrub(line), file=sys.stderr)
    if failed or left_out:
        reason = reason or "no time was left"
        total = f"hooks.on_event failed for {failed} of {ran} events, {left_out} were left out; last: {reason}"
        print(logs.scrub(f"kubetune: {total}; see {run.run_dir / 'logs' / LOG}"), file=sys.stderr)
        metrics.record_event(
            run.run_dir, "hooks", ran=ran, failed=failed, left_out=left_out, reason=reason
        )


def _call(
    command: list[str],
    event: Mapping[str, Any],
    variables: Mapping[str, str],
    run_dir: Path,
    seconds: float,
) -> str | None:
    """Return the reason for which the command failed, None if it did not. What it prints goes to a log."""
    reading, writing = os.pipe()
    output = _Output(run_dir / "logs" / LOG, reading)
    try:
        with os.fdopen(writing, "wb") as pipe:
            process = subprocess.Popen(
                command,
                env={**os.environ, **variables},
                stdin=subprocess.PIPE,
                stdout=pipe,
                stderr=pipe,
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
    finally:
        output.finish()
    if process.returncode:
        return f"exit code {process.returncode}"
    return None


class _Output:
    """What a command prints, on its way to the log, where no secret of the environment may arrive.

    It is written in large pieces that end with a line, so that a secret is not cut in two.
    """

    def __init__(self, path: Path, pipe: int) -> None:
        """Begin to read the pipe, in a thread: what the command leaves running may hold its other end open."""
        self._path = path
        self._pipe = pipe
        self._pending = bytearray()
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def finish(self) -> None:
        """Write what the command printed until it ended."""
        self._reader.join(_LAST_WORDS_SECONDS)
        with self._lock:
            self._write(len(self._pending))

    def _read(self) -> None:
        """Take what comes until all processes that hold the pipe have closed it."""
        with open(self._pipe, "rb", buffering=0) as pipe:
            while part := pipe.read(_PIECE_BYTES):
                with self._lock:
                    self._pending += part
                    if len(self._pending) > _MOST_PENDING_BYTES:
                        self._write(self._pending.rfind(b"\n") + 1 or len(self._pending))
        with self._lock:
            self._write(len(self._pending))

    def _write(self, size: int) -> None:
        text = self._pending[:size].decode(errors="surrogateescape")
        del self._pending[:size]
        if not text:
            return
        try:
            with self._path.open("ab") as log:
                log.write(logs.scrub(text).encode(errors="surrogateescape"))
        except OSError as error:
            print(f"kubetune: {self._path} cannot be written: {error.strerror}", file=sys.stderr)
