"""Recurrent models on packed batches: as transformers + PEFT one by one, and a leak of a single token is noticed."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM

from kubetune import errors
from kubetune.batching.batch import collate
from kubetune.batching.shared_beginnings import collate_shared
from kubetune.kernels.padded_rows import PaddedRows, batches_of
from kubetune.kernels.pointwise import Kernels
from kubetune.models import padding_free, recurrences
from kubetune.models.acceleration import recompute_activations
from kubetune.models.attention_hooks import CannotRunPaddingFree, packed
from kubetune.models.fused_forwards import swap_forwards
from kubetune.models.learner import Learner
from kubetune.models.padding_free import Route, choose_attention, hidden_states, require_head
from kubetune.models.prefix_sharing import why_not
from kubetune.tasks.causal_lm import TASK
from tests import toy
from tests.architectures import (
    COMMON,
    PROMISED,
    build_model,
    random_rows,
    reference_gradients,
    relative_error,
    take_gradients,
)
from tests.hybrids import BIASED, HYBRIDS
from tests.run.test_prefix import sharing_rows
from tests.tiny import train_tokenizer

SAME = 1e-6
GRADIENTS = 5e-6
QUICK = ("qwen3_next", "mamba2")


def learn(model: Any, batch: Any, route: Route, labels: int) -> tuple[float, Any]:
    loss = TASK.backward(Learner(model, route), batch, 1.0 / labels)
    return float(loss), take_gradients(model)


def route_in_rows(model: Any) -> Route:
    """Return the route of a model whose recurrent modules run on rows of padded batches."""
    route = choose_attention(model)
    assert route.padding_free, route.why_not
    assert route.in_rows
    # A recurrence makes a rounding up to 20 times as large, and how a processor sums decides how it rounds.
    assert route.difference <= 1.5 * SAME
    return route


def require_same(
    model: Any, route: Route, rows: Any, batch: Any, expected: tuple[float, Any]
) -> None:
    """Require that one packed batch gives the loss and gradients of plain transformers and PEFT."""
    loss, gradients = learn(model, batch, route, sum(int(trained[1:].sum()) for _, trained in rows))
    assert loss == pytest.approx(expected[0], rel=SAME)
    assert relative_error(gradients, expected[1]) <= GRADIENTS


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in HYBRIDS]
)
def test_a_packed_batch_gives_what_its_sequences_give_alone(name: str) -> None:
    model = build_model(name, HYBRIDS[name])
    rows = random_rows((37, 5, 130, 2, 21, 64, 66))
    expected = reference_gradients(model, rows)
    route = route_in_rows(model)
    with ExitStack() as undo:
        require_same(model, route, rows, collate(rows), expected)
        swap_forwards(model, Kernels(), undo)
        require_same(model, route, rows, collate(rows), expected)
    sizes = [getattr(module, "chunk_size", None) for module in model.modules()]
    assert recurrences.SCAN_CHUNK not in sizes, "the length of chunks is left as it was"


class Doubled(TorchFunctionMode):
    """Whatever asks for float32 gets float64: models compute in it, also where they say otherwise."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def doubled(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(
            *map(doubled, args), **{name: doubled(value) for name, value in (kwargs or {}).items()}
        )


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "lfm2" else pytest.mark.slow) for n in HYBRIDS]
)
def test_what_float32_leaves_of_a_packed_batch_is_as_near_to_the_truth(name: str) -> None:
    """Sums in another order than transformers' differ in their last digits; in float64 theirs say which are nearer."""
    rows = random_rows((37, 5, 130, 2, 21, 64, 66))
    exact = build_model(name, HYBRIDS[name]).double()
    for module in exact.modules():  # stacked experts as PEFT and transformers loop over them
        if hasattr(module, "parameter_name"):
            vars(module).pop("forward", None)
    exact.get_base_model().set_experts_implementation("eager")
    with Doubled():
        _, truth = reference_gradients(exact, rows)
    model = build_model(name, HYBRIDS[name])
    _, theirs = reference_gradients(model, rows)
    labels = sum(int(trained[1:].sum()) for _, trained in rows)
    _, ours = learn(model, collate(rows), route_in_rows(model), labels)
    ours_off, theirs_off = (
        relative_error({n: g.double() for n, g in gradients.items()}, truth)
        for gradients in (ours, theirs)
    )
    assert ours_off <= 1.25 * theirs_off + 0.1 * SAME, (ours_off, theirs_off)
    assert relative_error(ours, theirs) <= max(SAME, 1.5 * theirs_off)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "granitemoehybrid", "lfm2", "rwkv"])
def test_full_fine_tuning_and_recomputing_stay_exact(name: str) -> None:
    model = build_model(name, HYBRIDS[name], lora=False)
    rows = random_rows()
    expected = reference_gradients(model, rows)
    route = route_in_rows(model)
    require_same(model, route, rows, collate(rows), expected)
    if name != "rwkv":  # transformers recomputes none of its layers
        recompute_activations(model)
    require_same(model, route, rows, collate(rows), expected)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "lfm2" else pytest.mark.slow) for n in HYBRIDS]
)
def test_rows_share_their_beginnings(name: str) -> None:
    model = build_model(name, HYBRIDS[name])
    rows = sharing_rows()
    expected = reference_gradients(model, rows)
    route = route_in_rows(model)
    require_same(model, route, rows, collate_shared(rows), expected)
    assert why_not(Learner(model, Route(True))) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", BIASED)
def test_what_cannot_be_packed_runs_alone(name: str) -> None:
    model = build_model(name, BIASED[name])
    before = [vars(module).get("forward") for module in model.modules()]
    assert choose_attention(model).why_not
    assert [vars(module).get("forward") for module in model.modules()] == before
    require_head(model)


def test_a_hybrid_whose_modules_stay_as_they_are_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing = recurrences.KeptApart(0, (), lambda: None)
    monkeypatch.setattr(recurrences, "keep_apart", lambda *_: nothing)
    assert "causal_conv1d" in choose_attention(build_model("lfm2", HYBRIDS["lfm2"])).why_not
    assert "see each other" in choose_attention(build_model("minimax", HYBRIDS["minimax"])).why_not


def with_a_neighbour(cu_seqlens: Any, parents: Any, device: Any) -> PaddedRows:
    """Return rows, the second with the last token of the sequence before in front of it."""
    [batch], places = ROWS.__wrapped__(cu_seqlens, parents, device)
    shifted = torch.cat(
        [batch[:, :1], batch], 1
    )  # every row has a place in front, itself once more …
    rows = places // batch.shape[1]
    shifted[rows[cu_seqlens[1]], 0] = (
        cu_seqlens[1] - 1
    )  # … but for the second sequence: its neighbour
    return PaddedRows((shifted,), places + rows + 1)


ROWS = recurrences.rows_of


@pytest.mark.parametrize("family", ["minimax", "qwen3_5_text"])
def test_a_leak_of_one_token_is_noticed(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    model = build_model(family, HYBRIDS[family])
    assert choose_attention(model).in_rows
    padding_free.self_check(model)
    monkeypatch.setattr(recurrences, "rows_of", with_a_neighbour)
    with pytest.raises(CannotRunPaddingFree, match="see each other"):
        padding_free.self_check(model)
    assert not choose_attention(build_model(family, HYBRIDS[family])).padding_free


def test_modules_are_as_before_outside_of_packed_batches() -> None:
    model = build_model("qwen3_5_text", HYBRIDS["qwen3_5_text"])
    [(ids, trained), *_] = random_rows()
    batch = collate([(ids, trained)])
    with torch.no_grad():
        expected = model(input_ids=batch.input_ids[None], use_cache=False).logits
        assert choose_attention(model).in_rows == ("Qwen3_5GatedDeltaNet",)
        with packed(batch.cu_seqlens):
            alone = model.get_output_embeddings()(hidden_states(model.get_base_model(), batch))
        with padding_free.own_attention(model.get_base_model()):
            again = model(input_ids=batch.input_ids[None], use_cache=False).logits
    for actual in (alone[None], again):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_batches_of_rows_pad_little() -> None:
    lengths = sorted((7, 900, 850, 30, 28, 25, 31, 400), reverse=True)
    batches = batches_of(lengths)
    assert batches == [(0, 2), (2, 3), (3, 8)]
    assert batches_of([5]) == [(0, 1)]


def test_an_unknown_rule_of_logits_is_refused() -> None:
    model = build_model("llama", PROMISED["llama"])
    require_head(model)
    lm = model.get_base_model()
    stock = lm.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        result.logits = result.logits * 0.5
        return result

    lm.forward = scaled
    with pytest.raises(errors.ModelError, match="rule that is not known"):
        require_head(model)


def test_a_head_with_more_than_weight_and_bias_is_refused() -> None:
    """The loss takes these two alone. Dory's head multiplies the logits by a parameter, which begins as ones."""
    dory = {"num_hidden_layers": 3, "n_input_layers": 1, "n_output_layers": 1}
    adapted = build_model("dory", {**COMMON, **dory})
    require_head(adapted)
    lm = adapted.get_base_model()
    with torch.no_grad():
        lm.lm_head.logit_scale[7] *= 2
    for model in (adapted, build_model("dory", {**COMMON, **dory}, lora=False)):
        with pytest.raises(errors.ModelError, match="rule that is not known"):
            require_head(model)


@pytest.fixture
def hybrid(tmp_path: Path) -> dict[str, Any]:
    """Return the sections of a run file for a small hybrid, and the folder of its inputs."""
    inputs = toy.make_inputs(tmp_path)
    train_tokenizer(tmp_path / "hybrid")
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_5_text", **{**HYBRIDS["qwen3_5_text"], "vocab_size": 512})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hybrid")
    return {"inputs": inputs, "model": str(tmp_path / "hybrid")}


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("fla") is not None, reason="flash-linear-attention is installed"
)
def test_a_kernel_that_is_absent_is_named_once(tmp_path: Path, hybrid: dict[str, Any]) -> None:
    config = toy.make_config(**hybrid, training={"max_steps": 3})
    run_dir = toy.make_run(tmp_path / "run", config)
    command = [sys.executable, "-m", "kubetune.worker", str(run_dir)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    named = re.findall(
        r"`(\w+)` is falling back to its reference PyTorch implementation",
        done.stderr + done.stdout,
    )
    assert sorted(named) == ["causal_conv1d_fn", "chunk_gated_delta_rule"]


@pytest.mark.slow
def test_a_hybrid_goes_on_bit_by_bit(tmp_path: Path, hybrid: dict[str, Any]) -> None:
    config = toy.make_config(**hybrid, lora={"r": 4, "dropout": 0.1})
    whole = toy.finished(tmp_path / "whole", config)
    log = toy.log_of(whole)
    assert "Qwen3_5GatedDeltaNet: sequences go as rows of padded batches" in log
    run_dir = toy.make_run(tmp_path / "run", config)
    assert toy.train(run_dir, 1, {"KUBETUNE_FAULT": "signal 9:micro-batch:9"}) == [-signal.SIGKILL]
    assert toy.train(run_dir, 1) == [0]
    assert toy.digests(run_dir) == toy.digests(whole)


@pytest.mark.slow
@pytest.mark.parametrize("parallelism", ["ddp", "fsdp"])
def test_a_hybrid_on_two_ranks_learns_as_on_one(
    tmp_path: Path, hybrid: dict[str, Any], parallelism: str
) -> None:
    alone = toy.finished(tmp_path / "alone", toy.make_config(**hybrid, lora=None))
    config = toy.make_config(**hybrid, lora=None, training={"parallelism": parallelism})
    both = toy.finished(tmp_path / "both", config, 2)
    assert "rows of padded batches" in toy.log_of(both)
    assert toy.losses(both) == pytest.approx(toy.losses(alone), abs=1e-5)
