"""Loading a config: YAML, precedence, local paths, secrets, and reading back what was resolved."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kubetune.base.secrets import seems_random
from kubetune.config.load import load_config
from kubetune.config.resolved import as_yaml, load_resolved, resolved
from kubetune.config.schema import Config
from kubetune.errors import ConfigError

MINIMAL = "model: some/model\ndata: {train: some/data}\n"
EVALUATED = "model: some/model\ndata: {train: some/data, eval: 0.1}\n"


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write


def problems_of(path: Path | None, **kwargs: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, **kwargs)
    return [
        problem.replace(f"{path.parent}/", "") if path else problem
        for problem in caught.value.problems
    ]


def test_scalars_are_those_of_yaml_1_2(write: Any) -> None:
    config = load_config(
        write(
            "name: no\nmodel: {path: 2026-01-01, revision: '1e4'}\ndata: {train: yes, max_length: 1_024}\n"
            "training: {learning_rate: 2e-5, adam_epsilon: 1E-9, seed: 012, num_train_epochs: 2}\n"
        )
    )
    assert (config.name, config.model.path, config.model.revision) == ("no", "2026-01-01", "1e4")
    assert config.data.train[0].path == "yes"
    assert (config.training.learning_rate, config.training.adam_epsilon) == (2e-5, 1e-9)
    assert (config.training.seed, config.data.max_length) == (12, 1024)


def test_every_mistake_is_shown_at_once_with_its_line(write: Any) -> None:
    text = """\
name: Bad_Name
model: Qwen/Qwen3-8B
base_model: other
data:
  train: [a.jsonl, {pat: b}]
  eval: [{path: x, weigth: 2}]
  max_length: "2048"
  packing: no
lora: {r: 0, target_modules: 5}
training:
  learning_rat: 1e-4
  num_train_epochs: -1
  eval_steps: sometimes
  seed: true
  seed: 7
max_lenght: 5
trainin: {a: 1}
bf16: maybe
"""
    path = write(text)
    problems = problems_of(
        path,
        overrides=["foo", "training.wamup_ratio=1", "x=[1"],
        environ={"LR": "big", "BATCH": "0"},
    )
    expected = [
        'run.yaml:1: name: found "Bad_Name"; expected at most 40 lower case letters, digits and dashes',
        "run.yaml:3: base_model: the same setting as model (line 2); keep one",
        "run.yaml:5: data.train[1].pat: unknown key; did you mean path?",
        "run.yaml:5: data.train[1].path: missing; expected text",
        "run.yaml:6: data.eval[0].weigth: unknown key; did you mean weight?",
        'run.yaml:7: data.max_length: found "2048"; expected a whole number from 8 to 10,000,000',
        'run.yaml:8: data.packing: found "no"; expected true or false',
        "run.yaml:9: lora.r: found 0; expected a whole number from 1 to 4,096",
        "run.yaml:9: lora.target_modules: found 5; expected all-linear or a list or text",
        "run.yaml:11: training.learning_rat: unknown key; did you mean learning_rate?",
        "run.yaml:12: training.num_train_epochs: found -1; expected a number above 0",
        'run.yaml:13: training.eval_steps: found "sometimes"; expected a whole number of at least 1 or epoch',
        "run.yaml:14: training.seed: found true; expected a whole number",
        "run.yaml:15: training.seed: given twice (first in line 14); keep one",
        "run.yaml:16: max_lenght: unknown key; did you mean data.max_length?",
        "run.yaml:17: trainin: unknown key; did you mean training?",
        'run.yaml:18: model.dtype: found "maybe"; expected one of auto, bfloat16',
        "command line: found 'foo'; expected key=value",
        "environment variable BATCH: training.per_device_train_batch_size: found 0; expected a whole number",
        'environment variable LR: training.learning_rate: found "big"; expected a number',
        "override: training.wamup_ratio: unknown key; did you mean warmup_ratio?",
        "override: x: not valid YAML",
    ]
    assert len(problems) == len(expected), "\n".join(problems)
    for beginning in expected:
        assert any(problem.startswith(beginning) for problem in problems), beginning


def test_missing_keys_are_named() -> None:
    problems = problems_of(None)
    assert [problem.split(";")[0] for problem in problems] == [
        "command line: data.train: missing",
        "command line: model: missing",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [1", "run.yaml:1: not valid YAML"),
        ("model: x\n\tdata: y", "run.yaml:2: not valid YAML"),
        ("- a\n- b", "run.yaml:1: expected `key: value` lines"),
        ("model: !!python/object/apply:os.system ['true']\n", "run.yaml:1: model: has the tag"),
        ("model: !Custom {a: 1}\n", "run.yaml:1: model: has the tag !Custom"),
        ("training: {seed: !!int abc}\n", "run.yaml:1: training.seed: is not a valid !!int"),
        ("a: &a [*a]\n", "run.yaml:1: nested deeper than 40 levels"),
        ("[" * 1000, "run.yaml: nested deeper than"),
        ("? [a]\n: b\n", "run.yaml:1: the file: has a list or a mapping as key"),
        ("a: 1\n---\nb: 2\n", "run.yaml:2: not valid YAML"),
    ],
)
def test_what_is_no_plain_yaml_is_refused(write: Any, text: str, problem: str) -> None:
    problems = problems_of(write(text))
    assert any(line.startswith(problem) for line in problems), problems


def test_aliases_that_multiply_are_refused_quickly(write: Any) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    assert "once aliases are followed" in problems_of(write("\n".join(lines)))[0]


def test_merge_keys_work_and_own_keys_win(write: Any) -> None:
    config = load_config(
        write(
            "model: m\ndata:\n  train:\n    - &a {path: x, weight: 2}\n    - {path: y, <<: *a, split: test}\n"
        )
    )
    second = config.data.train[1]
    assert (second.path, second.weight, second.split) == ("y", 2, "test")


def test_files_that_cannot_be_read_are_explained(tmp_path: Path) -> None:
    assert "no such file; `kubetune init" in problems_of(tmp_path / "none.yaml")[0]
    assert "cannot be read" in problems_of(tmp_path)[0]
    (tmp_path / "latin.yaml").write_bytes(b"model: x\nname: \xff\n")
    assert problems_of(tmp_path / "latin.yaml")[0].startswith(
        "latin.yaml:2: found bytes that are not UTF-8"
    )
    (tmp_path / "large.yaml").write_text("#" * (1 << 20) + "\n")
    assert "not data" in problems_of(tmp_path / "large.yaml")[0]


def test_null_takes_back_a_whole_section(write: Any) -> None:
    path = write(MINIMAL + "training: {seed: 1}\ntracking: {tensorboard: true}\n")
    config = load_config(path, overrides=["tracking=null", "training=null", "training.max_steps=3"])
    assert config.tracking.tensorboard is False
    assert (config.training.seed, config.training.max_steps) == (42, 3)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["training.seed=1", "training.seed=2"], "training.seed"),
        (["lr=1e-5", "training.learning_rate=1e-4"], "training.learning_rate"),
        (["lora.r=4", "lora={alpha: 5}"], "lora"),
        (["lora.r=4", "lora=null"], "lora"),
        (["lora={r: 4}", "lora.r=5"], "lora.r"),
        (["lora={r: 4}", "lora.alpha=5", "lora={r: 4}"], "lora"),
    ],
)
def test_an_override_that_undoes_one_before_it_is_told_of(
    write: Any, caplog: pytest.LogCaptureFixture, overrides: list[str], named: str
) -> None:
    load_config(write(MINIMAL), overrides=overrides)
    message = f"override {named}: given twice, with other values; the last one counts"
    assert [record.message for record in caplog.records] == [message]


def test_overrides_that_agree_are_taken(write: Any, caplog: pytest.LogCaptureFixture) -> None:
    words = ["training.seed=1", "training.seed=1", "lora={r: 4}", "lora={r: 4}", "lora.alpha=5"]
    config = load_config(write(MINIMAL), overrides=words)
    assert (
        config.training.seed,
        config.lora and config.lora.r,
        config.lora and config.lora.alpha,
    ) == (1, 4, 5)
    assert not caplog.records


def test_a_section_may_be_given_for_the_model(write: Any) -> None:
    config = load_config(write(MINIMAL), overrides=["model={path: other/model, dtype: bf16}"])
    assert (config.model.path, config.model.dtype) == ("other/model", "bfloat16")


def test_later_sources_win(write: Any) -> None:
    path = write(
        MINIMAL + "training: {learning_rate: 1e-3, seed: 1, warmup_ratio: 0.1, max_steps: 5}\n"
    )
    config = load_config(
        path,
        environ={
            "LR": "2e-3",
            "EPOCHS": "2",
            "DTYPE": "bf16",
            "RUN_NAME": "run #1",
            "LORA_RANK": "4",
            "BATCH": "",
        },
        flags={"training.num_train_epochs": 3, "training.seed": 2},
        overrides=["training.seed=3", "training.max_steps=null", "lora.alpha=4", "name=007"],
    )
    training = config.training
    assert (training.learning_rate, training.num_train_epochs, training.seed) == (2e-3, 3, 3)
    assert (training.warmup_ratio, training.max_steps, training.per_device_train_batch_size) == (
        0.1,
        None,
        1,
    )
    assert (config.model.path, config.model.dtype, config.name) == ("some/model", "bfloat16", "007")
    assert config.lora is not None
    assert (config.lora.r, config.lora.alpha) == (4, 4)


def test_the_environment_is_read_only_when_given(
    write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LR", "0.5")
    assert load_config(write(MINIMAL)).training.learning_rate is None


@pytest.mark.parametrize(
    "line",
    [
        "hf_token: abc123",
        "training: {api_key: abc123}",
        "model: {path: x, password: abc123}",
        "name: hf_abc123abc123abc123abc123",
        "tracking: {mlflow: {uri: 'https://me:abc123@host/'}}",
        "tracking: {mlflow: {uri: 'https://abc123abc123abc123abc123@host/'}}",
        "data: {train: [a, {path: b, columns: {prompt: sk-abc123abc123abc123abc123}}]}",
        "kubernetes: {image: x, env: {WANDB_API_KEY: abc123}}",
        "hooks: {on_event: notify eyJhbabc123.eyJabc123abc123.abc123}",
    ],
)
def test_secrets_are_refused_and_never_echoed(write: Any, line: str) -> None:
    problems = "\n".join(problems_of(write(f"# first\n{line}\n")))
    assert "run.yaml:2: " in problems
    assert "a secret must not stand in a run file" in problems
    assert "abc123" not in problems


def test_a_name_that_holds_what_tokens_begin_with_is_no_secret(write: Any) -> None:
    name = "task-classification-of-qwen3"
    assert load_config(write(f"{MINIMAL}name: {name}\n")).name == name


@pytest.mark.parametrize(
    "number", ["0x" + "f" * 100_000, "9" * 100_000, "-" + "9" * 99, "0o" + "7" * 9999]
)
def test_numbers_without_end_are_refused_in_words(write: Any, number: str) -> None:
    for key in ("max_steps", "learning_rate", "nothing"):
        problems = "\n".join(problems_of(write(MINIMAL + f"training: {{{key}: {number}}}\n")))
        assert "run.yaml:3: " in problems
        assert len(problems) < 1000
    problems = "\n".join(problems_of(write(MINIMAL), overrides=[f"training.max_steps={number}"]))
    assert (
        problems
        == "override: training.max_steps: is an integer of more than 128 bits; write a smaller one"
    )
    with pytest.raises(ConfigError, match=r"more than 128 bits"):
        load_config({"model": "m", "data": {"train": "d"}, "training": {"seed": 1 << 99_999}})


@pytest.mark.parametrize(
    "line",
    [
        "hooks: {on_event: notify --password hunter2hunter2}",
        "tracking: {mlflow: {tags: {a: hunter2hunter2}}}",
        "name: hunter2hunter2",
        "data: {train: [x, {path: /data/hunter2hunter2.jsonl}]}",
        "kubernetes: {image: x, secrets: {A: {secret: hunter2hunter2, key: A}}}",
    ],
)
def test_a_value_that_the_environment_has_as_a_secret_is_refused(
    write: Any, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    before = problems_of(write(f"# first\n{line}\n"))
    assert not any("secret must not" in text for text in before)
    monkeypatch.setenv("MY_PASSWORD", "hunter2hunter2")
    problems = "\n".join(problems_of(write(f"# first\n{line}\n")))
    assert "run.yaml:2: " in problems
    assert "holds the value of the environment variable MY_PASSWORD" in problems
    assert "hunter2" not in problems


def test_words_that_only_look_like_a_short_secret_are_no_secrets(
    write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHORT_KEY", "support")
    monkeypatch.setenv("LONG_KEY", "customer")
    assert load_config(write(MINIMAL + "name: support-customers\n")).name == "support-customers"


@pytest.mark.parametrize(
    ("value", "is_random"),
    [
        ("q7Zt0XbW9mKc3RfPvL2sYh8N", True),
        ("user q7Zt0XbW9mKc3RfPvL2sYh8N", True),
        ("Zm9vYmFyMTIzNDU2Nzg5MGFiY2RlZg8Q7x==", True),
        ("d670460b4b4aece5915caf5c68d12f560a9fe3e4", False),
        ("registry.example/kubetune@sha256:" + "0123456789abcdef" * 4, False),
        ("registry.example/Team7/fine-tuning-image-of-2026:1.2.3-CUDA13", False),
        ("1b4E28ba-2fa1-11d2-883f-0016d3cca427", False),
        ("/outputs/Qwen3-8B-Instruct-2507/checkpoints/last", False),
        ("arn:aws:iam::123456789012:role/TrainingRoleForKubetune", False),
        ("expandable_segments:True,garbage_collection_threshold:0.8", False),
        ("http://proxy.example.org:3128", False),
        ("NCCL_DEBUG_SUBSYS=INIT,GRAPH,ENV,TUNING", False),
        ("SupercalifragilisticexpialidociousWord1", False),
    ],
)
def test_what_seems_random(value: str, is_random: bool) -> None:
    assert seems_random(value) == is_random


def test_users_in_addresses_are_no_secrets(write: Any) -> None:
    text = MINIMAL + "tracking: {mlflow: {uri: 'https://somebody@host/'}}\n"
    assert load_config(write(text)).tracking.mlflow is not None


def test_a_secret_in_an_override_is_not_echoed(write: Any) -> None:
    assert "hf_abcdef" not in "\n".join(
        problems_of(write(MINIMAL), overrides=["token=hf_abcdefabcdefabcdefabcdef"])
    )


def test_references_to_secrets_and_special_tokens_are_no_secrets(write: Any) -> None:
    text = (
        MINIMAL + "kubernetes: {image: x, secrets: {HF_TOKEN: {secret: hf-token, key: HF_TOKEN}}}\n"
    )
    assert load_config(write(text)).kubernetes is not None
    assert "unknown key" in problems_of(write(MINIMAL + "pad_token: <pad>\n"))[0]


def test_local_paths_become_absolute_and_hub_ids_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "configs"
    here = tmp_path / "here"
    for place in (folder, here):
        (place / "model").mkdir(parents=True)
    for file in (
        folder / "beside.jsonl",
        here / "beside.jsonl",
        here / "only-here.jsonl",
        here / "a#2",
    ):
        file.touch()
    monkeypatch.chdir(here)
    path = folder / "run.yaml"
    path.write_text(
        "model: model\ndata: {train: [beside.jsonl#5, {path: only-here.jsonl}, org/data#3, '*.jsonl', 'a#2']}\n"
    )
    config = load_config(path)
    assert config.model.path == str(folder / "model")
    assert [source.path for source in config.data.train] == [
        f"{folder}/beside.jsonl#5",
        f"{here}/only-here.jsonl",
        "org/data#3",
        f"{folder}/*.jsonl",
        f"{here}/a#2",
    ]
    # A teacher is one too, but the word for the model itself is none.
    (folder / "self").mkdir()
    for teacher, taken in (("model", str(folder / "model")), ("self", "self")):
        settings = "task: distill\nlora: {r: 4}\ndata: {train: beside.jsonl}\n"
        path.write_text(f"model: model\n{settings}distill: {{teacher: {teacher}, lmbda: 1.0}}\n")
        assert load_config(path).distill.teacher == taken
    # What is typed in a shell means the shell's directory, wherever the file lies.
    typed = load_config(path, flags={"data.train": "beside.jsonl"}, overrides=["model=model"])
    assert (typed.data.train[0].path, typed.model.path) == (f"{here}/beside.jsonl", f"{here}/model")


@pytest.mark.parametrize(
    ("written", "path", "subset"),
    [
        ("glue/sst2", "nyu-mll/glue", "sst2"),
        ("glue/sst2#500", "nyu-mll/glue#500", "sst2"),
        ("hub:glue/mnli", "nyu-mll/glue", "mnli"),
        ("{path: glue, subset: sst2}", "nyu-mll/glue", "sst2"),
        ("{path: 'hub:nyu-mll/glue', subset: sst2}", "nyu-mll/glue", "sst2"),
        ("{path: glue/sst2, subset: mnli}", "glue/sst2", "mnli"),
        ("nobody/glue", "nobody/glue", None),
        ("glued/sst2", "glued/sst2", None),
    ],
)
def test_data_sets_of_the_hub_go_by_the_names_of_today(
    write: Any, written: str, path: str, subset: str | None
) -> None:
    config = load_config(write(f"model: m\ndata: {{train: {written}}}\n"))
    assert [(source.path, source.subset) for source in config.data.train] == [(path, subset)]
    assert load_resolved(resolved(config)) == config


def test_a_folder_called_glue_is_that_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "glue" / "sst2").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    [source] = load_config(None, flags={"model.path": "m", "data.train": "glue/sst2"}).data.train
    assert (source.path, source.subset) == (str(tmp_path / "glue" / "sst2"), None)


def test_empty_sections_mean_their_defaults(write: Any) -> None:
    config = load_config(write(MINIMAL + "training:\n  # seed: 1\ntracking:\nlora:\n"))
    assert config.training.seed == 42
    assert config.lora is None


@pytest.mark.parametrize(
    ("task", "metric", "full_name"),
    [
        ("causal_lm", "token_accuracy", "eval_token_accuracy"),
        ("vision_language", "eval_loss", "eval_loss"),
        ("sequence_classification", "accuracy", "eval_accuracy"),
        ("sequence_classification", "pearson", "eval_pearson"),  # the data decide
    ],
)
def test_the_metric_of_the_best_goes_by_its_short_name_too(
    write: Any, task: str, metric: str, full_name: str
) -> None:
    sections = f"task: {task}\ntraining: {{metric_for_best_model: {metric}}}\n"
    assert load_config(write(EVALUATED + sections)).training.metric_for_best_model == full_name


@pytest.mark.parametrize(
    ("section", "known"),
    [
        ("task: causal_lm", "eval_loss, eval_perplexity, eval_token_accuracy"),
        (
            "task: sequence_classification\nclassification: {problem_type: regression}",
            "eval_loss, eval_mae, eval_pe",
        ),
    ],
)
def test_a_metric_that_no_evaluation_has_is_refused(write: Any, section: str, known: str) -> None:
    section += "\ntraining: {metric_for_best_model: accuracy}\n"
    message = f"training.metric_for_best_model: found eval_accuracy; evaluations of this task have {known}"
    for data in (EVALUATED, MINIMAL):  # a name that is wrong is so without evaluations too
        assert any(message in problem for problem in problems_of(write(data + section)))


def test_infinite_numbers_are_refused_in_every_section(write: Any) -> None:
    sections = "training: {max_grad_norm: .inf}\ncompute: {nodes: 1, peak_tflops: .inf, price_per_gpu_hour: .nan}\n"
    keys = [problem.split(": ")[1] for problem in problems_of(write(MINIMAL + sections))]
    assert keys == ["training.max_grad_norm", "compute.peak_tflops", "compute.price_per_gpu_hour"]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            "generate: {metric: bleurt}",
            'evaluation.generate.metric: found "bleurt"; did you mean bleu?',
        ),
        (
            "gate: {loss: 0.5}",
            "evaluation.gate: loss: found '0.5'; expected a comparison and a number",
        ),
    ],
)
def test_a_word_in_place_of_a_list_or_a_condition_is_shown_whole(
    write: Any, section: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(write(f"{EVALUATED}evaluation: {{{section}}}\n"))


@pytest.mark.parametrize("name", ["mlflow", "wandb", "trackio", "prometheus"])
def test_a_tracker_is_switched_on_by_true(write: Any, name: str) -> None:
    on, off = (
        load_config(write(f"{MINIMAL}tracking: {{{name}: {value}}}\n")).tracking
        for value in ("true", "false")
    )
    empty = load_config(write(f"{MINIMAL}tracking: {{{name}: {{}}}}\n")).tracking
    assert getattr(on, name) == getattr(empty, name) is not None
    assert getattr(off, name) is None


def test_storage_class_goes_by_both_of_its_names(write: Any) -> None:
    for name in ("class", "storage_class"):
        volume = f"kubernetes: {{image: a/b:1, storage: {{cache: {{size: 1Gi, {name}: fast}}}}}}\n"
        kubernetes = load_config(write(MINIMAL + volume)).kubernetes
        assert kubernetes
        assert kubernetes.storage.cache.storage_class == "fast"


def test_sections_must_agree(write: Any) -> None:
    problems = problems_of(
        write(MINIMAL + "quantization: 4bit\ntraining:\n  early_stopping_patience: 2\n")
    )
    assert [problem.split(";")[0] for problem in problems] == [
        "run.yaml:3: quantization: found 4bit without lora",
        "run.yaml:5: training.early_stopping_patience: needs evaluations",
    ]


names = st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=12).filter(
    str.strip
)
expressions = st.from_regex(r"[.]\*[a-z]{1,6}", fullmatch=True) | names.map(re.escape)
hub_ids = names.map(
    lambda name: f"nobody/{name}"
)  # no file of the machine that runs this, as `~` would be
sources = st.fixed_dictionaries(
    {"path": hub_ids},
    optional={
        "weight": st.floats(0.01, 1000),
        "range": st.tuples(st.integers(0, 5), st.integers(6, 9)).map(list),
    },
)
configs = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries(
            {"path": hub_ids}, optional={"dtype": st.sampled_from(["auto", "float16"])}
        )
    },
    optional={
        "data": st.fixed_dictionaries(
            {"train": st.lists(sources, min_size=1, max_size=3)},
            optional={
                "eval": st.floats(0, 0.99) | st.lists(sources, max_size=2),
                "max_length": st.integers(8, 10**7),
            },
        ),
        "lora": st.none()
        | st.fixed_dictionaries(
            {},
            optional={
                "r": st.integers(1, 4096),
                "alpha": st.floats(1e-6, 65_536),
                "target_modules": st.just("all-linear") | expressions | st.lists(names, max_size=3),
            },
        ),
        "training": st.fixed_dictionaries(
            {},
            optional={
                "learning_rate": st.floats(1e-12, 9.9),
                "eval_steps": st.integers(1, 10**9) | st.just("epoch"),
                "compile": st.booleans() | st.sampled_from(["auto", "layers"]),
                "seed": st.integers(0, 2**63 - 1),
                "warmup_steps": st.none() | st.integers(0, 10**6),
            },
        ),
        "kubernetes": st.fixed_dictionaries(
            {"image": st.just("registry.example/image:1")},
            optional={
                "storage": st.just({"cache": {"size": "1Gi", "class": "fast"}}),
                "env": st.just({"A": "1"}),
            },
        ),
    },
).map(lambda data: {"data": {"train": "x"}} | data)


@given(configs)
def test_a_resolved_config_reads_back_equal(data: dict[str, Any]) -> None:
    config = Config.model_validate_json(json.dumps(data), strict=True)
    assert load_resolved(json.loads(json.dumps(resolved(config)))) == config


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(configs)
def test_the_yaml_of_a_config_loads_equal(tmp_path: Path, data: dict[str, Any]) -> None:
    config = Config.model_validate_json(json.dumps(data), strict=True)
    path = tmp_path / "run.yaml"
    path.write_text(as_yaml(config))
    assert load_config(path) == config


def test_a_damaged_resolved_config_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "resolved.json"
    for text in ("", "{", '{"model": "x"}', '{"unknown": 1}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="not a config written by this version"):
            load_resolved(path)
    path.write_text('{"unknown": 1, "model": 3}')
    with pytest.raises(ConfigError, match=r"unknown: Extra inputs are not permitted") as caught:
        load_resolved(path)
    assert "pydantic" not in str(caught.value)


def test_accumulation_typed_above_the_files_global_batch_decides(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: a/b\ndata: {train: x.jsonl}\ntraining: {global_batch_size: 32}\n")
    typed = load_config(file, overrides=["training.gradient_accumulation_steps=4"])
    assert (typed.training.global_batch_size, typed.training.gradient_accumulation_steps) == (
        None,
        4,
    )
    by_environment = load_config(file, environ={"GRAD_ACC": "2"})
    assert (
        by_environment.training.global_batch_size,
        by_environment.training.gradient_accumulation_steps,
    ) == (None, 2)


def test_max_samples_in_the_environment_samples_every_source(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: a/b\ndata: {train: [x.jsonl, {path: y.jsonl, weight: 2}, z.jsonl#7]}\n")

    def paths(**environ: str) -> list[str]:
        return [source.path for source in load_config(file, environ=environ).data.train]

    assert paths(MAX_SAMPLES="5") == ["x.jsonl#5", "y.jsonl#5", "z.jsonl#7"]
    assert paths(MAX_SAMPLES="0") == paths() == ["x.jsonl", "y.jsonl", "z.jsonl#7"]
    with pytest.raises(ConfigError, match="environment variable MAX_SAMPLES: found 'many'"):
        paths(MAX_SAMPLES="many")


@pytest.mark.parametrize("task", ["reward_model", "sequence_classification"])
def test_questions_that_a_task_cannot_be_asked_are_refused(task: str) -> None:
    section = {"generate": {"metric": "exact_match"}}
    with pytest.raises(ValueError, match="which writes no answers"):
        Config.model_validate(
            {"task": task, "model": "m", "data": {"train": "d", "eval": 0.1}, "evaluation": section}
        )
