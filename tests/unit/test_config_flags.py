"""Runs described on the command line, and which of its words mean what."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from kubetune.cli import main
from kubetune.errors import ConfigError
from kubetune.plan.plan import make_plan
from kubetune.supervisor.command_line import add_run_arguments, config_from_args, parse, run_file


def config_of(*argv: str, environ: dict[str, str] | None = None) -> Any:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_run_arguments(parser)
    return config_from_args(parse(parser, argv), environ or {})


def test_all_flags_without_a_file(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    config = config_of(
        *("--model", "meta-llama/Llama-3.2-3B-Instruct", "--model-local-dir", str(model)),
        *(
            "--tokenizer-local-dir",
            str(model),
            "--local-files-only",
            "--data",
            "ds.jsonl",
            "--output",
            "/out/run",
        ),
        *(
            "--lora",
            "--bf16",
            "--epochs",
            "1",
            "--seq-len",
            "4096",
            "--batch",
            "2",
            "--grad-accum",
            "8",
        ),
        *(
            "--lora-r",
            "8",
            "--lora-alpha",
            "16",
            "--lora-dropout",
            "0.05",
            "--target-modules",
            "q_proj",
            "v_proj",
        ),
        *(
            "--log-level",
            "debug",
            "--log-batches",
            "all",
            "--report-json",
            "r.json",
            "--no-add-special-tokens",
        ),
        *("--eval", "0.1", "--learning-rate", "1e-4", "--seed", "7", "--max-steps", "3"),
    )
    assert (config.model.path, config.model.tokenizer) == (str(model), str(model))
    assert (config.model.local_files_only, config.model.dtype, config.output) == (
        True,
        "bfloat16",
        "/out/run",
    )
    assert ([source.path for source in config.data.train], config.data.eval) == (["ds.jsonl"], 0.1)
    assert (config.data.max_length, config.data.add_special_tokens) == (4096, False)
    assert (config.lora.r, config.lora.alpha, config.lora.dropout) == (8, 16, 0.05)
    assert config.lora.target_modules == ("q_proj", "v_proj")
    training = config.training
    assert (training.num_train_epochs, training.max_steps, training.seed) == (1, 3, 7)
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (2, 8)
    assert (training.learning_rate, config.logging.level, config.logging.batches) == (
        1e-4,
        "DEBUG",
        "all",
    )
    assert config.logging.report_json == "r.json"


def test_a_run_without_a_file_starts_from_what_init_writes() -> None:
    config = config_of("--model", "m", "--data", "d")
    assert (config.lora.r, config.data.eval, config.training.global_batch_size) == (16, 0.05, 32)
    assert config.data.add_special_tokens
    # Without --data, as in containers, nothing is added.
    assert config_of("model=m", "data.train=d").lora is None


def test_whoever_says_otherwise_is_obeyed() -> None:
    flags = ("--model", "m", "--data", "d")
    assert config_of(*flags, "--full").lora is None
    assert config_of(*flags, "lora=null", "data.eval=null").lora is None
    assert config_of(*flags, "data.eval=null").data.eval is None
    assert config_of(*flags, environ={"LORA_RANK": "4"}).lora.r == 4
    for batch in (("--batch", "2"), ("--grad-accum", "4"), ("training.global_batch_tokens=99",)):
        assert config_of(*flags, *batch).training.global_batch_size is None
    assert config_of(*flags, environ={"BATCH": "2"}).training.global_batch_size is None
    with pytest.raises(ConfigError, match="--full and LoRA's options exclude each other"):
        config_of(*flags, "--full", "--lora-r", "4")


def test_columns_are_named_beside_the_data() -> None:
    config = config_of("--model", "m", "--data", "d#5", "--columns", "prompt=q", "completion=a")
    [source] = config.data.train
    assert (source.path, source.columns) == ("d#5", {"prompt": "q", "completion": "a"})
    with pytest.raises(ConfigError, match="expected EXPECTED=NAME, such as prompt=question"):
        config_of("--model", "m", "--data", "d", "--columns", "prompt")
    with pytest.raises(ConfigError, match="--columns names columns of --data, which is missing"):
        config_of("--model", "m", "--columns", "prompt=q")


@pytest.mark.parametrize(
    "flag", [("--lora",), ("--lora-r", "16"), ("--target-modules", "all-linear")]
)
def test_any_lora_flag_switches_it_on(flag: tuple[str, ...]) -> None:
    config = config_of("--model", "m", "--data", "d", *flag)
    assert (config.lora.r, config.lora.target_modules) == (16, "all-linear")


def test_file_flags_and_overrides_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ndata: {train: d}\nlora: {r: 4}\ntraining: {seed: 1}\n")
    for argv in (
        [str(path), "--seed", "2", "lora.alpha=3"],
        ["--seed", "2", str(path), "lora.alpha=3"],
        ["lora.alpha=3", str(path), "--seed=2"],
        [str(path), "lora.alpha=3", "--seed", "5", "training.seed=2"],
    ):
        config = config_of(*argv, environ={"LORA_RANK": "5"})
        assert (config.training.seed, config.lora.alpha, config.lora.r) == (2, 3, 5), argv


def test_a_container_may_set_everything_by_its_environment() -> None:
    environ = {
        "MODEL_ID": "Qwen/Qwen3-8B",
        "DATASET_ID": "AI-ModelScope/alpaca-gpt4-data-en#500",
        "MAX_LEN": "2048",
    }
    environ |= {
        "BATCH": "1",
        "GRAD_ACC": "16",
        "EPOCHS": "1",
        "LR": "2e-4",
        "LORA_RANK": "8",
        "LORA_ALPHA": "16",
    }
    config = config_of(environ=environ | {"NPROC": "2", "DTYPE": "auto"})
    assert make_plan(config, 500).global_batch_size == 32
    assert (config.lora.r, config.lora.alpha, config.compute.processes) == (8, 16, 2)


def test_several_data_flags_are_several_sources() -> None:
    config = config_of("--model", "m", "--data", "a#5", "--data", "b", "--eval", "c")
    assert [source.path for source in config.data.train] == ["a#5", "b"]
    assert config.data.eval[0].path == "c"


def test_wrong_command_lines_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="found nothing to run"):
        config_of()
    with pytest.raises(ConfigError, match=r"found a\.yaml and b\.yaml; expected one run file"):
        config_of("a.yaml", "b.yaml")
    with pytest.raises(ConfigError, match=r"found -1\.0; expected a number above 0") as caught:
        config_of("--model", "m", "--epochs", "-1", "--batch", "0")
    assert len(caught.value.problems) == 3  # and no data
    for wrong in (["--epoch", "1"], ["--epochs", "many"], ["run.yaml", "--sed", "1"]):
        with pytest.raises(SystemExit) as left:
            config_of(*wrong)
        assert left.value.code == 2
    assert "unrecognized arguments: --sed" in capsys.readouterr().err


def test_a_path_with_an_equals_sign_is_a_file() -> None:
    args = argparse.Namespace(inputs=["./seed=1/run.yaml", "training.seed=2"])
    assert run_file(args) == Path("seed=1/run.yaml")


@pytest.mark.parametrize(
    ("argv", "messages"),
    [
        (["trian"], "kubetune: unknown verb 'trian'; did you mean `train`?"),
        (["train", "--nope"], "kubetune train: unrecognized arguments: --nope"),
        (
            ["train", "--lr", "fast"],
            "kubetune train: argument --learning-rate/--lr: invalid float value: 'fast'",
        ),
        (["data", "frob"], "kubetune data: argument ACTION: invalid choice: 'frob'"),
    ],
)
def test_a_mistaken_word_is_named_first(
    argv: list[str], messages: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(messages)


def test_a_key_of_a_source_joins_its_path_that_was_written_as_a_text(tmp_path: Path) -> None:
    columns = ["data.train.columns.prompt=q", "data.train.columns.completion=solution"]
    (source,) = config_of("--model", "m", "--data", "faq.csv", *columns).data.train
    assert source.path == "faq.csv"
    assert source.columns == {"prompt": "q", "completion": "solution"}

    path = tmp_path / "run.yaml"
    path.write_text("model: m\ndata: {train: [a.csv, b.csv], eval: e.csv}\npush: org/name\n")
    config = config_of(str(path), "data.eval.split=test", "push.private=false")
    assert (config.data.eval[0].path, config.data.eval[0].split) == ("e.csv", "test")
    assert (config.push.repo, config.push.private) == ("org/name", False)
    with pytest.raises(ConfigError) as refused:
        config_of(str(path), columns[0])
    assert refused.value.problems == [
        "override: data.train.columns.prompt: data.train is a list; expected a key of one of its items, such as "
        "data.train[0].columns.prompt"
    ]


def test_an_override_reaches_into_a_list(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: m\ndata: {train: [a.jsonl, {path: b.jsonl, weight: 2}], eval: e.jsonl}\n"
    )
    overrides = ["data.train[0].weight=0.5", "data.train[1]=c.jsonl", "data.eval[0].split=test"]
    data = config_of(str(path), *overrides).data
    assert [(source.path, source.weight) for source in data.train] == [
        ("a.jsonl", 0.5),
        ("c.jsonl", 1.0),
    ]
    assert isinstance(data.eval, tuple)
    assert data.eval[0].split == "test"
    with pytest.raises(ConfigError) as refused:
        config_of(
            str(path), "data.train[0].weight=no", "data.train[2].weight=1", "data.max_length[0]=4"
        )
    assert refused.value.problems == [
        "override: data.max_length[0]: data.max_length holds 0; expected one of them, or a key of one",
        'override: data.train[0].weight: found "no"; expected a number above 0 and of at most 1,000',
        "override: data.train[2].weight: data.train holds 2; expected one of them, or a key of one",
    ]
