"""Products by oneDNN where MKL is narrow, beside torch's own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from kubetune.base import allocator
from kubetune.kernels import experts, products
from kubetune.models import fused_forwards
from kubetune.models.fused_forwards import swap_forwards

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch without oneDNN"
)

ROWS, IN, OUT = 40, 64, 2500
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda w: w,
    "turned": lambda w: w.t().contiguous().t(),
    "columns of a wider one": lambda w: torch.cat([w, w], 1)[:, : w.shape[1]],
    "every second row": lambda w: w.repeat_interleave(2, 0)[::2],
}


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (products, fused_forwards):
        monkeypatch.setattr(module, "is_mkl_narrow", lambda: True)


def require_onednn(compute: Callable[[], Tensor], expected: Tensor) -> None:
    with FlopCounterMode(display=False) as counter:
        found = compute()
    counts = counter.get_flop_counts()["Global"]
    assert counts == {torch.ops.mkldnn._linear_pointwise: 2 * ROWS * IN * OUT}
    assert (found - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("of_x", LAYOUTS)
@pytest.mark.parametrize("of_w", LAYOUTS)
def test_products_of_all_layouts_are_the_same_by_onednn(of_x: str, of_w: str) -> None:
    torch.manual_seed(0)
    x, w = LAYOUTS[of_x](torch.randn(ROWS, IN)), LAYOUTS[of_w](torch.randn(IN, OUT))
    bias, total, wide = torch.randn(OUT), torch.randn(ROWS, OUT), torch.empty(ROWS + 3, OUT)
    expected = x @ w
    require_onednn(lambda: products.times(x, w), expected)
    require_onednn(lambda: products.times(x, w, bias), expected + bias)
    require_onednn(lambda: products.add_times(None, x, w), expected)
    require_onednn(lambda: products.add_times(total.clone(), x, w), expected + total)
    require_onednn(lambda: products.times_into(wide[:ROWS], x, w), expected)
    assert torch.equal(products.times_into(wide[:ROWS], x, w), wide[:ROWS])


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_linear_modules_and_all_their_gradients_are_by_onednn(
    bias: bool, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(products, "LEAST_OF_MODULES", ROWS * IN * OUT)
    module = nn.Linear(IN, OUT, bias=bias)
    module.weight.requires_grad_(not frozen)
    model = nn.Sequential(module)
    x, d_y = torch.randn(2, ROWS // 2, IN, requires_grad=True), torch.randn(2, ROWS // 2, OUT)
    given = [x, *(p for p in module.parameters() if p.requires_grad)]
    expected = torch.autograd.grad(module(x), given, d_y)
    assert swap_forwards(model, None, ExitStack(), packed=False)["linear"] == 1
    with FlopCounterMode(display=False) as counter:
        model(x).backward(d_y)
    made = 2 if frozen else 3
    counts = counter.get_flop_counts()["Global"]
    assert counts == {torch.ops.mkldnn._linear_pointwise: made * 2 * ROWS * IN * OUT}
    monkeypatch.setattr(products, "LEAST_OF_MODULES", ROWS * IN * OUT + 1)
    assert torch.equal(model(x), F.linear(x, module.weight, module.bias))
    for leaf, theirs in zip(given, expected, strict=True):
        assert leaf.grad is not None
        assert (leaf.grad - theirs).norm() <= 1e-6 * theirs.norm()


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(
    ("rows", "dtype"), [(8, torch.float32), (400, torch.float64), (400, torch.bfloat16)]
)
def test_small_products_and_other_dtypes_are_torchs_own(rows: int, dtype: torch.dtype) -> None:
    x, w = torch.randn(rows, IN).to(dtype), torch.randn(IN, OUT).to(dtype)
    assert torch.equal(products.times(x, w), x @ w)
    assert torch.equal(
        products.add_times(torch.ones_like(x @ w), x, w), torch.ones_like(x @ w).addmm_(x, w)
    )
    assert torch.equal(products.times_into(torch.empty_like(x @ w), x, w), x @ w)


@pytest.mark.parametrize(
    ("maker", "flags", "is_narrow"),
    [
        ("vendor_id\t: AuthenticAMD\n", "fma avx512f avx512dq avx512bw avx512vl", True),
        ("vendor_id\t: GenuineIntel\n", "fma avx512f avx512dq avx512bw avx512vl", False),
        ("vendor_id\t: AuthenticAMD\n", "fma avx2", False),
        ("", "fma avx512f avx512dq avx512bw avx512vl", False),
    ],
)
def test_mkl_is_narrow_on_processors_of_other_makers(
    maker: str, flags: str, is_narrow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\n{maker}flags\t: {flags}\n")
    assert allocator.is_mkl_narrow(info) is is_narrow
    assert not allocator.is_mkl_narrow(tmp_path / "absent")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(allocator, "is_mkl_narrow", lambda: is_narrow)
    for capability in ("AVX512", "AVX2"):
        monkeypatch.setattr(
            torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability
        )
        assert products.is_mkl_narrow.__wrapped__() is (is_narrow and capability == "AVX512")


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [(0, 300, 17, 100, 1), (1, 0, 0, 2, 400), (48, 64, 0, 300, 0)])
def test_rows_of_experts_are_multiplied_in_few_sizes(
    counts: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(sum(counts), IN).to(dtype), torch.randn(len(counts), 1000, IN).to(dtype)
    parts = [rows @ one.t() for rows, one in zip(x.split(counts), weight, strict=True)]
    multiplied = list[int]()
    monkeypatch.setattr(
        experts,
        "times",
        lambda rows, one: (multiplied.append(len(rows)), products.times(rows, one))[1],
    )
    found = experts._grouped(x, weight.mT, torch.tensor(counts).cumsum(0, dtype=torch.int32))
    assert multiplied
    assert set(multiplied) <= set(experts.STRIDES)
    assert (found - torch.cat(parts)).norm() <= (
        1e-6 if dtype == torch.float32 else 4e-3
    ) * found.norm()
