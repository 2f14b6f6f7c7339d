"""Kernels that inductor makes of the pointwise functions compile for GPUs that need not be here, and spill no register.

Needs Triton, which brings ptxas (`pip install triton`), and no GPU.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="Triton is not installed"
    ),
]
TARGETS = {"sm_80": 80, "sm_90a": 90, "sm_100a": 100, "sm_120a": 120}
NO_GPU_HERE = """
import json, sys, torch, triton
import torch._inductor.config as settings
from torch._inductor.async_compile import AsyncCompile
from triton.backends.compiler import GPUTarget
from kubetune.kernels.pointwise import POINTWISE

class Driver:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device=0): return 0
    def get_active_torch_device(self): return torch.device("cpu")
    def get_device_interface(self): return torch.cpu

class Kept:
    def __getattr__(self, name): return lambda *args, **kwargs: None

triton.runtime.driver.set_active(Driver())
settings.cpu_backend, settings.fx_graph_cache, settings.compile_threads = "triton", False, 1
found = []
AsyncCompile.triton = lambda self, name, source, *rest, **more: found.append(source) or Kept()
def half(*shape): return torch.randn(*shape).bfloat16()
x, scale, turned = half(1, 256, 4096), torch.rand(1, 256, 1), (half(1, 1, 256, 128), half(1, 1, 256, 128))
given = {
    "rms_norm_forward": (x, half(4096), 1e-6, 0.0, False), "rms_norm_backward": (x, x, half(4096), scale, 0.0),
    "rms_norm_weight_gradient": (x, x, scale), "swiglu_forward": (x, x), "swiglu_backward": (x, x, x),
    "rotary_forward": (half(1, 32, 256, 128), half(1, 8, 256, 128), *turned),
    "rotary_backward": (half(1, 32, 256, 128), half(1, 8, 256, 128), *turned),
    "cross_entropy": (half(16, 151936), torch.zeros(16, dtype=torch.long), 1.0, 1.0, 0.0), "round_rows": (x[0],),
}
sources = {}
for function in POINTWISE:
    found.clear()
    torch._dynamo.reset()
    torch.compile(function, dynamic=True)(*given[function.__name__])
    sources[function.__name__] = list(found)
json.dump(sources, open(sys.argv[1], "w"))
"""


def spilled(source: str, folder: Path, target: str) -> tuple[int, int]:
    """Return the bytes that one kernel stores and loads for lack of registers, by ptxas, in blocks as inductor has them."""
    import triton
    from triton.backends.compiler import GPUTarget

    signature = json.loads(
        re.search(r"'signature': (\{.*?\}), 'device'", source)[1].replace("'", '"')
    )  # type: ignore[index]
    reduces = "R0_BLOCK" in signature
    sizes = {"XBLOCK": 1 if reduces else 1024, "R0_BLOCK": 2048}
    if "ReductionHint.OUTER" in source:
        sizes = {"XBLOCK": 64, "R0_BLOCK": 8}
    blocks: dict[Any, Any] = {
        (list(signature).index(name),): n for name, n in sizes.items() if name in signature
    }
    head = "\n".join(line for line in source.splitlines() if re.match(r"(import|from) ", line))
    path = folder / "kernel.py"
    path.write_text(f"{head}\n{source[source.index('@triton.jit') :]}")
    spec = importlib.util.spec_from_file_location("kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel = next(
        value
        for name, value in vars(module).items()
        if name.startswith("triton_") and hasattr(value, "fn")
    )
    made = triton.compile(
        triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=blocks),
        target=GPUTarget("cuda", TARGETS[target], 32),
        options={"num_warps": 8 if reduces else 4, "enable_fp_fusion": True},
    )
    (folder / "kernel.ptx").write_text(made.asm["ptx"])
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas-blackwell"
    command = [
        ptxas,
        "-v",
        f"--gpu-name={target}",
        folder / "kernel.ptx",
        "-o",
        folder / "kernel.cubin",
    ]
    stderr = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    stores, loads = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", stderr).groups()  # type: ignore[union-attr]
    return int(stores), int(loads)


def test_kernels_compile_for_each_kind_of_gpu_and_spill_nothing(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", NO_GPU_HERE, str(tmp_path / "found.json")], check=True, timeout=600
    )
    report = json.loads((tmp_path / "found.json").read_text())
    assert all(report.values())
    for name, sources in report.items():
        # Ampere has no 8-bit floats, and training.fp8 refuses it.
        for target in [
            candidate
            for candidate in TARGETS
            if not (name == "round_rows" and candidate == "sm_80")
        ]:
            for source in sources:
                assert spilled(source, tmp_path, target) == (0, 0), (name, target)
