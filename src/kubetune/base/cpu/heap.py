"""Keep large blocks of memory for the next step, or give them back at once. Options of glibc's heap."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

# Options of glibc's mallopt.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_MMAP_MAX = -4

# Products of matrices that oneDNN keeps prepared, each with code that lies in the heap. Where sizes change from step to
# step, as those of labels do, its 1,024 take gigabytes. Those of one micro-batch must fit, or each layer prepares them
# anew: with 32, rows of many lengths took a fifth more time.
KEPT_PRODUCTS = 64
# oneDNN's own limit, and that of ideep, by which torch calls it.
_LIMITS_OF_PRODUCTS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def keep_memory() -> bool:
    """Let large blocks stay in the heap, and few products prepared. Return True if glibc accepted both.

    Training allocates the same large blocks in every step. By default the kernel maps, zeroes and unmaps each of them
    every time. Call this before torch is imported. `KUBETUNE_MALLOC=off` leaves everything as it is; other C libraries
    have no such options.
    """
    if os.environ.get("KUBETUNE_MALLOC") != "off":
        for name in _LIMITS_OF_PRODUCTS:
            os.environ.setdefault(name, str(KEPT_PRODUCTS))
    return _set_option(_M_MMAP_MAX, 0) and _set_option(_M_TRIM_THRESHOLD, 2**31 - 1)


def give_back() -> bool:
    """Do the contrary of `keep_memory`: the kernel gets every large block back as soon as it is free.

    An export wants that: what it has let go must be gone before it takes more.
    """
    return _set_option(_M_MMAP_THRESHOLD, 2**20)


def outside_heap(size: int) -> mmap.mmap:
    """Return zeroed bytes that no other block is ever cut from. Only what is touched of them takes memory.

    For the few blocks that are far larger than all others: in the heap smaller ones settle in the room that they leave
    for a moment, so that they find none when they come again, and the heap grows with every step.
    """
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _set_option(option: int, value: int) -> bool:
    if sys.platform != "linux" or os.environ.get("KUBETUNE_MALLOC") == "off":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(option, value))
