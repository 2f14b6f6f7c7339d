"""The adapter of a folder on its base, by PEFT, once its settings and weights have been found to fit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from kubetune import errors
from kubetune.base import expressions
from kubetune.base.files import IrregularFileError, require_plain
from kubetune.models import weight_files
from kubetune.models.adapters import saved
from kubetune.models.load_faults import OF_ODD_FILES, fault_of_files
from kubetune.models.sharded_base import base_shards


def with_adapter(base: Any, folder: Path) -> nn.Module:
    """Return PEFT's model of a base with the adapter of a folder. Raise ModelError as `require_plain_adapter` does."""
    from peft import PeftModel

    settings = require_plain_adapter(folder)
    _require_expressions(folder, settings, base)
    with warnings.catch_warnings(), _explained_adapter(folder):
        # Missing weights are an error below.
        warnings.filterwarnings("ignore", "Found missing adapter keys")
        with base_shards.measured(base, by_dora=settings.use_dora):
            adapted: Any = PeftModel.from_pretrained(base, str(folder))
        # `from_pretrained` keeps to itself what it did not find, and what it found besides.
        result = adapted.load_adapter(str(folder), adapted.active_adapter)
    weight_files.require_same_names(folder, result.missing_keys, result.unexpected_keys)
    return adapted  # type: ignore[no-any-return]


@contextmanager
def _explained_adapter(folder: Path) -> Iterator[None]:
    """Turn what PEFT raises for an adapter that is not on this base into one sentence that says what to do."""
    try:
        yield
    except (*OF_ODD_FILES, RuntimeError, ValueError) as error:
        raise errors.ModelError(
            f"adapter {folder}: PEFT cannot put it on this model ({fault_of_files(error)}); choose another "
            "checkpoint, or --model with the base that it was trained on. Nothing was loaded."
        ) from error


def _require_expressions(folder: Path, settings: saved.AdapterSettings, base: nn.Module) -> None:
    """Raise ModelError for an expression of an adapter that never ends, or does not match the modules that have one."""
    names = [name for name, _ in base.named_modules()]
    for key in ("target_modules", "exclude_modules"):
        expression = getattr(settings, key)
        if not isinstance(expression, str):
            continue
        matched = expressions.matches(expression, names)
        problem = None
        if matched is None:
            problem = "expected a regular expression that soon has an answer"
        elif key == "target_modules":
            lost = saved.adapted_modules(folder, settings) - matched
            if lost:
                problem = f"expected an expression that matches {min(lost)}, which has an adapter"
        if problem is not None:
            raise errors.ModelError(
                f"adapter {folder}: its {saved.SETTINGS} has {key}: {expression[:100]!r}; {problem}; {saved.ADVICE}"
            )


def require_plain_adapter(folder: Path) -> saved.AdapterSettings:
    """Return the settings of an adapter that fits itself.

    Raise ModelError for one with which PEFT would load other weights, pickles or modules, or none that work:

        megatron_core                                PEFT imports the module that it names
        another peft_type                            loads further adapters, from anywhere
        no adapter_model.safetensors                 PEFT reads a pickle, or asks the hub
    """
    try:
        require_plain(folder)
    except IrregularFileError as error:
        raise errors.ModelError(f"adapter {error}. Nothing was loaded.") from None

    if not (folder / saved.WEIGHTS).is_file():
        raise errors.ModelError(
            f"adapter {folder}: has no adapter_model.safetensors; its weights are read from nothing else. Nothing was "
            "loaded."
        )

    # PEFT does what this file says, so it must say nothing unknown.
    settings = saved.read_settings(folder)
    saved.require_fitting_weights(folder, settings)
    weight_files.require_finite_file(folder / saved.WEIGHTS)
    return settings
