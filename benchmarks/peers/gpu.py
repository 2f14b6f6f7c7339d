"""What a careful user would switch on on a GPU where it is installed. On a CPU there is nothing to switch on."""

from __future__ import annotations

from importlib.util import find_spec


def fast_attention() -> str:
    """The fastest attention of transformers that is installed."""
    import torch

    return "flash_attention_2" if torch.cuda.is_available() and find_spec("flash_attn") else "sdpa"


def has_liger() -> bool:
    """Whether Liger's Triton kernels can be used."""
    import torch

    return torch.cuda.is_available() and find_spec("liger_kernel") is not None
