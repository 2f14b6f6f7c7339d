"""The ten commands of the tutorial on clusters, one after the other, as a reader would type them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from standin.control_plane import CHECKOUT, ControlPlane
from tests.cluster.harness import Cluster
from tests.cluster.test_operate_training import model  # noqa: F401 - a fixture

PAGE = (CHECKOUT / "docs" / "tutorials" / "first-cluster-run.md").read_text()
NAMESPACE = "finetune"

# What stands in for the page's model, data and GPUs, of which there are none here; all else is the page's.
HERE: dict[str, Any] = {
    "compute": {"nodes": 2, "gpus_per_node": 0, "cpu": 1, "memory": "1Gi"},
    "training": {"max_steps": 8, "per_device_train_batch_size": 4, "compile": False},
    "data": {"train": "train.jsonl", "eval": 0.05, "max_length": 64},
}


def block(language: str) -> str:
    """Return the page's first block of a language."""
    match = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert match is not None
    return match[1]


def commands() -> list[str]:
    """Return each line without its comment."""
    return [line.split("  #")[0].rstrip() for line in block("sh").splitlines()]


@pytest.fixture
def cluster(control_plane: ControlPlane, tmp_path: Path) -> Iterator[Cluster]:
    """Yield a cluster as the page begins: without a namespace for runs."""
    cluster = Cluster(control_plane, NAMESPACE, tmp_path)
    with cluster.borrowed():
        yield cluster


@pytest.mark.slow
@pytest.mark.usefixtures("kubectl")
def test_the_ten_commands_do_what_the_page_says(
    cluster: Cluster,
    tmp_path: Path,
    model: Path,  # noqa: F811
) -> None:
    run = (
        yaml.safe_load(block("yaml"))
        | HERE
        | {"model": {"path": str(model), "local_files_only": True}}
    )
    run["kubernetes"]["mounts"] = [{"path": str(model.parent), "claim": "models"}]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    rows = [f'{{"prompt": "{n} plus one is", "completion": " {n + 1}"}}\n' for n in range(64)]
    (tmp_path / "train.jsonl").write_text("".join(rows))
    (tmp_path / ".env").write_text("HF_TOKEN=hf_of_this_test\n")
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "kubetune").write_text(f'#!/bin/sh\nexec {sys.executable} -m kubetune "$@"\n')
    (bin_folder / "kubetune").chmod(0o755)
    outputs = dict[str, str]()
    assert len(commands()) == 10
    for command in commands():
        environ = {**cluster.environment()}
        environ["PATH"] = f"{bin_folder}:{environ['PATH']}"
        asked = "y\n" if command.startswith("kubetune delete") else None
        script = f"script -qec '{command}' /dev/null" if asked else command
        if command.startswith("kubectl create namespace"):
            # The stand-in reads no protobuf, in which kubectl sends what it makes of words.
            name = command.split()[3]
            script = (
                f"kubectl create namespace {name} --dry-run=client -o yaml | kubectl apply -f -"
            )
        done = subprocess.run(
            script,
            shell=True,
            cwd=tmp_path,
            env=environ,
            input=asked,
            capture_output=True,
            text=True,
            timeout=240,
        )
        outputs[command] = done.stdout + done.stderr
        assert done.returncode == 0, f"{command}: {done.returncode}\n{outputs[command]}"
        if command.startswith("kubectl create namespace"):
            claim = {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": "models"},
            }
            spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
            cluster.apply({**claim, "spec": spec})
            shutil.copytree(model, cluster.claim_folder("models") / "tiny")

    for words, command in {
        "8 steps": "kubetune plan",
        "holds HF_TOKEN now": "kubetune secret",
        "would accept Job support-bot in namespace finetune. Nothing was changed.": "kubetune submit run.yaml --dry",
        "was submitted": "kubetune submit run.yaml",
        "support-bot: Job in finetune, ": "kubetune status",
        "[node 1] ": "kubetune logs",
        "all verified": "kubetune cp",
        "was deleted": "kubetune delete",
    }.items():
        assert any(words in text for line, text in outputs.items() if line.startswith(command)), (
            command,
            words,
            outputs,
        )
    assert "hf_of_this_test" not in str(outputs)
    left = [claim["metadata"]["name"] for claim in cluster.find("PersistentVolumeClaim")]
    assert "support-bot-outputs" in left
