"""Objects of KServe: strict in their fields, with the addresses that it takes, and refused in words where it takes none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from kubetune import cli
from kubetune.plugins.serving import manifests
from standin.schemas import problems
from standin.schemas.generate import strict
from tests.golden.serving import write_run

# A folder with KServe's own CRDs (config/crd/full of its repository, release 0.20), for whoever has them.
CRDS = os.environ.get("KSERVE_CRDS")
BASE = "--base=Qwen/Qwen3-8B"
INFERENCE = "--kserve=InferenceService"
LLM = "--kserve=LLMInferenceService"
IMAGE = "oci+native://registry.example:5000/team/bot:1"


def rendered(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    """Return the object, which a strict server would accept, and what is told to people."""
    assert cli.main(["serve", "--render", *words]) == 0
    output = capsys.readouterr()
    (obj,) = yaml.safe_load_all(output.out)
    assert problems(obj) == []
    crds = sorted(Path(CRDS).glob("*.yaml")) if CRDS else []
    for path in crds:
        crd = yaml.load(path.read_text(), yaml.CSafeLoader)
        if crd["spec"]["names"]["kind"] != obj["kind"]:
            continue
        for version in crd["spec"]["versions"]:
            if obj["apiVersion"].endswith(f"/{version['name']}"):
                schema = Draft202012Validator(strict(version["schema"]["openAPIV3Schema"]))
                assert [error.message for error in schema.iter_errors(obj)] == []
    return obj, output.err


def test_whole_weights_are_an_inference_service(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("acme/bot", "--gpus=2", "--max-replicas=3", "--max-model-len=4096", "--dtype=bfloat16")
    obj, notes = rendered(capsys, INFERENCE, *words)
    predictor = obj["spec"]["predictor"]
    assert (predictor["minReplicas"], predictor["maxReplicas"]) == (1, 3)
    assert predictor["model"]["storageUri"] == "hf://acme/bot"
    assert predictor["model"]["args"] == [
        "--model_name=bot",
        "--dtype=bfloat16",
        "--max-model-len=4096",
        "--tensor-parallel-size=2",
    ]
    assert predictor["model"]["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert "ServiceAccount default" in notes
    assert "KServe 0.20" in notes


def test_another_image_must_take_the_options_of_the_usual(
    capsys: pytest.CaptureFixture[str],
) -> None:
    image = "registry.example/kserve/huggingfaceserver:v0.20-gpu"
    obj, notes = rendered(capsys, INFERENCE, "acme/bot", f"--image={image}")
    assert obj["spec"]["predictor"]["model"]["image"] == image
    assert f"{image} stands in for KServe's Hugging Face server" in notes


def test_an_inference_service_fetches_adapters_from_the_hub(
    capsys: pytest.CaptureFixture[str],
) -> None:
    obj, _ = rendered(capsys, INFERENCE, "a=acme/a", "b=acme/b", BASE, "--rank=24")
    args = obj["spec"]["predictor"]["model"]["args"]
    assert args[-5:] == [
        "--max-loras=2",
        "--max-lora-rank=32",
        "--lora-modules",
        "a=acme/a",
        "b=acme/b",
    ]


def test_an_llm_inference_service_has_a_base_and_adapters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    targets = ("a=acme/a", "s=s3://bucket/adapters/s", "p=pvc://claim/p")
    obj, _ = rendered(capsys, LLM, *targets, BASE, "--gpus=2", "--rank=8", "--image=vllm/x:1")
    spec = obj["spec"]
    assert (spec["model"]["uri"], spec["model"]["name"]) == ("hf://Qwen/Qwen3-8B", "Qwen3-8B")
    uris = [adapter["uri"] for adapter in spec["model"]["lora"]["adapters"]]
    assert uris == ["hf://acme/a", "s3://bucket/adapters/s", "pvc://claim/p"]
    assert spec["model"]["lora"]["maxRank"] == 8
    assert spec["parallelism"] == {"tensor": 2}
    (server,) = spec["template"]["containers"]
    assert (server["name"], server["image"]) == ("main", "vllm/x:1")


def test_a_run_is_served_from_its_claim(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = str(write_run(tmp_path / "run"))
    obj, _ = rendered(capsys, LLM, run_dir, "--name=bot")
    (adapter,) = obj["spec"]["model"]["lora"]["adapters"]
    place = "pvc://support-bot-outputs/support-bot/exports/step-000120"
    assert adapter == {"name": "support-bot", "uri": f"{place}-adapter"}
    assert obj["spec"]["template"]["containers"][0]["env"][0]["name"] == "HF_TOKEN"
    obj, _ = rendered(capsys, INFERENCE, run_dir, "--merged")
    assert obj["spec"]["predictor"]["model"]["storageUri"] == f"{place}-merged"


def test_an_image_of_the_layout_of_kserve_is_a_base(capsys: pytest.CaptureFixture[str]) -> None:
    obj, notes = rendered(capsys, LLM, IMAGE)
    assert obj["spec"]["model"] == {"uri": IMAGE, "name": "bot"}
    assert "below /models" in notes


@pytest.mark.parametrize("kind", [INFERENCE, LLM])
def test_an_image_of_push_is_mounted(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    obj, notes = rendered(capsys, kind, IMAGE.replace("oci+native", "oci"))
    assert IMAGE in (
        obj["spec"].get("model", {}).get("uri"),
        obj["spec"].get("predictor", {}).get("model", {}).get("storageUri"),
    )
    assert "without --modelpack" in notes


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([LLM, "a=oci://registry.example/team/a:1", BASE], "and no images"),
        ([LLM, "acme/bot", "--base=oci://registry.example/Bot"], "is no address of an image"),
        ([LLM, f"a={IMAGE}", BASE], "and no images"),
        ([INFERENCE, "a=s3://bucket/a", BASE], "fetches adapters only from"),
        ([INFERENCE, "acme/bot", f"--image={manifests.IMAGE}"], "is vLLM's own server"),
        ([INFERENCE, "acme/bot", "--image=vllm-openai-cpu@sha256:1a"], "is vLLM's own server"),
        ([LLM, "acme/bot", "--max-replicas=3"], "is scaled by other means"),
        ([LLM, "/models/bot"], "no address that KServe takes"),
        ([LLM, "acme/bot", "--storage-class=fast"], "--storage-class: means nothing"),
        ([LLM, "acme/bot", "--api-key-secret=key"], "--api-key-secret: means nothing"),
        ([LLM, "acme/bot", "--cache-size=3Gi"], "--cache-size: means nothing"),
        (["s3://bucket/bot"], "it is none of them"),
        (["acme/bot", "--fetch-image=kubetune:1"], "--fetch-image: no target"),
        (["acme/bot", "--rank=8"], "--rank: no target"),
    ],
)
def test_what_kserve_does_not_take_is_refused(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "--render", *words]) == 2
    output = capsys.readouterr()
    assert reason in output.err
    assert output.out == ""


def test_a_reward_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path / "run", "task=reward_model", "evaluation.generate=null")
    assert cli.main(["serve", "--render", LLM, str(run_dir), "--merged"]) == 2
    assert "pooling runner" in capsys.readouterr().err


def test_a_base_for_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = str(write_run(tmp_path / "run"))
    assert cli.main(["serve", "--render", run_dir, BASE]) == 2
    assert "--base: the targets are runs" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--name=bot", "--gpus=2", "--dtype=float16", "--to=there"])
def test_options_of_servers_mean_nothing_to_ollama(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "--ollama", "outputs/first", option]) == 2
    name = option.partition("=")[0]
    assert f"{name}: means nothing with --ollama" in capsys.readouterr().err


def test_the_usual_image_may_be_asked_of_kserve(capsys: pytest.CaptureFixture[str]) -> None:
    obj, _ = rendered(capsys, LLM, "acme/bot", f"--image={manifests.IMAGE}")
    assert obj["spec"]["template"]["containers"][0]["image"] == manifests.IMAGE
