"""Tell what processor this is, and choose the dtype that trains fastest on it."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from kubetune.errors import ConfigError

CPU_INFO = Path("/proc/cpuinfo")

# The instructions of a processor that decide how fast it multiplies matrices.
INSTRUCTIONS = ("amx_bf16", "avx2", "avx512_bf16", "avx512f")
BFLOAT16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")

# Below this hidden size other things than products take the time, and those are slower in bfloat16.
NARROW = 512
DTYPES = ("float32", "bfloat16")
PINNED = "KUBETUNE_CPU_DTYPE"  # an environment variable: the dtype, whatever the processor is


def model_name() -> str:
    """Return the name that the processor is sold under, or its architecture if the system does not tell."""
    name = re.search(r"^model name\s*:\s*(.+)$", _cpu_info(), re.MULTILINE)
    if name is not None:
        return name[1]
    return platform.processor() or platform.machine() or "CPU"


def instructions() -> list[str]:
    """Return which of INSTRUCTIONS the processor has, sorted."""
    flags = re.search(r"^flags\s*:(.*)$", _cpu_info(), re.MULTILINE)
    names = set() if flags is None else set(flags[1].split())
    return [name for name in INSTRUCTIONS if name in names]


def dtype_for(width: int | None) -> tuple[str, str]:
    """Return the dtype that `model.dtype: auto` means on this processor, and why.

    `width` is the model's hidden size, None if it is not known. Raise ConfigError if the environment asks for a dtype
    that is not in DTYPES.
    """
    # Set by users, and by tests that must give the same numbers on every processor.
    pinned = os.environ.get(PINNED)
    if pinned:
        if pinned not in DTYPES:
            raise ConfigError(f"{PINNED} is {pinned!r}; expected {' or '.join(DTYPES)}, or nothing")
        return pinned, f"{PINNED} says so"
    return _fastest_dtype(width)


def slow_dtype(dtype: str, width: int | None) -> str | None:
    """Return in a sentence why `model.dtype: auto` would not take this dtype on this processor; None if it would.

    Without instructions for it, a step of LoRA took 8 times as long in float16 as in float32, and 13 times in bfloat16.
    """
    fastest, reason = _fastest_dtype(width)
    if dtype in (fastest, "auto", "float32"):
        return None
    if dtype == "float16":
        reason = "processors have fast products of float32 or of bfloat16"
    return (
        f"model.dtype: {dtype} may be many times slower than {fastest} here, because {reason}; leave it out, and "
        f"{fastest} is taken"
    )


def _fastest_dtype(width: int | None) -> tuple[str, str]:
    """Return the dtype in which training is fastest on this processor, and why."""
    if width is not None and width < NARROW:
        return "float32", f"the model is narrow: its hidden size is {width}"
    for name in instructions():
        if name in BFLOAT16_INSTRUCTIONS:
            return "bfloat16", f"this processor has instructions for it ({name})"
    return (
        "float32",
        f"this processor has no instructions for bfloat16 ({' or '.join(BFLOAT16_INSTRUCTIONS)})",
    )


def _cpu_info() -> str:
    try:
        return CPU_INFO.read_text(errors="replace")
    except OSError:
        return ""
