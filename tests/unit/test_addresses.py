"""Secrets in addresses: in what libraries log by handlers of their own, and in run files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kubetune.config.load import load_config
from kubetune.errors import ConfigError

ASK = """
import logging
from kubetune.base import logs
logs.scrub_tracebacks()
from huggingface_hub.utils import logging as theirs
theirs.get_logger("huggingface_hub.utils._http").warning("Retrying %s", "http://u:PASS-word@127.0.0.1:9/api/models/a/b")
"""


def test_libraries_log_no_password_of_an_address() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=dict(os.environ), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Retrying http://u:[secret]@127.0.0.1:9" in done.stderr
    assert "PASS-word" not in done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "tracking: {mlflow: {uri: 'https://mlflow.example/?token=abcdef123'}}",
        "tracking: {mlflow: {uri: 'https://me:abcdef123@mlflow.example'}}",
        "kubernetes: {image: i, env: {ENDPOINT: 'https://x.example/a?b=1&api_key=abcdef123'}}",
    ],
)
def test_run_files_with_a_secret_in_an_address_are_refused_and_not_echoed(
    tmp_path: Path, line: str
) -> None:
    (tmp_path / "run.yaml").write_text(f"model: a/b\ndata: {{train: x.jsonl}}\n{line}\n")
    with pytest.raises(ConfigError, match="a secret must not stand in a run file") as caught:
        load_config(tmp_path / "run.yaml", environ={})
    assert "abcdef123" not in str(caught.value)
