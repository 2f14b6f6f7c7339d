"""Whether a base that is quantised in its files can be loaded: the libraries of its method, a GPU, and tensors in that form.

As transformers' quantisers ask when they load one. What is in the tensors only loading tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from kubetune import extras
from kubetune.errors import ModelError
from kubetune.plan.model_shapes import ModelFiles, Weights


class _Method(NamedTuple):
    """What loading weights of a method takes."""

    modules: tuple[str, ...] = ()  # Python modules that do it
    packages: str = ""  # what installs them, if it is none of kubetune's extras
    needs_gpu: bool = False
    mark: str = ""  # a part of the names of tensors in that form


# By `quant_method` of config.json. A method that is not here is judged by loading.
_METHODS: Final = {
    "awq": _Method(("gptqmodel",), "gptqmodel", mark=".qweight"),
    "aqlm": _Method(("aqlm",), "aqlm[gpu,cpu]", mark=".codes"),
    "auto-round": _Method(("auto_round",), "auto-round"),
    "bitsandbytes": _Method(("bitsandbytes",)),
    "compressed-tensors": _Method(("compressed_tensors",)),
    "eetq": _Method(("kernels",), "kernels", needs_gpu=True),
    "fbgemm_fp8": _Method(("fbgemm_gpu",), "fbgemm-gpu", needs_gpu=True),
    "gptq": _Method(("optimum", "gptqmodel"), "optimum gptqmodel", mark=".qweight"),
    "higgs": _Method(("flute", "fast_hadamard_transform"), "flute-kernel fast-hadamard-transform", needs_gpu=True),
    "hqq": _Method(("hqq",), "hqq"),
    "nvfp4": _Method(needs_gpu=True),
    "quanto": _Method(("optimum.quanto",), "optimum-quanto"),
    "quark": _Method(("quark",), "amd-quark"),
    "spqr": _Method(("spqr_quant",), "spqr_quant[gpu]", needs_gpu=True),
    "torchao": _Method(("torchao",), "torchao"),
    "vptq": _Method(("vptq",), "vptq", needs_gpu=True),
}  # fmt: skip
_ADVICE: Final = "take the model as it was before it was quantised"


def require_loadable(model: ModelFiles, *, gpus: int) -> None:
    """Raise ModelError for a base that this machine cannot load for the form of its weights. `gpus`: those to be used."""
    stated = _settings(model.config or {})
    if stated is None:
        return
    name, method = stated
    missing = [module for module in method.modules if not extras.is_installed(module)]
    what = f"model {model.path}: its weights are quantised by {name}"
    if missing and all(module.partition(".")[0] in extras.EXTRA_OF for module in missing):
        raise ModelError(f"{extras.sentence(f'{what}, which', *missing)}, or {_ADVICE}")
    if missing:
        raise ModelError(
            f"{what}, and {' and '.join(missing)} cannot be found; `pip install {method.packages}`, or {_ADVICE}"
        )
    if method.needs_gpu and not gpus:
        raise ModelError(f"{what}, which loads only on a GPU, and this run has none; {_ADVICE}")


def require_form(path: str, weights: Weights) -> None:
    """Raise ModelError for tensors that are not in the form which config.json names."""
    stated = _settings(weights.config)
    if stated is None:
        return
    name, method = stated
    mark = method.mark
    if name == "bitsandbytes":
        settings = weights.config["quantization_config"]
        mark = ".SCB" if settings.get("load_in_8bit") else ".quant_state."
    if mark and not any(mark in tensor for tensor in weights.shapes):
        raise ModelError(
            f"model {path}: config.json says that its weights are quantised by {name}, but none of them is (no tensor has "
            f"{mark} in its name); take the quantization_config out of config.json, or fetch both from the same place again"
        )


def _settings(config: Mapping[str, Any]) -> tuple[str, _Method] | None:
    """Return name and needs of the method that config.json names; None if it names none, or one that is not listed."""
    settings = config.get("quantization_config")
    if not isinstance(settings, dict):
        return None
    name = settings.get("quant_method")
    if name is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        # Older releases wrote no name.
        name = "bitsandbytes"
    method = _METHODS.get(name) if isinstance(name, str) else None
    return None if method is None else (str(name), method)
