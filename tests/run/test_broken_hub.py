"""A hub that refuses, breaks off, stammers or is not one: each way ends with the right code and what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Protocol

import pytest

from kubetune import errors
from tests.broken_hub import serving
from tests.ranks import free_port

ASK = """
import gc, json, os, sys, traceback
import datasets, huggingface_hub.utils._http as http
from kubetune import errors
from kubetune.data.prepared import fetch_worker
from kubetune.result.publishing import hub_upload
from kubetune.config.schema import ModelConfig
from kubetune.data.reading import hub
from kubetune.data.reading import sources
from kubetune.plugins.recipes import dataset_files
hub_upload.WAITS_SECONDS = (0.0,)
datasets.config.STREAMING_READ_MAX_RETRIES, datasets.config.STREAMING_READ_RETRY_INTERVAL = 2, 0
for function in (http.http_backoff, http.http_stream_backoff.__wrapped__):
    function.__kwdefaults__["max_wait_time"] = function.__kwdefaults__["base_wait_time"] = 0.01

def ask(what, repo, folder):
    try:
        match what:
            case "find":
                hub.find_files(ModelConfig(path=repo), repo, ["config.json"])
            case "list":
                print(hub.list_files(ModelConfig(path=repo), repo))
            case "fetch":
                fetch_worker.fetch(ModelConfig(path=repo))
            case "data":
                sources.load_dataset(repo, None, "train")
            case "judge":
                hub.require_dataset(repo, os.environ)
            case "convert":
                dataset_files.locate_splits(f"hub:{repo}", ["train"], are_given=False)
            case "push":
                hub_upload.upload(folder, repo, private=True, message="m")
    except errors.KubetuneError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0

gc.freeze()
for line in sys.stdin:
    told, hub.PATIENCE_SECONDS, *asked = json.loads(line)
    pid = os.fork()
    if pid == 0:
        code = 1
        for number in (1, 2):
            os.dup2(os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        try:
            code = ask(*asked)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)  # taking all apart that was imported takes longer than what was asked
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
OUT = errors.ENVIRONMENT
OURS = errors.USER
LOST, AWAY, NOT_ONE = (
    "connection to the hub was lost",
    "the hub cannot be reached: ",
    "is not the hub: expected",
)
TOKEN, ABSENT = "the token in HF_TOKEN is not valid", "is not on the hub"
FIND = {
    "refused": (OUT, AWAY),
    "reset": (OUT, LOST),
    "slow": (OUT, AWAY),
    "500": (OUT, "the hub refused"),
    "truncated": (OUT, NOT_ONE),
    "garbage": (OUT, NOT_ONE),
    "other JSON": (OUT, NOT_ONE),
    "cut": (OUT, LOST),
    "stalled": (OUT, LOST),
    "swapped": (OUT, NOT_ONE),
    "429": (OUT, "too many requests"),
    "come back later": (OUT, "too many requests"),
    "401": (OURS, TOKEN),
    "403": (OURS, TOKEN),
    "404": (OURS, ABSENT),
}
CASES = {
    "find": FIND,
    "list": {
        way: outcome for way, outcome in FIND.items() if way not in ("cut", "stalled", "swapped")
    }
    | {"truncated": (OUT, LOST)},
    "fetch": FIND
    | {
        "500": (OUT, "hub"),
        "truncated": (OUT, LOST),
    },
    "data": FIND | {"404": (OURS, "org/")},
    # A problem of a run before it starts, whatever its cause.
    "judge": {
        way: (OURS, words)
        for way, (_, words) in FIND.items()
        if way not in ("cut", "stalled", "swapped", "truncated")
    }
    # Away or lost: whether the silence ends a first request or is found before a second is a matter of its timing.
    | {"slow": (OURS, "the hub")},
    "convert": FIND | {"truncated": (OUT, LOST)},
    "push": {
        "refused": (OUT, "could not be reached"),
        "reset": (OUT, "could not be reached"),
        "slow": (OUT, "could not be reached"),
        "500": (OUT, "could not be reached"),
        "truncated": (OUT, "could not be reached"),
        "garbage": (OUT, NOT_ONE),
        "other JSON": (OUT, NOT_ONE),
        "429": (OUT, "429"),
        "come back later": (OUT, "429"),
        "401": (OUT, "is not valid"),
        "403": (OUT, "may not write to org"),
        "404": (OUT, "the token may not make it"),
    },
}
QUICK = {
    "find": ("refused", "garbage", "other JSON", "429", "come back later"),
    "list": ("refused", "garbage", "401"),
    "fetch": ("reset", "slow", "cut", "swapped", "401"),
    "data": ("reset", "slow", "garbage", "429"),
    "judge": ("refused", "garbage", "404"),
    "convert": ("garbage", "other JSON", "cut", "404"),
    "push": ("garbage", "other JSON", "404"),
}

# The ways in which the hub says nothing are waited for; elsewhere a busy machine must not look like a silent hub.
SILENT = ("slow", "stalled")
SILENCE_SECONDS, HEARD_SECONDS = 1.0, 60.0


class Ask(Protocol):
    def __call__(
        self, what: str, repo: str, folder: Path, seconds: float = HEARD_SECONDS
    ) -> tuple[int, str]: ...


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def ask(port: int, home: Path) -> Iterator[Ask]:
    """Yield a function that asks the hub at `port` for something, in a process of its own that has imported everything."""
    kept = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    where = {
        "HF_ENDPOINT": f"http://127.0.0.1:{port}",
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
    }
    environ = {**kept, **where, "HF_TOKEN": "hf_" + "t" * 34}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", ASK], env=environ, stdin=pipe, stdout=pipe, text=True
    ) as asking:
        assert asking.stdin is not None
        assert asking.stdout is not None

        def ask(
            what: str, repo: str, folder: Path, seconds: float = HEARD_SECONDS
        ) -> tuple[int, str]:
            assert asking.stdin is not None
            assert asking.stdout is not None
            answer = folder / "told"
            asking.stdin.write(json.dumps([str(answer), seconds, what, repo, str(folder)]) + "\n")
            asking.stdin.flush()
            return int(asking.stdout.readline()), answer.read_text()

        yield ask
        asking.stdin.close()


@pytest.mark.parametrize(
    ("what", "way"),
    [
        pytest.param(what, way, marks=() if way in QUICK[what] else pytest.mark.slow)
        for what, ways in CASES.items()
        for way in ways
    ],
)
def test_what_the_user_hears(
    ask: Ask, port: int, home: Path, tmp_path: Path, what: str, way: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    expected, words = CASES[what][way]
    with nullcontext() if way == "refused" else serving(port) as hub:
        if hub is not None:
            hub.way = way
        began = time.monotonic()
        patience = SILENCE_SECONDS if way in SILENT else HEARD_SECONDS
        code, output = ask(what, f"org/{what}-{way.replace(' ', '-')}", tmp_path, patience)
        seconds = time.monotonic() - began
    assert code == expected, output
    assert words in output
    assert "Traceback" not in output
    assert "hf_ttt" not in output
    assert seconds < 60, "a second of silence is the limit, but for six tries of a file that stalls"
    names = [str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()]
    whole = [
        name for name in names if "/snapshots/" in name or name.endswith((".arrow", ".parquet"))
    ]
    marks = [name for name in names if name.startswith("fetched/") and not name.endswith(".lock")]
    assert whole + marks == [], "nothing arrived whole"


def test_the_files_of_a_model_are_listed(ask: Ask, port: int, tmp_path: Path) -> None:
    with serving(port) as hub:
        hub.way, hub.held = (
            "well",
            {"config.json": b"{}", "additional_chat_templates/rag.jinja": b"x", "LICENSE": b"y"},
        )
        code, output = ask("list", "org/listed", tmp_path)
    assert (code, output) == (
        0,
        "['LICENSE', 'additional_chat_templates/rag.jinja', 'config.json']\n",
    )


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"set.py": b"import datasets"}, "Dataset scripts are no longer supported"),
        ({"README.md": b"rows to come"}, "doesn't contain any data files"),
        ({"train.jsonl": b'{"a": 1}\n{"a": '}, "JSON parse error"),
        pytest.param({"train.jsonl": b""}, "they have none", marks=pytest.mark.slow),
        pytest.param(
            {"a.jsonl": b'{"a": 1}', "b.jsonl": b'{"b": {"c": 1}}'},
            "Couldn't cast",
            marks=pytest.mark.slow,
        ),
        pytest.param({"train.jsonl.gz": b"{}"}, "Not a gzipped file", marks=pytest.mark.slow),
    ],
)
def test_files_that_are_no_data_set_are_told_of(
    ask: Ask, port: int, home: Path, tmp_path: Path, files: dict[str, bytes], words: str
) -> None:
    with serving(port) as hub:
        hub.way, hub.held = "well", files
        code, output = ask("data", "org/set", tmp_path)
    for folder in (home / "hub", home / "datasets"):
        shutil.rmtree(folder, ignore_errors=True)
    assert (code, "Traceback" in output) == (errors.USER, False), output
    assert "no rows can be made of its files (" in output
    assert words in output
