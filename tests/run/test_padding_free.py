"""A packed batch gives the gradients of plain transformers + PEFT one sequence at a time, and leaks are noticed."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from kubetune.batching.batch import Batch, collate
from kubetune.config.schema import LoraConfig, TrainingConfig
from kubetune.data.prepared.micro_batches import pack
from kubetune.distributed.process_group import World
from kubetune.kernels.attention.blockwise import Rule, block_attention
from kubetune.kernels.pointwise import Kernels
from kubetune.models import attention_hooks as hooks
from kubetune.models.acceleration import Workload, recompute_activations, tune
from kubetune.models.adapters.lora import add_lora
from kubetune.models.attention_hooks import CannotRunPaddingFree, MaskRule, attend, packed
from kubetune.models.fused_forwards import swap_forwards
from kubetune.models.learner import Learner
from kubetune.models.padding_free import Route, choose_attention, self_check
from kubetune.tasks.causal_lm import TASK
from tests.architectures import (
    COMMON,
    PADDING_FREE,
    PROMISED,
    SMALL_EXPERTS,
    build_model,
    random_rows,
    randomize_lora,
    reference_gradients,
    relative_error,
    take_gradients,
)
from tests.hybrids import HYBRIDS
from tests.small_configs import settings

EXACT = 1e-5


def padding_free_gradients(model, rows, *, budget: int = 350):
    """Loss and gradients by kubetune's own way; also whether it ran padding-free."""
    route = choose_attention(model)
    lengths = np.array([len(ids) for ids, _ in rows])
    ids = np.arange(len(rows))
    groups = pack(ids, lengths, budget) if route.padding_free else [ids[i : i + 1] for i in ids]
    labels = sum(int(trained[1:].sum()) for _, trained in rows)
    task = Learner(model, route)
    loss = sum(
        float(TASK.backward(task, collate([rows[i] for i in group]), 1.0 / labels))
        for group in groups
    )
    return loss, take_gradients(model), route


def require_exact_padding_free(model, rows):
    """Require that the loss and gradients of a packed batch are those of its sequences one by one."""
    loss, gradients = reference_gradients(model, rows)
    packed_loss, ours, route = padding_free_gradients(model, rows)
    assert route.padding_free, route.why_not
    assert packed_loss == pytest.approx(loss, abs=EXACT)
    assert relative_error(ours, gradients) <= EXACT


@pytest.mark.parametrize("name", PROMISED)
@pytest.mark.parametrize(
    "lora", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["lora", "full"]
)
def test_gradients_equal_one_by_one(name, lora):
    model = build_model(name, PROMISED[name], lora=lora)
    rows = random_rows()
    require_exact_padding_free(model, rows)


@pytest.mark.parametrize(
    "settings", [{"use_dora": True}, {"use_rslora": True}], ids=["dora", "rslora"]
)
def test_lora_variants_stay_exact(settings):
    model = add_lora(
        build_model("qwen3", PROMISED["qwen3"], lora=False),
        LoraConfig(r=4, **settings),
        task_type="CAUSAL_LM",
        seed=0,
    )
    randomize_lora(model)
    rows = random_rows()
    loss, gradients = reference_gradients(model, rows)
    packed_loss, ours, route = padding_free_gradients(model, rows)
    assert route.padding_free
    assert packed_loss == pytest.approx(loss, abs=EXACT)
    assert relative_error(ours, gradients) <= EXACT


@pytest.mark.parametrize("layers", [None, 1])
def test_gradient_checkpointing_stays_exact(layers):
    model = build_model("llama", PROMISED["llama"])
    rows = random_rows()
    loss, gradients = reference_gradients(model, rows)
    recompute_activations(model, layers)
    flags = [layer.gradient_checkpointing for layer in model.get_base_model().model.layers]
    assert sum(flags[:layers]) == sum(flags) == (layers or len(flags))
    packed_loss, ours, _ = padding_free_gradients(model, rows)
    assert packed_loss == pytest.approx(loss, abs=EXACT)
    assert relative_error(ours, gradients) <= EXACT


def test_leaking_across_sequences_gives_other_gradients(monkeypatch):
    """The negative control: with all sequences taken for one, and the guards off, the comparison above fails."""
    model = build_model("llama", PROMISED["llama"])
    rows = random_rows()
    _, gradients = reference_gradients(model, rows)
    monkeypatch.setattr(hooks, "attend", _attend_to_everything)
    task = Learner(model, Route(True))
    model.get_base_model().set_attn_implementation("padding_free")
    labels = sum(int(trained[1:].sum()) for _, trained in rows)
    TASK.backward(task, collate(rows), 1.0 / labels)
    assert relative_error(take_gradients(model), gradients) > 0.01


def _attend_to_everything(q, k, v, sinks, cu_seqlens, rule):
    return attend(q, k, v, sinks, (0, cu_seqlens[-1]), rule)


def test_self_check_refuses_a_leaking_attention(monkeypatch):
    model = build_model("llama", PROMISED["llama"])
    monkeypatch.setattr(hooks, "attend", _attend_to_everything)
    with pytest.raises(CannotRunPaddingFree, match="see each other"):
        self_check(model)


def test_self_check_refuses_nan(monkeypatch):
    model = build_model("llama", PROMISED["llama"])
    monkeypatch.setattr(hooks, "attend", lambda q, *rest: torch.full_like(q, torch.nan))
    with pytest.raises(CannotRunPaddingFree):
        self_check(model)


def test_a_mask_that_no_layer_uses_refuses_nothing():
    """Qwen2-MoE makes one of a window of no token beside the causal one that its layers take."""
    model = build_model("qwen2_moe", {**COMMON, **SMALL_EXPERTS, "moe_intermediate_size": 48})
    assert model.config.sliding_window == 0
    assert choose_attention(model).padding_free


def test_mask_probe_refuses_borders_that_disagree_with_positions():
    model = build_model("llama", PROMISED["llama"])
    model.get_base_model().set_attn_implementation("padding_free")
    batch = collate(random_rows())
    wrong = Batch(
        batch.input_ids, batch.position_ids, (0, batch.num_tokens), batch.rows, batch.labels, ()
    )
    with pytest.raises(CannotRunPaddingFree, match="neither causal nor"):
        TASK.backward(Learner(model, Route(True)), wrong, 1.0)


@pytest.mark.parametrize(
    ("model_type", "settings", "rules"),
    [
        ("llama", {}, [0]),
        ("mistral", {"sliding_window": 9}, [9]),
        ("mistral", {"sliding_window": 9000}, [0]),
        ("gemma3_text", {"sliding_window": 9}, [9, 0]),
    ],
)
def test_the_rule_of_a_mask_is_found_without_a_look_at_the_device(model_type, settings, rules):
    """On a device that has no numbers to look at the rule is that which a CPU is asked for."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(model_type, **{**COMMON, "num_hidden_layers": 1, **settings})
        )
    make = [create_sliding_window_causal_mask] * ("sliding_window" in settings) + [
        create_causal_mask
    ]
    make = make[: len(rules)]
    model.set_attn_implementation("padding_free")
    batch = collate(random_rows())
    for device in ("cpu", "meta"):
        embedded = torch.empty(1, batch.num_tokens, 64, device=device)
        positions = batch.position_ids[None].to(device)
        with packed(batch.cu_seqlens):
            asked = [make_mask(model.config, embedded, None, None, positions) for make_mask in make]
            assert [rule.window for rule in asked] == rules


def test_attention_outside_a_packed_batch_is_refused():
    model = build_model("llama", PROMISED["llama"])
    model.get_base_model().set_attn_implementation("padding_free")
    with pytest.raises(CannotRunPaddingFree):
        model(input_ids=torch.arange(10)[None])


@pytest.mark.parametrize(
    "rule", [Rule(0.2), Rule(0.2, window=7), Rule(0.2, softcap=3.0), Rule(0.2, causal=False)]
)
@pytest.mark.parametrize("sinks", [False, True])
def test_block_attention_equals_the_formula(rule, sinks):
    """Against softmax(mask(scale·QKᵀ))·V written out, over sequences shorter and longer than a block, in fp64."""
    torch.manual_seed(0)
    cu_seqlens = (0, 3, 300, 340)
    q, k, v = (torch.randn(340, h, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True) if sinks else None
    inputs = [q, k, v] + [sink] * sinks
    weight = torch.randn(340, 4, 8, dtype=torch.float64)
    ours = block_attention(q, k, v, sink, cu_seqlens, rule)
    theirs = torch.cat(
        [_formula(q[a:b], k[a:b], v[a:b], sink, rule) for a, b in pairwise(cu_seqlens)]
    )
    torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad((out * weight).sum(), inputs) for out in (ours, theirs)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-5, atol=1e-6
        )  # gradients of keys are summed in fp32


def _formula(q, k, v, sink, rule):
    n = len(q)
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * rule.scale
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    distance = torch.arange(n)[:, None] - torch.arange(n)[None]
    hidden = (distance < 0) & rule.causal
    if rule.window:
        hidden |= distance >= rule.window
    scores = scores.masked_fill(hidden, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink[:, None, None].expand(4, n, 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :n], v.repeat_interleave(2, 1))


def test_long_sequences_take_another_kernel_with_the_same_result(monkeypatch):
    monkeypatch.setattr(hooks, "LONG", 100)
    model = build_model("qwen2", PROMISED["qwen2"])
    rows = random_rows()
    loss, gradients = reference_gradients(model, rows)
    packed_loss, ours, _ = padding_free_gradients(model, rows, budget=500)
    assert packed_loss == pytest.approx(loss, abs=EXACT)
    assert relative_error(ours, gradients) <= EXACT


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_dropout_beside_a_window_or_a_soft_cap_is_refused_before_it_is_drawn(name):
    """The check runs without dropout, and its sequences are shorter than most windows."""
    config = AutoConfig.for_model(
        name, **{**PROMISED[name], "sliding_window": 64, "attention_dropout": 0.1}
    )
    route = choose_attention(AutoModelForCausalLM.from_config(config).train())
    assert not route.padding_free
    assert "dropout beside a window" in route.why_not


def test_flat_mask_cannot_be_computed_with():
    with pytest.raises(CannotRunPaddingFree), packed((0, 3)):
        MaskRule(0).to(torch.float32)


@pytest.mark.parametrize(
    "fused", [pytest.param(False, marks=pytest.mark.slow), True], ids=["plain", "fused"]
)
@pytest.mark.parametrize("name", PROMISED)
def test_lean_forwards_change_nothing(name, fused):
    """Every swap together, dropped rows included, against plain transformers."""
    model = build_model(name, PROMISED[name])
    rows = random_rows()
    loss, gradients = reference_gradients(model, rows)
    names = [n for n, _ in model.named_parameters()]
    swapped = swap_forwards(model, Kernels() if fused else None, ExitStack())
    packed_loss, ours, _ = padding_free_gradients(model, rows)
    assert swapped["lora"]
    assert swapped["rows"]
    assert not fused or name in ("gpt2", "phi") or swapped["norm"]
    assert [n for n, _ in model.named_parameters()] == names
    assert packed_loss == pytest.approx(loss, abs=EXACT)
    assert relative_error(ours, gradients) <= EXACT


def test_dora_keeps_pefts_own_forward():
    base = build_model("llama", PROMISED["llama"], lora=False)
    model = add_lora(base, LoraConfig(r=4, use_dora=True), task_type="CAUSAL_LM", seed=0)
    assert not swap_forwards(model, None, ExitStack())["lora"]


class RoundingLinear(nn.Linear):
    """As those of models whose own quantisation transformers applies to what are still weights in bf16."""

    def forward(self, x):
        return F.linear(x, self.weight.sign(), self.bias)


def test_a_frozen_layer_with_a_forward_of_its_own_keeps_it():
    base = build_model("llama", PROMISED["llama"], lora=False)
    for layer in base.model.layers:
        layer.mlp.up_proj.__class__ = RoundingLinear
    model = add_lora(
        base,
        LoraConfig(r=4, target_modules=["up_proj", "down_proj"]),
        task_type="CAUSAL_LM",
        seed=0,
    )
    assert swap_forwards(model, None, ExitStack())["lora"] == len(
        base.model.layers
    )  # down_proj alone


def test_a_model_that_runs_layers_in_turns_keeps_all_rows() -> None:
    """HRM's two stacks take turns, so that rows without a label behind the last attention are seen again."""
    model = build_model("hrm_text", settings("hrm_text"), lora=False)
    rows = [(ids, np.arange(len(ids)) > len(ids) // 2) for ids, _ in random_rows((37, 5, 60))]
    expected = reference_gradients(model, rows)
    learner = Learner(model, choose_attention(model))
    assert learner.route.padding_free
    learner = tune(
        learner, TrainingConfig(), Workload(total_tokens=1), World(device=torch.device("cpu"))
    )
    labels = sum(int(trained[1:].sum()) for _, trained in rows)
    loss = float(TASK.backward(learner, collate(rows), 1 / labels))
    assert loss == pytest.approx(expected[0], rel=1e-6)
    assert relative_error(take_gradients(model), expected[1]) <= 5e-6


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "qwen3_5_text"])
def test_most_models_end_in_their_last_layer(name: str) -> None:
    known = PROMISED | PADDING_FREE | HYBRIDS
    assert choose_attention(build_model(name, known[name])).ends_in_last_layer
