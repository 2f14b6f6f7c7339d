"""Reads from a running vLLM what an adapter adds to each expert; run by vLLM's own Python, see vllm_adapters.py.

PYTHON_OF_VLLM vllm_load.py FOLDER
"""

import re
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from vllm import LLM
from vllm.lora.request import LoRARequest


def main() -> None:
    """Print one line: the largest relative distance, or what is missing."""
    folder = Path(sys.argv[1])
    llm = LLM(
        model=str(folder / "base"),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=2,
        enable_lora=True,
        max_lora_rank=8,
        enable_mixed_moe_lora_format=True,
    )
    llm.llm_engine.add_lora(
        LoRARequest("tuned", 1, str(folder / "adapter"), is_3d_lora_weight=True)
    )
    worker = llm.llm_engine.model_executor.driver_worker
    manager = getattr(worker, "worker", worker).model_runner.lora_manager._adapter_manager
    manager.activate_adapter(1)
    expected = load_file(folder / "expected.safetensors")
    config = (folder / "base" / "config.json").read_text()
    apart, layers = 0.0, 0
    for name, module in manager.modules.items():
        if not hasattr(module, "w13_lora_a_stacked"):
            continue
        layers += 1
        layer = name.split("layers.")[1].split(".")[0]
        for kind, tensor in (
            ("down", down(module)),
            ("up", up(module, interleaved='"gpt_oss"' in config)),
        ):
            of_it = re.compile(rf"\.{layer}\..*experts\.\w*{kind}_proj$")
            (wanted,) = (value for key, value in expected.items() if of_it.search(key))
            wanted = (
                wanted if wanted.shape == tensor.shape and '"gpt_oss"' not in config else wanted.mT
            )
            apart = max(apart, float((tensor - wanted).norm() / wanted.norm()))
    print(f"experts: {layers} layers, at most {apart:.1e} from PEFT's")


def down(module: torch.nn.Module) -> torch.Tensor:
    """Return what is added to the second weight of each expert: experts, out, in."""
    return product(module.w2_lora_b_stacked[0], module.w2_lora_a_stacked[0])


def up(module: torch.nn.Module, *, interleaved: bool) -> torch.Tensor:
    """Return the same of the first, whose two halves lie behind each other or, in gpt-oss, row by row."""
    parts = [
        product(b, a)
        for b, a in zip(module.w13_lora_b_stacked, module.w13_lora_a_stacked, strict=True)
    ]
    return torch.stack(parts, 2).flatten(1, 2) if interleaved else torch.cat(parts, 1)


def product(b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Return B A of each expert, of the only adapter."""
    return torch.einsum("eor,eri->eoi", b[0].float(), a[0].float())


if __name__ == "__main__":
    main()
