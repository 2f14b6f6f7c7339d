"""The optimizer against torch's own AdamW: several micro-batches, clipping, weight decay, tables of words."""

from __future__ import annotations

import math
from contextlib import ExitStack
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from kubetune.distributed.process_group import World
from kubetune.models.fused_forwards import swap_forwards
from kubetune.training.optimizer.adamw import (
    STRETCH,
    AdamSettings,
    FlatAdamW,
    decays,
    sum_of_squares,
)
from kubetune.training.optimizer.adamw_sharded import ShardedAdamW
from kubetune.training.optimizer.occurring_rows import LEAST, Collected
from tests.ranks import run_ranks

WORDS, WIDTH, LABELS = 40, 24, 3
RATE, DECAY = 1e-2, 0.1


class Reader(nn.Module):
    """Words to labels, with a table of words, a square layer, a norm, a head, and a part that is never used."""

    def __init__(self, dtype: torch.dtype, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0, sparse=sparse)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, LABELS)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.to(dtype)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(F.gelu(self.layer(self.words(ids))))).float()
        return logits


def losses(model: nn.Module, step: int, micro_batches: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(step)
    ids, labels = (
        torch.randint(0, high, (micro_batches, 16), generator=draw) for high in (WORDS // 2, LABELS)
    )
    return [F.cross_entropy(model(x), y) for x, y in zip(ids, labels, strict=True)]


def summed_gradients(model: nn.Module, step: int, micro_batches: int) -> dict[str, Tensor]:
    """Return what autograd gives for each micro-batch, added up in fp32."""
    gradients = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    for loss in losses(model, step, micro_batches):
        model.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[name] += parameter.grad.float().to_dense()
    return gradients


@pytest.mark.parametrize("clip", [0.0, 0.2])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "sparse"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)  # fmt: skip
def test_equal_to_torchs_adamw(
    dtype: torch.dtype, sparse: bool, micro_batches: int, clip: float
) -> None:
    ours, theirs = (Reader(dtype, sparse=sparse) for _ in range(2))
    masters = {name: nn.Parameter(p.detach().float()) for name, p in theirs.named_parameters()}
    groups = [
        {
            "params": [p for name, p in masters.items() if decays(name, p) is wanted],
            "weight_decay": DECAY * wanted,
        }
        for wanted in (True, False)
    ]
    reference = torch.optim.AdamW(groups, lr=RATE)
    optimizer = FlatAdamW(ours.named_parameters(), AdamSettings(weight_decay=DECAY))
    for step in range(5):
        theirs.load_state_dict(ours.state_dict())
        for name, gradient in summed_gradients(theirs, step, micro_batches).items():
            masters[name].grad = gradient
        wanted = float(nn.utils.clip_grad_norm_(masters.values(), clip or float("inf")))
        reference.step()
        for loss in losses(ours, step, micro_batches):
            loss.backward()
        norm = optimizer.reduce_gradient(World())
        assert norm == pytest.approx(wanted, rel=1e-6)
        optimizer.scale_gradient(1.0, norm, clip)
        optimizer.update(RATE)
        expected = torch.cat([masters[name].detach().flatten() for name in optimizer.layout])
        torch.testing.assert_close(optimizer.master, expected, rtol=1e-5, atol=1e-6)
        weights = torch.cat(
            [ours.get_parameter(name).detach().flatten() for name in optimizer.layout]
        )
        assert torch.equal(weights.float(), optimizer.master.to(dtype).float())
        assert not optimizer.gradient.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trained_table_of_words_leaves_out_those_that_do_not_occur(dtype: torch.dtype) -> None:
    facts = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
    )
    model = BertForSequenceClassification(facts).to(dtype)
    swap_forwards(model, None, ExitStack())
    table = model.get_input_embeddings()
    optimizer = FlatAdamW(model.named_parameters(), AdamSettings())
    sparse: list[bool] = []
    table.weight.register_hook(lambda gradient: sparse.append(gradient.is_sparse))
    model(input_ids=torch.tensor([[5, 6, 5]])).logits.float().sum().backward()
    assert sparse == [dtype == torch.bfloat16]
    assert optimizer.gradient.count_nonzero() > 0
    gradient = optimizer.collected[table.weight].gradient
    assert gradient.abs().sum(1).nonzero().flatten().tolist() == [5, 6]


def trained_words(*, occurring: bool) -> tuple[nn.Embedding, FlatAdamW]:
    torch.manual_seed(0)
    words = nn.Embedding(LEAST // 64, 64, sparse=True).bfloat16()
    optimizer = FlatAdamW(
        nn.ModuleList([words, nn.Linear(64, 5)]).named_parameters(), AdamSettings()
    )
    if not occurring:
        collected(words, optimizer).opened()
    return words, optimizer


def collected(words: nn.Embedding, optimizer: FlatAdamW) -> Collected:
    return optimizer.collected[cast(nn.Parameter, words.weight)]


def learn(
    words: nn.Embedding, optimizer: FlatAdamW, step: int, new: int, world: World | None = None
) -> float:
    draw = torch.Generator().manual_seed(step)
    for _ in range(2):
        ids = torch.cat(
            [torch.randint(0, 9, (8,), generator=draw), torch.arange(300 * step, 300 * step + new)]
        )
        (words(ids) * torch.randn(len(ids), 64, generator=draw)).float().square().sum().backward()
    norm = optimizer.reduce_gradient(world or World())
    optimizer.scale_gradient(1.0, 2.0, 1.0)
    optimizer.update(RATE)
    return norm


def is_same(mine: tuple[nn.Embedding, FlatAdamW], theirs: tuple[nn.Embedding, FlatAdamW]) -> bool:
    state = theirs[1].state()
    return torch.equal(mine[0].weight, theirs[0].weight) and all(
        torch.equal(value, state[name]) for name, value in mine[1].state().items()
    )


@pytest.mark.parametrize("new", [20, 1200], ids=["few", "too many in the end"])
def test_moving_the_words_that_occur_alone_changes_no_bit(new: int) -> None:
    whole, rare, again = (trained_words(occurring=occurring) for occurring in (False, True, True))
    for step in range(5):
        norms = [learn(*learner, step, new) for learner in (whole, rare, again)]
        assert norms[1] == norms[2] == pytest.approx(norms[0], rel=1e-6)
        assert is_same(rare, whole)
        assert is_same(again, whole)
        if step == 2:
            again = trained_words(occurring=True)
            again[1].load(rare[1].state())
    assert (collected(*rare).occurring is None) == (new == 1200)


def test_words_that_do_not_occur_are_not_moved() -> None:
    words, optimizer = trained_words(occurring=True)
    with torch.profiler.profile(record_shapes=True) as profile:
        learn(words, optimizer, 0, 20)
    moved = [
        event.input_shapes[0]
        for event in profile.events() or ()
        if event.name == "aten::_fused_adamw_"
    ]
    assert len(moved) == 3  # the head's weights, its bias, and the words
    occurring = collected(words, optimizer).occurring
    assert occurring is not None
    assert [len(buffer) for buffer in occurring.buffers()] == [20 * 64] * 4


@pytest.mark.parametrize(("factors", "moved"), [([[1.0], [0.0]], 1), ([[0.0], [0.0]], 0)])
def test_a_word_without_a_gradient_counts_neither_before_a_resume_nor_after(
    factors: list[list[float]], moved: int
) -> None:
    words, optimizer = trained_words(occurring=True)
    (words(torch.tensor([3, 7])) * torch.tensor(factors)).float().square().sum().backward()
    optimizer.update(RATE)
    again = trained_words(occurring=True)
    again[1].load(optimizer.state())
    for learner in ((words, optimizer), again):
        occurring = collected(*learner).occurring
        assert occurring is not None
        assert sum(map(len, occurring.buffers())) == 4 * 64 * moved


def drawn(size: int, rank: int = 0) -> Tensor:
    """Return a gradient as large models have them: most of it small, some of it a thousand times larger."""
    draw = torch.Generator().manual_seed(rank)
    gradient = torch.randn(size, generator=draw) * 1e-3
    gradient[:: size // 50 + 1] *= 1e3
    return gradient


def norm_in_fp64(*gradients: Tensor) -> float:
    return math.sqrt(
        math.fsum(float(np.square(g.numpy(), dtype=np.float64).sum()) for g in gradients)
    )


def holding(kind: type[FlatAdamW], gradient: Tensor, ranks: int = 1) -> FlatAdamW:
    optimizer = object.__new__(kind)
    optimizer.gradient, optimizer.collected = gradient, {}
    if isinstance(optimizer, ShardedAdamW):
        mesh = SimpleNamespace(ndim=1, size=lambda dim: ranks)
        optimizer._slices = [(SimpleNamespace(device_mesh=mesh), gradient)]
    return optimizer


@pytest.mark.parametrize("kind", [FlatAdamW, ShardedAdamW])
def test_the_norm_of_many_millions_is_that_of_fp64_and_copies_nothing(
    kind: type[FlatAdamW],
) -> None:
    gradient = drawn(20_000_003)
    optimizer = holding(kind, gradient)
    wanted = norm_in_fp64(gradient)
    assert abs(float(gradient.norm()) / wanted - 1) > 1e-4  # what a single sum in fp32 makes of it
    with torch.profiler.profile(profile_memory=True) as profile:
        norm = optimizer.reduce_gradient(World())
    assert norm == pytest.approx(wanted, rel=1e-6)
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.events() or ())
    assert 0 < allocated < gradient.nbytes / 100


@pytest.mark.parametrize("size", [0, 1, 1000, STRETCH - 1, STRETCH, STRETCH + 1, 5 * STRETCH + 7])
def test_the_norm_of_any_length(size: int) -> None:
    gradient = drawn(size)
    norm = math.sqrt(sum_of_squares(gradient))
    assert norm == pytest.approx(norm_in_fp64(gradient), rel=1e-6)
    if size < STRETCH:
        assert norm == float(gradient.norm())


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_norm_of_what_is_not_finite_is_not_finite(value: float) -> None:
    gradient = drawn(3 * STRETCH)
    gradient[STRETCH + 5] = value
    assert not math.isfinite(holding(FlatAdamW, gradient).reduce_gradient(World()))


def norms(world: World) -> tuple[list[float], list[int]]:
    kinds = (FlatAdamW, ShardedAdamW)
    norms_seen = [
        holding(kind, drawn(3_000_000, world.rank), world.size).reduce_gradient(world)
        for kind in kinds
    ]
    words, optimizer = trained_words(occurring=True)
    before = words.weight.detach().clone()
    norms_seen.append(learn(words, optimizer, 2 * world.rank, 20, world))
    return norms_seen, (before != words.weight).any(1).nonzero().flatten().tolist()


def test_two_ranks_have_the_norm_of_fp64_and_the_words_of_both() -> None:
    first, second = run_ranks(norms, 2)
    assert first == second
    (copies, slices, _), words = first
    parts = [drawn(3_000_000, rank) for rank in (0, 1)]
    assert copies == pytest.approx(
        norm_in_fp64(parts[0] + parts[1]), rel=1e-6
    )  # gradients are summed
    assert slices == pytest.approx(norm_in_fp64(*parts), rel=1e-6)  # the whole is both
    assert words == [*range(20), *range(600, 620)]
