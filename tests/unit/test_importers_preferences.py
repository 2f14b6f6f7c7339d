"""Other tools' preference tuning and reward models as run files: the loss, its weights, the data and their columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kubetune.config.load import load_config
from kubetune.config.schema import Config
from kubetune.errors import ConfigError
from kubetune.plugins.importers import Imported, import_config

AXOLOTL = "base_model: a/b\nsequence_len: 512\nadapter: lora\nlora_r: 8\nlora_alpha: 16\nlora_target_linear: true\n"
FACTORY = "model_name_or_path: a/b\ndataset: org/pairs\nfinetuning_type: lora\ncutoff_len: 512\n"
TRL = "model_name_or_path: a/b\ndataset_name: org/pairs\nuse_peft: true\nlora_dropout: 0.05\n"
SWIFT = "NPROC_PER_NODE=2 \\\nswift rlhf \\\n --model a/b --dataset org/pairs --tuner_type lora --use_hf true "

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "axolotl dpo": (
        "a.yml",
        f"{AXOLOTL}rl: dpo\nrl_beta: 0.2\ndatasets: [{{path: org/pairs, type: chatml.intel}}]\n",
        {"loss": "dpo", "beta": 0.2},
    ),
    "axolotl simpo": (
        "a.yml",
        f"{AXOLOTL}rl: simpo\nrl_beta: 0.1\ncpo_alpha: 0.5\nsimpo_gamma: 0.4\ndatasets: [{{path: org/pairs}}]\n",
        {"loss": "simpo", "beta": 0.1, "gamma": 0.4, "sft_weight": 0.5},
    ),
    "axolotl orpo": (
        "a.yml",
        f"{AXOLOTL}rl: orpo\norpo_alpha: 0.2\nsample_packing: true\ndatasets: [{{path: org/pairs}}]\n",
        {"loss": "orpo", "beta": 0.2},
    ),
    "axolotl kto": (
        "a.yml",
        f"{AXOLOTL}rl: kto\nkto_desirable_weight: 0.5\ndatasets: [{{path: org/pairs, type: llama3.ultra}}]\n",
        {"loss": "kto", "desirable_weight": 0.5},
    ),
    "axolotl reward": (
        "a.yml",
        f"{AXOLOTL}reward_model: true\ncenter_rewards_coefficient: 0.01\n"
        "datasets: [{path: org/pairs, type: bradley_terry.chat_template}]\n",
        {"center_coefficient": 0.01},
    ),
    "factory dpo": (
        "a.yaml",
        f"{FACTORY}stage: dpo\npref_beta: 0.3\npref_loss: sigmoid\npref_ftx: 0.1\ndpo_label_smoothing: 0.2\n",
        {"loss": "dpo", "beta": 0.3, "sft_weight": 0.1, "label_smoothing": 0.2},
    ),
    "factory kto": (
        "a.yaml",
        f"{FACTORY}stage: kto\nkto_rejected_weight: 2.0\n",
        {"undesirable_weight": 2.0},
    ),
    "factory rm": ("a.yaml", f"{FACTORY}stage: rm\n", {}),
    "trl dpo": (
        "a.sh",
        "trl dpo --model_name_or_path a/b --dataset_name org/pairs --beta 0.05 --loss_type hinge "
        "--max_prompt_length 64 --metric_for_best_model rewards/accuracies --eval_strategy epoch\n",
        {"loss": "hinge", "beta": 0.05},
    ),
    "trl dpo by its keys": (
        "a.yaml",
        f"{TRL}beta: 0.01\nrpo_alpha: 1.0\n",
        {"beta": 0.01, "sft_weight": 1.0},
    ),
    "trl cpo by its keys": (
        "a.yaml",
        f"{TRL}loss_type: simpo\ncpo_alpha: 0.0\nsimpo_gamma: 0.7\n",
        {"loss": "simpo", "beta": 0.1, "gamma": 0.7, "sft_weight": 0.0},
    ),
    "trl's example about images": (
        "a.sh",
        "accelerate launch examples/scripts/dpo_vlm.py --model_name_or_path a/b --dataset_name org/pairs --use_peft\n",
        {"loss": "dpo"},
    ),
    "trl kto": (
        "a.sh",
        "trl kto --model_name_or_path a/b --dataset_name org/pairs --beta 0.2\n",
        {"beta": 0.2},
    ),
    "trl reward": (
        "a.sh",
        "trl reward --model_name_or_path a/b --dataset_name org/pairs --center_rewards_coefficient 0.01\n",
        {"center_coefficient": 0.01},
    ),
    "swift dpo": (
        "a.sh",
        f"{SWIFT}--rpo_alpha 0.1 --loss_scale last_round\n",
        {"loss": "dpo", "sft_weight": 0.1},
    ),
    "swift orpo": ("a.sh", f"{SWIFT}--rlhf_type orpo\n", {"loss": "orpo"}),
    "swift kto": (
        "a.sh",
        f"{SWIFT}--rlhf_type kto --desirable_weight 0.8\n",
        {"desirable_weight": 0.8},
    ),
    "swift rm": ("a.sh", f"{SWIFT}--rlhf_type rm --task_type seq_cls\n", {}),
}


KEY = "metric_for_best_model"


def imported(folder: Path, name: str, text: str) -> tuple[Imported, Config]:
    (folder / name).write_text(text)
    result = import_config(folder / name)
    (folder / "run.yaml").write_text(result.text)
    return result, load_config(folder / "run.yaml")


@pytest.mark.parametrize("case", CASES)
def test_a_peers_preference_tuning_is_carried_over(case: str, tmp_path: Path) -> None:
    name, text, wanted = CASES[case]
    result, config = imported(tmp_path, name, text)
    is_reward = any(word in case for word in ("rm", "reward"))
    assert config.task == ("reward_model" if is_reward else "preference")
    assert {key: getattr(config.preference, key) for key in wanted} == wanted
    if "kto" in case:
        assert config.preference.loss == "kto"
    if config.lora is not None and case != "factory rm":
        assert config.lora.dropout == 0.0
    assert not config.training.global_batch_tokens
    assert not [note for note in result.notes if "not known" in note.text]


def test_what_only_trainers_of_preferences_have_is_told(tmp_path: Path) -> None:
    result, config = imported(tmp_path, *CASES["trl dpo"][:2])
    assert config.training.metric_for_best_model == "eval_accuracy"
    assert config.training.learning_rate == 1e-6
    assert [note.key for note in result.of("dropped")] == ["max_prompt_length"]
    held = "--val_dataset org/held"
    for case, more, dropped in (
        ("trl kto", "", []),
        ("swift kto", held, []),
        ("swift orpo", held, [KEY]),
    ):
        name, text, _ = CASES[case]
        result, config = imported(
            tmp_path,
            name,
            f"{text.rstrip()} --metric_for_best_model kl --eval_strategy epoch {more}\n",
        )
        assert (config.training.metric_for_best_model == "eval_kl") == (not dropped)
        assert [note.key for note in result.of("dropped")] == dropped
    _, config = imported(tmp_path, *CASES["axolotl dpo"][:2])
    assert config.data.train[0].format == "messages"


def test_columns_of_answers_are_found(tmp_path: Path) -> None:
    fields = "field_messages: talk, field_chosen: good, field_rejected: bad"
    source = f"{{path: org/pairs, type: chat_template.default, {fields}}}"
    _, config = imported(tmp_path, "a.yml", f"{AXOLOTL}rl: dpo\ndatasets: [{source}]\n")
    assert config.data.train[0].columns == {"messages": "talk", "chosen": "good", "rejected": "bad"}
    source = "{path: org/pairs, type: {field_prompt: q, field_chosen: a, field_rejected: b, prompt_format: '{prompt}'}}"
    result, config = imported(tmp_path, "a.yml", f"{AXOLOTL}rl: dpo\ndatasets: [{source}]\n")
    assert config.data.train[0].columns == {"prompt": "q", "chosen": "a", "rejected": "b"}
    assert [note.key for note in result.of("dropped")] == ["datasets[0].prompt_format"]


SEEING = {
    "axolotl": (
        "a.yml",
        f"{AXOLOTL}rl: dpo\nprocessor_type: AutoProcessor\ndatasets: [{{path: org/pairs}}]\n",
    ),
    "factory, by its images": (
        "a.yaml",
        f"{FACTORY}stage: kto\nimage_max_pixels: 262144\nvideo_max_pixels: 16384\n",
    ),
    "factory, by its data": ("a.yaml", f"{FACTORY.replace('org/pairs', 'rlhf_v')}stage: dpo\n"),
    "swift": (
        "a.sh",
        f"{SWIFT.replace('swift', 'MAX_PIXELS=602112 swift')}--rlhf_type orpo --freeze_vit true\n",
    ),
}


@pytest.mark.parametrize("case", SEEING)
def test_pairs_about_images_are_carried_over(case: str, tmp_path: Path) -> None:
    columns = {
        "messages": "conversations",
        "chosen": "chosen",
        "rejected": "rejected",
        "images": "images",
    }
    entry = {
        "hf_hub_url": "org/rlhf-v",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": columns,
    }
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"rlhf_v": entry}))
    result, config = imported(tmp_path, *SEEING[case])
    assert config.task == "preference"
    assert config.preference.images
    assert {note.key for note in result.of("dropped")} <= {"video_max_pixels", "dataset: org/pairs"}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yml", f"{AXOLOTL}rl: gdpo\ndatasets: [{{path: a/b}}]\n", "rl: is gdpo"),
        ("a.yaml", f"{FACTORY}stage: ppo\n", "stage: is ppo"),
        (
            "a.yaml",
            f"{FACTORY}stage: dpo\npref_loss: kto_pair\n",
            "is a loss that kubetune does not have",
        ),
        (
            "a.yaml",
            f"{TRL}beta: 0.1\nloss_type: [sigmoid, bco_pair]\n",
            "is a loss that kubetune does not have",
        ),
        ("a.sh", f"{SWIFT}--rlhf_type ppo\n", "rlhf_type: is ppo"),
        (
            "a.sh",
            f"{SWIFT}--rlhf_type rm --freeze_vit false\n",
            "a reward model scores texts alone",
        ),
        ("a.yaml", f"{TRL}beta: 0.1\nnum_generations: 8\n", "names no reward that kubetune has"),
    ],
)
def test_other_kinds_of_learning_are_refused(
    name: str, text: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words.replace("[", r"\[")) as error:
        imported(tmp_path, name, text)
    assert "Nothing was written." in str(error.value)
