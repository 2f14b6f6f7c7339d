"""The process that copies a run directory to an object store while the run goes on, or fetches it on an empty machine.

    python -m kubetune.rundir.mirror.copier follow RUN_DIR ADDRESS
        copies until its standard input ends, then copies the rest
    python -m kubetune.rundir.mirror.copier restore RUN_DIR ADDRESS
        fetches the run and its newest checkpoints if the store knows more. The environment variable KUBETUNE_STARTING
        holds the config of the run that begins

It is a separate process, so that training never waits for a network. sending.py and fetching.py say what is copied, and how.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kubetune import errors
from kubetune.base import logs, processes
from kubetune.base.humanize import shell_word
from kubetune.base.signals import Relay
from kubetune.rundir import metrics
from kubetune.rundir.mirror.fetching import FETCHING
from kubetune.rundir.mirror.sync import Mirror

SECONDS_BETWEEN_LOOKS = 10.0
LONGEST_WAIT_SECONDS = 60.0
FINISH_SECONDS = 1800.0  # for sending the rest after the end of a run
RESTORE_SECONDS = 60.0  # for fetching a run on an empty machine
# For a store that has never answered this process: a missing bucket or wrong credentials do not go away.
SECONDS_IF_NEVER_REACHED = 20.0

# Environment variable with the resolved config of the run that begins, as JSON. A copy with another config is
# refused.
STARTING = "KUBETUNE_STARTING"
_log = logs.family_logger("MIRROR")


def persistently(
    attempt: Callable[[], Any],
    seconds: float,
    *,
    what: str,
) -> Any:
    """Return `attempt()`. While it fails, repeat it with growing pauses. Raise EnvironmentFault after `seconds`."""
    began = time.monotonic()
    pause = 1.0
    while True:
        try:
            return attempt()
        except errors.KubetuneError:
            raise
        except Exception as error:  # every store has errors of its own
            reason = _reason(error)
            if time.monotonic() + pause > began + seconds:
                raise errors.EnvironmentFault(f"{what}: {reason}") from error
            _log.warning("%s: %s; again in %.0f s", what, reason, pause)
            time.sleep(pause)
            pause = min(pause * 2, LONGEST_WAIT_SECONDS)


def _reason(error: Exception) -> str:
    """Return the message of an error in one line, without secrets."""
    # Azure's messages continue with its whole answer as XML.
    text = " ".join(str(error).split()).partition(" RequestId:")[0]
    if isinstance(error, FileNotFoundError) and "://" in text:
        text = f"there is no {text}"  # the message is only the address
    return logs.scrub(text) or type(error).__name__


def follow(mirror: Mirror, stop: threading.Event) -> None:
    """Keep the copy current until `stop`, then send the rest. While the store does not answer, try again.

    Raise EnvironmentFault if the rest cannot be sent within half an hour, and ConfigError as soon as the copy belongs to
    another run or start.
    """
    was_reached = False

    def send() -> None:
        nonlocal was_reached
        # The first attempt may fail, so the copy is taken with the first one that reaches the store.
        mirror.lease.take()
        was_reached = True
        mirror.send()

    pause = 1.0
    is_lost = False  # the last attempt failed
    while not stop.is_set():
        try:
            send()
            if is_lost:
                _log.warning("%s is back", mirror.address)
                metrics.record_event(mirror.run_dir, "mirror", address=mirror.address, ok=True)
            pause = 1.0
            is_lost = False
            stop.wait(SECONDS_BETWEEN_LOOKS)
        except errors.ConfigError as error:
            _record_loss(mirror, error)
            raise
        except Exception as error:  # no trouble of the copy may end the run
            if not is_lost:
                reason = _record_loss(mirror, error)
                _log.warning(
                    "%s cannot be written to; training goes on: %s", mirror.address, reason
                )
            is_lost = True
            stop.wait(pause)
            pause = min(pause * 2, LONGEST_WAIT_SECONDS)

    seconds = FINISH_SECONDS if was_reached else SECONDS_IF_NEVER_REACHED
    persistently(send, seconds, what=f"{mirror.address} lacks the end of the run")


def _record_loss(mirror: Mirror, error: Exception) -> str:
    """Write down that the copy is not current, and return why."""
    reason = _reason(error)
    metrics.record_event(mirror.run_dir, "mirror", address=mirror.address, ok=False, reason=reason)
    return reason


@contextmanager
def following(run_dir: Path, address: str, relay: Relay) -> Iterator[None]:
    """Copy the run directory in another process while the block runs, and wait until it has sent the rest.

    A run that was asked to stop waits no longer than its grace time.
    """
    process = processes.start_companion("kubetune.rundir.mirror.copier", "follow", run_dir, address)
    assert process.stdin is not None
    try:
        yield
    finally:
        # The end of its input tells the process to send the rest.
        process.stdin.close()
        stop_began = None  # since when a request to stop is known
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
            if relay.stopping and stop_began is None:
                stop_began = time.monotonic()
            if stop_began is not None and time.monotonic() - stop_began > relay.grace_seconds:
                process.kill()
        if process.returncode == errors.USER:
            print(
                f"kubetune: {address} is another's now; the end of this run is in {run_dir} alone",
                file=sys.stderr,
            )
        elif process.returncode != errors.OK:
            print(
                f"kubetune: {address} lacks a part of {run_dir}; send it: kubetune sync {shell_word(run_dir)}",
                file=sys.stderr,
            )


def main(argv: Sequence[str]) -> int:
    """Do what the first argument says. Return the exit code."""
    processes.die_with_parent()
    verb, folder, address = argv
    run_dir = Path(folder)
    logs.configure("INFO")
    try:
        mirror = Mirror(run_dir, address)
        if verb == "follow":
            # A signal to the whole group asks the run to save and stop, and this process sends what it saves.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            stop = threading.Event()
            threading.Thread(target=_stop_at_the_end_of_input, args=(stop,), daemon=True).start()
            follow(mirror, stop)
        else:
            restore(mirror, json.loads(os.environ.get(STARTING, "null")))
    except errors.KubetuneError as error:
        print(logs.scrub(f"kubetune: {error}"), file=sys.stderr)
        return error.exit_code
    return errors.OK


def _stop_at_the_end_of_input(stop: threading.Event) -> None:
    sys.stdin.read()
    stop.set()


def restore(mirror: Mirror, starting: dict[str, Any] | None = None) -> None:
    """Fetch the run if the store knows more of it.

    If the store cannot be reached, a run that is on this machine continues without it. On an empty machine it ends with
    an error: a run that starts over would displace the copy of the run that it should continue. Raise ConfigError if
    the copy belongs to another run: it has another name, or another config than the one `starting` here.
    """
    has_run = mirror.lease.has_begun() and not (mirror.run_dir / FETCHING).exists()

    def attempt() -> int | None:
        if not has_run and starting is not None:
            mirror.lease.require_config(starting, has_begun=bool(mirror.stored.steps()))
        step = mirror.fetch()
        mirror.lease.recognise(claims=True)
        return step

    # A run that is here already need not wait for the store.
    seconds = 0.0 if has_run else RESTORE_SECONDS
    try:
        step = persistently(attempt, seconds, what=f"{mirror.address} cannot be read")
    except errors.EnvironmentFault as error:
        if not has_run:
            raise
        _log.warning("%s; going on from what is here", error)
        return
    if step is not None:
        _log.info("step %d and the run so far came from %s", step, mirror.address)


if __name__ == "__main__":
    # Not a normal exit, which would wait for requests that were given up.
    processes.leave(main(sys.argv[1:]))
