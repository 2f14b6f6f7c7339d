"""The promise as a whole: submit a file, two nodes really train by torchrun, and the adapter comes home and answers."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kubetune.cli import main
from standin.control_plane import ControlPlane
from standin.state.objects import name_of
from tests.cluster.harness import Cluster
from tests.cluster.operation import Desk
from tests.tiny import train_tokenizer

STEPS = 40
TRAINING = {"training.max_steps": STEPS, "training.save_steps": 10, "training.eval_steps": 20}
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def model() -> Iterator[Path]:
    """Yield a tiny Llama at a path that pods, whose /tmp is their own, can have too."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = Path(tempfile.mkdtemp(prefix="kubetune-models-", dir="/var/tmp"))
    folder.chmod(0o755)
    tiny = train_tokenizer(folder / "tiny")
    shape = LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(tiny)
    yield tiny
    shutil.rmtree(folder)


def furnish(cluster: Cluster, folder: Path, model: Path, **changes: Any) -> Desk:
    """Return a desk whose run file names the model, which lies on a claim of the cluster and at the same path here."""
    desk = Desk(cluster, folder)
    shutil.copytree(model, cluster.claim_folder("models") / "tiny")
    mounts = [{"path": str(model.parent), "claim": "models"}]
    desk.write({**TRAINING, "model.path": str(model), "kubernetes.mounts": mounts, **changes})
    return desk


@pytest.fixture
def desk(cluster: Cluster, tmp_path: Path, model: Path) -> Desk:
    return furnish(cluster, tmp_path, model)


def home(desk: Desk) -> Path:
    return desk.folder / "outputs" / "fit"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def result(run_dir: Path) -> tuple[bytes, str]:
    """Return what a repeat reproduces bit for bit: every number of every step, and the weights."""
    adapter = run_dir / "checkpoints" / "last" / "adapter_model.safetensors"
    return (run_dir / "metrics.jsonl").read_bytes(), sha256(adapter)


@dataclass(frozen=True)
class Journey:
    """A run from submit to its results, and what was said on the way."""

    folder: Path
    followed: str
    status: dict[str, Any]
    copied: str


def travel(desk: Desk) -> Journey:
    followed = desk.kubetune("submit", "run.yaml", "--follow").stdout
    status = json.loads(desk.quick("status", "run.yaml", "--json").stdout)
    return Journey(home(desk), followed, status, desk.quick("cp", "run.yaml").stdout)


@pytest.fixture(scope="session")
def journey(
    any_control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Journey:
    """Return the way of an undisturbed run of the default kind; it needs no namespaces."""
    folder = tmp_path_factory.mktemp("journey")
    cluster = Cluster(any_control_plane, f"journey-{next(_numbers)}", folder)
    cluster.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": cluster.namespace}}
    )
    return travel(furnish(cluster, folder, model))


def check(journey: Journey) -> None:
    """Require that both nodes trained, that every step was shown, and that the results are whole."""
    assert f"step {STEPS}/{STEPS}" in journey.followed
    assert "[node 1] kubetune: node 1 of 2 meets the others at" in journey.followed
    assert "WORLD_SIZE=2" in journey.followed
    assert (journey.status["state"], journey.status["step"]) == ("done", STEPS)
    assert "all verified" in journey.copied
    manifest = journey.folder / "checkpoints" / "best" / "manifest.json"
    for name, digest in json.loads(manifest.read_text())["files"].items():
        assert sha256(manifest.parent / name) == digest["sha256"]
    kept = [path.read_text() for path in (journey.folder / "logs" / "pods").iterdir()]
    assert len(kept) == 2
    assert any(f"step {STEPS}/{STEPS}" in text for text in kept)


def test_a_run_goes_to_the_cluster_and_its_adapter_comes_home(journey: Journey) -> None:
    check(journey)


def test_the_adapter_answers_on_this_machine(
    journey: Journey, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(journey.folder), "3 plus one is", "--max-new-tokens=4"]) == 0
    assert capsys.readouterr().out.endswith("\n")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jobset", "pytorchjob", "trainjob", "statefulset"])
def test_every_kind_ends_with_the_same_bits(
    cluster: Cluster, tmp_path: Path, model: Path, journey: Journey, kind: str
) -> None:
    other = travel(furnish(cluster, tmp_path, model, **{"kubernetes.kind": kind}))
    check(other)
    assert result(other.folder) == result(journey.folder)


def submit_and_reach(desk: Desk, step: int) -> list[str]:
    """Submit, and wait until node 0 has done so many steps; the names of the pods by node."""
    desk.quick("submit", "run.yaml")
    pods = desk.cluster.wait_ready("fit", pods=2, seconds=60)
    names = sorted(map(name_of, pods))
    desk.cluster.wait_log(names[0], f"step {step}/", seconds=90)
    return names


@pytest.mark.slow
@pytest.mark.parametrize("node", [0, 1])
def test_a_killed_pod_costs_no_bit(desk: Desk, journey: Journey, node: int) -> None:
    names = submit_and_reach(desk, 15)
    desk.cluster.kill_pod(names[node])
    done = desk.kubetune("submit", "run.yaml", "--follow", "--wait")
    assert "resumed from step-0000" in done.stdout
    desk.quick("cp", "fit")
    assert result(home(desk)) == result(journey.folder)


@pytest.mark.slow
def test_a_drained_node_costs_no_bit_and_no_retry(desk: Desk, journey: Journey) -> None:
    names = submit_and_reach(desk, 15)
    pod = desk.cluster.get("Pod", names[1])
    desk.cluster.drain(pod["spec"]["nodeName"])
    desk.cluster.wait_log(names[0], "stopped after step", seconds=60)
    desk.cluster.clear_faults()  # the node comes back
    done = desk.kubetune("submit", "run.yaml", "--follow")
    assert "resumed from step-0000" in done.stdout
    assert desk.cluster.get("Job", "fit")["status"].get("failed", 0) == 0
    desk.quick("cp", "fit")
    assert result(home(desk)) == result(journey.folder)


@pytest.mark.slow
def test_a_mistake_is_not_tried_again(desk: Desk) -> None:
    (desk.folder / "train.jsonl").write_text('{"prompt": "1", "completion": "2"}\nnot JSON\n')
    done = desk.kubetune("submit", "run.yaml", "--follow", "--no-check", code=2)
    assert "failed" in done.stdout.splitlines()[-1]
    starts = [
        event["message"] for event in desk.cluster.find("Event") if event["reason"] == "Started"
    ]
    assert (
        len(starts) <= 2
    )  # one for each node: the other one may have been told to go before it had begun
    assert "0-train.jsonl:2: is not JSON" in desk.quick("status", "fit").stdout


@pytest.mark.slow
def test_a_pod_that_never_comes_is_told_and_then_trains(desk: Desk) -> None:
    desk.cluster.never_schedule("fit-1-")
    with subprocess.Popen(
        desk.command("submit", "run.yaml", "--wait"), cwd=desk.folder, env=desk.environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        assert any("no node fits: 0/2 nodes are available" in line for line in process.stderr)
        desk.cluster.clear_faults()
        assert "done" in process.communicate(timeout=120)[0]
    assert process.returncode == 0


@pytest.mark.slow
def test_logs_and_status_outlive_ten_seconds_without_the_api_server(desk: Desk) -> None:
    desk.write({**TRAINING, "training.max_steps": 100000})
    submit_and_reach(desk, 3)
    with desk.started("logs", "-f", "fit") as follower:
        asking = desk.started("status", "fit")
        with asking:
            with desk.cluster.outage(), pytest.raises(subprocess.TimeoutExpired):
                follower.wait(10)
            assert "running, 2 of 2 pods running" in asking.communicate(timeout=60)[0]
        desk.quick("stop", "fit")
        assert follower.stdout is not None
        steps = [
            line.split("step ")[1].split("/")[0]
            for line in follower.stdout
            if "[TRAIN] step " in line
        ]
    assert steps == [str(n) for n in range(1, len(steps) + 1)]


@pytest.mark.slow
def test_dev_trains_with_the_code_of_this_folder(desk: Desk) -> None:
    desk.quick("dev", "start", "run.yaml")
    for node in range(2):
        desk.cluster.wait_phase(f"fit-dev-{node}", "Running")
        desk.cluster.wait_log(f"fit-dev-{node}", "idle")
    (desk.folder / "sitecustomize.py").write_text("print('my code', flush=True)\n")
    done = desk.kubetune("dev", "run", "run.yaml", "training.max_steps=4")
    assert "[node 0] my code" in done.stdout
    assert "step 4/4" in done.stdout
    assert "step 4/4" in json.dumps(
        desk.quick("status", "fit-dev", "-n", desk.cluster.namespace).stdout
    )
    assert (
        "training.max_steps was 4, now is 8"
        in desk.kubetune("dev", "run", "run.yaml", "training.max_steps=8", code=2).stdout
    )
    desk.kubetune("dev", "run", "run.yaml", "training.max_steps=8", "--fresh")
    with desk.started("dev", "run", "run.yaml", "training.max_steps=100000", "--fresh") as process:  # fmt: skip
        assert process.stdout is not None
        assert any("step 2/" in line for line in process.stdout)
        assert "ended with exit code 143" in desk.quick("dev", "stop", "run.yaml").stdout
        process.communicate(timeout=60)
    assert process.returncode == 143
    desk.quick("dev", "run", "run.yaml", "training.max_steps=2", "--fresh")
    stopped = desk.quick("dev", "stop", "run.yaml").stdout
    assert "node 0: no training ran" in stopped
    assert "kubetune: the pods stay: kubetune delete fit-dev" in stopped
    desk.quick("delete", "fit-dev", "--yes", "--volumes", "-n", desk.cluster.namespace)
