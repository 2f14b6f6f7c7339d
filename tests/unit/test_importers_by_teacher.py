"""Other tools' files of distillation as run files: the teacher, the divergence, whose answers, and what is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kubetune.config.load import load_config
from kubetune.errors import ConfigError
from kubetune.plugins.importers import import_config

SWIFT = (
    "swift rlhf --rlhf_type gkd --model a/b --dataset org/chats --use_hf true --tuner_type lora "
)
AXOLOTL = (
    "base_model: a/b\ndatasets: [{path: org/d, type: chat_template}]\nsequence_len: 512\n"
    "learning_rate: 1e-4\n"
)
TRL = "model_name_or_path: a/b\ndataset_name: org/chats\n"
GKD = {"teacher": "a/big", "beta": 0.5, "lmbda": 0.5, "temperature": 0.9}
SDFT = {
    "teacher": "self", "teacher_prompt": "{prompt}\n\n{privileged_context}", "beta": 0.5, "support": "student_k",
    "top_k": 100, "rest": "renormalise", "num_generations": 8, "max_completion_length": 256,
}  # fmt: skip

# File name, text, settings of distill that differ from ours, learning rate.
CASES: dict[str, tuple[str, str, dict[str, Any], float]] = {
    "trl's gkd": (
        "a.sh",
        "python examples/scripts/gkd.py --model_name_or_path a/b --teacher_model_name_or_path a/big --dataset_name "
        "org/chats --learning_rate 2e-5 --lmbda 0.25 --packing\n",
        {**GKD, "lmbda": 0.25, "max_completion_length": 128},
        2e-5,
    ),
    "trl's gkd by its keys": (
        "a.yaml",
        f"{TRL}teacher_model_name_or_path: a/big\nlmbda: 0.0\nbeta: 0.1\nmax_new_tokens: 64\n",
        {**GKD, "lmbda": 0.0, "beta": 0.1},
        2e-5,
    ),
    "trl's distillation": (
        "a.yaml",
        f"{TRL}teacher_model_name_or_path: a/big\nteacher_model_revision: v2\nmax_completion_length: 256\nbeta: 0.3\n"
        "temperature: 0.8\n",
        {
            "teacher": "a/big", "revision": "v2", "max_completion_length": 256, "beta": 0.3,
            "temperature": 0.8,
        },
        1e-6,
    ),
    "trl's gkd by the length of its answers": (
        "a.yaml",
        f"{TRL}teacher_model_name_or_path: a/big\nmax_new_tokens: 64\n",
        {**GKD, "max_completion_length": 64},
        2e-5,
    ),
    "ms-swift with servers": (
        "a.sh",
        SWIFT + """--gkd_logits_topk 20 --teacher_model_server '[{"url": "http://a:8000"}, {"url": "http://b:8000"}]'\n""",
        {
            **GKD, "teacher": ("http://a:8000", "http://b:8000"), "support": "teacher_k", "top_k": 20,
            "rest": "renormalise",
        },
        1e-4,
    ),
    "trl's sdft": (
        "a.sh",
        "python examples/scripts/sdft.py --model_name_or_path a/b --dataset_name org/d --learning_rate 2e-5 "
        "--max_completion_length 300 --teacher_model_kind ema --gradient_accumulation_steps 4 --distillation_topk 20\n",
        {**SDFT, "max_completion_length": 300, "top_k": 20},
        2e-5,
    ),
    "trl's sdft by its keys": (
        "a.yaml",
        f"{TRL}distillation_mode: full_logits\ndistillation_alpha: 0.25\nteacher_prompt_template: '{{prompt}}: "
        "{privileged_context}'\nnum_generations: 2\n",
        {
            "teacher": "self", "teacher_prompt": "{prompt}: {privileged_context}", "beta": 0.25, "num_generations": 2,
            "max_completion_length": 256,
        },
        5e-5,
    ),
    "ms-swift": (
        "a.sh",
        f"{SWIFT}--teacher_model a/big --sft_alpha 0.1 --gkd_logits_topk 64 --max_completion_length 300\n",
        {
            **GKD, "support": "teacher_k", "rest": "renormalise", "sft_weight": 0.1,
            "max_completion_length": 300,
        },
        1e-4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_file_of_distillation_becomes_a_run_file(case: str, tmp_path: Path) -> None:
    name, text, expected, rate = CASES[case]
    (tmp_path / name).write_text(text)
    imported = import_config(tmp_path / name)
    (tmp_path / "run.yaml").write_text(imported.text)
    config = load_config(tmp_path / "run.yaml")
    assert config.task == "distill"
    assert config.distill.model_dump(exclude_defaults=True) == expected
    assert config.learning_rate == rate


@pytest.mark.parametrize(
    "text",
    [f"{SWIFT}--teacher_adapters a/c\n", SWIFT + "\n"],
    ids=["adapter", "none"],
)
def test_a_file_without_a_teacher_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(text)
    with pytest.raises(ConfigError, match="names no teacher; expected"):
        import_config(tmp_path / "a.sh")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            f"{AXOLOTL}kd_trainer: true\nkd_alpha: 0.9\n",
            "a.yaml:5: kd_trainer: is distillation as axolotl does it; write",
        ),
        (
            f"{TRL}teacher_model_server_url: http://a\n",
            "a.yaml:3: teacher_model_server_url: is a server of TRL; write",
        ),
    ],
)
def test_distillation_that_compares_other_tokens_is_refused(
    text: str, why: str, tmp_path: Path
) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        import_config(tmp_path / "a.yaml")
    assert why in str(caught.value)


def test_what_is_off_is_not_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"{AXOLOTL}kd_trainer: false\n")
    assert "\ntask: " not in import_config(tmp_path / "a.yaml").text


def test_the_tokens_that_trl_compares_are_dropped_by_name(tmp_path: Path) -> None:
    text = f"{TRL}teacher_model_name_or_path: a/big\nloss_top_k: 8\n"
    (tmp_path / "a.yaml").write_text(text)
    notes = {note.key: note for note in import_config(tmp_path / "a.yaml").notes}
    assert notes["loss_top_k"].kind == "dropped"


def test_steps_of_sdft_count_prompts(tmp_path: Path) -> None:
    name, text, _, _ = CASES["trl's sdft"]
    (tmp_path / name).write_text(text)
    imported = import_config(tmp_path / name)
    (tmp_path / "run.yaml").write_text(imported.text)
    # 8 answers × 4 micro-batches there, 8 answers to each prompt.
    assert load_config(tmp_path / "run.yaml").training.global_batch_size == 4
    notes = {note.key: note for note in imported.notes}
    assert notes["teacher_model_kind"].kind == "approximated"


def test_a_teacher_of_two_trainers_is_said_to_be_open(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"{TRL}teacher_model_name_or_path: a/big\n")
    notes = {note.key: note for note in import_config(tmp_path / "a.yaml").notes}
    assert "DistillationTrainer or GKD: the file leaves it open" in notes["task"].text


def test_a_teacher_that_draws_is_dropped_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(f"{SWIFT}--teacher_model a/big --seq_kd true --top_p 0.9\n")
    notes = {note.key: note for note in import_config(tmp_path / "a.sh").notes}
    assert notes["seq_kd"].kind == "dropped"
    assert notes["top_p"].kind == "dropped"


def test_settings_of_a_model_that_sees_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(f"{SWIFT}--teacher_model a/big --freeze_vit false\n")
    with pytest.raises(ConfigError, match=r"a\.sh:1: freeze_vit: .* a teacher reads texts alone"):
        import_config(tmp_path / "a.sh")
