"""The forms that a result is exported in, a file each: what may be written so, its files, their proof, its words.

Not for what an export has besides its weights, nor for sending it (publishing). Read `form` first, then `merged`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kubetune import errors
from kubetune.config.schema import LoraConfig
from kubetune.result.forms import adapter, float8, gguf, merged, whole_model
from kubetune.result.forms.form import QUANTIZE, Form
from kubetune.result.forms.wanted import (
    TrainedModel,
    WantedExport,
    bytes_of,
    require_adapter,
    require_dtype,
    require_place,
)

# A new form is one file with a `FORM`, and one line here.
FORMS: Final[dict[str, Form]] = {
    "adapter": adapter.FORM,
    "merged": merged.FORM,
    "model": whole_model.FORM,
    "gguf": gguf.FORM,
    "fp8": float8.FORM,
}


def chosen(wanted: WantedExport, lora: LoraConfig | None) -> str:
    """Return the name of the form that the user asks for. Raise ConfigError for two, or for an unknown one."""
    if wanted.gguf is not None and wanted.quantize is not None:
        raise errors.ConfigError(
            "--gguf and --quantize write two kinds of files: ask for one. Nothing was written."
        )
    if wanted.gguf is not None:
        return "gguf"
    if wanted.quantize is not None:
        names = [name for name, form in FORMS.items() if form.option == QUANTIZE]
        if wanted.quantize not in names:
            raise errors.ConfigError(
                f"--quantize is {wanted.quantize!r}; expected {' or '.join(names)}. Nothing was written."
            )
        return wanted.quantize
    if lora is None:
        return "model"
    return "merged" if wanted.merged else "adapter"


def form_in(facts: Mapping[str, Any]) -> Form:
    """Return the form of an export by its provenance.json."""
    for form in FORMS.values():
        if form.key and form.key in facts:
            return form
    return FORMS[facts["kind"]]


def require_export(trained: TrainedModel, wanted: WantedExport) -> None:
    """Raise an error for an export that makes no sense, if settings and files show it."""
    form = FORMS[chosen(wanted, trained.lora)]
    if wanted.merged:
        require_adapter(trained)
    form.require(trained, wanted)
    if wanted.dtype is not None:
        require_dtype(wanted.dtype)
    bytes_of(wanted.max_shard_size)
    if wanted.out is not None:
        require_place(wanted.out)
