"""What docs/grpo.md says that reward functions cannot do: tried row by row, as root, as a user, and without namespaces."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kubetune.scoring.rewards import isolation
from tests import probes
from tests.trainer_with_secrets import MARK

ROOT = Path(__file__).parents[2]
NOBODY = 65534
ROWS = {
    "see other processes and their command lines": ["list_processes"],
    "read the environment, open files or memory maps of the trainer": [
        "read_environment",
        "list_open_files",
        "read_map",
    ],
    "read, change or trace its memory": ["read_memory", "write_memory", "copy_memory", "trace"],
    "signal processes that it has not started": ["send_signal"],
    "change their limits, priority or processors": ["set_limit", "set_processors", "set_priority"],
    "outlive the trainer where memory runs out": ["be_spared_without_memory"],
    "connect to sockets on the disk, such as Docker's or an SSH agent's, or to abstract ones": [
        "connect_by_path",
        "connect_pair_by_path",
        "connect_by_name",
    ],
    "reach a network, also that of this machine": ["connect_tcp", "send_udp"],
    "change mode, owner, times or attributes of files outside of its folder": [
        "change_mode",
        "change_owner",
        "change_times",
        "change_attributes",
    ],
    "write, truncate, rename, link, make or delete them": [
        "write_file",
        "truncate_file",
        "rename_file",
        "link_file",
        "make_file",
        "remove_file",
    ],
    "let other users run files of its own with its rights (setuid)": ["open_private_folder"],
    "hold locks (`flock`) on files that it may read": ["lock_file"],
    "hold leases on files of its user's, so that others wait to open them, 45 s at most": [
        "lease_file"
    ],
    "write to pipes on the disk": ["write_pipe"],
    "change the mode of the run's output": ["change_mode_of_output"],
    "open terminals": ["open_terminal"],
    "write to shared memory of others, in `/dev/shm` or by key": [
        "write_shared_memory",
        "use_queue",
    ],
    "change kernel settings, the host name or the clock": [
        "write_setting",
        "set_host_name",
        "set_clock",
    ],
    "mount, or make namespaces": ["mount", "new_user_namespace"],
    "use the user's keyrings": ["read_keys"],
    "use io_uring": ["start_ring"],
    "leave processes behind": ["keep_process"],
}
# Bash: gives the tree of Python to others than its owner, in a mount namespace that ends with the command.
OPEN_TREE = """
mount --bind "$TREE" "$STAGE" && mount -t tmpfs -o mode=755 tmpfs "$CLOSED" && mkdir -p "$TREE" &&
mount --bind "$STAGE" "$TREE" && exec "$@"
"""


def documented(column: str) -> dict[str, bool]:
    """Return a column of the table: True for rows that are contained."""
    lines = (ROOT / "docs/grpo.md").read_text("utf-8").splitlines()
    head = next(number for number, line in enumerate(lines) if "a function cannot" in line)
    names = [cell.strip() for cell in lines[head].strip("|").split("|")]
    rows = {}
    for line in lines[head + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[cells[0]] = cells[names.index(column)] == "yes"
    return rows


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder that the user `nobody` may enter, which pytest's are not."""
    made = Path(tempfile.mkdtemp(prefix="kubetune-test-containment-"))
    os.chmod(made, 0o755)
    (made / "stage").mkdir()
    (made / "targets").mkdir()
    try:
        yield made
    finally:
        shutil.rmtree(made)


def tried(folder: Path, way: str, user: int) -> dict[str, list[str]]:
    """Return what the function got done, and what the kernel refuses."""
    command = [sys.executable, "-m", "tests.trainer_with_secrets", str(folder / "targets"), way]
    environ = {**os.environ, "TEST_MARK": MARK, "TMPDIR": str(folder / "targets")}
    if user != os.geteuid():
        os.chown(folder / "targets", user, user)
        ids = [f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        command = ["setpriv", *ids, *command]
        if closed := _closed_folder(Path(sys.base_prefix)):
            environ |= {"TREE": sys.base_prefix, "CLOSED": str(closed)}
            environ["STAGE"] = str(folder / "stage")
            command = ["unshare", "-m", "bash", "-c", OPEN_TREE, "bash", *command]
    elif user == 0:
        # A try that succeeds mounts something.
        command = ["unshare", "-m", *command]
    # The mark is in the command line, too. The log is a file, as that of a run may be.
    log = folder / "log"
    with log.open("w") as errors:
        done = subprocess.run(
            [*command, MARK],
            env=environ,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, log.read_text()
    result: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return result


def _closed_folder(path: Path) -> Path | None:
    """Return the uppermost folder of a path that others may not enter."""
    for parent in reversed([path, *path.parents]):
        if not parent.stat().st_mode & 0o001:
            return parent
    return None


def user_of(column: str) -> int:
    """Return the user for a column. Skip where this machine cannot start a process of that user."""
    if os.geteuid() != 0:
        if column == "as root":
            pytest.skip("needs root")
        return os.geteuid()
    if column == "as root":
        return 0
    if not all(map(shutil.which, ("setpriv", "unshare", "bash"))) or _closed_folder(ROOT):
        pytest.skip("no other user can start Python here")
    return NOBODY


def test_every_row_is_tried() -> None:
    assert set(documented("as root")) == set(ROWS)
    names = [name for tries in ROWS.values() for name in tries]
    assert sorted(names) == sorted(probes.TRIES)


@pytest.mark.parametrize(
    ("column", "way"),
    [("as root", "bounded"), ("as a user", "bounded"), ("no namespaces", "refused")],
)
def test_functions_can_do_what_the_table_says_and_no_more(
    folder: Path, column: str, way: str
) -> None:
    result = tried(folder, way, user_of(column))
    expected = ["namespaces"] if way == "refused" else []
    if result["refused"] != expected:
        pytest.skip(f"this kernel refuses {isolation.consequences(result['refused'])}")
    contained = {row: not set(tries) & set(result["succeeded"]) for row, tries in ROWS.items()}
    assert contained == documented(column), result["succeeded"]


def test_each_try_succeeds_without_bounds(folder: Path) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root")
    result = tried(folder, "unbounded", 0)
    # What outlives its parent is tried without namespaces.
    assert set(probes.TRIES) - set(result["succeeded"]) == {"keep_process"}
