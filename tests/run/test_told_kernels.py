"""Kernels that transformers loads on a GPU are told where the sequences of a packed batch begin.

The packages need a GPU. Here functions stand in their place, with the parameters of flash-linear-attention 0.5,
causal-conv1d 1.6 and mamba-ssm 2.3, which write down the boundaries they are told and compute sequence by sequence.
transformers hands over only arguments that the signature of such a function has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kubetune.batching.batch import collate
from kubetune.models.learner import Learner
from kubetune.models.padding_free import Route, choose_attention
from kubetune.models.prefix_sharing import why_not
from kubetune.tasks.causal_lm import TASK
from tests.architectures import (
    build_model,
    random_rows,
    reference_gradients,
    relative_error,
    take_gradients,
)
from tests.hybrids import HYBRIDS

LENGTHS = (37, 5, 70, 2)
BOUNDARIES = (0, 37, 42, 112, 114)


class Kernels:
    """Stand-ins for kernels, and what they were told: (name, rows in the batch, boundaries or None)."""

    def __init__(self, source: ModuleType) -> None:
        self.source = source  # transformers' file of the family, whose functions in torch compute each sequence
        self.calls: list[tuple[str, int, tuple[int, ...] | None]] = []

    def by_sequence(
        self, name: str, streams: tuple[Tensor, ...], boundaries: Any, dim: int, compute: Any
    ) -> Any:
        """Compute each sequence by itself and join the outputs. `dim` is the dimension of the tokens."""
        arguments = None if boundaries is None else tuple(boundaries)
        self.calls.append((name, len(streams[0]), arguments))
        if arguments is None:
            return compute(*streams)
        assert len(streams[0]) == 1
        assert arguments[-1] == streams[0].shape[dim]
        parts = []
        for start, stop in pairwise(arguments):
            parts.append(compute(*(x.narrow(dim, start, stop - start) for x in streams)))
        return torch.cat(parts, dim)

    def causal_conv1d_fn(
        self, x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False,
        final_states_out=None, activation=None,
    ):  # fmt: skip
        compute = self.source.causal_conv1d_fn
        return self.by_sequence(
            "causal_conv1d_fn",
            (x,),
            starts_of(seq_idx),
            -1,
            lambda part: compute(part, weight, bias, activation=activation),
        )

    def chunk_gated_delta_rule(
        self, q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, cu_seqlens=None,
    ):  # fmt: skip
        compute = self.source.torch_chunk_gated_delta_rule
        return self.delta("chunk_gated_delta_rule", compute, (q, k, v, g, beta), cu_seqlens)

    def chunk_kda(
        self, q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, cu_seqlens=None, **kwargs,
    ):  # fmt: skip
        compute = self.source.chunk_kimi_delta_attention
        return self.delta("chunk_kda", compute, (q, k, v, g, beta), cu_seqlens)

    def delta(self, name: str, compute: Any, streams: tuple[Tensor, ...], cu_seqlens: Any) -> Any:
        def alone(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
            return compute(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]

        boundaries = None if cu_seqlens is None else cu_seqlens.tolist()
        return self.by_sequence(name, streams, boundaries, 1, alone), None

    def mamba_chunk_scan_combined(
        self, x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None,
        seq_idx=None, cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, float("inf")),
        return_final_states=False, return_varlen_states=False,
    ):  # fmt: skip
        def alone(x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
            rest = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
            return self.source.mamba2_chunk_scan(x, dt, A, b, c, chunk_size, **rest)

        name = "mamba_chunk_scan_combined"
        return self.by_sequence(name, (x, dt, B, C), starts_of(seq_idx), 1, alone)

    def mamba_split_conv1d_scan_combined(
        self, zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states=None,
        seq_idx=None, dt_limit=(0.0, float("inf")), return_final_states=False, activation="silu",
        rmsnorm_weight=None, rmsnorm_eps=1e-6, outproj_weight=None, outproj_bias=None, headdim=None,
        ngroups=1, norm_before_gate=True,
    ):  # fmt: skip
        """Write down what it is told and leave the work to the other kernels, as transformers does without it."""
        boundaries = starts_of(seq_idx)
        arguments = None if boundaries is None else tuple(boundaries)
        self.calls.append(("mamba_split_conv1d_scan_combined", len(zxbcdt), arguments))

    def mamba_inner_fn(
        self, xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight,
        out_proj_bias, A, B=None, C=None, D=None, delta_bias=None, delta_softplus=True,
    ):  # fmt: skip
        """Stand for Mamba's kernel for training, which knows no boundaries; it leaves the work to the others."""
        self.calls.append(("mamba_inner_fn", len(xz), None))

    def selective_scan_fn(
        self, u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False,
        return_last_state=False,
    ):  # fmt: skip
        """Stand for Mamba's scan, which knows no boundaries."""
        self.calls.append(("selective_scan_fn", len(u), None))
        return self.source.mamba_selective_scan(
            u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state
        )


def starts_of(seq_idx: Tensor | None) -> list[int] | None:
    """Return the boundaries of sequences, of the number of the sequence of each token, `[1, tokens]`."""
    if seq_idx is None:
        return None
    assert seq_idx.dtype is torch.int32  # what the kernels take
    assert seq_idx.shape[0] == 1
    changes = (seq_idx[0].diff() != 0).nonzero().flatten() + 1
    return [0, *changes.tolist(), seq_idx.shape[1]]


PACKAGES = {
    "causal_conv1d": ("causal_conv1d_fn",),
    "fla": ("chunk_gated_delta_rule", "chunk_kda"),
    "mamba_ssm": (
        "mamba_chunk_scan_combined",
        "mamba_split_conv1d_scan_combined",
        "mamba_inner_fn",
        "selective_scan_fn",
    ),
}


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Kernels]]:
    """Return a function that makes a copy of a model whose file was imported where packages of kernels are installed."""

    def load(model: Any, packages: tuple[str, ...] = tuple(PACKAGES)) -> tuple[Any, Kernels]:
        stock = sys.modules[type(model).__module__]
        kernels = Kernels(stock)
        for package in packages:
            stand_in = ModuleType(package)
            for name in PACKAGES[package]:
                setattr(stand_in, name, getattr(kernels, name))
            monkeypatch.setitem(sys.modules, package, stand_in)
        name = f"{stock.__name__}_with_kernels"
        spec = spec_from_file_location(name, stock.__file__)
        assert spec is not None
        assert spec.loader is not None
        source = module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, source)
        spec.loader.exec_module(source)
        copy = getattr(source, type(model).__name__)(model.config)
        copy.load_state_dict(model.state_dict())
        copy.set_attn_implementation("eager")
        return copy.train(), kernels

    return load


def learn(model: Any, route: Route, kernels: Kernels, expected: tuple[float, Any]) -> Any:
    """Learn from one packed batch, compare with the sequences alone, and return what the kernels were told."""
    rows = random_rows(LENGTHS)
    labels = sum(int(trained[1:].sum()) for _, trained in rows)
    kernels.calls.clear()
    loss = float(TASK.backward(Learner(model, route), collate(rows), 1.0 / labels))
    assert loss == pytest.approx(expected[0], rel=1e-6)
    assert relative_error(take_gradients(model), expected[1]) <= 5e-6
    return set(kernels.calls)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("qwen3_5_text", {"causal_conv1d_fn", "chunk_gated_delta_rule"}),
        ("qwen3_next", {"causal_conv1d_fn", "chunk_gated_delta_rule"}),
        ("olmo_hybrid", {"causal_conv1d_fn", "chunk_gated_delta_rule"}),
        pytest.param("kimi_linear", {"causal_conv1d_fn", "chunk_kda"}, marks=pytest.mark.slow),
        pytest.param("lfm2", {"causal_conv1d_fn"}, marks=pytest.mark.slow),
        (
            "granitemoehybrid",
            {
                "causal_conv1d_fn",
                "mamba_chunk_scan_combined",
                "mamba_split_conv1d_scan_combined",
            },
        ),
    ],
)
def test_kernels_are_told_where_sequences_begin(
    with_kernels: Callable[..., tuple[Any, Kernels]], family: str, names: set[str]
) -> None:
    plain = build_model(family, HYBRIDS[family], lora=False)
    expected = reference_gradients(plain, random_rows(LENGTHS))
    model, kernels = with_kernels(plain)
    route = choose_attention(model)
    assert route.padding_free, route.why_not
    assert route.in_rows == ()
    calls = learn(model, route, kernels, expected)
    assert calls == {(name, 1, BOUNDARIES) for name in names}


def test_kernels_that_know_no_boundaries_get_rows(
    with_kernels: Callable[..., tuple[Any, Kernels]],
) -> None:
    plain = build_model("mamba", HYBRIDS["mamba"], lora=False)
    expected = reference_gradients(plain, random_rows(LENGTHS))
    model, kernels = with_kernels(plain)
    route = choose_attention(model)
    assert route.in_rows == ("MambaMixer",)
    calls = learn(model, route, kernels, expected)
    assert {boundaries for _, _, boundaries in calls} == {None}
    assert max(rows for _, rows, _ in calls) > 1


def test_one_kernel_of_two_is_not_enough(
    with_kernels: Callable[..., tuple[Any, Kernels]],
) -> None:
    """transformers' convolution in torch refuses `seq_idx`, so that the module gets rows, with the other kernel."""
    plain = build_model("qwen3_5_text", HYBRIDS["qwen3_5_text"], lora=False)
    expected = reference_gradients(plain, random_rows(LENGTHS))
    model, kernels = with_kernels(plain, ("fla",))
    route = choose_attention(model)
    assert route.in_rows == ("Qwen3_5GatedDeltaNet",)
    calls = learn(model, route, kernels, expected)
    assert {name for name, _, _ in calls} == {"chunk_gated_delta_rule"}


def test_kernels_do_not_share_beginnings_and_say_so(
    with_kernels: Callable[..., tuple[Any, Kernels]],
) -> None:
    plain = build_model("lfm2", HYBRIDS["lfm2"], lora=False)
    model, _ = with_kernels(plain)
    reason = why_not(Learner(model, choose_attention(model)))
    assert reason == "its output for a row changes if rows share their beginning"
