"""What a careful user switches on for a GPU, if it is installed. On a CPU there is nothing to switch on."""

from __future__ import annotations

from importlib.util import find_spec


def fast_attention() -> str:
    """Return the name of the fastest attention of transformers that is installed."""
    import torch

    if torch.cuda.is_available() and find_spec("flash_attn"):
        return "flash_attention_2"
    return "sdpa"


def has_liger() -> bool:
    """True if Liger's Triton kernels can be used."""
    import torch

    return torch.cuda.is_available() and find_spec("liger_kernel") is not None
