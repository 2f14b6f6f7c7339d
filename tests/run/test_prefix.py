"""Rows that share their beginnings, computed once, give the losses and gradients of plain transformers one by one."""

from __future__ import annotations

import json
import random
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kubetune import cli
from kubetune.batching.batch import collate
from kubetune.batching.feed import Work
from kubetune.batching.shared_beginnings import collate_shared
from kubetune.config.schema import PreferenceConfig
from kubetune.data.prepared.prepare import prepare
from kubetune.distributed.process_group import World
from kubetune.kernels.attention import joined
from kubetune.kernels.attention.blockwise import Rule, block_attention
from kubetune.kernels.pointwise import Kernels
from kubetune.models import attention_hooks as hooks
from kubetune.models.acceleration import Workload, recompute_activations
from kubetune.models.attention_hooks import CannotRunPaddingFree, longest_path
from kubetune.models.fused_forwards import swap_forwards
from kubetune.models.learner import Learner
from kubetune.models.model_spec import ModelSpec
from kubetune.models.padding_free import Route, choose_attention
from kubetune.models.prefix_sharing import why_not
from kubetune.plan.plan import make_plan
from kubetune.rundir import metrics
from kubetune.tasks import causal_lm, preference
from kubetune.training.reference.scores import AskedForAnswers, scores
from tests import toy
from tests.architectures import (
    COMMON,
    ONE_BY_ONE,
    PADDING_FREE,
    PROMISED,
    build_model,
    reference_gradients,
    relative_error,
    take_gradients,
)

EXACT = 1e-6
ROPE = {
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "linear": {"factor": 4.0},
}
FAMILIES: dict[str, dict[str, Any]] = {
    **{name: PROMISED[name] for name in ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt2")},
    "gpt_oss": PADDING_FREE["gpt_oss"],
    "gemma3_text": PADDING_FREE["gemma3_text"],
    **{
        f"llama+{kind}": {
            **COMMON,
            "rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **settings},
        }
        for kind, settings in ROPE.items()
    },
}
WHOLE = ("llama", "gemma2", "gpt2")


def sharing_rows(seed: int = 0) -> list[tuple[Any, Any]]:
    """Return (ids, trained) of rows whose beginnings nest; one row twice, some with none, labels in beginnings too."""
    draw = np.random.default_rng(seed)

    def text(length: int) -> Any:
        return draw.integers(5, 300, length)

    trunk = text(70)
    branch = np.concatenate([trunk[:37], text(50)])
    begun = [
        (trunk, 20),
        (trunk, 7),
        (trunk[:40], 30),
        (branch, 11),
        (branch, 60),
        (branch, 1),
        ([], 33),
        ([], 12),
    ]
    ids = [
        np.concatenate([beginning, text(length)]).astype(np.uint32) for beginning, length in begun
    ]
    rows = [(row, np.arange(len(row)) >= draw.integers(1, len(row) - 1)) for row in ids]
    return [*rows, rows[0]]


def learn(learner: Learner, batch: Any, labels: int) -> tuple[float, Any]:
    loss = causal_lm.TASK.backward(learner, batch, 1.0 / labels)
    return float(loss), take_gradients(learner.model)


def require_exact(model: Any, rows: list[tuple[Any, Any]]) -> None:
    """Require that the shared batch gives what transformers makes of its rows one by one."""
    loss, gradients = reference_gradients(model, rows)
    learner = Learner(model, choose_attention(model))
    batch = collate_shared(rows)
    assert batch.num_tokens < 0.6 * sum(len(ids) for ids, _ in rows)
    ours, shared = learn(learner, batch, sum(int(trained[1:].sum()) for _, trained in rows))
    assert ours == pytest.approx(loss, rel=EXACT)
    assert relative_error(shared, gradients) <= EXACT


@pytest.mark.parametrize("name", FAMILIES)
def test_shared_rows_give_the_gradients_of_lone_ones(name: str) -> None:
    require_exact(build_model(name, FAMILIES[name]), sharing_rows())


@pytest.mark.parametrize("name", WHOLE)
def test_full_fine_tuning_shares_exactly(name: str) -> None:
    require_exact(build_model(name, FAMILIES[name], lora=False), sharing_rows())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PADDING_FREE if name not in FAMILIES])
def test_more_families_share(name: str) -> None:
    model = build_model(name, PADDING_FREE[name])
    require_exact(model, sharing_rows())
    assert not why_not(Learner(model, Route(True)))


def test_beginnings_nest_and_their_labels_count_for_every_row() -> None:
    rows = sharing_rows()
    batch = collate_shared(rows)
    assert batch.tree is not None
    parents = batch.tree.parents
    depths = [0] * len(parents)
    for number, parent in enumerate(parents):
        depths[number] = depths[parent] + 1 if parent >= 0 else 0
    assert max(depths) >= 2
    assert max(count for _, count in batch.tree.counts) > 1
    assert sum(n * count for n, count in batch.tree.counts) == sum(
        int(trained[1:].sum()) for _, trained in rows
    )


def test_recomputed_activations_stay_exact() -> None:
    model = build_model("llama", PROMISED["llama"])
    recompute_activations(model)
    require_exact(model, sharing_rows())


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt2"])
def test_cheaper_forwards_stay_exact(name: str) -> None:
    model = build_model(name, PROMISED[name])
    rows = sharing_rows()
    loss, gradients = reference_gradients(model, rows)
    with ExitStack() as undo:
        assert swap_forwards(model, Kernels(), undo)["rows"]
        learner = Learner(model, choose_attention(model))
        ours, shared = learn(
            learner, collate_shared(rows), sum(int(trained[1:].sum()) for _, trained in rows)
        )
    assert ours == pytest.approx(loss, rel=EXACT)
    assert relative_error(shared, gradients) <= EXACT


def test_long_rows_share_by_kernels_that_keep_no_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "LONG_SHARED", 60)
    for name in ("llama", "gpt2"):
        require_exact(build_model(name, PROMISED[name]), sharing_rows())


def test_parts_joined_by_their_log_sum_exps_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention in parts, by a flash kernel and by the formula in its place, against that with all its scores."""
    torch.manual_seed(0)
    cu_seqlens = (0, 40, 70, 75, 300, 340, 341, 400, 420)
    parents = (-1, 0, 1, 1, 0, 0, -1, 6)
    inputs = [torch.randn(420, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    weight = torch.randn(420, 4, 16)
    whole = block_attention(*inputs, None, cu_seqlens, Rule(0.25), parents)
    expected = torch.autograd.grad((whole * weight).sum(), inputs)
    for kernel in (joined.OnCPU, Formula):
        monkeypatch.setattr(joined, "OnCPU", kernel)
        ours = joined.joined_attention(*inputs, cu_seqlens, parents, 0.25)
        torch.testing.assert_close(ours, whole, rtol=1e-5, atol=EXACT)
        for actual, wanted in zip(
            torch.autograd.grad((ours * weight).sum(), inputs), expected, strict=True
        ):
            assert float((actual - wanted).norm() / wanted.norm()) <= EXACT


class Formula:
    """Attention of a part written out: with the interface of a kernel that knows stretches by `cu_seqlens`."""

    def forward(self, q: Any, k: Any, v: Any, part: joined.JoinedPart, scale: float) -> Any:
        scores = self.scores(q, k, part, scale)
        sums = scores.logsumexp(-1)
        return torch.einsum(
            "hqk,khd->qhd", (scores - sums[..., None]).exp(), v.repeat_interleave(2, 1)
        ), sums

    def backward(
        self,
        grad: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        part: joined.JoinedPart,
        scale: float,
    ) -> Any:
        p = (self.scores(q, k, part, scale) - lse[..., None]).exp()
        d_p = torch.einsum("qhd,khd->hqk", grad, v.repeat_interleave(2, 1))
        d_s = p * (d_p - (grad * out).sum(-1).t()[..., None]) * scale
        d_q = torch.einsum("hqk,khd->qhd", d_s, k.repeat_interleave(2, 1))
        d_k = torch.einsum("hqk,qhd->khd", d_s, q)
        d_v = torch.einsum("hqk,qhd->khd", p, grad)
        return d_q, *(d.unflatten(1, (2, 2)).sum(2) for d in (d_k, d_v))

    def scores(self, q: Any, k: Any, part: joined.JoinedPart, scale: float) -> Any:
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * scale
        stretch_of_query, stretch_of_key = (
            torch.repeat_interleave(
                torch.arange(len(cu_seqlens) - 1), torch.tensor(cu_seqlens).diff()
            )
            for cu_seqlens in (part.cu_queries, part.cu_keys)
        )
        hidden = stretch_of_query[:, None] != stretch_of_key[None]
        if part.causal:
            hidden |= torch.ones_like(hidden).triu(1)
        return scores.masked_fill(hidden, -torch.inf)


def test_what_differs_by_one_token_is_not_shared() -> None:
    """The negative control: rows of which one differs early, put into one tree by force, give other gradients."""
    ids, trained = sharing_rows()[0]
    other = ids.copy()
    changed = ids.copy()
    other[-5:], changed[-5:] = other[-5:][::-1], changed[-5:][::-1]
    changed[3] = (changed[3] + 1) % 300
    apart = collate_shared([(ids, trained), (changed, trained)])
    assert apart.tree is None
    model = build_model("llama", PROMISED["llama"])
    rows = [(ids, trained), (changed, trained)]
    _, gradients = reference_gradients(model, rows)
    learner = Learner(model, choose_attention(model))
    labels = 2 * int(trained[1:].sum())
    assert relative_error(learn(learner, apart, labels)[1], gradients) <= EXACT
    forced = collate_shared([(ids, trained), (other, trained)])
    assert forced.tree is not None
    assert relative_error(learn(learner, forced, labels)[1], gradients) > 0.01


def test_evaluation_of_a_shared_batch_is_that_of_its_rows() -> None:
    rows = sharing_rows()
    model = build_model("llama", PROMISED["llama"])
    learner = Learner(model, choose_attention(model))
    samples = range(10, 10 + len(rows))
    shared, plain = (
        causal_lm.TASK.evaluate(learner, lay(rows, samples)) for lay in (collate_shared, collate)
    )
    assert shared[1:3] == plain[1:3]
    assert shared.loss == pytest.approx(plain.loss)
    np.testing.assert_array_equal(shared.samples, plain.samples)
    np.testing.assert_array_equal(shared.sample_labels, plain.sample_labels)
    np.testing.assert_allclose(shared.sample_losses, plain.sample_losses, rtol=1e-5)


@pytest.mark.parametrize("name", ["dpo", "orpo"])
def test_a_pair_shares_its_prompt(name: str) -> None:
    """Loss, measures and gradients of pairs whose prompts are computed once are those of whole ones."""
    draw = np.random.default_rng(0)
    pairs = []
    for length in (60, 33, 100, 33, 7):
        prompt = draw.integers(5, 300, length)
        for answer_length in draw.integers(3, 30, 2):
            ids = np.concatenate([prompt, draw.integers(5, 300, answer_length)]).astype(np.uint32)
            pairs.append((ids, np.arange(len(ids)) >= length))
    settings = PreferenceConfig.model_validate({"loss": name})
    model = build_model("llama", PROMISED["llama"])
    learner = replace(Learner(model, choose_attention(model)), preference=settings)
    reference = torch.linspace(-90, -30, 10, dtype=torch.float64).view(5, 2)
    results = []
    for lay in (collate_shared, collate):
        batch = replace(lay(pairs, range(5)), reference=reference)
        work = preference.TASK.with_batch_totals(
            learner, Work([batch], divisor=5, labels=0, tokens=0, samples=5), World()
        )
        loss = preference.TASK.backward(learner, work.batches[0], 1 / work.divisor)
        results.append(
            (
                batch.num_tokens,
                loss,
                take_gradients(model),
                preference.TASK.evaluate(learner, batch),
            )
        )
    (few, ours, shared, scores), (many, theirs, gradients, whole) = results
    assert few < many - 200
    torch.testing.assert_close(
        ours, theirs, rtol=EXACT, atol=EXACT, equal_nan=True
    )  # what a loss has no measure of
    assert relative_error(shared, gradients) <= EXACT
    np.testing.assert_allclose(scores.logps, whole.logps, rtol=EXACT)


def test_models_that_share_are_proved_and_others_are_said() -> None:
    model = build_model("llama", PROMISED["llama"])
    learner = Learner(model, choose_attention(model))
    assert why_not(learner) == ""
    attention = model.get_base_model().model.layers[0].self_attn
    attention.attention_dropout = 0.1
    assert "dropout" in why_not(learner)
    attention.attention_dropout = 0.0
    alone = build_model("doge", ONE_BY_ONE["doge"])
    assert "one sequence at a time" in why_not(Learner(alone, choose_attention(alone)))
    model.get_base_model().model.layers[0].mlp.register_forward_hook(
        lambda module, inputs, output: output + output.roll(1, 1)
    )
    assert "its output for a row changes" in why_not(learner)
    model.get_base_model().model.layers[1].mlp.down_proj.lora_dropout["default"] = nn.Dropout(0.1)
    assert "dropout" in why_not(learner)


def test_a_tree_out_of_order_is_refused() -> None:
    """Windows are found by asking the longest row, whose tokens must lie in their order."""
    assert longest_path((0, 10, 30, 32), (-1, 0, 0)) == (0, 30)
    with pytest.raises(CannotRunPaddingFree, match="longest"):
        longest_path((0, 10, 12, 32), (-1, 0, 0))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return rows of which most begin with one of two long instructions."""
    folder = toy.make_inputs(tmp_path_factory.mktemp("prefix"))
    draw = random.Random(1)
    systems = [" ".join(draw.choices(toy.WORDS, k=25)) for _ in range(2)]
    with (folder / "train.jsonl").open("w") as file:
        for number in range(toy.ROWS):
            prompt, answer = (
                " ".join(draw.choices(toy.WORDS, k=draw.randint(1, 8))) for _ in range(2)
            )
            begun = systems[number % 2] if number % 5 else ""
            file.write(
                json.dumps({"prompt": f"{begun} {number} {prompt}", "completion": f" {answer}"})
                + "\n"
            )
    return folder


def config_of(inputs: Path, training: dict[str, Any] | None = None, **data: Any) -> Any:
    settings = {
        "per_device_train_batch_size": 1,
        "num_train_epochs": 1,
        "preflight": False,
        **(training or {}),
    }
    return toy.make_config(inputs, settings, data={"max_length": 512, **data})


@pytest.fixture(scope="module")
def shared_run(inputs: Path) -> Path:
    return toy.finished(inputs / "shared", config_of(inputs))


def computed(run_dir: Path) -> list[int]:
    return [
        line.get("computed_tokens", 0) for line in metrics.stream_lines(run_dir / metrics.TIMINGS)
    ]


def test_a_run_with_sharing_learns_what_one_without_does(inputs: Path, shared_run: Path) -> None:
    plain = toy.finished(inputs / "plain", config_of(inputs, share_prefixes=False))
    np.testing.assert_allclose(toy.losses(shared_run), toy.losses(plain), rtol=1e-5)
    tokens = [line["tokens"] for line in metrics.read_metrics(shared_run) if "tokens" in line]
    assert tokens == [line["tokens"] for line in metrics.read_metrics(plain) if "tokens" in line]
    assert 0 < sum(computed(shared_run)) < 0.8 * sum(tokens)
    assert not any(computed(plain))
    assert "are computed once" in toy.log_of(shared_run)


@pytest.mark.slow
def test_two_ranks_share_alike(inputs: Path, shared_run: Path) -> None:
    two = toy.finished(inputs / "two", config_of(inputs), world_size=2)
    np.testing.assert_allclose(toy.losses(two), toy.losses(shared_run), rtol=1e-5)
    assert sum(computed(two)) > 0


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(inputs: Path, shared_run: Path) -> None:
    killed = toy.make_run(inputs / "killed", config_of(inputs))
    assert toy.train(killed, environ={"KUBETUNE_FAULT": "signal 9:step:6:0"}) == [-9]
    assert toy.train(killed) == [0]
    assert toy.digests(killed) == toy.digests(shared_run)


@pytest.fixture(scope="module")
def pairs(inputs: Path) -> dict[str, Any]:
    """Return `data` of a run on pairs whose prompts are longer than their answers."""
    draw = random.Random(2)
    with (inputs / "pairs.jsonl").open("w") as file:
        for number in range(12):
            prompt, *answers = (
                " ".join(draw.choices(toy.WORDS, k=length)) for length in (20, 3, 5)
            )
            pair = {"chosen": f" {answers[0]}", "rejected": f" {answers[1]}"}
            file.write(json.dumps({"prompt": f"{number} {prompt}", **pair}) + "\n")
    return {"train": str(inputs / "pairs.jsonl"), "eval": None, "max_length": 256}


def test_what_the_reference_says_is_the_same_where_prompts_are_computed_once(
    inputs: Path, pairs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = toy.make_config(inputs, task="preference", data=pairs)
    world = World()
    tokens = []
    asked = preference.log_probabilities

    def counted(learner: Learner, batch: Any) -> Any:
        tokens[-1] += batch.num_tokens
        return asked(learner, batch)

    monkeypatch.setattr(preference, "log_probabilities", counted)
    rows = prepare(config).train
    learner = preference.TASK.build(ModelSpec.of(config), config.training, world, Workload(0))
    plan = make_plan(config, len(rows))
    runs = []
    for share_prefixes in (True, False):
        tokens.append(0)
        tables = scores(
            AskedForAnswers(), learner, {"train": rows}, plan, world, share_prefixes=share_prefixes
        )
        runs.append(tables["train"])
    np.testing.assert_allclose(*runs, rtol=1e-6)
    assert tokens[0] < 0.75 * tokens[1] == 0.75 * rows.lengths.sum()


def test_a_run_on_pairs_shares_their_prompts(inputs: Path, pairs: dict[str, Any]) -> None:
    runs = []
    for name, sharing in (("together", {}), ("apart", {"share_prefixes": False})):
        settings = {"max_steps": 2, "preflight": False, "metric_for_best_model": "eval_loss"}
        config = toy.make_config(inputs, settings, task="preference", data={**pairs, **sharing})
        runs.append(toy.finished(inputs / name, config))
    kept = [np.load(file)["train"] for file in (inputs / "cache").rglob("*.reference-*.npz")]
    assert len(kept) == 2  # each asked for itself
    np.testing.assert_allclose(*kept, rtol=1e-6)
    np.testing.assert_allclose(toy.losses(runs[0]), toy.losses(runs[1]), rtol=1e-5)
    assert all(computed(runs[0]))
    assert not any(computed(runs[1]))


def test_plans_and_checks_say_what_is_shared(
    inputs: Path, shared_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = []
    checks = []
    for sharing in ({}, {"share_prefixes": False}):
        config = json.loads(config_of(inputs, **sharing).model_dump_json(exclude_unset=True))
        file = inputs / "run.yaml"
        file.write_text(
            json.dumps({**config, "output": str(inputs / "none"), "compute": {"gpus_per_node": 0}})
        )
        assert cli.main(["plan", str(file), "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
        assert cli.main(["data", "check", str(file)]) == 0
        checks.append(capsys.readouterr().out)
    tokens = sum(line["tokens"] for line in metrics.read_metrics(shared_run) if "tokens" in line)
    assert plans[0]["saved_share"] == pytest.approx(
        1 - sum(computed(shared_run)) / tokens, abs=0.05
    )
    assert plans[1]["saved_share"] == 0
    assert ["shared beginnings" in text for text in checks] == [True, False]


def test_dropout_keeps_rows_apart_and_says_so(inputs: Path) -> None:
    config = config_of(inputs, {"max_steps": 1})
    config = config.model_copy(update={"lora": config.lora.model_copy(update={"dropout": 0.1})})
    run = toy.finished(inputs / "dropped", config)
    assert "again for each row" in toy.log_of(run)
    assert not any(computed(run))
