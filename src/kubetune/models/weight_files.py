"""Files of weights, opened by one function that says in words what is wrong with one.

A run directory, an adapter or a model may come from anybody, with a manifest that fits whatever is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from kubetune import errors
from kubetune.base.files import StrPath

# The source of weights, and each with its name.
RequireFinite = Callable[[StrPath, Iterable[tuple[str, Tensor]]], None]

# Far above the weights of any model that was trained. Products of larger ones leave the range of a dtype.
_LARGEST: Final = 1e8
_COMPARED: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Yield a safetensors file as `safe_open` does. Raise ModelError if it is none, or not whole."""
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


def require_finite_file(path: Path) -> None:
    """Raise ModelError if a file is not whole, or as `require_finite` does."""
    with opened(path) as file:
        require_finite(path, ((name, file.get_tensor(name)) for name in file.keys()))  # noqa: SIM118 - it is no mapping


def require_finite(origin: StrPath, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ModelError if weights, each with its name, hold numbers that are not finite, or larger than any model has."""
    for name, weight in weights:
        if isinstance(weight, DTensor):
            weight = weight.to_local()
        # Weights of another rank have no numbers here, and weights of fewer bits have none that torch compares.
        if weight.is_meta or weight.dtype not in _COMPARED or not weight.numel():
            continue
        if not weight.untyped_storage().nbytes():
            continue
        # Lowest and highest are NaN if any number is. `isfinite` would take a byte for each number.
        lowest, highest = torch.aminmax(weight.detach())
        if not torch.isfinite(lowest) or not torch.isfinite(highest):
            raise errors.ModelError(
                f"{origin}: {name} has numbers that are not finite, with which no answer means anything; get the "
                "weights again, or choose another checkpoint. Nothing was loaded."
            )
        largest = max(-float(lowest), float(highest))
        if largest > _LARGEST:
            raise errors.ModelError(
                f"{origin}: {name} has numbers up to {largest:.3g}, which no trained model has, and with which no answer "
                "means anything; get the weights again, or choose another checkpoint. Nothing was loaded."
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
