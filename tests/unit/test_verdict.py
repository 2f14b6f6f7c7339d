"""One verdict: each half-right run is refused by every verb with the same sentence and exit code 2, and none goes on."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file, save_file

import kubetune
from kubetune import errors, extras
from kubetune.base.secrets import HUB_TOKENS
from kubetune.cli import main
from kubetune.cli.installation import mcp
from kubetune.config.load import load_config
from kubetune.config.naming import RESOLVED
from kubetune.config.resolved import dotted_values, resolved
from kubetune.data.findings.checked import prepare_run
from kubetune.errors import KubetuneError
from kubetune.k8s.manifests import local_files
from kubetune.k8s.manifests.mistakes import Mistake
from kubetune.k8s.manifests.run_spec import plan_without_data
from kubetune.library.clusters import checked_manifests
from kubetune.library.plans import plan_here
from kubetune.library.verdict.run_problems import problems_of, warnings_of
from kubetune.ui.form import new_run
from kubetune.ui.site import Site
from tests.tiny import pretend_weights, train_tokenizer

MODEL = Path(kubetune.__file__).parent / "cli" / "local" / "embedded" / "model"
GOES_ON = re.compile(r"^ready to train|^Next: |\bsteps · ", re.MULTILINE)
Settings = dict[str, Any]


@pytest.fixture(autouse=True)
def _without_a_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever runs the tests may be logged in."""
    for name in HUB_TOKENS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))


def rows(*records: Mapping[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


SUMS = rows(
    *({"prompt": f"What is {n} plus {n}?", "completion": f"It is {2 * n}."} for n in range(40))
)
LONG = rows(*({"prompt": f"{n}?", "completion": "a very long word " * 20} for n in range(10)))
WORDS = rows(*({"prompt": f"Say word {n}", "completion": "a word"} for n in range(40)))
PROMPTS = rows(
    *({"messages": [{"role": "user", "content": f"{n}?"}], "hint": "x"} for n in range(40))
)
TALKS = rows(
    *(
        {
            "messages": [
                {"role": "user", "content": f"Say {n}"},
                {"role": "assistant", "content": f"{n}"},
            ]
        }
        for n in range(40)
    )
)
LABELLED = rows(*({"text": f"Say {n}", "label": ("odd", "even")[n % 2]} for n in range(40)))
EQUAL = rows(*({"prompt": f"{n}?", "chosen": "same", "rejected": "same"} for n in range(40)))
PICTURED = rows(*({"image": "a.png", "prompt": f"{n}?", "completion": "red"} for n in range(4)))


@dataclass(frozen=True)
class Case:
    """A run file with one mistake, and what every verb says of it."""

    says: str  # an expression
    settings: Settings = field(
        default_factory=dict
    )  # what differs from a run that is right, by dotted key
    data: str = SUMS
    make: Callable[[Path], None] = lambda folder: None  # more files
    lacks: tuple[str, ...] = ()  # modules that are not installed
    by_code: bool = False  # of code, which no page takes
    no_cache: bool = False  # the folder of caches cannot be made
    by_init: bool = False  # the run file is what `init` writes, so that it has to say it too


def copy_model(folder: Path, **changes: Any) -> Path:
    """Copy the demo's model, with changes to its config.json, to `model`."""
    target = folder / "model"
    shutil.copytree(MODEL, target)
    facts = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**facts, **changes}))
    return target


def without(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for file in copy_model(folder).glob(name):
            file.unlink()

    return make


def empty_weights(folder: Path) -> None:
    (copy_model(folder) / "model.safetensors").write_bytes(b"")


def cut_weights(folder: Path) -> None:
    file = copy_model(folder) / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)


def lose_shard(folder: Path) -> None:
    """Leave of a model in two files the second."""
    model = copy_model(folder)
    (model / "model.safetensors").rename(model / "model-00002-of-00002.safetensors")
    index = {
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00002-of-00002.safetensors",
        }
    }
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def add_experts(folder: Path) -> None:
    """Make a mixture of the demo's model, by the names of its weights."""
    file = copy_model(folder) / "model.safetensors"
    tensors = load_file(file)
    for name in ("down_proj", "gate_up_proj"):
        tensors[f"model.layers.0.mlp.experts.{name}"] = torch.zeros(2, 4, 4)
    save_file(tensors, file, {"format": "pt"})


def put_pointer(folder: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (copy_model(folder) / "model.safetensors").write_text(pointer)


def more_layers(folder: Path) -> None:
    layers = json.loads((MODEL / "config.json").read_text())["num_hidden_layers"]
    copy_model(folder, num_hidden_layers=layers + 2)


def other_sizes(folder: Path) -> None:
    copy_model(folder, intermediate_size=32)


def adapter(folder: Path) -> None:
    (copy_model(folder) / "adapter_config.json").write_text("{}")


def encoder(folder: Path) -> None:
    copy_model(folder, architectures=["BertForMaskedLM"], model_type="bert")


def few_positions(folder: Path) -> None:
    model = copy_model(folder, model_type="gpt2", n_positions=8)
    (model / "model.safetensors").unlink()
    # Sizes by the names that Llama has would be those of another model.
    facts = json.loads((model / "config.json").read_text())
    del facts["intermediate_size"], facts["num_hidden_layers"]
    (model / "config.json").write_text(json.dumps(facts))
    pretend_weights(model, "h", ("ln_1", "attn.c_attn", "ln_2", "mlp.c_fc"))


def put_family(folder: Path, family: str) -> None:
    copy_model(folder, model_type=family)


def put_quantised(folder: Path, method: str, **settings: Any) -> None:
    copy_model(folder, quantization_config={"quant_method": method, **settings})


def few_embeddings(folder: Path) -> None:
    file = copy_model(folder, vocab_size=40) / "model.safetensors"
    weights = load_file(file)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            weights[name] = weights[name][:40].clone()
    save_file(weights, file, {"format": "pt"})


def without_template(folder: Path) -> None:
    target = copy_model(folder)
    (target / "chat_template.jinja").unlink(missing_ok=True)
    train_tokenizer(target, None)


def without_special_tokens(folder: Path) -> None:
    file = copy_model(folder, eos_token_id=None, pad_token_id=None) / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    kept = {key: value for key, value in settings.items() if not key.endswith("_token")}
    file.write_text(json.dumps(kept))


def sees(folder: Path) -> None:
    copy_model(folder, vision_config={"patch_size": 14}, image_token_id=5, model_type="qwen2_vl")
    shutil.copy(Path(__file__).parents[2] / "docs" / "images" / "demo.gif", folder / "a.png")


def put_classifier(folder: Path, names: list[str]) -> None:
    labels = {str(number): name for number, name in enumerate(names)}
    copy_model(folder, architectures=["LlamaForSequenceClassification"], id2label=labels)


def unfinished(task: str) -> Callable[[Path], None]:
    """Return what makes `model` a run directory of a run that has made no checkpoint."""

    def make(folder: Path) -> None:
        settings = {"task": task, "model": str(MODEL), "data": {"train": "train.jsonl"}}
        (folder / "model").mkdir()
        (folder / "model" / RESOLVED).write_text(json.dumps(resolved(load_config(settings))))

    return make


def begun(folder: Path) -> None:
    """Put a run with another learning rate, which has begun, to `outputs/old`."""
    settings = {
        "model": str(MODEL),
        "data": {"train": "train.jsonl", "max_length": 128},
        "training": {"learning_rate": 0.5},
    }
    run_dir = folder / "outputs" / "old"
    run_dir.mkdir(parents=True)
    put(run_dir / RESOLVED, json.dumps(resolved(load_config(settings))))
    put(run_dir / "metrics.jsonl", '{"step": 1}\n')


def put_aside(folder: Path) -> None:
    """Put a file that is of no run to `outputs/old`."""
    run_dir = folder / "outputs" / "old"
    run_dir.mkdir(parents=True)
    put(run_dir / "thesis.txt", "mine")


def put(file: Path, text: str) -> None:
    file.write_text(text)


def code(text: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / "mine.py").write_text(text)

    return make


REWARD = {"task": "grpo", "lora": {"r": 8}}
MINE = {**REWARD, "rewards": [{"file": "mine.py", "function": "score"}]}
OWN = {
    "data.eval": 0.2,
    "evaluation.generate": {"metric": "exact_match"},
    "evaluation.metrics": {"file": "mine.py", "functions": ["score"]},
}
OF_MODEL = {"model.path": "model"}
TAUGHT = {**REWARD, "rewards": [{"teacher": "./model"}]}
SCORED = {**REWARD, "rewards": [{"reward_model": "./model"}]}

CASES = {
    # Rows.
    "all rows left out": Case(r"data\.train: 40 of 40 records .* would be left out", {"data.max_length": 8}),
    "some rows left out": Case(
        "would be left out: .* longer than data.max_length 32", {"data.max_length": 32}, data=SUMS + LONG
    ),
    "a bad record": Case(r"train\.jsonl:41: has the keys? `word`", data=SUMS + '{"word": "a"}\n'),
    "not JSON": Case(r"train\.jsonl:41: ", data=SUMS + "{\n"),
    "no data file": Case(r"nothing\.jsonl does not exist", {"data.train": "nothing.jsonl"}),
    "near data file": Case(r"did you mean .*train\.jsonl", {"data.train": "trian.jsonl"}),
    "no evaluation file": Case(r"held\.jsonl does not exist", {"data.eval": "held.jsonl"}),
    "data of the hub that are away": Case(
        "dataset some/rows is not in the local cache and the hub cannot be reached.*--repo-type dataset",
        {"data.train": "some/rows"},
    ),
    "evaluation data of the hub that are away": Case(
        "dataset some/held is not in the local cache", {"data.eval": "some/held"},
    ),
    "fewer samples than processes": Case(
        "training.global_batch_size: found 2 samples for 3 processes",
        {"training.global_batch_size": 2, "compute.processes": 3},
    ),
    "batches that contradict": Case(
        "training.global_batch_size: found 8, but per_device_train_batch_size 1",
        {"training.global_batch_size": 8, "training.gradient_accumulation_steps": 3},
    ),
    "nodes that do not know which they are": Case(
        r"compute.nodes is 2, but NODE_RANK \(or PET_NODE_RANK, JOB_COMPLETION_INDEX\) is not set",
        {"compute.nodes": 2},
    ),
    "no records": Case(r"holds no records", data="\n"),
    "no label": Case(r"`label` is missing|has the keys", {"task": "sequence_classification"}),
    "pairs that are equal": Case("has the same answer as chosen and as rejected", {"task": "preference"}, data=EQUAL),
    "no number to compare with": Case(
        "numeric finds no number in any of the",
        {"data.eval": 0.2, "evaluation.generate": {"metric": "numeric"}}, data=WORDS,
    ),
    "a teacher that is shown what records lack": Case(
        "40 of 40 records of data.train lack 'hint', which the teacher is to be shown",
        {"task": "distill", "distill": {"teacher": "self", "teacher_prompt": "{prompt} {hint}"}},
    ),
    "a teacher that is shown nothing more": Case(
        "39 of 40 records of data.train lack a column `teacher_prompt`, which the teacher is to be shown",
        {"task": "distill", "distill": {"teacher": "self"}},
        data=SUMS.replace("{", '{"teacher_prompt": "It is 0. 0 + 0?", ', 1),
    ),
    "given answers that prompts lack": Case(
        r"40 of 40 rows of data\.train have no answer, and with distill\.lmbda 0\.5",
        {"task": "distill", "distill": {"teacher": str(MODEL), "lmbda": 0.5, "sft_weight": 0.1}}, data=PROMPTS,
    ),
    "a teacher that is the model by its name": Case(
        "39 of 40 records of data.train lack a column `teacher_prompt`",
        {"task": "distill", "distill": {"teacher": str(MODEL)}},
        data=SUMS.replace("{", '{"teacher_prompt": "It is 0. 0 + 0?", ', 1),
    ),
    "no question to ask": Case(
        "no row of the evaluation data has a prompt and an answer",
        {"data.eval": 0.2, "evaluation.generate": {"metric": "exact_match"}, "data.max_length": 64},
        data=rows(*({"text": f"Some words {n}."} for n in range(40))),
    ),
    "no answer to compare with": Case(
        "reward exact_match compares with the right answer, and no record has an answer",
        {**REWARD, "rewards": ["exact_match"]}, data=PROMPTS,
    ),
    "no such column of answers": Case(
        "no record has a column truth; name another one, or leave `column` out",
        {**REWARD, "rewards": [{"name": "numeric", "column": "truth"}]}, data=PROMPTS,
    ),
    "no number to reward": Case(
        "reward numeric finds no number in any right answer", {**REWARD, "rewards": ["numeric"]}, data=WORDS,
    ),
    "no label to reward": Case(
        "reward label finds no word of its labels in any right answer",
        {**REWARD, "rewards": [{"name": "label", "settings": {"labels": ["yes", "no"]}}]}, data=WORDS,
    ),
    "no formula to reward": Case(
        "reward accuracy_reward finds no formula or number in any right answer",
        {**REWARD, "rewards": ["accuracy_reward"]}, data=WORDS,
    ),
    "no JSON to reward": Case(
        "reward json_equal finds no JSON in any right answer", {**REWARD, "rewards": ["json_equal"]}, data=WORDS,
    ),
    "prompts of evaluations without answers": Case(
        "data.eval: 40 of 40 rows have no right answer, and exact_match compares with it",
        {
            **REWARD, "rewards": [{"name": "length", "settings": {"max_tokens": 9}}], "data.eval": "asked.jsonl",
            "evaluation.generate": {"metric": ["reward", "exact_match"]},
        },
        make=lambda folder: put(folder / "asked.jsonl", PROMPTS),
    ),
    "no chat template": Case(
        "chat_template", OF_MODEL, data=TALKS, make=without_template,
    ),
    "no image processor": Case(
        "preprocessor_config.json", {**OF_MODEL, "task": "vision_language"}, data=PICTURED, make=sees, by_init=True,
    ),
    "a model that sees nothing": Case(
        r"\(llama\) takes no images .* take a model that does, such as Qwen/Qwen2\.5-VL-3B-Instruct",
        {"task": "vision_language"}, by_init=True,
    ),
    "no token to fill rows up": Case(
        "names no pad_token, and no eos_token in its place", {**OF_MODEL, "task": "sequence_classification"},
        data=LABELLED, make=without_special_tokens,
    ),
    # The model.
    "no such folder": Case(r"model \./modle: there is no such folder; did you mean \./model\?",
                           {"model.path": "./modle"}, make=copy_model, by_init=True),
    "a file in place of a model": Case(
        r"/one\.bin: is a file; expected the folder of a model", {"model.path": "one.bin"},
        make=lambda folder: put(folder / "one.bin", "x"),
    ),
    "no config.json": Case("has no config.json", OF_MODEL, make=without("config.json")),
    "no weights": Case("has no \\*.safetensors file", OF_MODEL, make=without("model.safetensors"), by_init=True),
    "weights without one of their files": Case(
        r"its index of weights names model-00001-of-00002\.safetensors, not in the folder", OF_MODEL,
        make=lose_shard, by_init=True,
    ),
    "empty weights": Case("model.safetensors has 0 bytes", OF_MODEL, make=empty_weights, by_init=True),
    "weights that are cut": Case(
        r"model.safetensors has [0-9,]+ of [0-9,]+ bytes: it is damaged", OF_MODEL, make=cut_weights, by_init=True,
    ),
    "a pointer in place of weights": Case("is a pointer of Git LFS", OF_MODEL, make=put_pointer, by_init=True),
    "fewer layers than asked for": Case(
        r"its weights have \d layers, and config.json asks for \d", OF_MODEL, make=more_layers, by_init=True,
    ),
    "weights of other sizes": Case("its weights have other shapes than its config.json asks for: ", OF_MODEL,
                                   make=other_sizes),
    "an unknown kind of model": Case(
        "the installed transformers knows no model_type wobble9", OF_MODEL, by_init=True,
        make=lambda folder: copy_model(folder, model_type="wobble9") and None,
    ),
    "a model that needs its own code": Case(
        "model needs code from its repository: set model.trust_remote_code", OF_MODEL, by_init=True,
        make=lambda folder: copy_model(folder, model_type="wobble9", auto_map={"AutoModelForCausalLM": "a.B"}) and None,
    ),
    "code of a hub's kernel": Case(
        "its config.json has _attn_implementation: 'some/kernel', code from elsewhere", OF_MODEL,
        make=lambda folder: copy_model(folder, _attn_implementation="some/kernel") and None,
    ),
    "heads that do not divide": Case(
        "config.json has num_attention_heads 4 and num_key_value_heads 3", OF_MODEL,
        make=lambda folder: copy_model(folder, num_attention_heads=4, num_key_value_heads=3) and None,
    ),
    "no layers": Case(
        "its config.json has num_hidden_layers: 0; expected 1 to", OF_MODEL,
        make=lambda folder: copy_model(folder, num_hidden_layers=0) and None,
    ),
    "a teacher with fewer layers": Case(
        r"rewards\[0\]\.teacher: model .*: its weights have \d layers", TAUGHT, make=more_layers,
    ),
    "no tokenizer": Case("tokenizer", OF_MODEL, make=without("tokenizer*")),
    "an adapter": Case("it holds adapter_config.json", OF_MODEL, make=adapter, by_init=True),
    "an encoder": Case("is an encoder, for task: sequence_classification", OF_MODEL, make=encoder),
    "too few positions": Case("the model has 8 positions, the longest row", OF_MODEL, make=few_positions),
    "too few embeddings": Case("has embeddings for 40 tokens", OF_MODEL, make=few_embeddings),
    "not in the cache": Case(
        "some/model is not in the local cache and the hub cannot be reached.*HF_TOKEN",
        {"model.path": "some/model"}, by_init=True,
    ),
    "not to be fetched": Case(
        "some/model is not in the local cache and local_files_only is set",
        {"model.path": "some/model", "model.local_files_only": True},
    ),
    "another tokenizer": Case("other/tokenizer is not in the local cache", {"model.tokenizer": "other/tokenizer"}),
    "targets that are not there": Case(
        "lora.target_modules: this model has no module named qproj; did you mean q_proj?",
        {"lora.target_modules": ["qproj"]},
    ),
    "a target that is not there": Case(
        "this model has no module named vproj; did you mean v_proj?", {"lora.target_modules": ["q_proj", "vproj"]},
    ),
    "experts that servers do not know": Case(
        "grpo.servers: the adapter is on experts that lie in one tensor",
        {
            **REWARD, "rewards": [{"name": "length", "settings": {"max_tokens": 9}}],
            **OF_MODEL, "grpo": {"servers": "http://127.0.0.1:9"},
        },
        data=PROMPTS, make=add_experts,
    ),
    "a module to train whole that is not there": Case(
        "lora.modules_to_save: this model has no module named embed_tokns; did you mean embed_tokens?",
        {"lora.modules_to_save": ["norm", "embed_tokns"]},
    ),
    # Models of rewards.
    "a teacher without weights": Case(
        r"rewards\[0\]\.teacher: model .*model: has no \*.safetensors file", TAUGHT, make=without("model.safetensors"),
    ),
    "weights of another family": Case(
        "its weights are of another kind of model than its config.json, which says qwen3: no layer has self_attn.q_norm",
        OF_MODEL, make=lambda folder: put_family(folder, "qwen3"),
    ),
    "a base whose libraries are not here": Case(
        "its weights are quantised by gptq, and optimum and gptqmodel cannot be found", OF_MODEL,
        make=lambda folder: put_quantised(folder, "gptq"), lacks=("optimum", "gptqmodel"),
    ),
    "a base that takes an extra": Case(
        r"its weights are quantised by bitsandbytes, which needs kubetune\[quantization\]", OF_MODEL,
        make=lambda folder: put_quantised(folder, "bitsandbytes", load_in_4bit=True), lacks=("bitsandbytes",),
    ),
    "a base that takes a GPU": Case(
        "its weights are quantised by nvfp4, which loads only on a GPU", OF_MODEL,
        make=lambda folder: put_quantised(folder, "nvfp4"),
    ),
    "a base that is called quantised": Case(
        r"its weights are quantised by bitsandbytes, but none of them is \(no tensor has \.quant_state\.", OF_MODEL,
        make=lambda folder: put_quantised(folder, "bitsandbytes", load_in_4bit=True),
    ),
    "no such teacher": Case(
        r"rewards\[0\]\.teacher: model \./model: there is no such folder; did you mean \./modle", TAUGHT,
        make=lambda folder: (folder / "modle").mkdir(),
    ),
    "a teacher of other tokens": Case(
        "the teacher .* has other tokens than the model that learns", TAUGHT, make=without_template,
    ),
    "a reward model without weights": Case(
        r"rewards\[0\]\.reward_model: model .*model: has no \*.safetensors file", SCORED,
        make=without("model.safetensors"),
    ),
    "a reward model that writes": Case("so it is no reward model; expected a classifier", SCORED, make=copy_model),
    "a reward model of two classes": Case(
        "has 2 outputs; expected a reward model, which has one", SCORED,
        make=lambda folder: put_classifier(folder, ["good", "bad"]),
    ),
    "a reward by a run without a checkpoint": Case("model has no checkpoint", SCORED, make=unfinished("reward_model")),
    "a reward by a run of another task": Case(
        "is a run of `task: causal_lm`; expected one of reward_model", SCORED, make=unfinished("causal_lm"),
    ),
    "nothing to continue": Case(
        "training.resume is must, but .* has no checkpoint", {"training.resume": "must", "output": "outputs/none"},
    ),
    "nothing to train": Case("none of the [0-9,]+ parameters of the model would be trained",
                             {"lora.target_modules": ["embed_tokens.weight.nothing", "score"]}),
    "no experts": Case("this model has no experts", {"training.router_aux_loss_coef": 0.1, "lora.r": None}),
    # What is installed.
    "no wandb": Case(r"tracking\.wandb needs kubetune\[wandb\]", {"tracking.wandb": {"project": "a"}}, lacks=("wandb",)),
    "no key of wandb": Case("there is no WANDB_API_KEY", {"tracking.wandb": {"project": "a"}}),
    "no trackio": Case(r"needs kubetune\[trackio\]", {"tracking.trackio": {"project": "a"}}, lacks=("trackio",)),
    "no mlflow": Case(r"needs kubetune\[tracking\]", {"tracking.mlflow": {"uri": "./mlruns"}}, lacks=("mlflow",)),
    "no bitsandbytes": Case(r"quantization: 4bit needs kubetune\[quantization\]", {"quantization": "4bit"},
                            lacks=("bitsandbytes",)),
    "no rouge": Case(r"needs kubetune\[evaluation\]", {"data.eval": 0.2, "evaluation.generate": {"metric": "rouge_l"}},
                     lacks=("rouge_score",)),
    "no harness": Case(r"needs kubetune\[benchmarks\]", {"evaluation.benchmarks": {"tasks": ["arc_easy"]}},
                       lacks=("lm_eval",)),
    "no store": Case(r"needs kubetune\[s3\]", {"mirror": "s3://bucket/place"}, lacks=("s3fs",)),
    "no schemas": Case(
        r"needs kubetune\[evaluation\]",
        {**REWARD, "rewards": [{"name": "json_schema", "settings": {"schema": {"type": "object"}}}]},
        lacks=("jsonschema",),
    ),
    # Code of the user's, which is read and not run.
    "a reward of a metric's form": Case(
        r"score\(prompt, answer, reference, record\) is no reward function", MINE, by_code=True,
        make=code("raise SystemExit('run')\ndef score(prompt, answer, reference, record): ..."),
    ),
    "a reward by a column that is missing": Case(
        "rewards: score needs `level`, and no record of data.train has such a column; they have", MINE, by_code=True,
        make=code("def score(completions, level): return 1"),
    ),
    "a reward in verl's form without right answers": Case(
        "score compares with the right answer, and no record has an answer; expected one of .*`reference_answer`", MINE,
        data=PROMPTS, by_code=True,
        make=code("def score(data_source, solution_str, ground_truth, extra_info=None):\n"
                  "    return float(ground_truth in solution_str)"),
    ),
    "a reward in OpenRLHF's form without right answers": Case(
        "score compares with the right answer, and no record has an answer; expected one of .*`reference_answer`", MINE,
        data=PROMPTS, by_code=True,
        make=code("def score(queries, prompts, labels):\n"
                  "    return [float(query.endswith(label)) for query, label in zip(queries, labels)]"),
    ),
    "a reward that its form gives nothing": Case(
        r"score needs other, which nothing gives it; expected f\(", MINE, by_code=True,
        make=code("def score(data_source, solution_str, ground_truth, other): return 1"),
    ),
    "no such reward": Case("defines no score; did you mean scores", MINE, by_code=True,
                           make=code("def scores(completions): ...")),
    "no file of rewards": Case("mine.py is no file", MINE, by_code=True),
    "a reward that is no Python": Case(r"mine\.py:1: .*expected a Python file", MINE, by_code=True, make=code("def (")),
    "a reward that imports nothing": Case(
        "imports nowhere_at_all, which is not installed", MINE, by_code=True,
        make=code("import nowhere_at_all.inside\ndef score(completions, **columns): return 1"),
    ),
    "a reward that is a generator": Case(
        r"mine\.py:1: score is a generator \(it has `yield`\), and its values are never read", MINE, by_code=True,
        make=code("def score(completions, **columns):\n    for text in completions:\n        yield 1.0"),
    ),
    "a reward that is an asynchronous generator": Case(
        "score is a generator", MINE, by_code=True,
        make=code("class score:\n    async def __call__(self, completions, **columns):\n        yield 1.0"),
    ),
    "a reward that returns nothing": Case(
        "score has no `return` with a value", MINE, by_code=True,
        make=code("def score(completions, **columns):\n    def inner(): return 1\n    print(inner())\n    return"),
    ),
    "a metric that has to be waited for": Case(
        "score is `async`, and it is never awaited", OWN, by_code=True,
        make=code("async def score(prompt, answer, reference, record): return 1.0"),
    ),
    "a metric of a reward's form": Case(
        r"expected score\(prompt, answer, reference, record\) -> float", OWN, by_code=True,
        make=code("def score(completions, **columns): ..."),
    ),
    "no token to push with": Case("push: there is no token for the hub", {"push": "org/bot"}),
    "no credentials of a store": Case(
        r"mirror: there are no credentials for s3://bucket/place: set AWS_ACCESS_KEY_ID", {"mirror": "s3://bucket/place"},
    ),
    "events without a command": Case("there is no hooks.on_event to call", {"hooks.events": ["stop"]}, by_code=True),
    "no such command": Case("there is no command 'no-such-program'", {"hooks.on_event": "no-such-program"}, by_code=True),
    # Places.
    "a report that is a folder": Case("logging.report_json: .* is a folder", {"logging.report_json": "model"},
                                      make=copy_model),
    "a cache below a file": Case("data.cache: .* cannot be made", {"data.cache": "train.jsonl/cache"}),
    "a usual cache below a file": Case("data.cache: .* cannot be made", {"data.cache": None}, no_cache=True),
    "an output with other files": Case("outputs/old holds thesis.txt but no run of kubetune", {"output": "outputs/old"},
                                       make=put_aside),
    "an output of another run": Case(r"training\.learning_rate was 0\.5, now is", {"output": "outputs/old"}, make=begun),
    "an output in what the kernel shows": Case(
        r"output: /proc/run cannot be made, as /proc shows what the kernel knows \(proc\)", {"output": "/proc/run"},
    ),
    "a cache in what the kernel shows": Case(
        r"data\.cache: /sys/kernel/a/b cannot be made, as /sys/kernel shows what", {"data.cache": "/sys/kernel/a/b"},
    ),
    "a report in what the kernel shows": Case(
        r"logging\.report_json: /proc cannot be made", {"logging.report_json": "/proc/report.json"},
    ),
    "an output below a file": Case("output: .* cannot be made", {"output": "train.jsonl/run"}),
}  # fmt: skip


@pytest.fixture(params=CASES, ids=[name.replace(" ", "-") for name in CASES])
def case(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    """Write the files of a case to the current folder, and hide what it lacks."""
    case = CASES[request.param]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    if case.no_cache:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "train.jsonl"))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        extras, "find_spec", lambda name: None if name in case.lacks else find_spec(name)
    )
    write(case, tmp_path)
    return case


def write(case: Case, folder: Path) -> None:
    (folder / "train.jsonl").write_text(case.data)
    case.make(folder)
    settings = {
        "name": "half-right",
        "model.path": str(MODEL),
        "data.train": "train.jsonl",
        "data.max_length": 128,
        "data.cache": "cache",
        "lora.r": 8,
        "output": "out",
    }
    tree: dict[str, Any] = {}
    for key, value in {**settings, **case.settings}.items():
        if value is None:
            continue
        *sections, last = key.split(".")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[last] = value
    with (folder / "run.yaml").open("w") as file:
        YAML(typ="safe").dump(tree, file)


@dataclass
class Said:
    """What a verb has said."""

    code: int
    text: str

    def require(self, verb: str, sentence: str) -> None:
        assert self.code == errors.USER, f"{verb}: exit code {self.code}\n{self.text}"
        assert sentence in self.text, f"{verb} does not say {sentence!r}\n{self.text}"
        assert not GOES_ON.search(self.text), f"{verb} goes on beside a problem\n{self.text}"


def verb(capsys: pytest.CaptureFixture[str], *words: str) -> Said:
    capsys.readouterr()
    code = main(list(words))
    captured = capsys.readouterr()
    return Said(code, captured.out + captured.err)


def train(capsys: pytest.CaptureFixture[str]) -> Said:
    """Do what `train` does before its rank has imported anything: what the first process does, then the data."""
    capsys.readouterr()
    try:
        config, _ = plan_here(load_config(Path("run.yaml"), environ=os.environ))
        prepare_run(config)
    except KubetuneError as error:
        return Said(error.exit_code, str(error))
    return Said(0, capsys.readouterr().out)


def page(folder: Path) -> Said:
    """Plan in the page what the run file says. Its Start begins `kubetune train`, which says the same."""
    config = load_config(Path("run.yaml"))
    settings = config.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    settings.pop("output")
    values = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in dotted_values(settings)
    }
    if config.lora is not None:
        values["lora"] = "true"
    site = Site.of(folder / "outputs")
    planned = new_run._planned(site, {"values": values})
    assert planned["problems"]
    assert not planned["command"]
    assert not planned["summary"]
    return Said(errors.USER, "\n".join(planned["problems"]))


def test_every_verb_says_the_same(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_plan = verb(capsys, "plan", "run.yaml")
    found = re.search(f".*(?:{case.says}).*", by_plan.text)
    assert found, by_plan.text
    # The whole sentence, as `plan` has it.
    sentence = found[0].removeprefix("kubetune: ").removesuffix(" Nothing was written.").rstrip(".")
    by_plan.require("plan", sentence)
    verb(capsys, "data", "check", "run.yaml").require("data check", sentence)
    train(capsys).require("train", sentence)
    if not case.by_code and "output" not in case.settings:
        # What to write into a file is a button there.
        in_form = re.sub("; other names are given so: .* proposes them", "", sentence)
        page(tmp_path).require("the page", in_form)
    if case.by_init:
        model = str(case.settings.get("model.path", MODEL))
        task = str(case.settings.get("task", "causal_lm"))
        verb(
            capsys, "init", "train.jsonl", "--model", model, "--task", task, "-o", "made.yaml"
        ).require("init", sentence)


@pytest.mark.parametrize(
    "name", ["no such command", "all rows left out", "batches that contradict"]
)
def test_the_plan_as_json_says_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """MCP calls it. The sentence is that of the plan for people, whatever the problem is."""
    monkeypatch.chdir(tmp_path)
    write(CASES[name], tmp_path)
    found = re.search(f".*(?:{CASES[name].says}).*", verb(capsys, "plan", "run.yaml").text)
    assert found
    sentence = found[0].removeprefix("kubetune: ").removesuffix(" Nothing was written.").rstrip(".")
    verb(capsys, "plan", "run.yaml", "--json").require("plan --json", sentence)


def test_an_empty_file_of_weights_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(CASES["empty weights"], tmp_path)
    said = verb(capsys, "plan", "run.yaml")
    assert said.text.count("model.safetensors") == 1


def test_a_file_in_place_of_a_model_has_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(CASES["a file in place of a model"], tmp_path)
    assert verb(capsys, "plan", "run.yaml").text.count("one.bin") == 1
    made = verb(capsys, "init", "train.jsonl", "--model", "./one.bin", "-o", "made.yaml")
    assert "one.bin: is a file; expected the folder of a model" in made.text


def test_a_right_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Case(""), tmp_path)
    planned = verb(capsys, "plan", "run.yaml")
    assert planned.code == errors.OK
    assert "Next: " in planned.text
    assert "ready to train" in verb(capsys, "data", "check", "run.yaml").text
    assert train(capsys).code == errors.OK


def test_several_problems_are_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    settings = {
        "lora.target_modules": ["qproj"],
        "tracking.wandb": {"project": "a"},
        "data.max_length": 8,
    }
    write(Case("", settings), tmp_path)
    for words in (("plan", "run.yaml"), ("data", "check", "run.yaml")):
        said = verb(capsys, *words)
        for problem in ("no module named qproj", "tracking.wandb: ", "would be left out"):
            said.require(words[0], problem)


def test_a_compiler_that_is_asked_for_has_to_be_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Case("", {"training.compile": True}), tmp_path)
    config = load_config(Path("run.yaml"))
    monkeypatch.setenv("PATH", str(tmp_path))
    [problem] = problems_of(config, {}, here=True)
    assert "training.compile is true, but there is no C++ compiler" in str(problem)


def test_gpus_that_are_not_here_are_a_warning_of_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan may be for another machine, so only a start is refused, with the same sentence."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    write(Case("", {"compute.gpus_per_node": 4, "lora.target_modules": ["q_proj"]}), tmp_path)
    sentence = "compute.gpus_per_node: the run wants 4 GPUs on this machine, which has 0"
    for words in (("plan", "run.yaml"), ("data", "check", "run.yaml")):
        said = verb(capsys, *words)
        assert said.code == errors.OK, said.text
        assert f"warning: {sentence}" in said.text
        assert not re.search("^ready to train$|^Next: .* train ", said.text, re.MULTILINE)
    planned = json.loads(verb(capsys, "plan", "run.yaml", "--json").text)
    assert planned["warnings"][0].startswith(sentence)
    for tool in (mcp.Tools().plan, mcp.Tools().data_check):
        assert sentence in json.dumps(tool("run.yaml"))
    values = {"model.path": str(MODEL), "data.train": "train.jsonl", "compute.gpus_per_node": "4"}
    planned = new_run._planned(Site.of(tmp_path / "outputs"), {"values": values})
    assert [text for text in planned["warnings"] if text.startswith(sentence)]
    train(capsys).require("train", sentence)


def test_gpus_of_a_cluster_need_not_be_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    settings: Settings = {
        "model": "org/m",
        "data": {"train": "org/d"},
        "compute": {"gpus_per_node": 8},
        "kubernetes": {"image": "registry.example/kubetune:1.0"},
    }
    assert warnings_of(load_config(settings), os.environ) == []


def test_agents_are_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(CASES["all rows left out"], tmp_path)
    tools = mcp.Tools()
    for answer in (tools.plan("run.yaml"), tools.data_check("run.yaml")):
        assert answer["exit_code"] == errors.USER
        assert "would be left out" in answer["messages"]
    assert tools.plan("run.yaml")["result"]["problems"]


@pytest.mark.slow
def test_targets_that_only_a_model_can_judge_are_judged_by_every_verb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # Whole names are not those of the files, so an expression is left to the model.
    write(Case("", {"lora.target_modules": ".*qproj"}), tmp_path)
    sentence = "lora.target_modules: no module's whole name matches .*qproj; names end in down_proj"
    verb(capsys, "plan", "run.yaml").require("plan", sentence)
    verb(capsys, "data", "check", "run.yaml").require("data check", sentence)
    train(capsys).require("train", sentence)
    page(tmp_path).require("the page", sentence)


@pytest.mark.slow
def test_the_command_line_says_the_same(case: Case, tmp_path: Path) -> None:
    if case.lacks:
        pytest.skip("what is installed is hidden in this process alone")
    for words in (["plan"], ["data", "check"], ["train"]):
        done = subprocess.run(
            [sys.executable, "-m", "kubetune", *words, "run.yaml"], capture_output=True, text=True
        )
        text = done.stdout + done.stderr
        assert done.returncode == errors.USER, text
        assert re.search(case.says, text), text
        assert not GOES_ON.search(text), text


def test_pods_that_push_need_a_token(tmp_path: Path) -> None:
    settings: Settings = {
        "model": "org/m",
        "data": {"train": "org/d"},
        "push": "org/bot",
        "compute": {"gpus_per_node": 1, "memory": "8Gi"},
        "kubernetes": {"image": "registry.example/kubetune:1.0"},
    }
    problems = problems_of(load_config(settings), {}, here=False)
    assert any("the pods have no token for the hub" in str(problem) for problem in problems)
    settings["kubernetes"] = {**settings["kubernetes"], "secrets": {"HF_TOKEN": "hf-token"}}
    assert problems_of(load_config(settings), {}, here=False) == []
    settings["compute"] = {}
    text = str(problems_of(load_config(settings), {}, here=False)[0])
    assert "compute.gpus_per_node: left out" in text, "as submit says"


def test_pods_that_copy_to_a_store_are_asked_for_credentials(tmp_path: Path) -> None:
    settings: Settings = {
        "model": "org/m",
        "data": {"train": "org/d"},
        "mirror": "gs://bucket/run",
        "compute": {"gpus_per_node": 1, "memory": "8Gi"},
        "kubernetes": {"image": "registry.example/kubetune:1.0"},
    }
    assert problems_of(load_config(settings), {}, here=False) == []
    says = "the run file gives the pods no credentials for gs://bucket/run"
    assert says in " ".join(finding.text for finding in _findings(settings))
    for more in (
        {"secrets": {"GOOGLE_APPLICATION_CREDENTIALS": "store"}},
        {"service_account": "trainer"},
    ):
        given = {**settings, "kubernetes": {**settings["kubernetes"], **more}}
        assert [finding for finding in _findings(given) if finding.key == "mirror"] == []


def _findings(settings: Settings) -> list[Mistake]:
    config = load_config(settings)
    return checked_manifests(config, plan_without_data(config), local_files(config))[1]


def test_models_of_rewards_that_are_here_are_judged_for_a_cluster_too(tmp_path: Path) -> None:
    write(Case("", SCORED, make=copy_model), tmp_path)
    settings = {
        "model": "org/base",
        "data": {"train": "org/d"},
        "task": "grpo",
        "rewards": [{"reward_model": str(tmp_path / "model")}],
        "compute": {"gpus_per_node": 1, "memory": "8Gi"},
        "kubernetes": {
            "image": "registry.example/kubetune:1.0",
            "mounts": [{"path": "/models", "claim": "models"}],
        },
    }
    problems = problems_of(load_config(settings), {}, here=False)
    assert any("so it is no reward model" in str(problem) for problem in problems)
    settings["rewards"] = [{"reward_model": "/models/that-only-the-pods-have"}]
    assert problems_of(load_config(settings), {}, here=False) == []
