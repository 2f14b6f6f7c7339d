"""An adapter of a run whose settings are others than those of training is refused wherever the run is opened."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kubetune import errors
from kubetune.config.load import load_config
from kubetune.config.naming import RESOLVED
from kubetune.config.resolved import read_config, resolved
from kubetune.data.prepared import identity
from kubetune.plugins.serving.served_targets import TargetOptions, target_of
from kubetune.result.inference.requirements import require_result
from kubetune.rundir.adapter_settings import choose_trained
from kubetune.scoring.rewards.named_models import NamedModel, require_named_model

SAVED = {"peft_type": "LORA", "r": 8, "lora_alpha": 16.0, "use_rslora": False, "alpha_pattern": {}}
# What somebody writes into the file, and what is said of it.
CHANGED = [
    ({"lora_alpha": 999.0}, "has lora_alpha: 999.0, and the run was trained with 16.0"),
    ({"r": 4}, "has r: 4, and the run was trained with 8"),
    ({"use_rslora": True}, "has use_rslora: True, and the run was trained with False"),
    ({"alpha_pattern": {"q_proj": 99}}, "has alpha_pattern: {'q_proj': 99}"),
    ({"rank_pattern": {"q_proj": 99}}, "has rank_pattern: {'q_proj': 99}"),
    ({"use_dora": True}, "has use_dora: True"),
]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return a run with a checkpoint and an export, of which only what is asked before torch is there."""
    base = tmp_path / "base"
    base.mkdir()
    settings = {"model": str(base), "data": {"train": "a.jsonl"}, "lora": {"r": 8}}
    folder = tmp_path / "run"
    for adapter in (folder / "checkpoints" / "best", folder / "exports" / "step-000001-adapter"):
        adapter.mkdir(parents=True)
        (adapter / "manifest.json").write_text("{}")
        (adapter / "provenance.json").write_text("{}")
        (adapter / "adapter_config.json").write_text(json.dumps(SAVED))
    (folder / RESOLVED).write_text(json.dumps(resolved(load_config(settings))))
    return folder


def change(run_dir: Path, **values: Any) -> None:
    for file in run_dir.glob("*/*/adapter_config.json"):
        file.write_text(json.dumps({**SAVED, **values}))


@pytest.mark.parametrize(("values", "says"), CHANGED)
def test_another_scale_or_rank_is_refused(run_dir: Path, values: dict[str, Any], says: str) -> None:
    assert choose_trained(run_dir, read_config(run_dir).lora).is_dir()
    change(run_dir, **values)
    with pytest.raises(errors.ModelError) as refused:
        require_result(run_dir)
    assert says in str(refused.value)
    assert "Nothing was loaded" in str(refused.value)


def test_each_way_to_a_run_asks(run_dir: Path) -> None:
    from kubetune.result.inference.result import open_result

    change(run_dir, lora_alpha=1.0)
    learner = load_config({"model": "org/m", "data": {"train": "a.jsonl"}})
    teacher = NamedModel("distill.teacher", str(run_dir), None, is_teacher=True)
    ways = [
        lambda: open_result(run_dir),
        lambda: target_of(str(run_dir), TargetOptions(base="org/base")),
        lambda: require_named_model(teacher, learner.model, learner.data, {}),
    ]
    for way in ways:
        with pytest.raises(errors.ModelError, match=r"has lora_alpha: 1\.0"):
            way()


def test_a_damaged_file_is_left_to_the_checksums(run_dir: Path) -> None:
    """They name it, and say how to go on: run/test_export."""
    file = run_dir / "checkpoints" / "best" / "adapter_config.json"
    file.write_text("{")
    assert choose_trained(run_dir, read_config(run_dir).lora).samefile(file.parent)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", r"identity\.json is damaged \("),
        ('{"parts": 3}', r"identity\.json is damaged \(parts: Input should be"),
        ('{"parts": {"model": [3]}}', r"is damaged \(parts\.model: Input should be"),
        ('{"parts": {"model": {"path": 3, "commit": null, "files": {}}}}', r"parts\.model\.path: "),
        (
            '{"parts": {"model": {"path": "a", "commit": null, "files": {"b": {"sha256": 3, "bytes": 1}}}}}',
            r"parts\.model\.files\.b\.sha256: ",
        ),
        ("{}", r"parts: Input should be"),
    ],
)
def test_a_damaged_identity_is_told_in_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, says: str
) -> None:
    (tmp_path / "identity.json").write_text(text)
    with caplog.at_level("WARNING", logger="kubetune"):
        assert identity.read(tmp_path) == {}
    assert "the base of the run is not compared" in caplog.text
    assert re.search(says, caplog.text)
