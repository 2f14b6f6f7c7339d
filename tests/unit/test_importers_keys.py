"""Every key of every peer's own schema ends in exactly one of the lists that `kubetune import` prints.

The schemas are a table of names, types and defaults, read from the peers' source: tests/peers/read_keys.py.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kubetune.errors import ConfigError
from kubetune.plugins.importers import Foreign, import_config, not_here, understand
from kubetune.plugins.importers.engine import Note
from tests.peers.read_keys import TABLE

SMALLEST: dict[str, dict[str, Any]] = {
    "axolotl": {
        "base_model": "a/model",
        "datasets": [{"path": "a/set"}],
        "adapter": "lora",
        "lora_target_linear": True,
        "sequence_len": 512,
    },
    "LLaMA-Factory": {"model_name_or_path": "a/model", "dataset": "a", "finetuning_type": "lora"},
    "TRL": {"model_name_or_path": "a/model", "dataset_name": "a/set", "use_peft": True},
    "ms-swift": {"model": "a/model", "dataset": ["a/set"], "tuner_type": "lora"},
}
SOURCE = {"path": "a/set", "type": "chat_template"}


@cache
def table() -> dict[str, Any]:
    return dict(json.loads(TABLE.read_text("utf-8")))


def another_value(kind: str, default: Any) -> Any:
    """Return a value that the type allows and that is not the default."""
    if "Literal[" in kind:
        literals = [
            node.value for node in ast.walk(ast.parse(kind)) if isinstance(node, ast.Constant)
        ]
        return next(
            (value for value in literals if value is not None and value != default), default
        )
    if "bool" in kind and "str" not in kind:
        return default is not True
    if "float" in kind:
        return 0.25 if default != 0.25 else 0.5
    if "int" in kind:
        return 3 + default if isinstance(default, int) else 3
    if "dict" in kind.lower() and "str |" not in kind.lower():
        return {"thing": 1}
    return ["thing"] if "list" in kind.lower() else "thing"


def keys(peer: str) -> Iterator[tuple[str, Any]]:
    for key, (kind, default) in table()[peer]["keys"].items():
        yield key, another_value(kind, default)


def notes_of(peer: str, settings: dict[str, Any], folder: Path) -> list[Note]:
    lines = {key: number for number, key in enumerate(settings, 1)}
    draft = understand(folder / "theirs.yaml", Foreign(settings, lines), peer)
    return [note for note in draft.notes if note.kind != "assumed"]


@pytest.mark.parametrize("peer", SMALLEST)
def test_every_key_of_a_peers_schema_ends_in_one_list(peer: str, tmp_path: Path) -> None:
    lost = []
    silent = []
    refused = {}
    for key, value in keys(peer):
        try:
            notes = notes_of(peer, {**SMALLEST[peer], key: value}, tmp_path)
        except ConfigError as error:
            refused[key] = str(error)
            continue
        matching = [note for note in notes if note.key == key]
        if len(matching) != 1 or not matching[0].text:
            lost.append((key, value, matching))
        elif "no setting follows" in matching[0].text:
            silent.append(key)
    assert not lost
    assert not silent
    assert all(key in message for key, message in refused.items())
    assert len(refused) < 12  # other kinds of learning


@pytest.mark.parametrize("peer", SMALLEST)
def test_every_key_of_a_peers_schema_is_known_by_its_purpose(peer: str, tmp_path: Path) -> None:
    unknown = []
    for key, value in keys(peer):
        try:
            notes = notes_of(peer, {**SMALLEST[peer], key: value}, tmp_path)
        except ConfigError:
            continue
        if any(note.key == key and "not known to" in note.text for note in notes):
            unknown.append(key)
    assert not unknown


# Keys whose default is none, which the tools' code takes for off.
OFF_WHERE_LEFT_OUT = {
    "axolotl": "auto_find_batch_size bfloat16 cosine_constant_lr_ratio cosine_min_lr_ratio dataloader_drop_last "
    "dataset_exact_deduplication float16 float32 fp16 fp8 gptq kd_trainer neftune_noise_alpha noisy_embedding_alpha "
    "peft_use_dora peft_use_rslora process_reward_model reward_model resize_token_embeddings_to_32x streaming "
    "trust_remote_code use_comet use_eaft use_mlflow use_tensorboard use_trackio use_wandb wandb_watch",
    "LLaMA-Factory": "neftune_noise_alpha",
    "TRL": "neftune_noise_alpha",
    "ms-swift": "neftune_noise_alpha fp16",
}


@pytest.mark.parametrize("peer", SMALLEST)
def test_only_a_tools_own_default_is_off_as_here(peer: str, tmp_path: Path) -> None:
    wrong = []
    for key, (_, default) in table()[peer]["keys"].items():
        for value in (False, 0):
            try:
                notes = notes_of(peer, {**SMALLEST[peer], key: value}, tmp_path)
            except ConfigError:
                continue
            is_off = any(note.key == key and note.text == "off, as here" for note in notes)
            is_default = default is not None and default == value
            if is_off and not is_default and key not in OFF_WHERE_LEFT_OUT[peer].split():
                wrong.append((key, value, default))
    assert not wrong


@pytest.mark.parametrize(
    ("peer", "key", "value"),
    [
        ("ms-swift", "init_weights", False),
        ("ms-swift", "eval_iters", 0),
        ("ms-swift", "data_seed", 0),
        ("LLaMA-Factory", "video_fps", 0),
        ("ms-swift", "freeze_parameters_ratio", 0.5),
        ("LLaMA-Factory", "create_new_adapter", True),
        ("LLaMA-Factory", "freeze_trainable_layers", 2),
        ("axolotl", "loraplus_lr_ratio", 16),
    ],
)
def test_what_is_not_done_here_is_dropped_with_its_reason(
    peer: str, key: str, value: Any, tmp_path: Path
) -> None:
    (note,) = (n for n in notes_of(peer, {**SMALLEST[peer], key: value}, tmp_path) if n.key == key)
    assert note.kind == "dropped"
    assert "not known" not in note.text


@pytest.mark.parametrize(
    ("peer", "key"),
    [
        ("axolotl", "lora_target_parameters"),
        ("TRL", "lora_target_parameters"),
        ("ms-swift", "target_parameters"),
    ],
)
def test_tensors_that_get_adapters_are_carried(peer: str, key: str, tmp_path: Path) -> None:
    settings = {**SMALLEST[peer], key: ["mlp.experts.down_proj"]}
    noted = [
        (note.kind, note.text) for note in notes_of(peer, settings, tmp_path) if note.key == key
    ]
    assert noted == [("carried", "lora.target_parameters: [mlp.experts.down_proj]")]


@pytest.mark.parametrize("peer", SMALLEST)
def test_keys_that_are_empty_are_told_too(peer: str, tmp_path: Path) -> None:
    empty = {key: None for key in table()[peer]["keys"] if key not in SMALLEST[peer]}
    notes = notes_of(peer, {**SMALLEST[peer], **empty}, tmp_path)
    noted_keys = [note.key for note in notes]
    assert sorted(noted_keys) == sorted(set(noted_keys))
    assert set(noted_keys) >= empty.keys()
    # No limit, and the modules that PEFT chooses.
    means_something = {"max_length", "lora_target_modules"} if peer == "TRL" else set()
    assert {note.kind for note in notes if note.key in empty.keys() - means_something} == {
        "unneeded"
    }


def test_no_limit_is_not_their_default(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(
        "model_name_or_path: a/model\ndataset_name: a/set\nmax_length: null\n"
    )
    result = import_config(tmp_path / "t.yaml", "TRL")
    assert "max_length: 8192\n  overlong: error  # max_length: null in the file" in result.text


def test_every_key_of_a_data_set_of_llama_factory_is_carried_or_told(tmp_path: Path) -> None:
    tags = {
        "role_tag": "role",
        "content_tag": "content",
        "user_tag": "user",
        "assistant_tag": "bot",
    }
    entry = {
        "file_name": "a.json",
        "formatting": "sharegpt",
        "tags": tags,
        "num_samples": 7,
        "folder": "b",
        "new": 1,
    }
    (tmp_path / "data").mkdir()
    info = tmp_path / "data" / "dataset_info.json"
    info.write_text(json.dumps({"a": entry}))
    notes = {
        note.key: note.text
        for note in notes_of("LLaMA-Factory", SMALLEST["LLaMA-Factory"], tmp_path)
    }
    assert "a.json#7, format: messages" in notes["dataset"]
    assert [key for key in notes if key.startswith("dataset: a")] == [
        "dataset: a.tags.assistant_tag", "dataset: a.folder", "dataset: a.new"
    ]  # fmt: skip
    info.write_text('{"a": {"file_name": "a.json"}, "a": {"file_name": "b.json"}}')
    with pytest.raises(ConfigError, match=r"dataset_info.json:1: a: given twice"):
        notes_of("LLaMA-Factory", SMALLEST["LLaMA-Factory"], tmp_path)


def test_sections_of_sources_lose_no_key(tmp_path: Path) -> None:
    source = {**SOURCE, "roles_to_train": []}
    noted_keys = [
        note.key
        for note in notes_of("axolotl", {**SMALLEST["axolotl"], "datasets": [source]}, tmp_path)
    ]
    assert "datasets[0].roles_to_train" in noted_keys
    mixture = {"datasets": [{"id": "a/set", "columns": ["text"], "new": 1}], "shuffled": True}
    settings = {"model_name_or_path": "a/model", "dataset_mixture": mixture}
    noted_keys = [note.key for note in notes_of("TRL", settings, tmp_path)]
    assert {"dataset_mixture.datasets[0].new", "dataset_mixture.shuffled"} <= set(noted_keys)


def test_pretraining_trains_every_token(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("swift pt --model a/model --dataset texts.txt\n")
    result = import_config(tmp_path / "a.sh")
    assert "train_on: all" in result.text
    assert not result.of("dropped")


def test_launchers_and_further_commands_of_a_script_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(
        "accelerate launch --config_file z3.yaml --num_processes 8 examples/scripts/sft.py \\\n"
        "  --model_name_or_path a/model --dataset_name a/set && trl dpo --beta 1\ntrl sft --packing true\n"
    )
    result = import_config(tmp_path / "a.sh")
    assert "processes: 8" in result.text
    assert [(note.key, note.value) for note in result.of("dropped")] == [
        ("launcher --config_file", "z3.yaml"), ("line 2", "trl dpo --beta 1"), ("line 3", "trl sft --packing true")
    ]  # fmt: skip


def test_every_key_of_a_source_of_axolotl_is_carried_or_told(tmp_path: Path) -> None:
    plain = notes_of("axolotl", {**SMALLEST["axolotl"], "datasets": [SOURCE]}, tmp_path)
    lost = []
    for key, value in keys("axolotl datasets"):
        settings = {**SMALLEST["axolotl"], "datasets": [{**SOURCE, key: value}]}
        if key.startswith("message_field_training"):
            with pytest.raises(ConfigError, match=f"say under `{value}` what is trained"):
                notes_of("axolotl", settings, tmp_path)
            continue
        notes = notes_of("axolotl", settings, tmp_path)
        is_carried = {note.text for note in notes if note.key == "datasets"} != {
            note.text for note in plain if note.key == "datasets"
        }
        if not is_carried and not any(note.key == f"datasets[0].{key}" for note in notes):
            lost.append(key)
    assert not lost


@pytest.mark.parametrize(
    ("peer", "key", "value"),
    [
        ("axolotl", "chat_template", "llama3"),
        ("axolotl", "shuffle_merged_datasets", False),
        ("axolotl", "plugins", ["mine.Plugin"]),
        ("axolotl", "model_type", "LlamaForSequenceClassification"),
        ("LLaMA-Factory", "template", "qwen3"),
        ("LLaMA-Factory", "enable_thinking", True),
        ("LLaMA-Factory", "enable_thinking", False),
        ("LLaMA-Factory", "tokenized_path", "kept"),
        ("TRL", "loss_type", "dft"),
        ("TRL", "resume_from_checkpoint", "elsewhere/checkpoint-5"),
        ("TRL", "push_to_hub", True),
        ("TRL", "data_seed", 5),
        ("ms-swift", "template", "qwen3"),
        ("ms-swift", "dataset_shuffle", False),
        ("ms-swift", "eval_iters", 5),
    ],
)
def test_what_changes_a_result_is_never_called_not_needed(
    peer: str, key: str, value: Any, tmp_path: Path
) -> None:
    notes = notes_of(peer, {**SMALLEST[peer], key: value}, tmp_path)
    assert [note.kind for note in notes if note.key == key] == ["dropped"]


@pytest.mark.parametrize(
    ("peer", "data", "share"),
    [
        ("axolotl", {"test_datasets": [SOURCE]}, "val_set_size"),
        ("LLaMA-Factory", {"eval_dataset": "held"}, "val_size"),
        ("ms-swift", {"val_dataset": "a/set"}, "split_dataset_ratio"),
    ],
)
def test_a_share_beside_data_for_evaluations_replaces_none_of_them(
    peer: str, data: dict[str, Any], share: str, tmp_path: Path
) -> None:
    notes = {
        note.key: note for note in notes_of(peer, {**SMALLEST[peer], **data, share: 0.1}, tmp_path)
    }
    assert [notes[key].kind for key in (*data, share)] == ["carried", "unneeded"]
    assert next(iter(data)) in notes[share].text


@pytest.mark.parametrize("peer", ["axolotl", "TRL"])
def test_numbers_of_16_bits_switched_off_are_float32_there(peer: str, tmp_path: Path) -> None:
    (off,) = (
        n for n in notes_of(peer, {**SMALLEST[peer], "bf16": False}, tmp_path) if n.key == "bf16"
    )
    assert (off.kind, off.text) == ("carried", "model.dtype: float32")
    notes = notes_of(peer, {**SMALLEST[peer], "fp16": True, "bf16": False}, tmp_path)
    assert {n.key: n.kind for n in notes if n.key.endswith("16")} == {
        "fp16": "carried",
        "bf16": "unneeded",
    }


def test_no_pattern_of_what_is_not_here_is_covered_by_an_earlier_one() -> None:
    earlier: list[str] = []
    covered = []
    for patterns in not_here.DROPPED:
        for name in patterns.split():
            covered += [(name, pattern) for pattern in earlier if fnmatchcase(name, pattern)]
            earlier.append(name)
    assert covered == []
