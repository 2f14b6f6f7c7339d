"""What vLLM makes of adapters on stacked experts: each family's as PEFT merges them, in a vLLM of its own environment.

    python -m tests.peers.vllm_adapters PYTHON_OF_VLLM [FAMILY …]

A tiny mixture of each family gets adapters by kubetune, is saved by PEFT, and merged by it: the difference of the
experts' weights is what an adapter does. `vllm_load.py`, run by vLLM's Python, loads both and reads the same back from
the buffers that vLLM's kernels are given. `serving.EXPERTS_IN_VLLM` names the families for which they are equal; of
others vLLM says nothing, fails, or does not know the model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from tests.architectures import build_model
from tests.run.test_experts import MIXTURES

LOADER = Path(__file__).with_name("vllm_load.py")
FAMILIES = (
    "qwen3_moe", "gpt_oss", "mixtral", "olmoe", "deepseek_v3", "glm4_moe", "granitemoe", "phimoe", "minimax_m2",
    "ernie4_5_moe", "qwen3_next", "qwen3_5_moe_text", "lfm2_moe",
)  # fmt: skip
# Of a size that vLLM's attention takes on a CPU; nothing is as wide as something else.
WIDTHS: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 96}
# What published configs of these have and vLLM reads.
OWN: dict[str, dict[str, Any]] = {
    "gpt_oss": {"intermediate_size": 160},
    "deepseek_v3": {"topk_method": "noaux_tc"},
    "minimax_m2": {"rotary_dim": 64, "scoring_func": "sigmoid", "intermediate_size": 160},
}


def main() -> None:
    """Try all families, or those named, and print a line for each."""
    python, *names = sys.argv[1:]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    for name in names or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            write(name, Path(folder))
            done = subprocess.run(
                [python, LOADER, folder], env=environ, capture_output=True, text=True
            )
        lines = [line for line in done.stdout.splitlines() if line.startswith("experts:")]
        print(f"{name:20}", *(lines or [done.stderr.strip().rpartition("\n")[2][:200]]), flush=True)


def write(name: str, folder: Path) -> None:
    """Write a base, an adapter with random numbers, and what PEFT adds to each tensor of experts."""
    settings = MIXTURES[name]
    settings = (
        settings
        | {key: value for key, value in WIDTHS.items() if key in settings}
        | OWN.get(name, {})
    )
    base = build_model(name, settings, lora=False)
    base.save_pretrained(folder / "base")
    adapted = build_model(name, settings)
    adapted.save_pretrained(folder / "adapter")
    stacked = json.loads((folder / "adapter" / "adapter_config.json").read_text())[
        "target_parameters"
    ]
    before = {k: v.clone() for k, v in base.state_dict().items() if k.endswith(tuple(stacked))}
    after = adapted.merge_and_unload().state_dict()
    save_file(
        {k: (after[k] - v).contiguous() for k, v in before.items()}, folder / "expected.safetensors"
    )


if __name__ == "__main__":
    main()
