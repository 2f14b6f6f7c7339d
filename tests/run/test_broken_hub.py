"""A hub that refuses, breaks off, stammers or is not one: each way ends with the right code and what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kubetune import errors
from tests.broken_hub import serving

ASK = """
import sys, time
from kubetune import errors, fetch_worker, push
from kubetune.config.schema import ModelConfig
from kubetune.data import hub, sources
model, folder = ModelConfig(path="org/model"), sys.argv[2]
push.WAITS_SECONDS, hub.PATIENCE_SECONDS = (0.0,), 1.0
try:
    match sys.argv[1]:
        case "find":
            hub.find_files(model, "org/model", ["config.json"])
        case "fetch":
            fetch_worker.fetch(model)
        case "data":
            sources.load_dataset("org/data", None, "train")
        case "push":
            push.upload(folder, "org/bot", private=True, message="m")
except errors.KubetuneError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""
OUT, OURS = errors.ENVIRONMENT, errors.USER
CASES = [
    ("fetch", "refused", OUT, "hub"),
    ("fetch", "reset", OUT, "connection to the hub was lost"),
    ("fetch", "500", OUT, "hub"),
    ("fetch", "429", OUT, "hub"),
    ("fetch", "slow", OUT, "hub cannot be reached"),
    ("fetch", "truncated", OUT, "connection to the hub was lost"),
    ("fetch", "garbage", OUT, "is not the hub: expected JSON"),
    ("fetch", "401", OURS, "the token in HF_TOKEN is not valid"),
    ("fetch", "403", OURS, "HF_TOKEN"),
    ("fetch", "404", OURS, "is not on the hub"),
    ("find", "refused", OUT, "hub cannot be reached"),
    ("find", "reset", OUT, "connection to the hub was lost"),
    ("find", "500", OUT, "hub"),
    ("find", "401", OURS, "the token in HF_TOKEN is not valid"),
    ("find", "404", OURS, "is not on the hub"),
    ("data", "reset", OUT, "connection to the hub was lost"),
    ("data", "500", OUT, "hub cannot be reached"),
    ("data", "404", OURS, "org/data"),
    ("push", "refused", OUT, "could not be reached"),
    ("push", "reset", OUT, "could not be reached"),
    ("push", "500", OUT, "could not be reached"),
    ("push", "429", OUT, "429"),
    ("push", "slow", OUT, "could not be reached"),
    ("push", "truncated", OUT, "could not be reached"),
    ("push", "401", OUT, "is not valid"),
]
QUICK = {("fetch", "reset"), ("fetch", "slow"), ("fetch", "garbage"), ("fetch", "401")}


@pytest.mark.parametrize(
    ("what", "way", "code", "words"),
    [pytest.param(*case, marks=() if case[:2] in QUICK else pytest.mark.slow) for case in CASES],
)
def test_what_the_user_hears(tmp_path: Path, what: str, way: str, code: int, words: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    with serving() as hub:
        hub.way = way
        kept = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        environ = {
            **kept,
            "HF_ENDPOINT": "http://127.0.0.1:1" if way == "refused" else hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_TOKEN": "hf_" + "t" * 34,
            "HF_HUB_DISABLE_XET": "1",
        }
        command = [sys.executable, "-c", ASK, what, str(tmp_path)]
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=50)
    assert ended.returncode == code, ended.stderr
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "hf_ttt" not in ended.stderr
