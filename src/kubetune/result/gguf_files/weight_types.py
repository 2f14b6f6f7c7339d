"""Types of the weights of a GGUF file, by their names on the command line."""

from __future__ import annotations

from typing import Final

from kubetune import errors
from kubetune.base.humanize import nearest

# Plain types, and the dtype of weights that they hold exactly.
DTYPES: Final = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}

# What `--gguf` takes.
ADAPTER: Final = "adapter"
TYPES: Final = (
    "bf16", "f16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0",
    "q6_k", "q5_k_m", "q5_k_s", "q4_k_m", "q4_k_s", "q3_k_l", "q3_k_m", "q3_k_s", "q2_k",
    "iq4_xs", "iq4_nl", "iq3_m", "iq3_s", ADAPTER,
)  # fmt: skip


def require_type(kind: str) -> None:
    """Raise ConfigError for a type of weights that no GGUF file of ours has."""
    if kind not in TYPES:
        close = nearest(kind, TYPES)
        meant = f"did you mean {close}? Expected" if close else "expected"
        raise errors.ConfigError(
            f"--gguf is {kind!r}; {meant} one of {', '.join(TYPES)}. Nothing was written."
        )


def file_name(kind: str) -> str:
    """Return the name of the file with weights of a type."""
    return "adapter.gguf" if kind == ADAPTER else f"model-{kind}.gguf"


def plain_type(dtype: str) -> str:
    """Return the plain type that holds weights of a dtype exactly."""
    return next(kind for kind, held in DTYPES.items() if held == dtype)
