"""The examples of models that see, as manifests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kubetune.cli import main
from kubetune.config.schema import Config
from kubetune.plan.forecast import forecast
from kubetune.plan.model_shapes import Weights, shapes_of
from kubetune.plan.plan import make_plan
from kubetune.plan.rank_work import RankWork

EXAMPLES = Path(__file__).parents[2] / "examples"


def rendered(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[tuple[str, str], Any]:
    assert main(["render", *arguments]) == 0
    return {
        (obj["kind"], obj["metadata"]["name"]): obj
        for obj in yaml.safe_load_all(capsys.readouterr().out)
    }


def test_fire_is_prepared_without_gpus_and_trained_with_four(
    capsys: pytest.CaptureFixture[str],
) -> None:
    objects = rendered(capsys, str(EXAMPLES / "fire-qwen3vl-32b.yaml"))
    before = objects["Job", "fire-qwen3vl-32b-preprocess"]["spec"]["template"]["spec"]
    [container] = before["containers"]
    assert container["command"][:2] == ["sh", "-c"]
    convert, prepare = container["command"][2].split(" && exec ")
    assert convert.startswith(
        "kubetune data convert fire --source hub:PengxiangLi/FIRE --split train,test --images hub"
    )
    assert prepare == "kubetune data prepare /etc/kubetune/run.yaml"
    assert "gpu" not in str([*before["initContainers"], container])
    [trainer] = objects["Job", "fire-qwen3vl-32b"]["spec"]["template"]["spec"]["containers"]
    assert trainer["resources"]["limits"]["nvidia.com/gpu"] == "4"
    run = yaml.safe_load(objects["ConfigMap", "fire-qwen3vl-32b"]["data"]["run.yaml"])
    assert run["task"] == "vision_language"
    assert run["vision"]["image_max_tokens"] == 2048
    assert run["data"]["train"] == [{"path": "/outputs/fire_bc/fire_bc_train.jsonl"}]
    assert (run["data"]["max_length"], run["lora"]["r"], run["training"]["learning_rate"]) == (
        8192,
        32,
        1e-4,
    )
    batch = (
        run["training"]["per_device_train_batch_size"],
        run["training"]["gradient_accumulation_steps"],
    )
    assert batch == (1, 16)


QWEN3_VL_32B: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "text_config": {
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 25600,
        "vocab_size": 151936,
    },
}


def test_the_plan_of_fire_says_that_four_bits_fit_and_what_else_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_VL_32B))
    words = [
        "plan",
        str(EXAMPLES / "fire-qwen3vl-32b.yaml"),
        f"model={tmp_path}",
        "compute.gpu_memory=80Gi",
    ]
    # The folder is not in the pods, which is a problem at the end of the plan.
    assert main(words) == 2
    stdout = capsys.readouterr().out
    assert "kubernetes.preprocess makes them on the cluster" in stdout
    assert (
        "64 samples; at most 16 micro-batches of at most 8,192 tokens on each of 4 processes"
        in stdout
    )
    assert "fits into 80 GiB" in stdout
    assert main([*words, "quantization=none"]) == 2
    stdout = capsys.readouterr().out
    assert "does not fit into 80 GiB" in stdout
    assert "would fit with    training.parallelism: shard_base" in stdout


def test_what_sees_is_counted_whole_where_what_speaks_is_cut() -> None:
    text = shapes_of(QWEN3_VL_32B["text_config"])
    tower = {"model.visual.blocks.0.mlp.weight": (4096, 1024)}
    training = {"parallelism": "fsdp", "global_batch_size": 4}
    config = Config.model_validate(
        {"model": "x", "data": {"train": "x"}, "lora": {}, "training": training}
    )
    plan = make_plan(config, gpus=4)
    assert plan.world_size == 4
    blind, seeing = (
        forecast(RankWork.of(config, plan), Weights(shapes, QWEN3_VL_32B, stated=True))
        for shapes in (text, text | tower)
    )
    assert blind is not None
    assert seeing is not None
    assert seeing.parts["weights"] - blind.parts["weights"] == 2 * 4096 * 1024


def test_volcano_finds_its_images_on_a_volume(capsys: pytest.CaptureFixture[str]) -> None:
    objects = rendered(capsys, str(EXAMPLES / "volcano-qwen2.5vl-7b.yaml"))
    before = objects["Job", "volcano-qwen2-5vl-7b-preprocess"]["spec"]["template"]["spec"]
    [container] = before["containers"]
    assert "--images /data/llava --output /outputs/volcano &&" in container["command"][2]
    trainer = objects["Job", "volcano-qwen2-5vl-7b"]["spec"]["template"]["spec"]
    for pod in (before, trainer):
        claims = [
            volume.get("persistentVolumeClaim", {}).get("claimName") for volume in pod["volumes"]
        ]
        assert "llava-images" in claims
        assert "/data/llava" in [
            mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]
        ]
