"""What is done for CPUs alone, each with its reason: the dtype of a run, the sizes of products, and how memory is kept.

Only what makes LoRA or full fine-tuning at least 1.3 times as fast, or saves much memory, belongs here. On two cores of
an AMD EPYC (docs/performance.md and docs/forecast.md):

    bfloat16 where the processor has instructions for it     LoRA: 983 tokens/CPU-s, 525 in float32: 1.9 times as fast
    large blocks stay in the heap (`keep_memory`)            LoRA of experts by PEFT's own code: 1.5 to 2.3 times as fast
    few products of matrices stay prepared (`keep_memory`)   rows of many lengths in bfloat16: 874 MiB instead of 1,576
    weights made anew lie outside the heap (`outside_heap`)  they leave no holes, so that the heap does not grow
    few sizes of products (`STRIDES`, `few_values`)          LoRA of experts in bfloat16: 1.5 to 3.3 times as fast as by
                                                             PEFT's code with `keep_memory`; before, slower than that
    short chunks of Mamba-2's scan (`SCAN_CHUNK`)            most of the 2.0 times of Granite's hybrid

The last two decide in which order numbers are added, so that to take them away would change the bits of losses. They are
used in kernels/experts, kernels/attention/padded and models/recurrences. That bitsandbytes computes otherwise on a CPU
(models/quantization) is about right numbers, not about speed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import sys
from pathlib import Path

from kubetune.errors import ConfigError

CPU_INFO = Path("/proc/cpuinfo")

# Of a processor's instructions, those that decide how fast it multiplies matrices.
INSTRUCTIONS = ("amx_bf16", "avx2", "avx512_bf16", "avx512f")
BFLOAT16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")

# Below this hidden size other things than products take the time, and those are slower in bfloat16.
NARROW = 512
DTYPES = ("float32", "bfloat16")
PINNED = "KUBETUNE_CPU_DTYPE"  # an environment variable: the dtype, whatever the processor is

# Options of glibc's mallopt.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_MMAP_MAX = -4

# Products of matrices that oneDNN keeps prepared, each with code that lies in the heap. Where sizes change from step to
# step, as those of labels do, its 1,024 take gigabytes. Those of one micro-batch must fit, or each layer prepares them
# anew: with 32, rows of many lengths took a fifth more time.
KEPT_PRODUCTS = 64
# Numbers of rows of products in 16 bits: so few that the code of all stays prepared.
STRIDES = (16, 32, 48, 64, 96, 128, 160, 192, 224, 256)
# Most tokens of a chunk of Mamba-2's scan. transformers fills every row up to 256 of them.
SCAN_CHUNK = 32
# oneDNN's own limit, and that of ideep, by which torch calls it.
_LIMITS_OF_PRODUCTS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


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


def _cpu_info() -> str:
    try:
        return CPU_INFO.read_text(errors="replace")
    except OSError:
        return ""


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


def compiles_each_size(device_type: str, bytes_each: int) -> bool:
    """True if products of matrices are compiled for each size, which takes longer than a small product itself.

    `bytes_each`: of a number. oneDNN does so for numbers of 16 bits.
    """
    return device_type == "cpu" and bytes_each == 2


def few_values(n: int) -> int:
    """Round `n` up to three significant bits: at most a quarter more, and four values for each power of two.

    Examples: 5 → 5, 9 → 10, 33 → 40. So there are few sizes of products, which oneDNN prepares once.
    """
    step = 1 << max(0, n.bit_length() - 3)
    return -(-n // step) * step


def keep_memory() -> bool:
    """Let large blocks stay in the heap, and few products prepared. Return True if glibc accepted both.

    Training allocates the same large blocks in every step. By default the kernel maps, zeroes and unmaps each of them
    every time. Call this before torch is imported. `KUBETUNE_MALLOC=off` leaves everything as it is; other C libraries
    have no such options.
    """
    if os.environ.get("KUBETUNE_MALLOC") != "off":
        for name in _LIMITS_OF_PRODUCTS:
            os.environ.setdefault(name, str(KEPT_PRODUCTS))
    return _set(_M_MMAP_MAX, 0) and _set(_M_TRIM_THRESHOLD, 2**31 - 1)


def give_back() -> bool:
    """Do the contrary of `keep_memory`: the kernel gets every large block back as soon as it is free.

    An export wants that: what it has let go must be gone before it takes more.
    """
    return _set(_M_MMAP_THRESHOLD, 2**20)


def outside_heap(size: int) -> mmap.mmap:
    """Return zeroed bytes that no other block is ever cut from. Only what is touched of them takes memory.

    For the few blocks that are far larger than all others: in the heap smaller ones settle in the room that they leave
    for a moment, so that they find none when they come again, and the heap grows with every step.
    """
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _set(option: int, value: int) -> bool:
    if sys.platform != "linux" or os.environ.get("KUBETUNE_MALLOC") == "off":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(option, value))
