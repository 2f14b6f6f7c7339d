"""Every change that a verb makes on a disk, refused in turn: a sentence and an exit code, no traceback.

Which changes a verb makes is not written here: it runs once unharmed, and each kind of change it made then fails. Runs
that train: crash/test_disk, test_refusals; copies from clusters and to object stores: the tests of those.
"""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import shutil
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import kubetune
from kubetune import errors
from kubetune.cli import main
from kubetune.config.resolved import as_yaml
from kubetune.ui.server import application
from kubetune.ui.site import Site
from tests import toy
from tests.ranks import started, wait_all
from tests.refusing import is_possible, refuse

PACKAGE = str(Path(kubetune.__file__).parent)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = (
    "open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.symlink",
    "os.link",
    "os.truncate",
)

VERBS = {
    "init": ["init", "-o", "new/first.yaml"],
    "import": ["import", "axolotl.yaml", "-o", "imported.yaml"],
    "render": ["render", "cluster.yaml", "-o", "manifests"],
    "report": ["report", "run", "-o", "new/page.html"],
    "compare": ["report", "run", "--compare", "run2", "-o", "page.html"],
    "data check": ["data", "check", "run.yaml", "--html", "page.html"],
    "data prepare": ["data", "prepare", "run.yaml"],
    "data convert": ["data", "convert", "rows.csv", "-o", "new/rows.jsonl"],
    "generate": ["generate", "run", "the quick", "--max-new-tokens", "2"],
    "evaluate": ["evaluate", "run"],
    "export": ["export", "run", "--output", "exported"],
    "merge": ["export", "run", "--output", "merged", "--merge"],
    "chat": ["chat", "run", "--max-new-tokens", "2"],
    "sweep": [
        "sweep",
        "run.yaml",
        "lora.r=2,4",
        "--sampler",
        "grid",
        "--trials",
        "1",
        "-o",
        "found",
    ],
    "serve": ["serve", "--render", "org/model", "-o", "serving"],
    "start on the page": [],
}
QUICK = ("init", "report")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all that the verbs begin with."""
    folder = tmp_path_factory.mktemp("failing") / "place"
    folder.mkdir()
    toy.make_inputs(folder)
    config = toy.make_config(folder, {"max_steps": 2})
    toy.finished(folder / "run", config)
    shutil.copytree(folder / "run", folder / "run2", symlinks=True)
    (folder / "run.yaml").write_text(as_yaml(config))
    (folder / "axolotl.yaml").write_text(
        "base_model: org/m\ndatasets: [{path: train.jsonl, type: alpaca}]\n"
    )
    (folder / "rows.csv").write_text("prompt,completion\n1,2\n3,4\n")
    storage = {name: {"size": "1Gi"} for name in ("cache", "outputs")}
    cluster = {"kubernetes": {"image": "registry.example/kubetune:1.0", "storage": storage}}
    cluster["compute"] = {"gpus_per_node": 0, "cpu": 1, "memory": "1Gi"}
    (folder / "cluster.yaml").write_text(
        json.dumps({"name": "fit", "model": "org/m", "data": {"train": "org/d"}, **cluster})
    )
    return folder


def attempt(
    place: Path, argv: list[str], refused: str = "", limit: int | None = None
) -> tuple[int, str, list[str]]:
    """Run a verb in a copy of the folder: its exit code, what it said, and the changes it made on the disk."""
    folder = place.with_name(f"copy-{os.getpid()}")
    shutil.copytree(place, folder, symlinks=True)
    os.chdir(folder)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    made: list[str] = []

    def see(event: str, args: tuple[Any, ...]) -> None:
        if event not in CHANGES or (
            event == "open" and not (isinstance(args[2], int) and args[2] & WRITING)
        ):
            return
        path = next((str(arg) for arg in args if isinstance(arg, str)), "")
        if path.startswith("/") and not path.startswith(str(folder)):
            return
        frame = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back  # type: ignore[assignment]
        if frame is None:
            return
        made.append(
            f"{event} {os.path.relpath(frame.f_code.co_filename, PACKAGE)}:{frame.f_code.co_name}"
        )
        if made[-1] == refused:
            raise OSError(
                errno.ENOSPC if event == "open" else errno.EIO, os.strerror(errno.EIO), path
            )

    output = io.StringIO()
    press = pressed(folder) if not argv else None
    with redirect_stdout(output), redirect_stderr(output):
        if limit is not None:
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
            )
        elif refused == "fsync":
            refuse(["fsync=EIO"])
        else:
            sys.addaudithook(see)
        code = main(argv) if press is None else press()
    return code, output.getvalue(), made


def pressed(folder: Path) -> Callable[[], int]:
    """Return a function that presses *Start* on the page: it prints the problems and returns the exit code of a verb."""
    site = Site.of(folder / "outputs")
    values = {
        "name": "first",
        "model.path": str(folder / "model"),
        "data.train": str(folder / "train.jsonl"),
    }
    client = TestClient(application(site, "token"), base_url="http://localhost").__enter__()
    client.get("/", params={"token": "token"})

    def press() -> int:
        answer = client.post(
            "/new/start", json={"values": values}, headers={"origin": "http://localhost"}
        ).json()
        print("\n".join(f"kubetune: {problem}" for problem in answer["problems"]))
        (*begun,) = site.jobs._children.values()
        was_running = [child.poll() is None for child in begun]
        for child in begun:
            child.kill()
            child.wait()
        assert any(was_running) <= (not answer["problems"]), "a start that was refused goes on"
        return errors.ENVIRONMENT if answer["problems"] else errors.OK

    return press


def in_child(place: Path, *args: Any) -> tuple[int, str, list[str]]:
    """Attempt it in a process of its own, which is left with whatever was done to it."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            result: Any = attempt(place, *args)
        except BaseException:
            result = (-1, traceback.format_exc(), [])
        os.write(writing, json.dumps(result).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        code, output, made = json.load(pipe)
    os.waitpid(pid, 0)
    return code, output, made


def refuse_each(place: str, argv: list[str], answer_to: str) -> None:
    """Run a verb unharmed, and then once for each kind of change that it makes, with that change refused."""
    tries = {"unharmed": in_child(Path(place), argv)}
    for change in dict.fromkeys(tries["unharmed"][2]):
        tries[change] = in_child(Path(place), argv, change)
    for limit in (0, 100):
        tries[f"files of {limit} bytes"] = in_child(Path(place), argv, "", limit)
    if is_possible():
        tries["fsync"] = in_child(Path(place), argv, "fsync")
    Path(answer_to).write_text(json.dumps(tries))


@pytest.mark.parametrize(
    "verb",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in VERBS],
)
def test_every_change_on_a_disk_may_be_refused(place: Path, tmp_path: Path, verb: str) -> None:
    with started(refuse_each, 1, str(place), VERBS[verb], str(tmp_path / "tries")) as ranks:
        assert wait_all(ranks, 600) == [0]
    tries = json.loads((tmp_path / "tries").read_text())
    unharmed = tries.pop("unharmed")
    assert unharmed[0] == errors.OK, unharmed[1]
    for change, (code, output, _) in tries.items():
        assert code in (errors.OK, errors.USER, errors.ENVIRONMENT), f"{change}: {output}"
        assert "Traceback" not in output, f"{change}: {output}"
        assert code == errors.OK or "kubetune: " in output, f"{change}: {output}"
