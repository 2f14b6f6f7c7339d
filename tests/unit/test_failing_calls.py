"""Calls to the surroundings that fail: which there are is read from the code, and each has a test that breaks it."""

from __future__ import annotations

import argparse
import ast
import errno
import functools
import io
import os
import select
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

import kubetune
from kubetune import errors
from kubetune.base import faults
from kubetune.cli.installation import doctor
from kubetune.distributed import process_group
from kubetune.distributed.process_group import World
from kubetune.k8s.api import connection
from kubetune.k8s.api.client import Cluster
from tests.broken_store import DRIP, WAYS, serving
from tests.ranks import run_ranks, started, wait_until

PACKAGE = Path(kubetune.__file__).parent
TESTS = Path(__file__).parents[1]

CALLS: dict[str, Callable[[Cluster], object]] = {
    "get": lambda cluster: cluster.get("Pod", "fit-0"),
    "list": lambda cluster: cluster.list("Pod"),
    "list_with_revision": lambda cluster: cluster.list_with_revision("Pod"),
    "require_namespace": lambda cluster: cluster.require_namespace(),
    "apply": lambda cluster: cluster.apply({"kind": "Pod", "metadata": {"name": "fit-0"}}),
    "create": lambda cluster: cluster.create({"kind": "Pod", "metadata": {"name": "fit-0"}}),
    "merge": lambda cluster: cluster.merge("Pod", "fit-0", {}),
    "delete": lambda cluster: cluster.delete("Pod", "fit-0"),
    "serves": lambda cluster: cluster.serves("Job"),
    "may": lambda cluster: cluster.may("create", "Pod"),
    "watch": lambda cluster: list(cluster.watch("Pod", seconds=1)),
    "log": lambda cluster: list(cluster.log("fit-0", "trainer")),
    "exec": lambda cluster: cluster.exec(
        "fit-0", "trainer", ["true"], stdout=io.BytesIO(), seconds=0.1
    ),
}
ASKS_NOTHING = {"tell_once"}
# Answers to 404 that are no errors.
NOT_THERE = {
    "get": None,
    "list": [],
    "list_with_revision": ([], ""),
    "delete": False,
    "serves": False,
}
# What has no time is no line of a log; the user is told of it.
UNKNOWING: dict[str, dict[str, object]] = {"garbage": {"log": []}}
MAY_NOT_KNOW = {"403": {"require_namespace": None}}


def test_every_method_that_asks_the_api_server_is_here() -> None:
    methods = {
        name
        for part in Cluster.__mro__[:-1]  # all but object
        for name, member in vars(part).items()
        if callable(member) and not name.startswith("_")
    }
    assert methods == set(CALLS) | ASKS_NOTHING


@pytest.mark.parametrize("way", [way for way in WAYS if way != "slow"])  # a stream may be slow
def test_a_call_to_the_api_server_that_fails_is_a_fault_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(connection, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(connection, "_SILENCE_SECONDS", 0.1)
    harmless = {"404": NOT_THERE, **UNKNOWING, **MAY_NOT_KNOW}.get(way, {})
    with serving(way=way) as server:
        (tmp_path / "config").write_text(
            f"clusters: [{{name: c, cluster: {{server: '{server.url}'}}}}]\n"
            "contexts: [{name: c, context: {cluster: c}}]\ncurrent-context: c\n"
        )
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        cluster = Cluster(tell=lambda text: None)
        for name, call in CALLS.items():
            with suppress(errors.EnvironmentFault):
                answer = call(cluster)
                assert name in harmless, f"{name} takes it for an answer"
                assert answer == harmless[name]


HUB_SAYS = {
    "cut": "cannot be reached: ",
    "garbage": "is not the hub: expected JSON",
    "401": "does not take the token",
    "403": "answers with 403",
    "404": "answers with 404",
    "429": "answers with 429",
    "500": "answers with 500",
}


@pytest.mark.parametrize("way", [*WAYS, DRIP])
def test_the_doctor_tells_of_a_hub_that_fails(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(doctor, "_HUB_SECONDS", 0.3 if way in ("silent", "slow", DRIP) else 30.0)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "t" * 34)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with serving(way="garbage") as behind, serving(behind.url, way) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        (finding,) = doctor._hub(argparse.Namespace(offline=False))
        assert finding.level == ("wrong" if way == "401" else "note")
        assert HUB_SAYS.get(way, "cannot be reached: ") in finding.result
        assert finding.remedy


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff", b'"' + b"a" * (1 << 20) + b'"'])
def test_the_doctor_reads_no_answer_that_is_none_of_the_hubs(
    monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    """Nested too deeply, no text, or too long."""

    class Hub(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
        *_, finding = doctor._hub(argparse.Namespace(offline=False))
        hub.shutdown()
    assert "is not the hub: expected JSON" in finding.result
    assert ("at most 1,048,576 bytes" in finding.result) == (len(content) > 1 << 20)


def test_the_doctor_keeps_the_token_from_where_a_hub_redirects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other origin differs in its port alone."""
    heard: dict[str, str | None] = {}

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard[self.path] = self.headers.get("Authorization")
            is_moved = self.path.startswith("/api/")
            self.send_response(307 if is_moved else 200)
            self.send_header("Location", f"http://localhost:{other.server_port}/elsewhere")
            self.end_headers()
            if not is_moved:
                self.wfile.write(b'{"name": "alice"}')

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    token = "hf_" + "t" * 34
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub,
        ThreadingHTTPServer(("127.0.0.1", 0), Hub) as other,
    ):
        for server in (hub, other):
            threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
        list(doctor._hub(argparse.Namespace(offline=False)))
        hub.shutdown()
        other.shutdown()
    assert heard == {"/api/whoami-v2": f"Bearer {token}", "/elsewhere": None}


@pytest.mark.parametrize(
    "endpoint", ["http://[::1", "huggingface.co", "http://127.0.0.1:1 /", "ftp://user:secret@x"]
)
def test_the_doctor_takes_no_endpoint_for_granted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, endpoint: str
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    (tmp_path / "token").write_bytes(b"\xff\xfe")
    token, hub = doctor._hub(argparse.Namespace(offline=False))
    assert f"{tmp_path / 'token'} cannot be read" in token.result
    assert "cannot be reached" in hub.result
    assert "secret" not in hub.result


COLLECTIVES: dict[str, Callable[[World], object]] = {
    "sum_": lambda world: process_group.sum_(torch.tensor([world.rank + 1.0]), world).tolist(),
    "sum_numbers": lambda world: process_group.sum_numbers([world.rank + 1.0], world),
    "agree": lambda world: process_group.agree(world.rank == 1, world),
    "gather": lambda world: process_group.gather(world.rank, world),
    "gather_parts": lambda world: process_group.gather_parts([world.rank, 5], world),
    "broadcast": lambda world: process_group.broadcast(f"of {world.rank}", world),
    "barrier": process_group.barrier,
    "side_group": lambda world: process_group.gather(
        world.rank, world, process_group.side_group(world, 60.0)
    ),
}
COLLECTED = [[3.0], [3.0], True, [0, 1], [0, 5, 1, 5], "of 0", None, [0, 1]]


def test_every_function_that_waits_for_other_ranks_is_here() -> None:
    tree = ast.parse(Path(str(process_group.__file__)).read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    waiting = {"peers"}
    previous = set[str]()
    while waiting != previous:
        previous = set(waiting)
        waiting |= {
            function.name
            for function in functions
            for node in ast.walk(function)
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in previous
        }
    # As ranks meet: crash/test_peers. As neighbours do: run/test_base_shards, which needs four.
    assert waiting == {*COLLECTIVES, "peers", "join", "copy_of"}


def collect_late(world: World) -> list[object]:
    """Return the result of each collective, for which the other rank comes late."""
    outcomes = []
    for call in COLLECTIVES.values():
        if world.rank:
            select.select([], [], [], 0.02)
        outcomes.append(call(world))
    return outcomes


def test_a_late_rank_is_waited_for_in_every_collective() -> None:
    assert run_ranks(collect_late, 2) == [COLLECTED, COLLECTED]


def collect_alone(folder: str, number: int) -> int:
    """Call each collective, for which the other rank does not come; return 0 where all of them say so."""
    with process_group.join(timeout_seconds=20.0) as world:
        if world.rank:
            os.kill(os.getpid(), number)

        def soon(world: World) -> object:
            return process_group.side_group(world, 0.5)

        for name, call in {**COLLECTIVES, "side_group": soon}.items():
            try:
                call(world)
            except errors.LostPeer as error:
                (Path(folder) / name).write_text(str(error))
    return errors.OK


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_rank_that_does_not_come_is_lost_in_every_collective(tmp_path: Path, number: int) -> None:
    with started(collect_alone, 2, str(tmp_path), number) as ranks:
        wait_until(lambda: ranks[0].exitcode is not None)
    assert {path.name for path in tmp_path.iterdir()} == set(COLLECTIVES)
    assert all(path.read_text().startswith("lost another rank: ") for path in tmp_path.iterdir())


# -- what there is, by the code itself
# Names by which the hub, or any other web server, is asked.
ASKED = {
    "hf_hub_download", "snapshot_download", "load_dataset", "get_dataset_split_names", "list_repo_files", "create_repo",
    "model_info", "upload_folder", "urlopen", "load_dataset_builder", "dataset_info", "upload_file", "create_commit",
    "get_dataset_config_names", "whoami", "auth_check", "repo_info", "list_repo_tree", "hf_hub_url",
}  # fmt: skip
HUB_CASES = {
    "cli/installation/doctor.py": "unit/test_failing_calls.py",
    "data/prepared/fetch_worker.py": "run/test_broken_hub.py",
    "data/reading/hub.py": "run/test_broken_hub.py",
    "data/reading/sources.py": "run/test_broken_hub.py",
    "plugins/recipes/dataset_files.py": "run/test_broken_hub.py",
    "result/publishing/hub_upload.py": "run/test_broken_hub.py",
}


@functools.cache
def calls() -> list[tuple[str, ast.Call, str]]:
    """Return each call in kubetune: its file, itself, and the name of the function or method."""
    return [
        (
            str(path.relative_to(PACKAGE)),
            node,
            getattr(node.func, "attr", getattr(node.func, "id", "")),
        )
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]


def is_of(node: ast.Call, module: str) -> bool:
    """True for a call of `module.something`."""
    of = getattr(node.func, "value", None)
    return isinstance(of, ast.Name) and of.id == module


def require_cases(names: set[str], cases: dict[str, str]) -> None:
    """Require that each file with such calls has a test that breaks them, and that no case is superfluous."""
    assert names == set(cases)
    assert all((TESTS / test).is_file() for test in cases.values())


def test_every_file_that_asks_the_hub_has_a_test_that_breaks_it() -> None:
    require_cases({file for file, _, name in calls() if name in ASKED}, HUB_CASES)


RANKS_CASES = {
    "plugins/diagnostics/smoke/rank_measurements.py": "run/test_smoke.py",
    "distributed/process_group.py": "unit/test_failing_calls.py",
    "distributed/rendezvous.py": "crash/test_hang.py",
    "models/fsdp.py": "crash/test_peers.py",
}


def test_every_file_that_speaks_to_other_ranks_has_a_test_that_breaks_it() -> None:
    named = {"fully_shard", "TCPStore", "full_tensor", "redistribute"}
    of_torch = {name for name in dir(torch.distributed) if name[0].islower()} - {
        "get_backend",
        "is_available",
        "is_initialized",
    }
    files_with_calls = {
        file
        for file, node, name in calls()
        if name in named or (is_of(node, "dist") and name in of_torch)
    }
    require_cases(files_with_calls, RANKS_CASES)


REFUSED_IN = {
    "base": "unit/test_files.py",
    "cli": "run/test_failing_disk.py",
    "data": "run/test_failing_disk.py",
    "k8s": "cluster/test_operate_faults.py",
    "plugins": "run/test_failing_disk.py",
    "result": "run/test_failing_disk.py",
    "rundir": "crash/test_disk.py",
    "training": "crash/test_disk.py",
    "ui": "unit/test_ui_new.py",
}
# Rooms whose errors go up to the command, which says what the system refused (faults.fault_of).
EXPLAINED_AT_THE_END = {"library", "scoring", "supervisor"}


def changes_disk(node: ast.Call, name: str) -> bool:
    """True if the call makes, changes, moves or removes a file or a folder."""
    if name == "open":
        modes = [str(arg.value) for arg in node.args[:2] if isinstance(arg, ast.Constant)]
        return any(set(mode) <= set("rwxabt+") and set(mode) & set("wxa+") for mode in modes)
    if name in ("rename", "replace", "remove", "link", "truncate"):
        return is_of(node, "os")
    return name in {
        "write_text", "write_bytes", "mkdir", "makedirs", "symlink", "symlink_to", "unlink", "rmdir", "rmtree",
        "copyfile", "copytree", "copyfileobj", "move", "touch", "fsync", "ftruncate", "save_file", "save_pretrained",
    }  # fmt: skip


def test_rooms_change_files_where_a_refusal_is_tested_or_goes_up_to_the_command() -> None:
    rooms = {file.partition("/")[0] for file, node, name in calls() if changes_disk(node, name)}
    require_cases(rooms - EXPLAINED_AT_THE_END, REFUSED_IN)


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EFBIG, "allow larger files (ulimit -f)"),
        (errno.EROFS, "see that it can be read and written"),
    ],
)
def test_what_the_system_refuses_is_explained_at_the_end(number: int, advice: str) -> None:
    message = str(faults.fault_of(OSError(number, os.strerror(number), "/run/file")))
    assert message.startswith(f"/run/file: {os.strerror(number)}; {advice}")
