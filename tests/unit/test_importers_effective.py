"""What keys of other tools mean together: `carried over` is said only of what was computed there."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from kubetune.config.load import load_config
from kubetune.config.schema import Config
from kubetune.config.schema.preference import ONLY_WITH
from kubetune.errors import ConfigError
from kubetune.plan.linears import Trainable, adapted_linears
from kubetune.plan.model_shapes import read_weights
from kubetune.plan.plan import learning_rate_at, make_plan
from kubetune.plugins.importers import Imported, import_config
from kubetune.plugins.importers.common.target_keys import PEFT_DEFAULTS, of_family
from tests.peers.read_effective import PEERS, STEPS, TABLE

LLAMA_FACTORY = "model_name_or_path: a/model\nstage: sft\nfinetuning_type: lora\ndataset: a\n"
TRL = "model_name_or_path: {model}\ndataset_name: a/set\nuse_peft: true\n"
AXOLOTL = "base_model: a/model\nadapter: lora\nlora_r: 8\nlora_target_linear: true\ndatasets: [{path: a/set}]\n"
SWIFT = "swift sft --model a/model --dataset a.jsonl "


def imported(folder: Path, text: str, peer: str | None = None) -> tuple[Imported, Config]:
    file = folder / ("theirs.sh" if text.startswith("swift") else "theirs.yaml")
    file.write_text(text)
    result = import_config(file, peer)
    run_file = folder / "run.yaml"
    run_file.write_text(result.text)
    return result, load_config(run_file)


def kinds(result: Imported) -> dict[str, str]:
    return {note.key: note.kind for note in result.notes}


def text_of(result: Imported, key: str) -> str:
    return next(note.text for note in result.notes if note.key == key)


def model_folder(folder: Path, model_type: str) -> Path:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder / "model"


@pytest.mark.parametrize(
    ("peer", "text"),
    [
        ("axolotl", AXOLOTL + "warmup_steps: 5\nwarmup_ratio: 0.1\n"),
        ("TRL", TRL.format(model="a/model") + "warmup_steps: 5\nwarmup_ratio: 0.1\n"),
        ("ms-swift", SWIFT + "--warmup_steps 5 --warmup_ratio 0.1"),
    ],
)
def test_steps_of_the_warm_up_beside_a_share_are_refused(
    peer: str, text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r":\d+: warmup_(steps|ratio): is set beside .* keep one"):
        imported(tmp_path, text, peer)


@pytest.mark.parametrize("value", ["true", "often", ".inf", "-3"])
def test_a_warm_up_that_is_no_number_is_refused_at_its_line(value: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"theirs.yaml:5: warmup_steps: found "):
        imported(tmp_path, LLAMA_FACTORY + f"warmup_steps: {value}\n")


def test_left_out_target_modules_are_pefts_choice_for_the_family(tmp_path: Path) -> None:
    text = TRL.format(model=model_folder(tmp_path, "qwen2"))
    result, config = imported(tmp_path, text)
    assert config.lora is not None
    assert config.lora.target_modules == ("q_proj", "v_proj")
    assert "PEFT's choice for qwen2" in text_of(result, "lora.target_modules")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "gpt_neox"}')
    lora = imported(tmp_path, text)[1].lora
    assert lora is not None
    assert lora.target_modules == ("query_key_value",)


def test_left_out_target_modules_of_a_model_that_is_not_here(tmp_path: Path) -> None:
    result, config = imported(tmp_path, TRL.format(model="a/model"))
    assert config.lora is not None
    assert config.lora.target_modules == ("q_proj", "v_proj")
    assert kinds(result)["lora_target_modules"] == "approximated"
    assert "config.json of a/model" in text_of(result, "lora_target_modules")


def test_left_out_target_modules_of_a_family_that_peft_does_not_know(tmp_path: Path) -> None:
    text = TRL.format(model=model_folder(tmp_path, "newest"))
    with pytest.raises(ConfigError, match=r"theirs.yaml:3: use_peft: .* none by itself for newest"):
        imported(tmp_path, text)


@pytest.mark.slow
def test_the_choice_for_each_family_is_pefts_own() -> None:
    constants = pytest.importorskip("peft.utils.constants")
    theirs = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    families = {name for listed in PEFT_DEFAULTS.values() for name in listed.split()}
    assert families == set(theirs)
    assert {family: of_family(family) for family in families} == theirs


def test_training_without_a_chat_template_is_refused_or_plain_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"theirs.sh:1: use_chat_template: .* without a chat tem"):
        imported(tmp_path, SWIFT + "--use_chat_template false")
    result, _ = imported(tmp_path, SWIFT + "--use_chat_template true")
    assert kinds(result)["use_chat_template"] == "unneeded"
    for more in ("", "--use_chat_template false"):
        _, config = imported(tmp_path, f"swift pt --model a/model --dataset a.jsonl {more}")
        assert (config.data.train[0].format, config.data.train_on) == ("text", "all")
    text = "swift pt --model a/model --dataset a.jsonl --use_chat_template true"
    assert imported(tmp_path, text)[1].data.train[0].format == "auto"
    result, _ = imported(tmp_path, SWIFT + "--task_type seq_cls --num_labels 2")
    assert kinds(result)["use_chat_template"] == "approximated"


def test_pretraining_of_the_others_is_plain_text_too(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    entry = {"a": {"file_name": "a.json", "columns": {"prompt": "content"}}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(entry))
    _, config = imported(tmp_path, LLAMA_FACTORY.replace("sft", "pt"))
    source = config.data.train[0]
    assert (source.format, source.columns) == ("text", {"text": "content"})
    text = AXOLOTL.replace("datasets", "pretraining_dataset") + "sequence_len: 512\n"
    assert imported(tmp_path, text)[1].data.train[0].format == "text"


def test_the_term_of_llama_factory_that_is_a_mean_of_means_is_near(tmp_path: Path) -> None:
    result, config = imported(tmp_path, LLAMA_FACTORY.replace("sft", "dpo") + "pref_ftx: 0.2\n")
    assert config.preference is not None
    assert config.preference.sft_weight == 0.2
    assert kinds(result)["pref_ftx"] == "approximated"
    assert "mean over all tokens" in text_of(result, "pref_ftx")


@pytest.mark.parametrize(
    ("peer", "text"),
    [
        ("LLaMA-Factory", LLAMA_FACTORY + "lr_scheduler_type: cosine\nlr_scheduler_kwargs: {num_cycles: 3}\n"),
        ("TRL", TRL.format(model="a/model") + "lr_scheduler_type: cosine\nlr_scheduler_kwargs: {num_cycles: 3}\n"),
        ("ms-swift", SWIFT + "--lr_scheduler_type cosine --lr_scheduler_kwargs '{\"num_cycles\": 3}'"),
        ("axolotl", AXOLOTL + "lr_scheduler: cosine\ncosine_min_lr_ratio: 0.1\n"),
        ("axolotl", AXOLOTL + "lr_scheduler: cosine\njagged_restart_steps: 10\n"),
    ],
)  # fmt: skip
def test_a_schedule_whose_shape_other_keys_change_comes_only_near(
    peer: str, text: str, tmp_path: Path
) -> None:
    result, config = imported(tmp_path, text, peer)
    assert config.training.lr_scheduler_type == "cosine"
    key = "lr_scheduler" if peer == "axolotl" else "lr_scheduler_type"
    assert kinds(result)[key] == "approximated"


def test_settings_of_a_schedule_that_say_nothing(tmp_path: Path) -> None:
    for schedule, ratio in (("linear", 0.1), ("constant", 0.1), ("cosine", 0)):
        text = f"{AXOLOTL}lr_scheduler: {schedule}\ncosine_min_lr_ratio: {ratio}\n"
        result, _ = imported(tmp_path, text)
        assert kinds(result)["lr_scheduler"] == "carried"


@pytest.mark.parametrize(
    ("more", "epochs", "kind"),
    [
        ("--max_epochs 1", 1, "approximated"),
        ("--max_epochs 1 --num_train_epochs 2", 1, "approximated"),
        ("--num_train_epochs 2 --max_epochs 1", 1, "approximated"),
        ("--num_train_epochs 2 --max_epochs 5 --max_steps -1", 2, "unneeded"),
        ("--max_epochs 1 --max_steps 100", 3, "dropped"),
    ],
)
def test_max_epochs_of_swift_ends_a_run_before_its_schedule(
    more: str, epochs: float, kind: str, tmp_path: Path
) -> None:
    result, config = imported(tmp_path, SWIFT + more)
    assert config.training.num_train_epochs == epochs
    assert kinds(result)["max_epochs"] == kind


def test_of_two_keys_that_axolotl_refuses_together_the_first_counts(tmp_path: Path) -> None:
    text = AXOLOTL + "val_set_size: 0.1\neval_steps: 5\nevals_per_epoch: 1\n"
    result, config = imported(tmp_path, text)
    assert config.training.eval_steps == 5
    assert "an earlier key, eval_steps" in text_of(result, "evals_per_epoch")


def test_a_zero_that_says_nothing(tmp_path: Path) -> None:
    result, config = imported(tmp_path, SWIFT + "--val_dataset b.jsonl --early_stop_interval 0")
    assert config.training.early_stopping_patience is None
    text = AXOLOTL + "val_set_size: 0.1\nearly_stopping_patience: 0\nsave_total_limit: 0\n"
    result, config = imported(tmp_path, text)
    assert config.training.early_stopping_patience is None
    assert kinds(result)["save_total_limit"] == "unneeded"
    lora = imported(tmp_path, LLAMA_FACTORY + "lora_rank: 4\nlora_alpha: 0\n")[1].lora
    assert lora is not None
    assert lora.lora_alpha == 8


def test_words_of_swift_are_no_names_of_modules(tmp_path: Path) -> None:
    result, _ = imported(tmp_path, SWIFT + "--target_modules all-embedding")
    assert kinds(result)["target_modules"] == "dropped"
    text = SWIFT + "--target_modules q_proj all-embedding --modules_to_save lm_head all-norm"
    result, config = imported(tmp_path, text)
    assert config.lora is not None
    assert (config.lora.target_modules, config.lora.modules_to_save) == (("q_proj",), ("lm_head",))
    assert kinds(result)["target_modules"] == kinds(result)["modules_to_save"] == "approximated"


@pytest.mark.parametrize(("shape", "kind"), [("chat_template", "approximated"), ("alpaca", "carried")])  # fmt: skip
def test_all_that_axolotl_trains_of_a_conversation(shape: str, kind: str, tmp_path: Path) -> None:
    text = AXOLOTL.replace("a/set", f"a/set, type: {shape}") + "train_on_inputs: true\n"
    result, config = imported(tmp_path, text)
    assert config.data.train_on == "all"
    assert kinds(result)["train_on_inputs"] == kind


# What each tool makes of pairs of keys, recorded with its own classes: tests/peers/read_effective.py.

OVERLONG = {"delete": "drop", "right": "truncate", "left": "truncate", "raise": "error"}
LOSSES = {"sigmoid": "dpo"}
NEAR = ("approximated", "dropped")
# Keys whose being near excuses a difference; of other topics all that differ from case to case.
ABOUT = {"preference": {"loss_type", "pref_loss"}}


def recorded() -> list[Any]:
    """Return each tool with each of its topics."""
    table = json.loads(TABLE.read_text("utf-8"))
    cases = []
    for peer in table:
        for topic in sorted({case["topic"] for case in table[peer]["cases"]}):
            cases.append(pytest.param(peer, topic, id=f"{peer}-{topic}"))
    return cases


def tiny(folder: Path) -> Path:
    """Write the config of the model that the record was made with."""
    config = {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 64, "hidden_size": 16,
        "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 4096, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config))
    return folder / "model"


def ours(topic: str, config: Config, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return our effective values of a topic, under the names of the record."""
    if topic == "rates":
        return {"rates": our_rates(config, wanted["rates"])}
    if topic == "adapters":
        return {"adapters": our_adapters(config)}
    if topic == "bits":
        asked = {"4bit": 4, "8bit": 8}.get(config.quantization)
        return {"bits": asked, "adapters": config.lora is not None}
    if topic == "data":
        return our_data(config, wanted)
    if topic == "preference":
        return our_preference(config, wanted)
    return our_run(config, wanted)


def our_rates(config: Config, wanted: list[float]) -> list[float]:
    """Return the rates of the first steps, those of the warm-up a step later, as the tools have them."""
    steps = config.training.model_copy(update={"max_steps": STEPS})
    plan = make_plan(config.model_copy(update={"training": steps}), rows=1000)
    rates = []
    for step in range(len(wanted)):
        if step == 0 and plan.warmup_steps:
            rates.append(0.0)
            continue
        same_step = step if step >= plan.warmup_steps else step - 1
        rates.append(round(learning_rate_at(plan, same_step) / plan.learning_rate, 6))
    return rates


def our_adapters(config: Config) -> dict[str, Any] | None:
    if config.lora is None:
        return None
    weights = read_weights(config.model.path, {})
    assert weights is not None
    names = {
        name.split(".")[-1]
        for name, *_ in adapted_linears(Trainable(config.lora, config.sight), weights)
    }
    rank = config.lora.r
    divisor = math.sqrt(rank) if config.lora.use_rslora else rank
    return {
        "modules": sorted(names),
        "r": rank,
        "scale": round(config.lora.lora_alpha / divisor, 6),
        "dropout": config.lora.dropout,
    }


def our_data(config: Config, wanted: dict[str, Any]) -> dict[str, Any]:
    values = {
        "packing": config.data.packing,
        "max_length": config.data.max_length,
        "held_out": config.data.eval or 0,
        "overlong": config.data.overlong,
        "chat_template": config.data.train[0].format != "text",
    }
    return {key: value for key, value in values.items() if key in wanted}


def our_run(config: Config, wanted: dict[str, Any]) -> dict[str, Any]:
    training = config.training
    plan = make_plan(config, rows=1000)
    values = {
        "samples": plan.global_batch_size,
        "max_steps": training.max_steps,
        # Epochs say nothing where the number of steps is given.
        "epochs": training.num_train_epochs if training.max_steps is None else wanted["epochs"],
        "learning_rate": plan.learning_rate,
        "weight_decay": training.weight_decay,
        "beta2": training.adam_beta2,
        "max_grad_norm": training.max_grad_norm,
        # A checkpoint more changes no result, nor does an evaluation.
        "save": wanted["save"] if wanted["save"] == "no" else training.save_steps,
        "eval": training.eval_steps if config.data.eval else "no",
    }
    return {key: value for key, value in values.items() if key in wanted}


def our_preference(config: Config, wanted: dict[str, Any]) -> dict[str, Any]:
    preference = config.preference
    values = {
        "loss": preference.loss,
        "beta": preference.beta,
        "label_smoothing": preference.label_smoothing,
        "sft_weight": preference.sft_weight,
        "gamma": preference.gamma,
    }
    return {key: value for key, value in values.items() if key in wanted}


def theirs(topic: str, effective: dict[str, Any]) -> dict[str, Any]:
    """Return the recorded values in our words."""
    values = dict(effective)
    if topic == "data" and "overlong" in values:
        values["overlong"] = OVERLONG.get(values["overlong"], values["overlong"])
    if topic == "preference":
        values["loss"] = LOSSES.get(values["loss"], values["loss"])
        values["sft_weight"] = values.get("sft_weight") or 0.0
        if values["loss"] not in ONLY_WITH["label_smoothing"]:
            values["label_smoothing"] = 0.0  # it has no effect on them
        if values["loss"] not in ONLY_WITH["sft_weight"]:
            values["sft_weight"] = 0.0
    if topic == "run" and values["save"] is None:
        values["save"] = 500
    return values


@pytest.mark.parametrize(("peer", "topic"), recorded())
def test_what_is_carried_over_is_what_the_tool_computes(
    peer: str, topic: str, tmp_path: Path
) -> None:
    table = json.loads(TABLE.read_text("utf-8"))[peer]
    model = tiny(tmp_path)
    base = PEERS[peer][1]
    wrong = []
    for case in table["cases"]:
        if case["topic"] != topic:
            continue
        settings = json.loads(json.dumps(case["settings"]).replace("MODEL", str(model)))
        varied = {key for key, value in case["settings"].items() if base.get(key) != value}
        try:
            result, config = imported(tmp_path, json.dumps(settings), peer)
        except ConfigError:
            continue  # refused with a reason
        near = {note.key for note in result.notes if note.kind in NEAR} & varied
        if "refused" in case:
            continue  # nobody's file
        wanted = theirs(topic, case["effective"])
        got = ours(topic, config, wanted)
        different = {key: (wanted[key], got[key]) for key in got if wanted[key] != got[key]}
        if "saves_per_epoch" in varied:
            different.pop("save", None)  # of one epoch there, of each here, which changes no result
        excused = near & ABOUT.get(topic, near)
        if different and not excused:
            wrong.append((varied_of(case, varied), different))
    assert not wrong, "\n".join(map(str, wrong[:40]))


def varied_of(case: dict[str, Any], varied: set[str]) -> dict[str, Any]:
    return {key: case["settings"][key] for key in sorted(varied)}
