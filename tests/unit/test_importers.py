"""Other tools' configs as run files: what is carried over means the same, and no key gets lost in silence."""

from __future__ import annotations

import json
import math
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest

from kubetune import cli
from kubetune.cli.program import program
from kubetune.config.load import load_config
from kubetune.config.schema import Config
from kubetune.errors import ConfigError
from kubetune.plan.plan import make_plan
from kubetune.plugins.importers import TOOLS, Imported, _tools, import_config, understand
from kubetune.plugins.importers.engine import Draft, Tool
from kubetune.plugins.importers.foreign import Foreign
from kubetune.plugins.importers.writing import inline

AXOLOTL = """\
base_model: some-lab/tiny-1b
load_in_4bit: true
load_in_8bit: false
datasets:
  - path: some-lab/instructions
    type: alpaca
    split: train[:2000]
  - path: json
    data_files: chats.jsonl
    type: chat_template
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
val_set_size: 0.05
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_target_linear: true
lora_model_dir:
sequence_len: 4096
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
optimizer: paged_adamw_8bit
lr_scheduler: rex
learning_rate: 2e-4
bf16: auto
flash_attention: true
evals_per_epoch: 4
saves_per_epoch: 1
warmup_steps: 10
wandb_project: mine
special_tokens: {pad_token: <pad>}
learning_rat: 1
"""
FACTORY = """\
### model
model_name_or_path: some-lab/tiny-1b
stage: sft
finetuning_type: lora
lora_rank: 8
lora_target: q_proj,v_proj
dataset: known,unknown
template: qwen3
max_samples: 300
preprocessing_num_workers: 4
output_dir: saves/tiny
save_steps: 200
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
"""
TRL = """\
model_name_or_path: some-lab/tiny-1b
dataset_name: some-lab/chats
dataset_config: en
use_peft: true
lora_target_modules: all-linear
assistant_only_loss: true
eval_strategy: steps
eval_steps: 50
learning_rate: 1.0e-4
report_to: [tensorboard, wandb]
"""
SWIFT = """\
# four processes
nproc_per_node=4
NPROC_PER_NODE=$nproc_per_node \\
CUDA_VISIBLE_DEVICES=0,1,2,3 \\
swift sft \\
    --model some-lab/tiny-1b \\
    --tuner_type lora \\
    --dataset some-lab/chats:en/de#500 my/file.jsonl \\
    --split_dataset_ratio 0.01 \\
    --gradient_accumulation_steps $(expr 64 / $nproc_per_node) \\
    --target_modules all-linear \\
    --torch_dtype bfloat16 \\
    --max_length 1024 \\
    --system 'You are kind.' \\
    --packing true \\
    --deepspeed zero3  # don't forget: eight GPUs
"""
FILES = {"axolotl": ("a.yml", AXOLOTL), "LLaMA-Factory": ("l.yaml", FACTORY), "TRL": ("t.yaml", TRL),
         "ms-swift": ("s.sh", SWIFT)}  # fmt: skip


RESOURCES = """\
resources:
  gpu:
    accelerator_count: 1      # GPUs per replica
    accelerator: H100
  memory: 128                # in GB
  cpu: 4
replicas: 4
config_map:
  HF_TOKEN: <your hf token with write creds>
  RESULT_MODEL_ID: <your repo id>
  RUN_NAME: "run #1"
shared_volume:
  size: 10
"""


def imported(folder: Path, text: str, name: str = "config.yml") -> tuple[Imported, Config]:
    (folder / name).write_text(text)
    result = import_config(folder / name)
    (folder / "run.yaml").write_text(result.text)
    return result, load_config(folder / "run.yaml")


def notes(result: Imported, kind: str) -> dict[str, str]:
    return {note.key: note.text for note in result.of(kind)}


def test_axolotl(tmp_path: Path) -> None:
    result, config = imported(tmp_path, AXOLOTL)
    assert result.peer == "axolotl"
    assert (config.model.path, config.quantization) == ("some-lab/tiny-1b", "4bit")
    first, second = config.data.train
    assert (first.path, first.format, first.split) == (
        "some-lab/instructions",
        "alpaca",
        "train[:2000]",
    )
    assert (second.path, second.format, second.columns) == ("chats.jsonl", "sharegpt", {})
    assert (config.data.eval, config.data.max_length, config.data.packing) == (0.05, 4096, True)
    assert config.lora is not None
    assert (config.lora.r, config.lora.alpha, config.lora.target_modules) == (32, 16, "all-linear")
    training = config.training
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (2, 4)
    assert (training.num_train_epochs, training.learning_rate, training.warmup_steps) == (
        3,
        2e-4,
        10,
    )
    assert (training.optim, training.lr_scheduler_type, training.save_steps) == (
        "adamw_8bit",
        "cosine",
        "epoch",
    )
    near = {"optimizer", "lr_scheduler", "evals_per_epoch", "datasets[0].type"}
    assert notes(result, "approximated").keys() == near
    dropped = notes(result, "dropped")
    assert config.tracking.wandb is not None
    assert config.tracking.wandb.project == "mine"
    assert dropped.keys() == {"special_tokens", "learning_rat"}
    assert dropped["learning_rat"].endswith("did you mean learning_rate?")


def test_llama_factory_with_its_registry_of_data(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    entry = {"file_name": "known.json", "formatting": "sharegpt", "columns": {"messages": "turns"}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"known": entry}))
    result, config = imported(tmp_path, FACTORY)
    known, unknown = config.data.train
    assert (known.path, known.format) == (f"{tmp_path}/data/known.json#300", "sharegpt")
    assert known.columns == {"conversations": "turns"}
    assert unknown.path == "unknown#300"
    assert "dataset: unknown" in notes(result, "dropped")
    assert config.lora is not None
    assert (config.lora.r, config.lora.target_modules) == (8, ("q_proj", "v_proj"))
    # What LLaMA-Factory does where its file says nothing.
    training = config.training
    assert (training.num_train_epochs, training.lr_scheduler_type) == (3, "linear")
    assert (config.data.max_length, config.data.overlong, config.data.packing) == (
        2048,
        "truncate",
        False,
    )
    assert config.training.timeout_seconds == 1800
    assert "LLaMA-Factory cuts prompt and answer" in notes(result, "assumed")["data.overlong"]


def test_trl(tmp_path: Path) -> None:
    _, config = imported(tmp_path, TRL)
    (source,), evaluated = config.data.train, config.data.eval
    assert (source.path, source.subset, source.split) == ("some-lab/chats", "en", "train")
    assert isinstance(evaluated, tuple)
    assert (evaluated[0].path, evaluated[0].split) == ("some-lab/chats", "test")
    assert config.lora is not None
    assert (config.lora.r, config.lora.alpha, config.lora.dropout) == (16, 32, 0.05)
    assert (config.data.max_length, config.data.train_on) == (1024, "assistant")
    assert (config.training.per_device_train_batch_size, config.training.eval_steps) == (8, 50)
    assert config.tracking.tensorboard
    assert config.tracking.wandb is not None


SFT = "model_name_or_path: a/b\ndataset_name: a/c\nuse_peft: true\n"
WANDB = "wandb_entity: we\nwandb_project: mine\nwandb_mode: offline\nwandb_log_model: checkpoint\nwandb_name: bot\n"


def test_a_method_that_is_neither_on_nor_off_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="yml:3: use_peft: found sometimes, which is no value"):
        imported(tmp_path, SFT.replace("use_peft: true", "use_peft: sometimes"))


def test_a_kind_that_is_switched_off_is_known(tmp_path: Path) -> None:
    off = "reward_model: false\nprocess_reward_model: false\n"
    result, config = imported(tmp_path, AXOLOTL + off)
    assert config.task == "causal_lm"
    unneeded = notes(result, "unneeded")
    assert unneeded["reward_model"] == unneeded["process_reward_model"] == "off, as here"


@pytest.mark.parametrize(("text", "tracker", "expected"), [
    (AXOLOTL + WANDB.replace("wandb_project: mine\n", ""), "wandb",
     {"project": "mine", "entity": "we", "mode": "offline", "log_model": True}),
    (AXOLOTL + "trackio_space_id: we/board\ntrackio_project_name: p\nuse_trackio: true\n", "trackio",
     {"project": "p", "space_id": "we/board"}),
    (AXOLOTL + "mlflow_tracking_uri: http://s\nhf_mlflow_log_artifacts: true\nuse_mlflow: yes\n", "mlflow",
     {"uri": "http://s", "log_model": True}),
    (AXOLOTL + "mlflow_tracking_uri: http://s\n", "mlflow", None),
    (SFT + WANDB + "report_to: wandb\n", "wandb",
     {"project": "mine", "entity": "we", "mode": "offline", "log_model": True}),
    (SFT + WANDB, "wandb", None),
    (SFT + "project: p\nreport_to: [trackio]\n", "trackio", {"project": "p"}),
    ("export WANDB_PROJECT=mine\n" + SWIFT.replace("swift sft", "swift sft --report_to wandb"), "wandb",
     {"project": "mine"}),
])  # fmt: skip
def test_what_is_said_of_a_tracker_counts_where_the_tracker_is_on(
    tmp_path: Path, text: str, tracker: str, expected: dict[str, Any] | None
) -> None:
    _, config = imported(tmp_path, text, "train.sh" if "swift" in text else "theirs.yaml")
    section = getattr(config.tracking, tracker)
    assert (section and section.model_dump(exclude_unset=True)) == expected


def test_ms_swift_from_a_script(tmp_path: Path) -> None:
    result, config = imported(tmp_path, SWIFT, "train.sh")
    assert [(s.path, s.subset) for s in config.data.train] == [
        ("some-lab/chats#500", "en"), ("some-lab/chats#500", "de"), ("my/file.jsonl", None),
    ]  # fmt: skip
    assert (config.compute.processes, config.training.gradient_accumulation_steps) == (4, 64 // 4)
    assert config.training.global_batch_tokens == "packed"
    assert (config.training.weight_decay, config.training.adam_beta2) == (0.1, 0.95)
    assert config.training.parallelism == "fsdp"
    assert config.lora is not None
    assert (config.lora.r, config.lora.alpha) == (8, 32)
    assert "system" in notes(result, "dropped")
    assert notes(result, "unneeded")["CUDA_VISIBLE_DEVICES"].startswith("an environment variable")


def test_resources_of_a_job(tmp_path: Path) -> None:
    result, config = imported(tmp_path, RESOURCES)
    compute = config.compute
    kubernetes = config.kubernetes
    assert (result.peer, config.name) == ("job resources", "run-1")
    assert (compute.nodes, compute.gpus_per_node, compute.cpu, compute.memory) == (4, 1, 4, "128G")
    assert kubernetes is not None
    assert kubernetes.storage.outputs.size == "10G"
    assert kubernetes.secrets["HF_TOKEN"].secret == "hf-token"
    assert "<your hf token" not in result.text + str(result.notes)
    assert notes(result, "carried").keys() == {
        "resources.gpu.accelerator_count", "resources.memory", "resources.cpu", "replicas", "config_map.HF_TOKEN",
        "shared_volume.size",
    }  # fmt: skip
    assert notes(result, "approximated").keys() == {
        "resources.gpu.accelerator",
        "config_map.RUN_NAME",
    }
    assert notes(result, "dropped").keys() == {"config_map.RESULT_MODEL_ID"}
    # The script beside the file, which it says nothing of: an example to be replaced.
    assert (config.task, config.model.path) == (
        "sequence_classification",
        "google-bert/bert-base-uncased",
    )
    assert "model.path" in notes(result, "assumed")


def test_variables_of_a_job_are_settings_where_they_have_a_meaning(tmp_path: Path) -> None:
    variables = "MODEL_ID: some-lab/tiny\n  DATASET_ID: rows.jsonl#50\n  LORA_RANK: 4\n  RESULT_MODEL_ID: team/bot\n"
    text = f"replicas: 2\nconfig_map:\n  {variables}  NCCL_DEBUG: INFO\nresources:\n  gpu: {{}}\n  disk: 5\n"
    result, config = imported(tmp_path, text)
    assert (config.model.path, config.data.train[0].path, config.task) == (
        "some-lab/tiny",
        "rows.jsonl#50",
        "causal_lm",
    )
    assert config.lora is not None
    assert config.lora.r == 4
    assert config.push is not None
    assert config.push.repo == "team/bot"
    assert config.kubernetes is not None
    assert config.kubernetes.env == {"NCCL_DEBUG": "INFO"}
    assert notes(result, "dropped").keys() == {"resources.disk"}


def test_models_that_see_and_results_that_are_uploaded(tmp_path: Path) -> None:
    sees = "freeze_vision_tower: false\nimage_max_pixels: 262144\nimage_min_pixels: 1024\n"
    more = f"{sees}push_to_hub: true\nhub_model_id: team/bot\nfsdp: full_shard\n"
    result, config = imported(tmp_path, FACTORY + more)
    assert config.task == "vision_language"
    assert "`causal_lm` for one that reads texts alone" in notes(result, "assumed")["task"]
    assert not config.vision.freeze_vision_tower
    assert (config.vision.image_max_tokens, config.vision.image_min_tokens) == (334, 1)
    assert config.push is not None
    assert config.push.repo == "team/bot"
    assert config.training.parallelism == "fsdp"
    _, config = imported(
        tmp_path, FACTORY.replace("finetuning_type: lora", "finetuning_type: full") + more
    )
    assert config.lora is None
    assert config.training.parallelism == "fsdp"


@pytest.mark.parametrize(
    ("model", "frozen", "task"),
    [
        ("org/text-7B", "true", "causal_lm"),
        ("org/text-7B", "false", "vision_language"),
        ("org/Qwen2.5-VL-7B", "true", "vision_language"),
        ("text", "true", "causal_lm"),
        ("text", "false", "causal_lm"),
        ("seeing", "true", "vision_language"),
    ],
)
def test_a_frozen_tower_makes_no_model_see(
    model: str, frozen: str, task: str, tmp_path: Path
) -> None:
    """ms-swift freezes by default, and its files for models of text say so too."""
    for name, facts in (("text", "{}"), ("seeing", '{"vision_config": {}}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"model_type": "x", "all": {facts}}}')
    path = str(tmp_path / model) if (tmp_path / model).is_dir() else model
    result, config = imported(
        tmp_path, f"model: {path}\ntuner_type: lora\ndataset: y\nfreeze_vit: {frozen}\n"
    )
    assert config.task == task
    assert ("freeze_vit" in notes(result, "unneeded")) is (task == "causal_lm")


PACKED = {
    "axolotl": "base_model: x\ndatasets: [{path: y}]\nsequence_len: 4096\nsample_packing: true\nmicro_batch_size: 2\n",
    "LLaMA-Factory": "model_name_or_path: x\nstage: sft\ndataset: y\ncutoff_len: 4096\nneat_packing: true\n",
    "LLaMA-Factory, pre-training": "model_name_or_path: x\nstage: pt\ndataset: y\ncutoff_len: 4096\n",
    "TRL": "model_name_or_path: x\ndataset_name: y\nmax_length: 4096\npacking: true\nuse_peft: true\n",
    "ms-swift": "model: x\ntuner_type: lora\ndataset: y\nmax_length: 4096\npacking: true\n",
}


@pytest.mark.parametrize("peer", PACKED)
def test_a_batch_of_packed_rows_stays_one(peer: str, tmp_path: Path) -> None:
    """1,000 rows of about 200 tokens, packed as these tools do, two at a time, four times: six or seven steps."""
    more = "" if peer == "axolotl" else "per_device_train_batch_size: 2\n"
    _, config = imported(tmp_path, f"{PACKED[peer]}{more}gradient_accumulation_steps: 4\n")
    lengths = [40 + 7 * n % 321 for n in range(1000)]
    bins: list[int] = []
    for length in sorted(lengths, reverse=True):
        place = next((n for n, used in enumerate(bins) if used + length <= 4096), None)
        if place is None:
            bins.append(length)
        else:
            bins[place] += length
    plan = make_plan(config, len(lengths), tokens=sum(lengths))
    length = 4095 if peer == "LLaMA-Factory" else 4096  # packing takes a token there
    assert plan.micro_batch_tokens == 2 * length
    assert plan.steps_per_epoch == math.ceil(len(bins) / (2 * 4)) == 7
    assert plan.accumulation == 4


def test_packing_that_is_off_counts_samples(tmp_path: Path) -> None:
    _, config = imported(
        tmp_path,
        "model_name_or_path: x\ndataset_name: y\npacking: false\npacking_strategy: wrapped\n",
    )
    assert (config.data.packing, config.training.global_batch_tokens) == (False, None)
    _, config = imported(tmp_path, f"{PACKED['TRL']}packing_strategy: bfd_split\n")
    assert config.data.overlong == "split"
    _, config = imported(tmp_path, f"{PACKED['ms-swift']}truncation_strategy: split\n")
    assert config.data.overlong == "split"
    _, config = imported(tmp_path, PACKED["LLaMA-Factory, pre-training"])
    assert config.data.overlong == "split"
    result, config = imported(tmp_path, f"{PACKED['TRL']}packing_strategy: wrapped\n")
    assert (config.data.packing, notes(result, "dropped").keys()) == (True, {"packing_strategy"})


@pytest.mark.parametrize(
    ("text", "kind", "key"),
    [
        ("chat_template: llama3\n", "dropped", "chat_template"),
        ("chat_template: tokenizer_default\n", "unneeded", "chat_template"),
        ("chat_template: tokenizer_default_fallback_chatml\n", "unneeded", "chat_template"),
        ("chat_template: chatml\n", "carried", "chat_template"),
        ("chat_template: jinja\nchat_template_jinja: my.jinja\n", "carried", "chat_template_jinja"),
        ("chat_template_jinja: '{{ messages }}'\n", "dropped", "chat_template_jinja"),
    ],
)
def test_templates_of_axolotl_decide_every_prompt(
    text: str, kind: str, key: str, tmp_path: Path
) -> None:
    data = "base_model: x\nsequence_len: 512\ndatasets: [{path: y, type: chat_template}]\n"
    result, config = imported(tmp_path, data + text)
    assert key in notes(result, kind)
    expected = {"carried": text.split(": ")[-1].strip()}.get(kind)
    assert config.model.chat_template == expected
    inside = text.strip().replace("\n", ", ")
    result, config = imported(
        tmp_path, data.replace("type: chat_template", f"type: chat_template, {inside}")
    )
    assert f"datasets[0].{key}" in notes(result, kind)
    assert config.model.chat_template == expected


def test_of_sources_that_disagree_on_the_template_the_first_counts(tmp_path: Path) -> None:
    sources = "[{path: y, type: chat_template, chat_template: chatml}, {path: z, chat_template: tokenizer_default}]"
    text = f"base_model: x\nsequence_len: 512\nchat_template_jinja: a.jinja\ndatasets: {sources}\n"
    result, config = imported(tmp_path, text)
    assert config.model.chat_template == "chatml"
    why = "an earlier key, datasets[0].chat_template, sets the same setting otherwise: model.chat_template: chatml"
    assert notes(result, "dropped") == {"chat_template_jinja": why}


@pytest.mark.parametrize(
    ("mapping", "expected", "message"),
    [
        ("{role: role, content: content}", ("messages", {}), False),
        ("{role: from, content: value}", ("sharegpt", {"conversations": "messages"}), False),
        ("{role: speaker, content: text}", ("messages", {}), True),
        ("{role: from, content: text}", ("messages", {}), True),
        ("{role: role, content: content, reasoning_content: thoughts}", ("messages", {}), True),
    ],
)
def test_names_inside_messages_are_carried_or_told(
    mapping: str, expected: tuple[str, dict[str, str]], message: bool, tmp_path: Path
) -> None:
    source = f"{{path: y, type: chat_template, message_property_mappings: {mapping}}}"
    result, config = imported(tmp_path, f"base_model: x\nsequence_len: 512\ndatasets: [{source}]\n")
    assert (config.data.train[0].format, config.data.train[0].columns) == expected
    assert ("datasets[0].message_property_mappings" in notes(result, "dropped")) == message


def test_a_template_of_llama_factory_is_told(tmp_path: Path) -> None:
    result, _ = imported(tmp_path, FACTORY)
    assert "model.chat_template" in notes(result, "dropped")["template"]
    result, config = imported(tmp_path, FACTORY.replace("qwen3", "chatml"))
    assert (
        config.model.chat_template
        == notes(result, "carried")["template"].split(": ")[1]
        == "chatml"
    )


def test_variables_that_a_script_does_not_set_are_no_values(tmp_path: Path) -> None:
    script = "OUT=${OUT:-/runs}\nswift sft --model some/model \\\n  --dataset a.jsonl $MORE/b.jsonl --output_dir $OUT/x\n"
    with pytest.raises(ConfigError) as caught:
        imported(tmp_path, script, "train.sh")
    assert "train.sh:2: dataset: " in str(caught.value)
    assert "holds $MORE, which the file does not set; put its value there" in str(caught.value)
    assert "names no" not in str(caught.value)
    _, config = imported(tmp_path, script.replace("$MORE/", ""), "train.sh")
    assert config.output == "/runs/x"
    result, config = imported(
        tmp_path, script.replace("$MORE/", "").replace("$OUT", "$ELSEWHERE"), "train.sh"
    )
    assert (config.output, "output_dir" in notes(result, "dropped")) == (None, True)


def test_what_says_lora_without_an_adapter_is_not_passed_over(tmp_path: Path) -> None:
    text = AXOLOTL.replace("adapter: qlora\n", "adapter:\n")
    with pytest.raises(
        ConfigError,
        match=r"config\.yml:2: load_in_4bit: becomes quantization: found 4bit without lora",
    ):
        imported(tmp_path, text)
    result, config = imported(tmp_path, text.replace("load_in_4bit: true", "load_in_4bit: false"))
    assert config.lora is None
    assert {"lora_r", "lora_alpha", "lora_target_linear"} <= notes(result, "dropped").keys()
    assert "adapter" in notes(result, "unneeded")


def test_first_rows_and_drawn_rows_are_told_apart(tmp_path: Path) -> None:
    result, _ = imported(tmp_path, FACTORY)
    assert "not the first" in notes(result, "approximated")["max_samples"]


def test_a_watchdog_over_finite_losses_is_carried(tmp_path: Path) -> None:
    _, config = imported(
        tmp_path, f"{AXOLOTL}loss_watchdog_threshold: 5.0\nloss_watchdog_patience: 7\n"
    )
    assert (config.training.loss_watchdog_threshold, config.training.loss_watchdog_patience) == (
        5.0,
        7,
    )


def test_mistakes_are_told_at_the_lines_of_the_file(tmp_path: Path) -> None:
    text = f"{AXOLOTL}\n\n"
    number = text.splitlines().index("lora_r: 32") + 1
    with pytest.raises(ConfigError) as caught:
        imported(tmp_path, text.replace("lora_r: 32", "lora_r: -3"))
    assert f"config.yml:{number}: lora_r: becomes lora.r: found -3; expected" in str(caught.value)


RECIPE = """\
model_name_or_path: some-lab/tiny-1b
torch_dtype: bfloat16
dataset_mixture:
  datasets:
    - {id: some-lab/chats, config: en, split: train_sft, columns: [messages], weight: 1.0}
    - {id: some-lab/more, columns: [messages, hints], weight: 0.5}
  test_split_size: 0.05
  seed: 0
chat_template: "{{ messages }}"
eval_strategy: steps
eval_steps: 50
max_steps: -1
logging_strategy: steps
"""


LEAST = {
    "axolotl": {"base_model": "a/b", "datasets": [{"path": "x.jsonl", "type": "alpaca"}]},
    "trl": {"model_name_or_path": "a/b", "dataset_name": "c/d"},
    "llama-factory": {"model_name_or_path": "a/b", "stage": "sft", "dataset": "d"},
    "ms-swift": {"model": "a/b", "dataset": "c/d"},
}
UNMAPPED = {"path": "x", "type": "chat_template", "message_property_mappings": ["role"]}


@pytest.mark.parametrize(
    ("peer", "wrong", "message"),
    [
        (
            "axolotl",
            {"learning_rate": "fast"},
            "learning_rate: becomes training.learning_rate: found",
        ),
        ("axolotl", {"optimizer": [["adamw"]]}, "optimizer: found"),
        ("axolotl", {"datasets": [UNMAPPED]}, "datasets: found"),
        ("axolotl", {"base_model": [{}]}, "base_model: becomes model: found"),
        ("trl", {"optim": {"name": "adamw"}}, "optim: found"),
        ("llama-factory", {"warmup_steps": "many"}, "warmup_steps: found many"),
        ("ms-swift", {"warmup_steps": "many"}, "warmup_steps: found many"),
    ],
)
def test_values_of_another_kind_are_told_at_their_key(
    peer: str,
    wrong: dict[str, Any],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "theirs.json"
    file.write_text(json.dumps(LEAST[peer] | wrong), encoding="utf-8")
    assert cli.main(["import", str(file), "--from", peer]) == 2
    assert f"{file}:1: {message}" in capsys.readouterr().err


def test_a_recipe_for_trl_with_a_mixture_and_no_number_of_steps(tmp_path: Path) -> None:
    """As recipes for TRL are usually written, with -1 for what is off."""
    result, config = imported(tmp_path, RECIPE)
    assert result.peer == "TRL"
    first, second = config.data.train
    assert (first.path, first.subset, first.split, first.weight) == (
        "some-lab/chats",
        "en",
        "train_sft",
        1,
    )
    assert (second.path, second.subset, second.split, second.weight) == (
        "some-lab/more",
        None,
        "train",
        0.5,
    )
    assert (config.data.eval, config.training.max_steps, config.training.num_train_epochs) == (
        0.05,
        None,
        3,
    )
    assert notes(result, "unneeded").keys() >= {"max_steps", "dataset_mixture.seed"}
    assert notes(result, "dropped").keys() == {
        "chat_template",
        "dataset_mixture.datasets[1].columns",
    }


def test_a_key_of_another_tool_is_not_taken_for_one_of_this(tmp_path: Path) -> None:
    result, config = imported(tmp_path, f"{AXOLOTL}use_rslora: true\npacking: true\n")
    assert config.lora is not None
    assert not config.lora.use_rslora
    dropped = notes(result, "dropped")
    assert all(
        "not known to `kubetune import`" in dropped[key] for key in ("use_rslora", "packing")
    )


TOY = '''
"""Toy's configs."""

from kubetune.plugins.importers.engine import Row, Table, Tool, near, switch

TOOL = Tool(
    name="Toy",
    marks="checkpoint rows",
    defaults={"training.learning_rate": 3e-4},
    tables=(
        Table(
            same={"model.path": "checkpoint", "data.train": "rows"},
            rows=[
                Row("too_long", "data.overlong", {"cut": "truncate"}, near("drop", "left out here")),
                switch("half", "model.dtype", "float16"),
            ],
            dropped={"noise": ("kubetune adds no noise", 0)},
            unneeded={"threads": "kubetune takes all cores"},
        ),
    ),
)
'''


def test_a_new_tool_is_a_file_and_a_line_in_the_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "toy_tool.py").write_text(TOY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(TOOLS, "Toy", "toy_tool")
    text = "checkpoint: a/b\nrows: c.jsonl\ntoo_long: split\nhalf: yes\nnoise: 3\nthreads: 8\ntread: 1\n"
    result, config = imported(tmp_path, text)
    assert (result.peer, config.model.path, config.model.dtype) == ("Toy", "a/b", "float16")
    assert config.training.learning_rate == 3e-4
    assert notes(result, "approximated") == {"too_long": "data.overlong: drop; left out here"}
    assert notes(result, "dropped") == {
        "noise": "kubetune adds no noise",
        "tread": "not known to `kubetune import`; did you mean threads?",
    }
    assert notes(result, "unneeded") == {"threads": "kubetune takes all cores"}
    assert cli.main(["import", str(tmp_path / "config.yml"), "--from", "toy-tool"]) == 0
    assert "from a config of Toy" in capsys.readouterr().out


def test_what_is_taken_out_again_is_named_by_the_key_it_came_from(tmp_path: Path) -> None:
    text = AXOLOTL.replace("val_set_size: 0.05", "val_set_size: 0").replace(
        "adapter: qlora", "adapter: lora"
    )
    text = text.replace("load_in_4bit: true", "load_in_4bit: false")
    result, config = imported(tmp_path, f"{text}fsdp: [full_shard]\nfp8: true\n")
    assert (config.training.eval_steps, config.training.parallelism, config.training.fp8) == (
        "epoch",
        "fsdp",
        False,
    )
    dropped = notes(result, "dropped")
    assert "nothing is evaluated" in dropped["evals_per_epoch"]
    assert "fp8" in dropped
    assert not {"evals_per_epoch", "eval_steps"} & notes(result, "approximated").keys()


def test_the_batch_of_a_script_counts_the_samples_of_each_process(tmp_path: Path) -> None:
    _, config = imported(
        tmp_path,
        f"{SWIFT.replace('--packing true', '--per_device_train_batch_size 2')}",
        "train.sh",
    )
    training = config.training
    parts = (training.per_device_train_batch_size, training.gradient_accumulation_steps)
    assert (*parts, config.compute.processes) == (2, 64 // 4, 4)


def test_a_script_that_takes_its_settings_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "lora.yaml").write_text(FACTORY)
    script = tmp_path / "scripts" / "run.sh"
    script.parent.mkdir()
    script.write_text("llamafactory-cli train examples/lora.yaml \\\n  --learning_rate 3e-5\n")
    result = import_config(script)
    assert (result.peer, "learning_rate: 3e-5" in result.text) == ("LLaMA-Factory", True)
    assert "some-lab/tiny-1b" in result.text
    script.write_text("trl sft --output_dir x --config nowhere.yaml\n")
    with pytest.raises(
        ConfigError,
        match=r"takes its settings from nowhere\.yaml, which is not found\. Nothing was",
    ):
        import_config(script)


MEGATRON = """\
NPROC_PER_NODE=2 megatron sft --model some-lab/tiny-1b --dataset some-lab/chats --use_hf true --tuner_type lora \\
    --micro_batch_size 2 --global_batch_size 16 --lr 1e-4 --lr_warmup_fraction 0.05 --train_iters 100 \\
    --tensor_model_parallel_size 2 --recompute_granularity full --no_save_optim true --lr_decay_style constant
"""


def test_the_other_command_of_ms_swift(tmp_path: Path) -> None:
    result, config = imported(tmp_path, MEGATRON, "train.sh")
    training = config.training
    assert (
        training.per_device_train_batch_size,
        training.global_batch_size,
        training.max_steps,
    ) == (2, 16, 100)
    assert (training.learning_rate, training.warmup_ratio) == (1e-4, 0.05)
    assert notes(result, "dropped").keys() == {"tensor_model_parallel_size"}
    assert config.lora is not None
    batches = "--micro_batch_size 2 --global_batch_size 16 "
    _, config = imported(
        tmp_path, MEGATRON.replace("--tuner_type lora", "").replace(batches, ""), "train.sh"
    )
    training = config.training
    assert config.lora is None, "every parameter is trained by default, other than by `swift sft`"
    assert (training.per_device_train_batch_size, training.global_batch_size) == (1, 16)


def test_a_secret_is_not_repeated(tmp_path: Path) -> None:
    secret = "hf_" + "aB3" * 11
    result, _ = imported(tmp_path, f"{FACTORY}hub_token: {secret}\n")
    assert "hub_token" in notes(result, "dropped")
    assert secret not in result.text + str(result.notes)


@pytest.mark.parametrize("peer", FILES)
def test_every_key_is_told_of(peer: str, tmp_path: Path) -> None:
    name, text = FILES[peer]
    result, _ = imported(tmp_path, text, name)
    noted = {note.key.split("[")[0].split(":")[0] for note in result.notes}
    written = {
        line.split(":")[0].strip()
        for line in text.splitlines()
        if line[:1].isalpha() and ": " in f"{line} "
    }
    written |= {word.removeprefix("--").strip() for word in text.split() if word.startswith("--")}
    assert written <= noted
    assert result.peer == peer


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "rl: gdpo\nbase_model: x\ndatasets: [{path: y}]\n",
            ":1: rl: is gdpo; kubetune import converts supervised fine-tuning",
        ),
        ("stage: ppo\nfinetuning_type: lora\n", ":1: stage: is ppo"),
        (
            "a: 1\nb: 2\n",
            "not recognised as a config of axolotl, LLaMA-Factory, TRL, ms-swift, verl, job resources; found keys a, b",
        ),
        ("base_model: x\nsequence_len: 512\n", "names no data to train on"),
        (
            "model_name_or_path: x\nfinetuning_type: lora\nmax_samples: 5\n",
            "names no data to train on",
        ),
        (
            f"{FACTORY}max_samples: 0\n".replace("max_samples: 300\n", ""),
            "max_samples: 0 leaves no records to train on",
        ),
        ("base_model: x\nbase_model: y\n", ":2: base_model: given twice"),
        ("compute_environment: LOCAL\n", "is a config of accelerate"),
        ("model: x\nmodel_class: llm\n", "is a config of LLaMA-Factory's second trainer"),
        (
            "model_name_or_path: x\ndataset_name: y\nreward_funcs: [z]\n",
            ":3: reward_funcs: read as a file of TRL, it names no reward that kubetune has",
        ),
        ("model: x\ndata: {train: y}\n", "is a run file of kubetune already"),
        (
            "model: {model_name: x}\ndata: {train: {datasets: [{dataset_name: y}]}}\n",
            "not recognised as a config of",
        ),
        ("base_model: [\n", "not valid YAML"),
        ("", "holds no setting"),
        (
            "base_model: x\ndatasets: [{path: y}]\nlora_r: -3\nadapter: lora\nlora_target_linear: true\n",
            "lora.r: found -3; expected",
        ),
    ],
)
def test_what_cannot_be_imported_is_explained(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        imported(tmp_path, text)
    assert message in str(caught.value)
    assert "Nothing was written." in str(caught.value) or ":2:" in message or "YAML" in message


def test_the_command_writes_a_file_that_can_be_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}
    ] * 20
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "a.yml").write_text(
        "base_model: x\ndatasets: [{path: rows.jsonl}]\nsequence_len: 512\n"
    )
    assert cli.main(["import", "a.yml", "-o", "run.yaml"]) == 0
    assert f"wrote run.yaml; next: {program()} plan run.yaml" in capsys.readouterr().out
    assert cli.main(["import", "a.yml", "-o", "run.yaml"]) == 2
    assert "exists already" in capsys.readouterr().err
    # The model is not here, which is the one thing that is left to do.
    assert cli.main(["plan", "run.yaml", "--json"]) == 2
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (plan["rows"], plan["method"]) == (20, "full")
    assert cli.main(["import", ".", "--json"]) == 2
    assert ".: is a folder; expected a config of another tool" in capsys.readouterr().err
    assert cli.main(["import", "a.yml", "--json", "--from", "trl"]) == 2
    assert "names no model" in capsys.readouterr().err


# For each tool the settings with which more keys have an effect.
_SAME_SETTING: dict[str, dict[str, Any]] = {
    "axolotl": {"adapter": "lora", "lora_target_linear": True, "val_set_size": 0.1},
    "LLaMA-Factory": {"finetuning_type": "lora", "val_size": 0.1, "quantization_bit": 4},
    "TRL": {"use_peft": True, "lora_target_modules": "all-linear", "eval_strategy": "steps"},
    "ms-swift": {"tuner_type": "lora", "split_dataset_ratio": 0.1, "quant_method": "bnb", "quant_bits": 4},
}  # fmt: skip
_VALUES = (True, False, 4, 8, 0.5, 3, "epoch", "fp4", "linear", "a", "b", "keep_start", "bfd_split")


def _keys_of_settings(tool: Tool) -> dict[str, list[str]]:
    """Return the keys of a tool's table that fill in each of our settings, where there are several."""
    table = tool.by_key()
    keys: dict[str, list[str]] = {}
    for key, row in table.items():
        if row.path:
            keys.setdefault(row.path, []).append(key)
    return {path: names for path, names in keys.items() if len(names) > 1}


def _understood(peer: str, settings: dict[str, Any]) -> Draft | None:
    base = {key: value for key, value in _SAME_SETTING[peer].items() if key not in settings}
    base["report_to"] = ["wandb", "mlflow", "trackio"]
    try:
        return understand(Path("theirs.yaml"), Foreign(base | settings, {}), peer)
    except ConfigError:
        return None


def _telling_values(peer: str, key: str, path: str) -> list[Any]:
    """Return values with which a key fills in our setting, each otherwise, two at most."""
    chosen: dict[str, Any] = {}
    for value in _VALUES:
        draft = _understood(peer, {key: value})
        if draft is not None and draft.origin(path) == key:
            chosen.setdefault(inline(draft.ours(path)), value)
    return list(chosen.values())[:2]


@pytest.mark.parametrize("peer", _SAME_SETTING)
def test_of_two_keys_for_one_setting_only_that_which_counts_is_carried_over(peer: str) -> None:
    """All pairs of keys that fill in one setting, in both orders."""
    conflicts = set()
    for path, keys in _keys_of_settings(_tools()[peer]).items():
        values = {key: _telling_values(peer, key, path) for key in keys}
        for first, second in permutations(keys, 2):
            for pair in product(values[first], values[second]):
                settings = {first: pair[0], second: pair[1]}
                draft = _understood(peer, settings)
                if draft is None:
                    continue
                shown = f"{path}: {inline(draft.ours(path))}"
                for note in draft.notes:
                    if note.key not in settings or note.kind != "carried":
                        continue
                    assert note.text.startswith(shown), (settings, note)
                why = f"an earlier key, {first}, sets the same setting otherwise: {shown}"
                if any(note.text == why for note in draft.notes):
                    conflicts.add((first, second))
    assert len(conflicts) > 5


def test_keys_that_act_on_each_other_count_in_either_order(tmp_path: Path) -> None:
    lines = "model_name_or_path: a/b\ndataset_name: a/c\nuse_peft: true\nlora_target_modules: all-linear\n"
    pairs = (
        ("load_in_4bit: true\n", "bnb_4bit_quant_type: fp4\n"),
        ("save_steps: 100\n", "save_strategy: epoch\n"),
    )
    for pair in pairs:
        for first, second in (pair, pair[::-1]):
            result, config = imported(tmp_path, lines + first + second)
            assert not result.of("dropped")
            assert config.quantization == ("fp4" if pair == pairs[0] else "none")
            if pair == pairs[1]:
                assert config.training.save_steps == "epoch"


@pytest.mark.parametrize(
    ("peer", "settings", "reason"),
    [
        ("ms-swift", {"quant_method": None, "quant_bits": 4}, "has no effect without quant_method"),
        (
            "TRL",
            {"packing": True, "truncation_mode": "keep_end"},
            "has no effect, since packing counts",
        ),
        (
            "LLaMA-Factory",
            {"stage": "sft", "pref_beta": 0.2},
            "a setting of preference tuning; it has no effect in supervised fine-tuning",
        ),
        ("LLaMA-Factory", {"stage": "kto", "pref_loss": "sigmoid"}, "has no effect in KTO"),
        ("LLaMA-Factory", {"stage": "rm", "pref_beta": 0.2}, "has no effect on a reward model"),
        (
            "axolotl",
            {"datasets": [{"path": "a/b", "type": "alpaca", "field_messages": "turns"}]},
            "does not apply to type: alpaca; name the column in the source's columns",
        ),
    ],
)
def test_a_setting_without_effect_is_named_with_the_reason(
    peer: str, settings: dict[str, Any], reason: str
) -> None:
    draft = _understood(peer, settings)
    assert draft is not None
    assert reason in [note.text for note in draft.notes]


@pytest.mark.parametrize("share", [0.1, 0.01])
def test_a_share_of_all_steps_between_lines_of_the_log_becomes_a_number(
    tmp_path: Path, share: float
) -> None:
    result, config = imported(tmp_path, f"{FACTORY}logging_steps: {share}\n")
    assert config.training.logging_steps == 10
    assert "a share of all steps in the tool" in notes(result, "approximated")["logging_steps"]
    result, _ = imported(tmp_path, f"{FACTORY}logging_steps: 0\n")
    assert "expected 1 or more" in notes(result, "dropped")["logging_steps"]


@pytest.mark.parametrize("stage_first", [True, False])
def test_supervised_fine_tuning_of_a_model_that_sees_stays_that(
    tmp_path: Path, stage_first: bool
) -> None:
    """LLaMA-Factory's own examples have `image_max_pixels` before `stage: sft`."""
    pixels = "image_max_pixels: 262144\n"
    text = FACTORY + pixels if stage_first else pixels + FACTORY
    result, config = imported(tmp_path, text)
    assert config.task == "vision_language"
    assert "stage" in notes(result, "unneeded")


@pytest.mark.parametrize(("key", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_16_bits_are_carried_over_with_a_word_on_machines_without_a_gpu(
    tmp_path: Path, key: str, dtype: str
) -> None:
    result, config = imported(tmp_path, f"{TRL}{key}: true\n")
    assert config.model.dtype == dtype
    text = f"model.dtype: {dtype}; without a GPU or instructions for it many times slower than auto"
    assert notes(result, "carried")[key] == text
