"""A copy of a run directory in an object store: kept up while the run goes on, and gone on from on an empty machine.

    python -m kubetune.mirror follow RUN_DIR ADDRESS      copies until its standard input ends, then the rest
    python -m kubetune.mirror restore RUN_DIR ADDRESS     fetches what is newer there: the run, its newest checkpoints;
                                                          `STARTING` in the environment: the config of what begins

A process of its own, so that training waits for no network. Of a checkpoint the manifest is sent last and deleted
first: a step that has one is whole. Stores are fsspec's; credentials and endpoints are those their libraries look for.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kubetune import checkpoint, errors, files, logs, metrics, processes
from kubetune.mirror_owner import REMOTE, Title
from kubetune.relay import Relay

LIBRARIES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs"}
LINKS = ("best", "last")
RUN_FILES = (
    "config.yaml", "resolved.json", "plan.json", "metrics.jsonl", "timings.jsonl", "events.jsonl", "tracking.json",
    "report.json",
)  # fmt: skip
"""What a run needs to go on, besides a checkpoint."""

SECONDS_BETWEEN_LOOKS = 5.0
SECONDS_BETWEEN_LOGS = 30.0
LONGEST_WAIT_SECONDS = 60.0
FINISH_SECONDS = 1800.0
STARTING = "KUBETUNE_STARTING"
"""Environment variable with the resolved config of the run that begins, as JSON: another one's copy is refused."""
RESTORE_SECONDS = 120.0

_log = logs.family_logger("MIRROR")


def check_installed(address: str) -> None:
    """Raise ConfigError when the library for an address is not there. Imports none."""
    library = LIBRARIES[address.split("://")[0]]
    if find_spec(library) is None:
        package = "'kubetune[s3]'" if library == "s3fs" else library
        raise errors.ConfigError(f"{address} needs {library}, which is not installed: pip install {package}")


class Mirror:
    """One run directory and its copy. `send` and `fetch` raise whatever the store's library raises."""

    def __init__(self, run_dir: Path, address: str) -> None:
        check_installed(address)
        from fsspec.core import url_to_fs

        self.run_dir, self.address = run_dir, address
        # Another process may write there too; what was listed a minute ago is not what is there.
        self._fs, root = url_to_fs(address, use_listings_cache=False, skip_instance_cache=True)
        self._root = root.rstrip("/")
        self.title = Title(self._fs, self._root, address, run_dir)
        self._sent: dict[str, tuple[int, int]] = {}
        self._sent_steps: dict[int, str] = {}
        self._sent_links: dict[str, str] = {}
        self._last_logs = -SECONDS_BETWEEN_LOGS

    def remote_files(self) -> dict[str, int]:
        """Sizes of the run's files in the store, by their path in the run directory."""
        try:
            found = self._fs.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        named = {name[len(self._root) + 1 :]: int(info["size"]) for name, info in found.items()}
        return {name: size for name, size in named.items() if name != REMOTE}

    def send(self, *, everything: bool = True) -> None:
        """Make the copy what the directory is now. Not `everything`: logs only every half minute.

        Raises ConfigError where the copy is another run's, or a later start of this one keeps it up.
        """
        self.title.check()
        steps = [s for s in checkpoint.steps(self.run_dir) if (self._folder(s) / checkpoint.MANIFEST).is_file()]
        # After the look at the checkpoints, whose metrics are on disk before they are: so they are sent before, too.
        if everything or time.monotonic() - self._last_logs >= SECONDS_BETWEEN_LOGS:
            self._last_logs, everything = time.monotonic(), True
        for name, facts in self._run_files(everything):
            if self._sent.get(name) != facts:
                self._put(self.run_dir / name, name)
                self._sent[name] = facts
        for step in steps:
            self._send_step(step)
        for name in LINKS:
            self._send_link(name)
        self._forget_pruned(steps)

    def _folder(self, step: int) -> Path:
        return checkpoint.folder_of(self.run_dir, step)

    def _run_files(self, everything: bool) -> Iterator[tuple[str, tuple[int, int]]]:
        for path in sorted(self.run_dir.rglob("*")):
            name = path.relative_to(self.run_dir)
            hidden = any(part.startswith(".") for part in name.parts)
            if hidden or name.parts[0] == "checkpoints" or path.suffix == ".lock" or path.is_symlink():
                continue
            if not everything and name.parts[0] in ("logs", "tensorboard"):
                continue
            try:
                if path.is_file():
                    found = path.stat()
                    yield str(name), (found.st_size, found.st_mtime_ns)
            except FileNotFoundError:
                continue  # it was there a moment ago

    def _put(self, path: Path, name: str) -> None:
        try:
            self._fs.put_file(str(path), f"{self._root}/{name}")
        except FileNotFoundError:
            if path.exists():
                raise  # it is the bucket that is missing

    def _send_step(self, step: int) -> None:
        folder = self._folder(step)
        try:
            manifest = (folder / checkpoint.MANIFEST).read_text()
        except FileNotFoundError:
            return  # pruned meanwhile
        if self._sent_steps.get(step) == manifest:
            return
        place = f"{self._root}/checkpoints/{folder.name}"
        if self._read(f"{place}/{checkpoint.MANIFEST}") != manifest:
            for path in sorted(folder.rglob("*")):
                if path.is_file() and path.name != checkpoint.MANIFEST:
                    self._put(path, f"checkpoints/{folder.name}/{path.relative_to(folder)}")
            if not (folder / checkpoint.MANIFEST).exists():
                return
            self._fs.pipe_file(f"{place}/{checkpoint.MANIFEST}", manifest.encode())
            _log.info("%s is at %s", folder.name, self.address)
        self._sent_steps[step] = manifest

    def _read(self, place: str) -> str | None:
        try:
            return str(self._fs.cat_file(place).decode())
        except FileNotFoundError:
            return None

    def _send_link(self, name: str) -> None:
        link = self.run_dir / "checkpoints" / name
        target = link.readlink().name if link.is_symlink() else None
        if target is not None and self._sent_links.get(name) != target and self._step_of(target) in self._sent_steps:
            self._fs.pipe_file(f"{self._root}/checkpoints/{name}", target.encode())
            self._sent_links[name] = target

    @staticmethod
    def _step_of(folder_name: str) -> int:
        found = checkpoint.STEP_FOLDER.fullmatch(folder_name)
        return int(found[1]) if found else -1

    def _forget_pruned(self, steps: Sequence[int]) -> None:
        """Delete steps that are gone here, but never the newest there: it may be all there is of a longer run."""
        there = self.remote_steps()
        for step in there:
            if step not in steps and steps and step < steps[-1] and step in self._sent_steps:
                self._delete_step(step)

    def _delete_step(self, step: int) -> None:
        place = f"{self._root}/checkpoints/{self._folder(step).name}"
        self._fs.rm_file(f"{place}/{checkpoint.MANIFEST}")
        self._fs.rm(place, recursive=True)
        del self._sent_steps[step]

    def remote_steps(self) -> list[int]:
        """Steps whose checkpoint in the store is whole, in order."""
        marker = re.compile(rf"checkpoints/{checkpoint.STEP_FOLDER.pattern}/{re.escape(checkpoint.MANIFEST)}")
        return sorted(int(m[1]) for name in self.remote_files() if (m := marker.fullmatch(name)))

    def fetch(self, *, everything: bool = False) -> int | None:
        """Bring the run here where the store knows it longer; returns the step it can go on from, None for nothing.

        The newest checkpoint and the best one come, each checked and then named; `everything`: all files there are.
        Raises ConfigError where the directory holds another run.
        """
        self.title.recognise(claims=False)
        there = self.remote_files()
        remote, local = self.remote_steps(), checkpoint.steps(self.run_dir)
        if not there or (local and not everything and (not remote or remote[-1] <= local[-1])):
            return None
        links = {name: self._read(f"{self._root}/checkpoints/{name}") for name in LINKS}
        wanted = [name for name in there if not name.startswith("checkpoints/")] if everything else list(RUN_FILES)
        best = self._step_of(links["best"] or "")
        for step in remote[:-1]:
            if everything or step == best:
                self._fetch_step(step)
        for name in wanted:
            if name in there:
                content = self._fs.cat_file(f"{self._root}/{name}")
                files.write_atomic(files.join_inside(self.run_dir, name), content)
        newest = self._fetch_newest(remote)  # last, because a fetch that was cut off is known by its lack
        if newest is not None:
            checkpoint.link(self.run_dir, "last", newest)
        if self._folder(best).is_dir():
            checkpoint.link(self.run_dir, "best", best)
        return newest

    def _fetch_newest(self, steps: Sequence[int]) -> int | None:
        for step in reversed(steps):
            if self._fetch_step(step):
                return step
        return None

    def _fetch_step(self, step: int) -> bool:
        """Fetch a checkpoint unless it is here; whether it is whole."""
        final = self._folder(step)
        if final.is_dir() and checkpoint.verify(final) is None:
            return True
        partial = files.temporary_sibling(final)
        try:
            with files.explained_writes(final):
                partial.mkdir(parents=True)
                place = f"{self._root}/checkpoints/{final.name}/"
                for name in self._fs.find(place):
                    target = files.join_inside(partial, name[len(place) :])
                    target.parent.mkdir(parents=True, exist_ok=True)
                    self._fs.get_file(name, str(target))
                if problem := checkpoint.verify(partial):
                    _log.warning("%s at %s %s; left there", final.name, self.address, problem)
                    return False
                files.fsync_tree(partial)
                if final.exists():
                    checkpoint.set_aside(final)
                partial.rename(final)
                files.fsync_folder(final.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return True


def persistently(
    attempt: Callable[[], Any], seconds: float, *, wait: Callable[[float], Any] = time.sleep, what: str
) -> Any:
    """`attempt()`, again and again with longer waits while it fails. Raises EnvironmentFault after `seconds`."""
    deadline, pause = time.monotonic() + seconds, 1.0
    while True:
        try:
            return attempt()
        except errors.KubetuneError:
            raise
        except Exception as error:  # every store has errors of its own
            reason = _reason(error)
            if time.monotonic() + pause > deadline:
                raise errors.EnvironmentFault(f"{what}: {reason}") from error
            _log.warning("%s: %s; again in %.0f s", what, reason, pause)
            wait(pause)
            pause = min(pause * 2, LONGEST_WAIT_SECONDS)


def _reason(error: Exception) -> str:
    return logs.scrub(" ".join(str(error).split())) or type(error).__name__


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
            mirror.title.take()
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
            metrics.record_event(mirror.run_dir, "mirror", address=mirror.address, ok=False, reason=_reason(error))
            raise
        except Exception as error:  # nothing that happens to the copy may end the original
            if not is_lost:
                _log.warning("%s cannot be written to; training goes on: %s", mirror.address, _reason(error))
                metrics.record_event(mirror.run_dir, "mirror", address=mirror.address, ok=False, reason=_reason(error))
            is_lost = True
            stop.wait(pause)
            pause = min(pause * 2, LONGEST_WAIT_SECONDS)
    persistently(lambda: send(everything=True), FINISH_SECONDS, what=f"{mirror.address} lacks the end of the run")


@contextmanager
def following(run_dir: Path, address: str, relay: Relay) -> Iterator[None]:
    """A process that follows the run while the block runs, and then sends the rest, which is waited for.

    A run that was asked to stop waits no longer than its grace time.
    """
    command = [sys.executable, "-m", "kubetune.mirror", "follow", str(run_dir), address]
    environ = {**os.environ, processes.AGENT_PID: str(os.getpid())}
    # A session of its own: Ctrl-C is for the run, whose end is still to be sent.
    process = subprocess.Popen(
        command, env=environ, stdin=subprocess.PIPE, start_new_session=True, preexec_fn=processes.die_with_parent
    )
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
            print(f"kubetune: {address} is another's now; the end of this run is in {run_dir} alone", file=sys.stderr)
        elif process.returncode != errors.OK:
            print(f"kubetune: {address} lacks a part of {run_dir}; send it: kubetune sync {run_dir}", file=sys.stderr)


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
    has_run = (mirror.run_dir / "resolved.json").is_file()

    def attempt() -> int | None:
        if not has_run and starting is not None:
            mirror.title.require_config(starting, has_begun=bool(mirror.remote_steps()))
        step = mirror.fetch()
        mirror.title.recognise(claims=True)
        return step

    try:
        step = persistently(attempt, 0.0 if has_run else RESTORE_SECONDS, what=f"{mirror.address} cannot be read")
    except errors.EnvironmentFault as error:
        if not has_run:
            raise
        _log.warning("%s; going on from what is here", error)
        return
    if step is not None:
        _log.info("step %d and the run so far came from %s", step, mirror.address)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
