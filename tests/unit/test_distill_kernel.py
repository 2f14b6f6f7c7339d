"""The divergence from a teacher: against a formula of ten lines in plain torch, in chunks, for any support."""

from __future__ import annotations

import json
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kubetune.config.schema.distill import DistillConfig
from kubetune.kernels import cross_entropy
from kubetune.kernels import divergence as kernel
from kubetune.kernels.cross_entropy import Head, LogitRule
from kubetune.kernels.divergence import LocalTeacher, divergence, linear_divergence
from kubetune.kernels.pointwise import Kernels
from kubetune.plan import forecast
from tests.peers import swift_distill, trl_distill

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "peers"
PEERS = ROOT / "benchmarks" / ".venv-peers" / "bin" / "python"

LABELS, HIDDEN, WIDE, VOCABULARY, SCALE = 37, 16, 24, 53, 0.25
RULES = [LogitRule(), LogitRule(multiplier=2.0, cap=4.0)]
ROWS_AT_ONCE = kernel.ROWS_AT_ONCE
SUPPORTS: list[dict[str, Any]] = [
    {},
    {"support": "teacher_k", "top_k": 5},
    {"support": "teacher_k", "top_k": 5, "rest": "renormalise"},
    {"support": "student_k", "top_k": 5},
    {"support": "student_k", "top_k": 5, "rest": "renormalise"},
]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda *_: 5)
    monkeypatch.setattr(kernel, "ROWS_AT_ONCE", 2)


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def compared(student: Tensor, teacher: Tensor, settings: DistillConfig) -> tuple[Tensor, Tensor]:
    """Return probabilities of the events of both models, by plain softmax in fp64."""
    s = (student.double() / settings.temperature).softmax(-1)
    t = (teacher.double() / settings.temperature).softmax(-1)
    if settings.support == "all":
        return s, t
    chooser = t if settings.support == "teacher_k" else s
    ids = chooser.detach().topk(settings.top_k).indices
    s, t = s.gather(1, ids), t.gather(1, ids)
    if settings.rest == "renormalise":
        return s / s.sum(1, keepdim=True), t / t.sum(1, keepdim=True)
    return torch.cat([s, 1 - s.sum(1, True)], 1), torch.cat([t, 1 - t.sum(1, True)], 1)


def plain(student: Tensor, teacher: Tensor, labels: Tensor, settings: DistillConfig) -> Tensor:
    s, t = compared(student, teacher, settings)
    beta = settings.beta
    if beta == 0:
        value = (t * (t / s).log()).sum()
    elif beta == 1:
        value = (s * (s / t).log()).sum()
    else:
        m = beta * t + (1 - beta) * s
        value = beta * (t * (t / m).log()).sum() + (1 - beta) * (s * (s / m).log()).sum()
    return value + settings.sft_weight * F.cross_entropy(student.double(), labels, reduction="sum")


def case(rule: LogitRule) -> tuple[Tensor, Tensor, Tensor, Tensor, LocalTeacher]:
    hidden = numbers(LABELS, HIDDEN, seed=0).requires_grad_()
    weight = numbers(VOCABULARY, HIDDEN, seed=1).requires_grad_()
    labels = torch.randint(VOCABULARY, (LABELS,), generator=torch.Generator().manual_seed(2))
    of_teacher = Head(numbers(VOCABULARY, WIDE, seed=3) * 0.3, None, rule, Kernels())
    return hidden, weight, labels, of_teacher.weight, LocalTeacher(
        numbers(LABELS, WIDE, seed=4), of_teacher, 1.0
    )  # fmt: skip


def test_the_forecast_counts_the_rows_of_the_kernel() -> None:
    assert forecast.COMPARED_ROWS == ROWS_AT_ONCE


def test_worked_example() -> None:
    student = torch.tensor([[0.5, 0.3, 0.2]]).log()
    teacher = torch.tensor([[0.7, 0.2, 0.1]]).log()
    loss, gradient = divergence(student, teacher, 0.0)
    assert loss.item() == pytest.approx(0.0851, abs=1e-4)
    assert gradient.tolist()[0] == pytest.approx([-0.2, 0.1, 0.1], abs=1e-6)
    loss, gradient = divergence(student, teacher, 1.0)
    assert loss.item() == pytest.approx(0.0920, abs=1e-4)
    assert gradient.tolist()[0] == pytest.approx([-0.2142, 0.0940, 0.1202], abs=1e-4)


@pytest.mark.parametrize("rule", RULES, ids=["plain", "capped"])
@pytest.mark.parametrize(
    "support", SUPPORTS, ids=lambda support: "-".join(map(str, support.values()))
)
def test_equal_to_plain_torch(rule: LogitRule, support: dict[str, Any]) -> None:
    for beta, temperature, sft_weight in product((0, 0.1, 0.5, 1), (0.7, 1, 2), (0, 0.3)):
        settings = DistillConfig(
            lmbda=0, beta=beta, temperature=temperature, sft_weight=sft_weight, **support
        )
        hidden, weight, labels, of_teacher, teacher = case(rule)
        logits = rule.apply(F.linear(hidden, weight))
        theirs = rule.apply(F.linear(teacher.hidden, of_teacher))
        expected = plain(logits, theirs, labels, settings) * SCALE
        expected.backward()
        wanted = hidden.grad, weight.grad

        hidden, weight, labels, _, teacher = case(rule)
        teacher = LocalTeacher(teacher.hidden, teacher.head, temperature)
        head = Head(weight, None, rule, Kernels())
        value, sums = linear_divergence(hidden, labels, head, teacher, settings, SCALE)
        value.backward()
        torch.testing.assert_close(value.double(), expected.detach(), rtol=2e-6, atol=1e-6)
        torch.testing.assert_close(hidden.grad, wanted[0], rtol=1e-5, atol=3e-6)
        torch.testing.assert_close(weight.grad, wanted[1], rtol=1e-5, atol=3e-6)
        of_labels = F.cross_entropy(logits, labels, reduction="sum")
        total = sums[0] + sft_weight * sums[5]
        torch.testing.assert_close(total.double() * SCALE, expected.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(sums[5], of_labels.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", RULES, ids=["plain", "capped"])
@pytest.mark.parametrize(
    "support", SUPPORTS, ids=lambda support: "-".join(map(str, support.values()))
)
def test_rows_that_pad_a_vocabulary_say_nothing(rule: LogitRule, support: dict[str, Any]) -> None:
    tokens = 45
    results = []
    for of_student, of_teacher in ((tokens, tokens), (VOCABULARY, VOCABULARY - 3)):
        hidden, weight, labels, _, teacher = case(rule)
        weight = weight.detach()[:of_student].requires_grad_()
        assert teacher.head is not None
        head = teacher.head._replace(weight=teacher.head.weight[:of_teacher])
        teacher = LocalTeacher(teacher.hidden, head, 0.7, tokens)
        settings = DistillConfig(beta=0.5, temperature=0.7, **support)
        ours = Head(weight, None, rule, Kernels())
        value, sums = linear_divergence(hidden, labels % tokens, ours, teacher, settings, 1, tokens)
        value.backward()
        assert weight.grad is not None
        assert not weight.grad[tokens:].any()
        # Cross-entropy is that of plain training, over all rows.
        results.append((value.detach(), hidden.grad, weight.grad[:tokens], sums[:5]))
    for bare, padded in zip(*results, strict=True):
        torch.testing.assert_close(padded, bare, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_every_recorded_case_of_trl_is_the_same() -> None:
    recorded = json.loads((RECORDED / "trl_distill.json").read_text())
    assert recorded["trl"] == "1.16.0"
    assert len(recorded["cases"]) == 12
    for case_of_trl in recorded["cases"]:
        temperature = case_of_trl["temperature"]
        student, teacher = (
            (trl_distill.logits(seed)[0] / temperature).log_softmax(-1) for seed in (0, 1)
        )
        losses, gradient = divergence(student, teacher, case_of_trl["beta"])
        wanted = torch.tensor(case_of_trl["gradient"]).view_as(gradient)
        assert losses.sum().item() == pytest.approx(case_of_trl["loss"], rel=1e-6)
        torch.testing.assert_close(gradient / temperature, wanted, rtol=0, atol=1e-6)


def test_every_recorded_case_of_ms_swift_is_the_same() -> None:
    recorded = json.loads((RECORDED / "swift_distill.json").read_text())
    assert recorded["ms-swift"] == "4.6.0"
    assert len(recorded["cases"]) == 12
    student, of_teacher = (trl_distill.logits(seed)[0] for seed in (0, 1))
    # A head that changes nothing.
    head = Head(torch.eye(trl_distill.VOCABULARY), None, LogitRule(), Kernels())
    rows = slice(0, trl_distill.TOKENS)
    for case_of_swift in recorded["cases"]:
        temperature = case_of_swift["temperature"]
        settings = DistillConfig(
            beta=case_of_swift["beta"],
            temperature=temperature,
            support="teacher_k",
            top_k=swift_distill.TOP_K,
            rest="renormalise",
        )
        teacher = LocalTeacher(of_teacher, head, temperature)
        labels = torch.zeros(trl_distill.TOKENS, dtype=torch.int64)
        losses, gradient, _ = kernel.tile(student, labels, rows, teacher, settings, head.rule)
        wanted = torch.tensor(case_of_swift["gradient"]).view_as(gradient)
        assert losses.sum().item() == pytest.approx(case_of_swift["loss"], rel=1e-6)
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(
    not PEERS.exists(),
    reason="peers have an environment of their own: benchmarks/peers/venv makes it",
)
@pytest.mark.parametrize("peer", ["trl_distill", "swift_distill"])
def test_the_recorded_cases_are_those_of_the_peer_itself(tmp_path: Path, peer: str) -> None:
    words = [str(PEERS), "-m", f"tests.peers.{peer}", str(tmp_path / "anew.json")]
    subprocess.run(words, cwd=ROOT, check=True)
    recorded = json.loads((RECORDED / f"{peer}.json").read_text())
    anew = json.loads((tmp_path / "anew.json").read_text())
    for ours, theirs in zip(recorded["cases"], anew["cases"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert ours["gradient"] == pytest.approx(theirs["gradient"], abs=1e-6)


@pytest.mark.parametrize("support", ["teacher_k", "student_k"])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_tail_of_one_token_is_the_whole(support: Any, beta: float) -> None:
    values = []
    gradients = []
    settings = DistillConfig(beta=beta)
    with_tail = DistillConfig(beta=beta, support=support, top_k=VOCABULARY - 1)
    for of_case in (settings, with_tail, with_tail.model_copy(update={"top_k": VOCABULARY})):
        hidden, weight, labels, _, teacher = case(LogitRule())
        head = Head(weight, None, LogitRule(), Kernels())
        value, _ = linear_divergence(hidden, labels, head, teacher, of_case)
        value.backward()
        values.append(value.detach())
        gradients.append(hidden.grad)
    for value, gradient in zip(values[1:], gradients[1:], strict=True):
        torch.testing.assert_close(value, values[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-5, atol=1e-5)


def test_one_token_that_is_all_there_is_is_refused() -> None:
    with pytest.raises(ValueError, match="top_k is 1 with `rest: renormalise`"):
        DistillConfig(support="teacher_k", top_k=1, rest="renormalise")
    assert DistillConfig(support="teacher_k", top_k=1).rest == "tail"


def test_tokens_without_probability() -> None:
    """A token that a model's rule has made impossible adds nothing where the other gives it none."""
    student = torch.tensor([[0.5, 0.5, 0.0]]).log()
    teacher = torch.tensor([[0.7, 0.3, 0.0]]).log()
    for beta in (0.0, 0.5, 1.0):
        loss, gradient = divergence(student, teacher, beta)
        assert torch.isfinite(loss).all()
        assert torch.isfinite(gradient).all()
    loss, _ = divergence(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[1.0, 0.0]]).log(), 1.0)
    assert loss.isinf().all()  # what the teacher rules out is infinitely far
