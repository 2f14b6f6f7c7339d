"""An organisation's defaults: under everything a run says, never what is of one run, and always shown."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kubetune.cli import main
from kubetune.config.load import load_config
from kubetune.config.schema import Config
from kubetune.errors import ConfigError

DEFAULTS = """
kubernetes:
  image: registry.example/kubetune:2.0
  queue: gpu
  tolerations: [{key: dedicated, operator: Exists}]
tracking: {mlflow: {uri: "http://mlflow.example:5000"}}
lora: {r: 64}
training: {seed: 7, learning_rate: 1e-3}
"""
RUN = "model: some/model\ndata: {train: train.jsonl}\ntraining: {seed: 8}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "defaults.yaml").write_text(DEFAULTS)
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 9)
    monkeypatch.setenv("KUBETUNE_DEFAULTS", str(tmp_path / "defaults.yaml"))
    return tmp_path


def load(folder: Path, more: str = "", *overrides: str) -> Config:
    (folder / "run.yaml").write_text(RUN + more)
    return load_config(folder / "run.yaml", overrides=overrides, environ={})


def test_what_the_run_says_wins(folder: Path) -> None:
    config = load(folder, "kubernetes: {queue: mine}\n")
    assert config.kubernetes is not None
    assert (config.kubernetes.image, config.kubernetes.queue) == (
        "registry.example/kubetune:2.0",
        "mine",
    )
    assert config.kubernetes.tolerations[0].key == "dedicated"
    assert config.tracking.mlflow is not None
    assert (config.training.seed, config.training.learning_rate) == (8, 1e-3)
    assert load(folder, "", "training.learning_rate=5e-4").training.learning_rate == 5e-4
    assert load(folder, "kubernetes: {tolerations: []}\n").kubernetes.tolerations == ()  # type: ignore[union-attr]


def test_defaults_turn_no_section_on(folder: Path) -> None:
    config = load(folder)
    assert config.lora is None
    assert config.kubernetes is None
    chosen = load(folder, "lora: {}\n")
    assert chosen.lora is not None
    assert chosen.lora.r == 64
    assert load(folder, "", "lora.alpha=8").lora.r == 64  # type: ignore[union-attr]


def test_where_the_file_is_looked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBETUNE_DEFAULTS", "")
    assert load(folder).tracking.mlflow is None
    monkeypatch.delenv("KUBETUNE_DEFAULTS")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    assert load(folder).tracking.mlflow is None
    (folder / "config" / "kubetune").mkdir(parents=True)
    (folder / "defaults.yaml").rename(folder / "config" / "kubetune" / "defaults.yaml")
    assert load(folder).tracking.mlflow is not None
    monkeypatch.setenv("KUBETUNE_DEFAULTS", str(folder / "none.yaml"))
    with pytest.raises(ConfigError, match="there is no file"):
        load(folder)


def test_mistakes_name_the_file_of_defaults(folder: Path) -> None:
    (folder / "defaults.yaml").write_text(
        "output: outputs/x\nmodel: a/b\ntraining:\n  sed: 1\n  seed: x\n"
    )
    with pytest.raises(ConfigError) as caught:
        load(folder)
    message = str(caught.value)
    for expected in (
        "defaults.yaml:1: output: found in a file of defaults",
        "defaults.yaml:2: model",
        "defaults.yaml:4: training.sed: unknown key; did you mean seed?",
    ):
        assert expected in message


def test_a_mistake_of_two_files_names_both(folder: Path) -> None:
    outputs = "kubernetes: {image: a, storage: {outputs: {claim: shared}}}\n"
    (folder / "defaults.yaml").write_text(outputs)
    run = "kubernetes:\n  storage: {cache: {size: 1Gi}, outputs: {size: 5Gi%s}}\n"
    with pytest.raises(ConfigError) as caught:
        load(folder, run % "")
    place = folder / "defaults.yaml"
    expected = f"run.yaml:5: kubernetes.storage.outputs: give exactly one of .* size and claim .claim of {place}:1; "
    assert re.search(expected, str(caught.value)), caught.value
    config = load(folder, run % ", claim: null")
    assert config.kubernetes is not None
    assert config.kubernetes.storage.outputs.size == "5Gi"


def test_secrets_are_refused_there_too(folder: Path) -> None:
    (folder / "defaults.yaml").write_text("kubernetes: {env: {HF_TOKEN: hf_" + "a" * 34 + "}}\n")
    with pytest.raises(ConfigError) as caught:
        load(folder, "kubernetes: {image: a}\n")
    assert "defaults.yaml:1" in str(caught.value)
    assert "a" * 34 not in str(caught.value)


def test_a_plan_shows_where_everything_comes_from(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("EPOCHS", "2")
    (folder / "run.yaml").write_text(RUN + "kubernetes: {annotations: {example.com/team: ml}}\n")
    words = [str(folder / "run.yaml"), "training.weight_decay=0.5", "--lr", "3e-4"]
    assert main(["plan", *words, "--origins", "--json"]) == 0
    printed = capsys.readouterr()
    origins = {row["key"]: row["origin"] for row in json.loads(printed.out)}
    assert origins["training.seed"] == f"{folder / 'run.yaml'}:3"
    assert origins["model.path"] == f"{folder / 'run.yaml'}:1"
    assert origins["tracking.mlflow.uri"] == f"{folder / 'defaults.yaml'}:6"
    assert origins["kubernetes.annotations.example.com/team"] == f"{folder / 'run.yaml'}:4"
    assert origins["training.num_train_epochs"] == "environment variable EPOCHS"
    assert origins["training.weight_decay"] == "override"
    assert origins["training.learning_rate"] == "command line"
    assert origins["training.max_grad_norm"] == "kubetune's default"
    with caplog.at_level("INFO", "kubetune"):
        load(folder)
    assert "`kubetune plan --origins` shows which" in caplog.text
