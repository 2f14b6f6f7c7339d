"""glibc's allocator, told to keep memory: CPU training allocates the same large blocks in every step.

Without this each of them is mapped, zeroed and unmapped by the kernel again. Must run before torch is imported. An
export wants the contrary: what it has let go must be gone before it takes more.
`KUBETUNE_MALLOC=off` leaves the allocator alone. Does nothing on other C libraries.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import sys
from pathlib import Path

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_MMAP_MAX = -4


KEPT_PRODUCTS = 64
"""Matrix products that oneDNN keeps ready, each with code that lies in the heap. Its 1,024 hold gigabytes where sizes
change from step to step, as those of labels do, and the more are kept, the more holes they leave: with 128 full
fine-tuning in bf16 grew to 1,433 MiB in 24 steps, with 64 it stayed at 1,318. Those of one micro-batch must fit, or
each layer makes them anew: with 32 rows of many lengths took a fifth more CPU time."""
KEPT_PRODUCTS_OF_CLASSIFIERS = 256
"""The same where texts are classified: batches and attention within them are padded to few sizes, so that nearly all
come again, and in a step of a small encoder a product takes less time than its code does to make."""
_OF_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma"}
"""Flags of processors on which torch takes its kernels for AVX-512."""
_CACHES_OF_PRODUCTS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""oneDNN's own, and that of ideep, by which torch calls it: what either holds lives on."""


def kept_products(classifies: bool) -> int:
    """Products that are kept in a run, which classifies texts or does not."""
    return KEPT_PRODUCTS_OF_CLASSIFIERS if classifies else KEPT_PRODUCTS


def is_mkl_narrow(info: Path = Path("/proc/cpuinfo")) -> bool:
    """Presence of AVX-512 of another maker than Intel: torch uses it and MKL does not, so that products in fp32 are
    oneDNN's as well."""
    try:
        text = info.read_text()
    except OSError:
        return False
    maker = re.search(r"^vendor_id\s*:\s*(\S+)", text, re.MULTILINE)
    flags = re.search(r"^flags\s*:(.*)", text, re.MULTILINE)
    is_able = flags is not None and _OF_AVX512.issubset(flags[1].split())
    return is_able and maker is not None and maker[1] != "GenuineIntel"


def keep_memory(*, classifies: bool = False) -> bool:
    """Never serve blocks by mmap, never give memory back. Returns whether it was done.

    How many products are kept can be said anew until the first is made, which is when oneDNN asks.
    """
    if os.environ.get("KUBETUNE_MALLOC") != "off":
        for name in _CACHES_OF_PRODUCTS:
            if os.environ.get(name) in (None, str(KEPT_PRODUCTS)):
                os.environ[name] = str(kept_products(classifies))
    return _set(_M_MMAP_MAX, 0) and _set(_M_TRIM_THRESHOLD, 2**31 - 1)


def give_back() -> bool:
    """Serve every large block by mmap, so that the kernel has it back as soon as it is free."""
    return _set(_M_MMAP_THRESHOLD, 2**20)


def outside_heap(size: int) -> mmap.mmap:
    """Zeroed bytes that no other block is ever cut from. Only what is touched of them takes memory.

    For the few blocks that are far larger than all others: in the heap smaller ones settle in the room that they leave
    for a moment, so that they find none when they come again, and the heap grows with every step.
    """
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _set(option: int, value: int) -> bool:
    if sys.platform != "linux" or os.environ.get("KUBETUNE_MALLOC") == "off":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(option, value))
