"""Call the user's command for each event of a run, with the event as JSON on its standard input.

Calls run one after the other, each with a time limit and without a shell. A call that fails is counted and reported,
and does not end the run.
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
    from kubetune.supervisor.observers.observer_process import Observed

LOG = "hooks.log"

# Bytes read at once from the output, and bytes of it that are kept before they are written.
_PIECE_BYTES: Final = 1 << 16
_MOST_PENDING_BYTES: Final = 1 << 20
# How long the end of an output may take to arrive. Processes that the command left running may print more later.
_LAST_WORDS_SECONDS: Final = 1.0


def is_wanted(settings: Mapping[str, Any], environ: Mapping[str, str], node: int) -> bool:
    """True if the config has a command and this is the node that calls it."""
    return node == 0 and bool((settings.get("hooks") or {}).get("on_event"))


def require_command(config: HooksConfig) -> None:
    """Raise ConfigError, before anything starts, if the command cannot be called."""
    if config.on_event is not None:
        try:
            words = shlex.split(config.on_event)
        except ValueError as error:
            raise ConfigError(
                f"hooks.on_event: {error}: {config.on_event}. Nothing was written."
            ) from None
        if not words or shutil.which(words[0]) is None:
            command = config.on_event
            if words:
                command = words[0]
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
    config = run.hooks
    # For the summary at the end.
    ran = 0
    failed = 0
    left_out = 0
    reason = ""

    for event in events.follow(run.run_dir, run.offset, run.ended):
        if event is None:  # nothing new
            continue
        if not wants(config, event):
            continue

        # Near the end a call gets only the time that is left.
        seconds = min(config.timeout_seconds, run.deadline - time.monotonic())
        if seconds <= 0:
            left_out += 1
            continue
        ran += 1
        failure = call(config, event, run.run_dir, run.name, seconds)
        if failure is not None:
            failed += 1
            reason = f"{event['event']}: {failure}"
            if failed == 1:  # a command that always fails must not fill the log
                line = f"kubetune: hooks.on_event failed; the run goes on: {reason}"
                print(logs.scrub(line), file=sys.stderr)

    if failed or left_out:
        reason = reason or "no time was left"
        total = f"hooks.on_event failed for {failed} of {ran} events, {left_out} were left out; last: {reason}"
        print(logs.scrub(f"kubetune: {total}; see {run.run_dir / 'logs' / LOG}"), file=sys.stderr)
        metrics.record_event(
            run.run_dir, "hooks", ran=ran, failed=failed, left_out=left_out, reason=reason
        )


def wants(config: HooksConfig, event: Mapping[str, Any]) -> bool:
    """True if there is a command, and it is to be called for such an event."""
    is_wanted = not config.events or event["event"] in config.events
    return config.on_event is not None and is_wanted


def call(
    config: HooksConfig, event: Mapping[str, Any], run_dir: Path, run: str, seconds: float
) -> str | None:
    """Call the command. Return why it failed, None if it did not. Its output goes to a log. `run`: the run's name."""
    assert config.on_event is not None
    command = shlex.split(config.on_event)
    variables = {
        "KUBETUNE_RUN_DIR": str(run_dir.absolute()),
        "KUBETUNE_RUN": run,
        "KUBETUNE_EVENT": event["event"],
    }
    # A pipe of our own, not `communicate`: that would wait for processes that the command leaves running.
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
    # Its input is small, so it never fills a pipe that nobody reads.
    try:
        process.communicate(json.dumps(event).encode() + b"\n", seconds)
    except subprocess.TimeoutExpired:
        # Its children too: it has a session of its own.
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
    """Writes the output of a command to the log, without secrets of the environment.

    It is written in large pieces that end with a line, so that a secret is not cut in two.
    """

    def __init__(self, path: Path, pipe: int) -> None:
        """Read the pipe in a thread: processes that the command leaves running may hold its other end open."""
        self._path = path
        self._pipe = pipe
        self._pending = bytearray()
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def finish(self) -> None:
        """Write what the command has printed until now."""
        # The thread ends with the command, unless something else still holds the pipe.
        self._reader.join(_LAST_WORDS_SECONDS)
        with self._lock:
            self._write(len(self._pending))

    def _read(self) -> None:
        """Read until all processes that hold the pipe have closed it."""
        with open(self._pipe, "rb", buffering=0) as pipe:
            while part := pipe.read(_PIECE_BYTES):
                with self._lock:
                    self._pending += part
                    if len(self._pending) > _MOST_PENDING_BYTES:
                        whole_lines = self._pending.rfind(b"\n") + 1
                        self._write(whole_lines or len(self._pending))
        with self._lock:
            self._write(len(self._pending))

    def _write(self, size: int) -> None:
        """Move the first `size` bytes that are kept to the log."""
        text = self._pending[:size].decode(errors="surrogateescape")
        del self._pending[:size]
        if not text:
            return
        try:
            with self._path.open("ab") as log:
                log.write(logs.scrub(text).encode(errors="surrogateescape"))
        except OSError as error:
            print(f"kubetune: {self._path} cannot be written: {error.strerror}", file=sys.stderr)
