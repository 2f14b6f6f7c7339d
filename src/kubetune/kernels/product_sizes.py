"""Choose few sizes for products of matrices, since oneDNN compiles code for each size on a CPU (base/cpu)."""

from __future__ import annotations

# Numbers of rows of products in 16 bits: so few that the code of all stays prepared.
STRIDES = (16, 32, 48, 64, 96, 128, 160, 192, 224, 256)


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
