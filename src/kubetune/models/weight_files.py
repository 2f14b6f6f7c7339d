"""Files of weights, opened by one function that says in words what is wrong with one.

A run directory, an adapter or a model may come from anybody, with a manifest that fits whatever is in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kubetune import errors


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Yield a safetensors file as `safe_open` does. Raise ModelError where it is none, or not whole."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise errors.ModelError(
            f"{path} is no whole file of safetensors ({errors.first_line(error)}); get it again, or choose another "
            "checkpoint. Nothing was loaded."
        ) from None


def read(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by their names. Raise ModelError as `opened` does."""
    with opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping


def require_finite(path: Path) -> None:
    """Raise ModelError where a file is no whole one, or holds numbers that are not finite."""
    with opened(path) as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            if not torch.isfinite(file.get_tensor(name)).all():
                raise errors.ModelError(
                    f"{path}: {name} has numbers that are not finite, with which no answer means anything; choose "
                    "another checkpoint. Nothing was loaded."
                )


def require_same_names(folder: Path, missing: list[str], foreign: list[str]) -> None:
    """Raise ModelError where the weights of a folder lack some that its model has, or have others."""
    for names, verb in ((missing, "lack"), (foreign, "have the foreign")):
        if not names:
            continue
        shown = ", ".join(repr(name) for name in sorted(names)[:3])
        more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
        raise errors.ModelError(
            f"{folder}: its weights {verb} {shown}{more}, so it is not the model that was trained; choose another "
            "checkpoint, or --model with the base that it was trained on. Nothing was loaded."
        )
