"""A copy of a run directory in an object store: kept up while the run goes on, and gone on from on an empty machine.

    python -m kubetune.rundir.mirror.copier follow RUN_DIR ADDRESS
        copies until its standard input ends, then the rest
    python -m kubetune.rundir.mirror.copier restore RUN_DIR ADDRESS
        fetches what is newer there: the run, its newest checkpoints; `STARTING` in the environment: the config of what
        begins

A process of its own, so that training waits for no network. What is copied, and how, is sync.py's.
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
from kubetune.rundir.mirror.sync import FETCHING, Mirror

SECONDS_BETWEEN_LOOKS = 5.0
LONGEST_WAIT_SECONDS = 60.0
FINISH_SECONDS = 1800.0
"""After the end of a run: how long it is tried to send the rest."""

STARTING = "KUBETUNE_STARTING"
"""Environment variable with the resolved config of the run that begins, as JSON: another one's copy is refused."""
RESTORE_SECONDS = 120.0
SECONDS_IF_REFUSED = 5.0
REFUSALS = {
    *("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"),
    *("ClientAuthenticationError", "ResourceNotFoundError"),
}
"""Errors of boto, google.auth and azure.core by their names: none of them need be installed."""

_log = logs.family_logger("MIRROR")


def persistently(
    attempt: Callable[[], Any],
    seconds: float,
    *,
    wait: Callable[[float], Any] = time.sleep,
    what: str,
) -> Any:
    """`attempt()`, again and again with longer waits while it fails. Raises EnvironmentFault after `seconds`.

    After a few, where waiting helps little: a bucket that is not there, or credentials.
    """
    began, pause = time.monotonic(), 1.0
    while True:
        try:
            return attempt()
        except errors.KubetuneError:
            raise
        except Exception as error:  # every store has errors of its own
            reason = _reason(error)
            patience = min(seconds, SECONDS_IF_REFUSED) if _is_refused(error) else seconds
            if time.monotonic() + pause > began + patience:
                raise errors.EnvironmentFault(f"{what}: {reason}") from error
            _log.warning("%s: %s; again in %.0f s", what, reason, pause)
            wait(pause)
            pause = min(pause * 2, LONGEST_WAIT_SECONDS)


def _is_refused(error: Exception) -> bool:
    """The store answers, and says no; its libraries have classes of their own for that."""
    if isinstance(error, FileNotFoundError | PermissionError):
        return True
    status = getattr(error, "status_code", getattr(error, "code", None))
    return status in (401, 403) or bool(REFUSALS & {kind.__name__ for kind in type(error).__mro__})


def _reason(error: Exception) -> str:
    said = " ".join(str(error).split()).partition(" RequestId:")[
        0
    ]  # Azure goes on with its answer as XML
    what = "there is no " if isinstance(error, FileNotFoundError) and "://" in said else ""
    return logs.scrub(what + said) or type(error).__name__


def follow(mirror: Mirror, stop: threading.Event) -> None:
    """Keep the copy up until `stop`, however often the store is away; then send the rest.

    Raises EnvironmentFault when that is not possible within half an hour, and ConfigError as soon as the copy is found
    to be another's.
    """
    pause, is_lost = 1.0, False
    is_ours = False

    def send(*, everything: bool) -> None:
        nonlocal is_ours  # taken once, but the store may be away when it is wanted first
        if not is_ours:
            mirror.lease.take()
            is_ours = True
        mirror.send(everything=everything)

    while not stop.is_set():
        try:
            send(everything=False)
            if is_lost:
                _log.warning("%s is back", mirror.address)
                metrics.record_event(mirror.run_dir, "mirror", address=mirror.address, ok=True)
            pause, is_lost = 1.0, False
            stop.wait(SECONDS_BETWEEN_LOOKS)
        except errors.ConfigError as error:
            metrics.record_event(
                mirror.run_dir, "mirror", address=mirror.address, ok=False, reason=_reason(error)
            )
            raise
        except Exception as error:  # nothing that happens to the copy may end the original
            if not is_lost:
                _log.warning(
                    "%s cannot be written to; training goes on: %s", mirror.address, _reason(error)
                )
                metrics.record_event(
                    mirror.run_dir,
                    "mirror",
                    address=mirror.address,
                    ok=False,
                    reason=_reason(error),
                )
            is_lost = True
            stop.wait(pause)
            pause = min(pause * 2, LONGEST_WAIT_SECONDS)

    def send_the_rest() -> None:
        send(everything=True)
        mirror.lease.release()

    persistently(send_the_rest, FINISH_SECONDS, what=f"{mirror.address} lacks the end of the run")


@contextmanager
def following(run_dir: Path, address: str, relay: Relay) -> Iterator[None]:
    """A process that follows the run while the block runs, and then sends the rest, which is waited for.

    A run that was asked to stop waits no longer than its grace time.
    """
    process = processes.start_companion("kubetune.rundir.mirror.copier", "follow", run_dir, address)
    assert process.stdin is not None
    try:
        yield
    finally:
        process.stdin.close()
        asked = None
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
            asked = asked or (time.monotonic() if relay.stopping else None)
            if asked is not None and time.monotonic() - asked > relay.grace_seconds:
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
    """Do what the first argument says; returns the exit code."""
    processes.die_with_parent()
    verb, run_dir, address = argv[0], Path(argv[1]), argv[2]
    logs.configure("INFO")
    try:
        mirror = Mirror(run_dir, address)
        if verb == "follow":
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
    """Fetch what the store has newer. An unreachable store is no reason to stop where the run itself is here.

    On an empty machine it is: a run that starts over would displace the copy of the one it should go on with. Raises
    ConfigError where the copy is another run's: of another name, or of another config than the one `starting` here.
    """
    has_run = mirror.lease.has_begun() and not (mirror.run_dir / FETCHING).exists()

    def attempt() -> int | None:
        if not has_run and starting is not None:
            mirror.lease.require_config(starting, has_begun=bool(mirror.remote_steps()))
        step = mirror.fetch()
        mirror.lease.recognise(claims=True)
        return step

    try:
        step = persistently(
            attempt, 0.0 if has_run else RESTORE_SECONDS, what=f"{mirror.address} cannot be read"
        )
    except errors.EnvironmentFault as error:
        if not has_run:
            raise
        _log.warning("%s; going on from what is here", error)
        return
    if step is not None:
        _log.info("step %d and the run so far came from %s", step, mirror.address)


if __name__ == "__main__":
    processes.leave(main(sys.argv[1:]))  # waiting for no request that was given up
