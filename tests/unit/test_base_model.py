"""What a plan and a check of the data say of the model before its weights are read: its kind, targets, positions."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from pydantic import ValidationError
from safetensors.numpy import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from kubetune import cli, errors
from kubetune.base import processes
from kubetune.config.load import load_config
from kubetune.config.schema import Config, LoraConfig, ModelConfig
from kubetune.data.prepared.tally import require_rows
from kubetune.errors import ConfigError, ModelError
from kubetune.library.verdict import built_targets
from kubetune.library.verdict.built_targets import require_built_targets
from kubetune.models.adapters.lora import add_lora
from kubetune.models.loading import load_pretrained
from kubetune.models.model_spec import ModelSpec
from kubetune.plan.adapter_targets import lacks_whole_modules, may_lack_targets, require_targets
from kubetune.plan.base_model import positions_of
from kubetune.plan.linears import unreached
from kubetune.plan.model_shapes import ModelFiles, read_config, read_weights
from tests.architectures import COMMON
from tests.hybrids import HYBRIDS
from tests.tiny import pretend_weights, train_tokenizer

T5 = {"vocab_size": 512, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
MAMBA = {"vocab_size": 512, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a tokenizer without a model, rows of 5 to 200 tokens, and a run file over both."""
    monkeypatch.chdir(tmp_path)
    pretend_weights(train_tokenizer(tmp_path / "model"))
    rows = [{"text": "one two three four five " * (1 + n)} for n in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "run.yaml").write_text(
        "model: model\ndata: {train: rows.jsonl, num_proc: 1}\nlora: true\n"
    )
    return tmp_path


def describe_model(folder: Path, **facts: Any) -> None:
    (folder / "model" / "config.json").write_text(json.dumps(facts))


@pytest.mark.parametrize(
    "command",
    [["plan", "run.yaml"], ["data", "check", "run.yaml"], ["data", "prepare", "run.yaml"]],
)
@pytest.mark.parametrize(
    ("facts", "what"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True, "architectures": ["T5ForConditionalGeneration"]},
         "is an encoder-decoder (t5); task: causal_lm trains decoders"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "is an encoder, for task: sequence_classif"),
    ],
)  # fmt: skip
def test_models_that_do_not_write_are_refused_before_anything_is_read(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    facts: dict[str, Any],
    what: str,
) -> None:
    describe_model(folder, **facts)
    assert cli.main(command) == errors.USER
    assert what in " ".join(capsys.readouterr().err.split())


def test_a_class_that_has_no_such_model_is_named_without_the_hundreds_that_it_has(
    tmp_path: Path,
) -> None:
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **T5))
    model.save_pretrained(tmp_path)
    config = Config.model_validate({"model": str(tmp_path), "data": {"train": "x"}})
    with pytest.raises(ModelError) as caught:
        load_pretrained(AutoModelForCausalLM, ModelSpec.of(config), model.device)
    assert "is a T5, which AutoModelForCausalLM has no form of" in str(caught.value)
    assert len(str(caught.value)) < 250


def test_an_expression_that_is_none_is_refused_at_its_line(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "model: m\ndata: {train: x}\nlora:\n  target_modules: '(unclosed'\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "run.yaml")
    assert "run.yaml:4: lora.target_modules: found '(unclosed', no regular expression" in str(
        caught.value
    )
    assert "such as .*(q|v)_proj" in str(caught.value)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("a{99999999999}", "the repetition number is too large"),
        ("(" * 5000 + ")" * 5000, "recursion"),
    ],
)
def test_an_expression_that_python_cannot_hold_is_refused(expression: str, message: str) -> None:
    with pytest.raises(ValidationError, match=f"no regular expression .*{message}"):
        LoraConfig(target_modules=expression)


def test_an_expression_that_may_mean_more_in_the_future_is_what_python_reads_today() -> None:
    assert LoraConfig(target_modules="[[q]_proj").target_modules == "[[q]_proj"


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (
            ".*nosuch",
            "no module's whole name matches .*nosuch; names end in down_proj, embed_tokens, gate_proj",
        ),
        ("[q_proj, nosuch]", "this model has no module named nosuch; it has down_proj"),
        (".*\\.q_proj", None),
        ("[q_proj, v_proj]", None),
        ("q_proj,v_proj", None),
        ("q_proj, self_attn.v_proj", None),
        ("q_proj,nosuch", "this model has no module named nosuch; it has down_proj"),
        ("model\\.layers\\.0\\.self_attn\\.q_proj", None),
        (".*mlp.*", None),
        (
            ".*mlp",
            "no module's whole name matches .*mlp; names end in down_proj, embed_tokens, gate_proj",
        ),
        ("(((.+)+)+)+$x", "takes more than a second to match the names of modules"),
    ],
)
def test_targets_that_the_model_lacks_do_not_pass_a_plan(
    folder: Path, capsys: pytest.CaptureFixture[str], targets: str, message: str | None
) -> None:
    save_model(folder, "llama")
    capsys.readouterr()
    code = cli.main(["plan", "run.yaml", f"lora.target_modules={targets}"])
    assert code == (errors.USER if message else errors.OK)
    if message:
        assert message in capsys.readouterr().err


def test_an_expression_adapts_the_matrices_that_it_matches_without_what_is_around_them(
    folder: Path,
) -> None:
    """PEFT refuses an expression that matches a block or an activation too."""
    save_model(folder, "llama")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    adapted = add_lora(model, LoraConfig(target_modules=".*mlp.*"), task_type="CAUSAL_LM", seed=0)
    names = [name for name, _ in adapted.named_parameters() if "lora_A" in name]
    assert {name.split(".lora_A")[0].rpartition(".")[2] for name in names} == {
        "down_proj",
        "gate_proj",
        "up_proj",
    }
    assert all(".mlp." in name for name in names)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_an_expression_that_never_ends_is_refused_by_a_rank_too(folder: Path, kind: str) -> None:
    """The names of a model may be others than those of its files, which a plan reads."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **COMMON))
    endless = LoraConfig(target_modules="(((.+)+)+)+$x")
    with pytest.raises(ConfigError, match="soon has an answer"):
        add_lora(model, endless, task_type="CAUSAL_LM", seed=0)


def save_model(folder: Path, kind: str, **facts: Any) -> ModelConfig:
    """Save a tiny model that knows the tokenizer's words."""
    config = AutoConfig.for_model(kind, **COMMON | {"vocab_size": 1000} | facts)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    return ModelConfig(path=str(folder / "model"))


EMBEDDINGS = [("llama", "embed_tokens"), ("gpt2", "wte"), ("gpt_neox", "embed_in")]


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize(("kind", "name"), EMBEDDINGS)
def test_embeddings_that_the_head_is_tied_to_get_no_adapter(
    folder: Path, kind: str, name: str
) -> None:
    untied = save_model(folder, kind, tie_word_embeddings=False)
    for target in ((name,), f".*{name}"):
        require_built_targets(LoraConfig(target_modules=target), untied, "causal_lm")
    tied = save_model(folder, kind, tie_word_embeddings=True)
    advice = f"the output head shares the weight of {name} .* write lora.modules_to_save: .{name}."
    for target in ((name,), f".*{name}"):
        with pytest.raises(ConfigError, match=f"lora.target_modules: {advice}"):
            require_built_targets(LoraConfig(target_modules=target), tied, "causal_lm")
    whole = LoraConfig(modules_to_save=(name,))
    require_built_targets(whole, tied, "causal_lm")


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize(
    ("kind", "name"),
    [EMBEDDINGS[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in EMBEDDINGS[1:])],
)
def test_a_plan_refuses_adapters_on_embeddings_that_the_head_is_tied_to(
    folder: Path, capsys: pytest.CaptureFixture[str], kind: str, name: str
) -> None:
    save_model(folder, kind, tie_word_embeddings=True)
    assert cli.main(["plan", "run.yaml", f"lora.target_modules=[{name}]"]) == errors.USER
    assert (
        f"lora.target_modules: the output head shares the weight of {name} "
        in capsys.readouterr().err
    )


def test_an_expression_without_signs_is_a_whole_name(folder: Path) -> None:
    model = save_model(folder, "llama")
    with pytest.raises(ConfigError, match="no module's whole name matches q_proj"):
        require_built_targets(LoraConfig(target_modules="q_proj"), model, "causal_lm")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_parameters": ["mlp.experts.down_proj"]}, "mlp.experts.down_proj is not in this model; it has down"),
        ({"target_parameters": ["nosuch"]}, "nosuch is not in this model; it has down_proj.weight, embed_tokens"),
        ({"target_parameters": ["input_layernorm.weight"]}, "input_layernorm.weight is no matrix"),
        ({"target_parameters": ["down_proj.weight"], "dropout": 0.1}, "lora.dropout is 0.1, which adapters on tensors"),
        ({"target_parameters": ["down_proj.weight"], "use_dora": True}, "lora.use_dora is true, which adapters on"),
        ({"target_parameters": ["down_proj.weight"], "target_modules": ["q"]}, "this model has no module named q"),
    ],
)  # fmt: skip
def test_tensors_that_a_model_lacks_are_named_by_the_weights_as_by_the_built_model(
    folder: Path, settings: dict[str, Any], message: str
) -> None:
    model = save_model(folder, "llama", tie_word_embeddings=False)
    weights = read_weights(model.path, {})
    assert weights is not None
    lora = LoraConfig(**settings)
    with pytest.raises(ConfigError, match=re.escape(message)) as by_weights:
        require_targets(lora, weights)
    with pytest.raises(ConfigError) as by_built:
        require_built_targets(lora, model, "causal_lm")
    assert str(by_weights.value) == str(by_built.value)


@pytest.mark.parametrize(
    ("target", "modules", "is_open"),
    [
        ("down_proj.weight", ("q_proj",), False),
        ("model.layers.0.mlp.up_proj.weight", ("q_proj",), False),
        ("down_proj.weight", "all-linear", True),
        ("lm_head.weight", ("q_proj",), True),
        ("embed_tokens.weight", ("q_proj",), True),
    ],
)
def test_tensors_that_only_a_built_model_can_judge(
    folder: Path, target: str, modules: str | tuple[str, ...], is_open: bool
) -> None:
    model = save_model(folder, "llama", tie_word_embeddings=True)
    weights = read_weights(model.path, {})
    assert weights is not None
    lora = LoraConfig(target_parameters=(target,), target_modules=modules)
    require_targets(lora, weights)
    assert may_lack_targets(lora, weights) is is_open
    if not is_open:
        require_built_targets(lora, model, "causal_lm")


def test_a_new_head_of_a_classifier_gets_no_adapter(folder: Path) -> None:
    """The other process builds what the task builds."""
    model = save_model(folder, "llama", tie_word_embeddings=False)
    for task in ("sequence_classification", "reward_model"):
        require_built_targets(LoraConfig(target_modules=r".*(q_proj|score)"), model, task)
        with pytest.raises(ConfigError, match=r"lora\.target_modules"):
            require_built_targets(LoraConfig(target_modules=("score",)), model, task)


def test_a_process_that_does_not_answer_is_said_and_asked_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = save_model(folder, "llama")
    weights = read_weights(model.path, {})
    assert weights is not None

    def ask(code: str, seconds: float) -> None:
        command = [sys.executable, "-c", code]
        monkeypatch.setattr(processes, "module", lambda _: command)
        monkeypatch.setattr(built_targets, "_SECONDS", seconds)
        lora = LoraConfig(target_modules=("lm_head",))
        built_targets.require_targets_elsewhere(lora, model, "causal_lm", None, weights)

    ask("input()", 0)
    ask("exit('no module named torch')", 60)
    assert "open until training: building it took longer than 0 s" in caplog.text
    assert "ended with exit code 1 (no module named torch)" in caplog.text
    with pytest.raises(ConfigError, match="it has none"):
        ask("print('\"it has none\"')", 60)


def test_names_with_commas_are_a_list_and_expressions_stay_such() -> None:
    assert LoraConfig(target_modules="q_proj, mlp.up_proj").target_modules == (
        "q_proj",
        "mlp.up_proj",
    )
    assert LoraConfig(target_modules=".*[qv]_proj{1,2}").target_modules == ".*[qv]_proj{1,2}"
    assert LoraConfig(target_modules="q_proj").target_modules == "q_proj"


def test_targets_that_a_mamba_can_have_are_told_and_work(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **MAMBA)).save_pretrained(
        folder / "model"
    )
    assert cli.main(["plan", "run.yaml"]) == errors.OK
    capsys.readouterr()
    assert cli.main(["plan", "run.yaml", "lora.target_modules=[in_proj,out_proj]"]) == errors.USER
    assert (
        "[in_proj, out_proj] takes in out_proj, which can have no adapter in mamba; write [in_proj]"
        in capsys.readouterr().err
    )
    assert cli.main(["plan", "run.yaml", "lora.target_modules=[in_proj]"]) == errors.OK


# Linear modules whose weights a fused kernel reads, besides `dt_proj`; none in the last three.
READ_BY_KERNELS = {
    "bamba": {"out_proj"},
    "falcon_h1": {"out_proj"},
    "falcon_mamba": {"out_proj", "x_proj"},
    "granitemoehybrid": {"out_proj"},
    "mamba": {"out_proj", "x_proj"},
    "mamba2": {"out_proj"},
    "nemotron_h": {"out_proj"},
    "zamba2": {"out_proj"},
    "jamba": set[str](),
    "zamba": set[str](),
    "lfm2": set[str](),
}


@pytest.mark.parametrize("kind", READ_BY_KERNELS)
def test_all_linear_leaves_out_what_kernels_read_without_calling_it(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **HYBRIDS[kind]))
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and (".mamba." in name or ".mixer." in name)
    }
    with caplog.at_level(logging.INFO, logger="kubetune"):
        adapted = add_lora(model, LoraConfig(), task_type="CAUSAL_LM", seed=0)
    names = [name for name, _ in adapted.named_parameters() if "lora_A" in name]
    for left in READ_BY_KERNELS[kind]:
        assert not any(
            f".{block}.{left}.lora_A" in name for name in names for block in ("mamba", "mixer")
        )
        assert left in linear
    if READ_BY_KERNELS[kind]:
        assert caplog.text.count("no adapters on") == 1
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **HYBRIDS[kind]))
        with pytest.raises(
            ConfigError, match=f"takes in out_proj, which can have no adapter in {kind}; write"
        ):
            add_lora(model, LoraConfig(target_modules=("out_proj",)), task_type="CAUSAL_LM", seed=0)
    elif "out_proj" in linear:
        assert any("out_proj.lora_A" in name for name in names)


def test_the_kinds_whose_weights_kernels_read_are_those_of_transformers() -> None:
    """Its files hand such a weight to a kernel as an argument by itself: `outproj_weight=self.out_proj.weight,`."""
    handed = re.compile(r"^ +(?:outproj_weight=)?self\.((?:out|x|in)_proj)\.weight,$", re.MULTILINE)
    names_of_kernels: dict[str, set[str]] = {}
    for file in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        text = file.read_text()
        if "mamba" in text and (names := set(handed.findall(text))):
            names_of_kernels[file.parent.name] = names
    assert names_of_kernels == {kind: names for kind, names in READ_BY_KERNELS.items() if names}
    for kind, names in READ_BY_KERNELS.items():
        for name in ("in_proj", "out_proj", "x_proj"):
            is_left = any(
                unreached(kind).fullmatch(f"layers.0.{block}.{name}")
                for block in ("mamba", "mixer")
            )
            assert is_left == (name in names)


def test_a_table_of_positions_that_ends_is_told_before_training(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    describe_model(folder, model_type="gpt2", n_positions=32)
    pretend_weights(folder / "model", "h", ("ln_1", "attn.c_attn", "ln_2", "mlp.c_fc"))
    message = "the model has 32 positions, the longest row "
    assert cli.main(["plan", "run.yaml"]) == errors.USER
    assert message in capsys.readouterr().err
    assert cli.main(["data", "check", "run.yaml", "--json"]) == errors.USER
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["verdict"].startswith(message)) == (False, True)
    assert "set data.max_length to 32 or less" in report["findings"][0]["sentence"]
    for overlong in ("truncate", "drop"):
        fitting = ["data.max_length=32", f"data.overlong={overlong}", "data.max_lost_share=0.9"]
        assert cli.main(["plan", "run.yaml", *fitting]) == errors.OK
        capsys.readouterr()
        cli.main(["data", "check", "run.yaml", "--json", *fitting])
        listed = json.loads(capsys.readouterr().out)["findings"]
        assert "positions" not in [finding["id"] for finding in listed], overlong


def test_positions_that_turn_go_on_but_were_never_trained(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    describe_model(folder, model_type="llama", max_position_embeddings=32)
    assert cli.main(["plan", "run.yaml"]) == errors.OK
    assert "the model was trained on at most" in capsys.readouterr().out
    assert cli.main(["data", "check", "run.yaml"]) == errors.OK
    stdout = capsys.readouterr().out
    assert "the model was trained on at most" in stdout
    assert "ready to train" in stdout


def test_a_table_of_positions_is_seen_in_the_weights(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    describe_model(tmp_path, model_type="own", max_position_embeddings=32)
    config = Config.model_validate({"model": str(model), "data": {"train": "x"}})
    result = positions_of(config.task, ModelFiles(config.model.path, {}))
    assert result is not None
    assert not result.is_table
    save_file({"own.wpe.weight": np.zeros((34, 4), np.float32)}, model / "model.safetensors")
    result = positions_of(config.task, ModelFiles(config.model.path, {}))
    assert result is not None
    assert (result.limit, result.is_table) == (32, True)


def test_a_config_nested_too_deeply_is_no_traceback(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000)
    assert read_config(str(folder), {}) is None


def test_tokens_that_the_model_has_no_embedding_for_are_told_before_training(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    describe_model(folder, model_type="llama", vocab_size=60)
    assert cli.main(["plan", "run.yaml"]) == errors.USER
    stderr = capsys.readouterr().err
    assert "has embeddings for 60 tokens, but " in stderr
    assert re.search(r"but \d+ of \d+ rows hold ids beyond them, up to \d+ \('.*'\); ", stderr)
    assert cli.main(["data", "check", "run.yaml", "--json"]) == errors.USER
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    assert re.search(r"for 60 tokens, but \d+ of \d+ rows hold ids beyond them", report["verdict"])
    describe_model(folder, model_type="llama", vocab_size=100_000)
    assert [cli.main(["plan", "run.yaml"]), cli.main(["data", "check", "run.yaml"])] == [
        errors.OK,
        errors.OK,
    ]


def test_advice_on_lost_rows_fits_what_they_were_lost_to() -> None:
    config = Config.model_validate(
        {"model": "x", "data": {"train": "x", "max_length": 64, "max_lost_share": 0.1}}
    )

    def advice(**stats: int) -> str:
        with pytest.raises(errors.DataError) as caught:
            require_rows(
                config.data, "train", {"records": 10, "rows": 4, "lost_share": 0.6, **stats}
            )
        return str(caught.value)

    text = advice(overlong=0, no_label=6, longest=40)
    assert "6 with nothing to train on (no answer). data.max_lost_share allows 10%." in text
    assert text.endswith("Fix the data, or raise data.max_lost_share. Nothing was written.")
    assert "max_length" not in text
    text = advice(overlong=6, no_label=0, longest=90)
    assert (
        "left out: 6 longer than data.max_length 64 (the longest has 90 tokens). data.max_lost"
        in text
    )
    assert (
        "set data.overlong to truncate (or, of plain texts, to split), fix the data, or raise"
        in text
    )
    assert "Raise data.max_length, fix the data, or raise" in advice(
        overlong=0, no_label=6, longest=90
    )


def test_a_module_to_be_trained_whole_has_to_be_in_the_model() -> None:
    modules = ["", "model.embed_tokens", "model.norm", "lm_head"]
    assert lacks_whole_modules(["norm", "model.embed_tokens", "lm_head"], modules) is None
    problem = lacks_whole_modules(["lm_head", "embed_token"], modules)
    assert problem is not None
    assert "no module named embed_token; did you mean embed_tokens?" in problem
