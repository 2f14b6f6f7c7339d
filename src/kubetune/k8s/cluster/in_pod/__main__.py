"""Answer one question of the list in `__init__`, and end with its exit code."""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

from kubetune.base.signals import Relay
from kubetune.errors import ENVIRONMENT, OK
from kubetune.k8s.cluster.in_pod import dev_command
from kubetune.k8s.cluster.in_pod.run_files import listing
from kubetune.k8s.cluster.in_pod.unpacking import extract
from kubetune.k8s.cluster.in_pod.usage import usage
from kubetune.rundir.status import progress, read_status


def unpack(folder: Path) -> int:
    """Replace what is in `folder` by the tar archive on standard input, which cannot reach outside of it."""
    if dev_command.is_running(folder):
        print("training goes on here; end it first: kubetune dev stop", file=sys.stderr)
        return ENVIRONMENT
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        extract(archive, folder)
    return OK


def idle() -> None:
    """Hold the pod for people to work in. As its first process it must mind SIGTERM, or each end takes minutes."""
    with Relay() as relay:
        print("kubetune: idle; `kubetune dev run` starts training here", flush=True)
        relay.wait_for_stop()


def _print_json(value: object) -> None:
    """Print a value as one line of JSON."""
    print(json.dumps(value), flush=True)


def _print_listing(run_dir: str, *globs: str) -> None:
    """Print entries as they come, since hashes of a large checkpoint take minutes."""
    for entry in listing(Path(run_dir), globs):
        _print_json(entry)


_ANSWERS: dict[str, Callable[..., int | None]] = {
    "progress": lambda run_dir: _print_json(progress(Path(run_dir))),
    "status": lambda run_dir: _print_json(read_status(Path(run_dir))),
    "list": _print_listing,
    "usage": lambda: _print_json(usage()),
    "unpack": lambda folder: unpack(Path(folder)),
    "idle": idle,
    "start": lambda folder, *command: dev_command.start(Path(folder), *command),
    "follow": lambda folder, offset: dev_command.follow(Path(folder), int(offset)),
    "stop": lambda folder: dev_command.stop(Path(folder)),
}


def main(argv: Sequence[str]) -> int:
    """Answer a question and return the exit code."""
    return _ANSWERS[argv[0]](*argv[1:]) or OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
