"""A user's side of the stand-in cluster for tests: a folder with a run file, and kubetune run in it as a command."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from _pytest.mark.structures import ParameterSet

from kubetune.cli import main
from kubetune.config.load import load_config
from kubetune.k8s.api.client import Cluster as Client
from kubetune.k8s.cluster.submit import JobRef, submit
from kubetune.k8s.manifests import local_files
from tests.cluster.harness import Cluster

Finished = subprocess.CompletedProcess[str]

BASE: dict[str, Any] = {
    "name": "fit",
    "model": {"path": "/models/tiny", "local_files_only": True},
    "data": {"train": "train.jsonl", "eval": 0.1, "max_length": 64},
    "lora": {"r": 4},
    "training": {"per_device_train_batch_size": 4, "compile": False},
    "compute": {"nodes": 2, "gpus_per_node": 0, "cpu": 1, "memory": "1Gi"},
    "kubernetes": {
        "image": "registry.example/kubetune:1.0",
        "storage": {"cache": {"size": "1Gi"}, "outputs": {"size": "1Gi"}},
        "mounts": [{"path": "/models", "claim": "models"}],
        "grace_seconds": 10,
    },
}


@dataclass
class Desk:
    """One user: a working folder, and a namespace of the cluster."""

    cluster: Cluster
    folder: Path

    def __post_init__(self) -> None:
        rows = [{"prompt": f"{n} plus one is", "completion": f" {n + 1}"} for n in range(64)]
        (self.folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
        claim = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "models"},
            "spec": spec,
        }
        self.cluster.apply(claim)
        self.write({})

    def write(self, changes: Mapping[str, Any]) -> Path:
        """Write run.yaml: BASE with changes by dotted key."""
        config = json.loads(json.dumps(BASE))
        config["kubernetes"]["namespace"] = self.cluster.namespace
        for key, value in changes.items():
            *sections, last = key.split(".")
            at = config
            for section in sections:
                at = at.setdefault(section, {})
            at[last] = value
        path = self.folder / "run.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    def environment(self) -> dict[str, str]:
        return self.cluster.environment()

    def command(self, *argv: str) -> list[str]:
        return [sys.executable, "-m", "kubetune", *argv]

    def started(self, *argv: str, stderr: int | None = None) -> subprocess.Popen[str]:
        """Start kubetune as a process whose standard output is a pipe, unless its errors are."""
        return subprocess.Popen(
            self.command(*argv),
            cwd=self.folder,
            env=self.environment(),
            stdout=subprocess.PIPE if stderr is None else None,
            stderr=stderr,
            text=True,
        )

    def kubetune(self, *argv: str, code: int = 0) -> Finished:
        """Run kubetune as a process; AssertionError when it ends with another exit code."""
        done = subprocess.run(
            self.command(*argv),
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert done.returncode == code, f"{argv}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def quick(self, *argv: str, code: int = 0) -> Finished:
        """Run kubetune within this process, for verbs that need no process of their own."""
        done = self.any_end(*argv)
        assert done.returncode == code, f"{argv}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def any_end(self, *argv: str) -> Finished:
        """Run kubetune within this process, whatever exit code it ends with."""
        out, err = (io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2))
        with self.at(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(list(argv))
        texts = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
        return Finished(argv, code, *texts)

    @contextlib.contextmanager
    def at(self) -> Iterator[None]:
        """Be this user for a while: in their folder, with their kubeconfig."""
        before = os.environ.get("KUBECONFIG")
        os.environ["KUBECONFIG"] = str(self.cluster.kubeconfig)
        try:
            with contextlib.chdir(self.folder):
                yield
        finally:
            os.environ.pop("KUBECONFIG")
            if before is not None:
                os.environ["KUBECONFIG"] = before

    def submit_script(self, script: str, **changes: Any) -> JobRef:
        """Submit the run as it is, but for what its trainers do: a shell script instead of training."""
        path = self.write({key.replace("__", "."): value for key, value in changes.items()})
        with self.at():
            config = load_config(path, environ={})
            files = local_files(config)
            return submit(
                Client(),
                config,
                files,
                confirm=lambda question: True,
                change=partial(as_script, script),
            )

    def run_folder(self, name: str = "fit") -> Path:
        """Return the run directory on the cluster, as this machine sees it."""
        return self.cluster.claim_folder(f"{name}-outputs") / name


def as_script(script: str, objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return objects of a run, of which trainers run a shell script instead."""
    for template in _templates(objects):
        template["spec"]["containers"][0]["command"] = ["sh", "-c", script]
    return objects


def _templates(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every pod template in objects, however deep: those with containers."""
    if isinstance(value, dict):
        if "containers" in (value.get("spec") or {}) and "metadata" in value:
            yield value
        for inner in value.values():
            yield from _templates(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _templates(inner)


def write_progress(desk: Desk, name: str = "fit") -> Path:
    """Return a run directory such as training leaves on the way."""
    folder = desk.run_folder(name)
    (folder / "logs").mkdir(parents=True)
    steps = [{"step": n, "loss": 3.0 - n / 10} for n in range(1, 6)]
    lines = [*steps, {"step": 5, "eval_loss": 2.25}]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 6, "lo'
    )
    timings = [{"step": n, "seconds": 2.0, "tokens_per_second": 1234.5} for n in range(1, 6)]
    (folder / "timings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in timings))
    (folder / "plan.json").write_text(json.dumps({"num_steps": 20}))
    (folder / "logs" / "rank-0.log").write_text("one\ntwo\n")
    for step in (2, 4):
        (folder / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
        (folder / "checkpoints" / f"step-{step:06d}" / "manifest.json").write_text(f"{step}")
    (folder / "checkpoints" / "last").symlink_to("step-000004")
    return folder


def slow(value: object) -> ParameterSet:
    """Return a parameter that the default suite leaves out."""
    return pytest.param(value, marks=pytest.mark.slow)
