"""Other tools' spellings of our settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kubetune.config import json_schema
from kubetune.config.aliases import ALIASES
from kubetune.config.load import load_config
from kubetune.errors import ConfigError


def load(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_config(path)


def test_every_alias_leads_to_a_key() -> None:
    lost = [
        name
        for name, alias in ALIASES.items()
        if json_schema.at(tuple(alias.path.split("."))) is None
    ]
    assert not lost


def test_no_alias_hides_a_key() -> None:
    """A name that means something by itself at the top of the file cannot also be another name for something else."""
    assert not ALIASES.keys() & json_schema.keys(json_schema.schema()).keys()


@pytest.mark.parametrize(
    ("text", "tensorboard", "mlflow"),
    [
        ("report_to: none", False, False),
        ("report_to: [tensorboard, mlflow]", True, True),
        ("training: {report_to: mlflow}", False, True),
    ],
)
def test_report_to_names_trackers(
    tmp_path: Path, text: str, tensorboard: bool, mlflow: bool
) -> None:
    tracking = load(tmp_path, f"model: a/b\ndata: {{train: a.jsonl}}\n{text}\n").tracking
    assert (tracking.tensorboard, tracking.mlflow is not None) == (tensorboard, mlflow)


@pytest.mark.parametrize("text", ["all", "[comet_ml]", "{a: 1}"])
def test_a_tracker_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"run.yaml:3: tracking\..*: unknown key; known here: tensorboard, mlflow"
    ):
        load(tmp_path, f"model: a/b\ndata: {{train: a.jsonl}}\nreport_to: {text}\n")


LLAMA_FACTORY = """\
model_name_or_path: Qwen/Qwen3-4B
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: a.jsonl
cutoff_len: 1024
preprocessing_num_workers: 4
output_dir: saves/x
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
val_size: 0.1
"""
AXOLOTL = """\
base_model: Qwen/Qwen3-4B
load_in_4bit: true
load_in_8bit: false
data: {train: a.jsonl}
val_set_size: 0.1
sequence_len: 1024
sample_packing: true
adapter: lora
lora_r: 8
lora_target_linear: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 1e-4
train_on_inputs: false
bf16: auto
"""


@pytest.mark.parametrize("text", [LLAMA_FACTORY, AXOLOTL], ids=["llama-factory", "axolotl"])
def test_a_peers_file_means_the_same(tmp_path: Path, text: str) -> None:
    config = load(tmp_path, text)
    assert (config.model.path, config.lora.r, config.lora.target_modules) == (
        "Qwen/Qwen3-4B",
        8,
        "all-linear",
    )
    assert (config.data.train[0].path, config.data.max_length, config.data.eval) == (
        "a.jsonl",
        1024,
        0.1,
    )
    training = config.training
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (2, 4)
    assert (training.num_train_epochs, training.learning_rate) == (3, 1e-4)


def test_values_are_translated(tmp_path: Path) -> None:
    axolotl = load(tmp_path, AXOLOTL)
    assert (axolotl.quantization, axolotl.training.optim, axolotl.model.dtype) == (
        "4bit",
        "adamw_8bit",
        "auto",
    )
    base = "model: m\ntrain_file: x\n"
    assert load(tmp_path, base + "finetuning_type: full\n").lora is None
    assert load(tmp_path, base + "use_peft: true\n").lora.r == 16
    assert load(tmp_path, base + "lora: true\n").lora.r == 16
    assert load(tmp_path, base + "lora_target: q_proj, v_proj\n").lora.target_modules == (
        "q_proj",
        "v_proj",
    )
    assert load(tmp_path, base + "fp16: true\n").model.dtype == "float16"
    assert load(tmp_path, base + "fp16: false\nbf16: false\n").model.dtype == "auto"
    assert load(tmp_path, base + "dtype: bf16\n").model.dtype == "bfloat16"
    assert load(tmp_path, base + "peft: {lora_r: 4, lora_alpha: 8}\n").lora.alpha == 8
    litgpt = load(tmp_path, base + "train: {epochs: 4, global_batch_size: 8, max_seq_length: 64}\n")
    assert (
        litgpt.training.num_train_epochs,
        litgpt.training.global_batch_size,
        litgpt.data.max_length,
    ) == (4, 8, 64)
    assert load(tmp_path, base + "quantization_bit: 8\nlora: {rank: 4}\n").quantization == "8bit"


def test_an_alias_also_works_in_its_section(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "model: {model_name_or_path: m, torch_dtype: fp16}\ndata: {dataset: x, cutoff_len: 64}\n"
        "lora: {lora_rank: 4}\ntraining: {lr: 1e-3}\n",
    )
    assert (config.model.path, config.model.dtype, config.data.max_length) == ("m", "float16", 64)
    assert (config.lora.r, config.training.learning_rate) == (4, 1e-3)


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (
            "lora: {r: 8}\nlora_rank: 8",
            "run.yaml:4: lora_rank: the same setting as lora.r (line 3); keep one",
        ),
        (
            "cutoff_len: 64\nsequence_len: 64",
            "run.yaml:4: sequence_len: the same setting as cutoff_len (line 3)",
        ),
        (
            "load_in_4bit: true\nload_in_8bit: true",
            "run.yaml:4: load_in_8bit: the same setting as load_in_4bit",
        ),
        ("use_peft: false\nlora_r: 8", "run.yaml:4: lora_r: the same setting as use_peft (line 3)"),
        (
            "training: {learning_rate: 1e-4}\nlr: 1e-4",
            "run.yaml:4: lr: the same setting as training.learning_rate",
        ),
        ("base_model: n", "run.yaml:3: base_model: the same setting as model (line 1); keep one"),
    ],
)
def test_two_spellings_of_one_setting_are_an_error(
    tmp_path: Path, lines: str, problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, f"model: m\ntrain_file: x\n{lines}\n")
    assert any(problem in line for line in caught.value.problems), caught.value.problems


def test_an_alias_in_an_override_replaces_the_files_spelling(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ntrain_file: x\nlearning_rate: 1e-4\n")
    assert load_config(path, overrides=["lr=1e-5", "base_model=n"]).model.path == "n"
    assert load_config(path, overrides=["lr=1e-5"]).training.learning_rate == 1e-5


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        (
            "pref_beta: 0.3\npref_loss: sigmoid\npref_ftx: 0.1",
            {"loss": "dpo", "beta": 0.3, "sft_weight": 0.1},
        ),
        ("loss_type: robust\nlabel_smoothing: 0.1", {"loss": "robust", "label_smoothing": 0.1}),
        (
            "preference: {loss: simpo, simpo_gamma: 0.7}",
            {"loss": "simpo", "gamma": 0.7, "beta": 2.0},
        ),
        ("loss_type: kto\ndesirable_weight: 0.5", {"loss": "kto", "desirable_weight": 0.5}),
        ("loss_type: cpo", {"loss": "cpo", "sft_weight": 1.0}),
    ],
)
def test_words_of_preference_tuning(tmp_path: Path, lines: str, wanted: dict[str, Any]) -> None:
    preference = load(
        tmp_path, f"model: a/b\ntask: preference\ndata: {{train: a.jsonl}}\n{lines}\n"
    ).preference
    assert {key: getattr(preference, key) for key in wanted} == wanted


_SECTIONS = {
    "classification": "{labels: [a, b]}",
    "vision": "{image_max_tokens: 64}",
    "preference": "{loss: ipo}",
}


@pytest.mark.parametrize("section", _SECTIONS)
@pytest.mark.parametrize(
    ("task", "read"),
    [
        ("causal_lm", ""),
        ("sequence_classification", "classification"),
        ("vision_language", "vision"),
        ("preference", "preference"),
        ("reward_model", ""),
    ],
)
def test_sections_of_other_tasks_are_refused_by_key(
    tmp_path: Path, task: str, read: str, section: str
) -> None:
    text = f"model: a/b\ntask: {task}\ndata: {{train: a.jsonl}}\n{section}: {_SECTIONS[section]}\n"
    if section == read:
        load(tmp_path, text)
    else:
        with pytest.raises(
            ConfigError, match=rf":4: {section}\.\w+: means nothing to `task: {task}`"
        ):
            load(tmp_path, text)


def test_pairs_with_images_read_vision_and_defaults_of_a_section_are_no_settings(
    tmp_path: Path,
) -> None:
    text = "model: a/b\ntask: preference\ndata: {train: a.jsonl}\nvision: {image_max_tokens: 64}\n"
    assert load(tmp_path, text + "preference: {images: true}\n").vision.image_max_tokens == 64
    plain = "model: a/b\ndata: {train: a.jsonl}\nvision: {}\nclassification: {problem_type: auto}\n"
    load(tmp_path, plain)


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (
            "task: preference\npreference: {gamma: 0.5}",
            "gamma means nothing to `loss: dpo`",
        ),
        (
            "task: preference\npreference: {loss: ipo, label_smoothing: 0.1}",
            "label_smoothing means nothing to",
        ),
        (
            "task: preference\npreference: {loss: robust}",
            "label_smoothing: found 0 with `loss: robust`",
        ),
        (
            "task: preference\npreference: {loss: orpo, sft_weight: 0.1}",
            "sft_weight means nothing to `loss: orpo`",
        ),
        (
            "task: preference\npreference: {loss: simpo, reference_free: true}",
            "reference_free means nothing to",
        ),
        (
            "task: preference\npreference: {center_coefficient: 0.1}",
            "means nothing to `task: preference`, but to `task: reward_model`",
        ),
        (
            "task: reward_model\npreference: {beta: 0.2}",
            "preference.beta: means nothing to `task: reward_model`",
        ),
        ("preference: {loss: ipo}", "preference.loss: means nothing to `task: causal_lm`"),
        (
            "task: preference\npreference: {loss: nca_pair}",
            "expected one of dpo, ipo, hinge, robust, orpo, simpo",
        ),
        (
            "task: preference\ntrain_on_inputs: true",
            "data.train_on: found all with `task: preference`",
        ),
        ("task: causal_lm\ndata.unusable_pairs: drop", "data.unusable_pairs: means nothing"),
    ],
)
def test_what_means_nothing_together_is_refused(tmp_path: Path, lines: str, problem: str) -> None:
    dropped = "data.unusable_pairs" in lines
    data = "{train: a.jsonl, unusable_pairs: drop}" if dropped else "{train: a.jsonl}"
    lines = lines.replace("\ndata.unusable_pairs: drop", "")
    with pytest.raises(ConfigError) as error:
        load(tmp_path, f"model: a/b\ndata: {data}\n{lines}\n")
    assert problem in str(error.value)
