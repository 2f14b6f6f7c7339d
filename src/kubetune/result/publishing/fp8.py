"""Export weights in FP8, in the form of compressed-tensors, which vLLM and transformers load. No data is needed.

Each row of a linear layer is scaled by its largest number and rounded to e4m3. Whoever runs the model rounds the inputs
of these layers in the same way, token by token (FP8_DYNAMIC of compressed-tensors). Embeddings and the head stay.

The base is the measure of the cost: quantised alike, the logits of the model may move twice as far as those of the base.
"""

from __future__ import annotations

import gc
import shutil
import warnings
from pathlib import Path
from typing import Any, Final

from kubetune import errors
from kubetune.base import fault_injection
from kubetune.data.reading import hub
from kubetune.models.padding_free import TOLERANCE
from kubetune.models.patches import Replaced
from kubetune.result.publishing import equivalence
from kubetune.result.publishing.equivalence import Comparison, Sample
from kubetune.result.publishing.writers import Job, ask_reloaded

# How far logits may move, relative to their norm.
WITHOUT_BASE: Final = 0.2  # if the base cannot be quantised for comparison
LEAST_ALLOWED: Final = 2e-2  # a smaller move cannot be distinguished from rounding
SHARE_OF_BASE: Final = 2.0  # times as far as the base


def write(
    job: Job, staging: Path, folder: Path, sample: Sample
) -> tuple[dict[str, Any], list[Comparison]]:
    """Write the export in `staging` to `folder` with weights in FP8. Return facts for its provenance, and the proof."""
    with _without_progress_bars():
        return _write(job, staging, folder, sample)


def _without_progress_bars() -> Replaced:
    """Return the context in which tqdm draws nothing. compressed-tensors has no switch for its bars."""
    from tqdm import tqdm

    original = tqdm.__init__

    def hidden(bar: Any, *arguments: Any, **settings: Any) -> None:
        original(bar, *arguments, **{**settings, "disable": True})

    return Replaced(tqdm, "__init__", hidden)


def _write(
    job: Job, staging: Path, folder: Path, sample: Sample
) -> tuple[dict[str, Any], list[Comparison]]:
    job.tell("rounding the weights to FP8")
    model = _load(job, staging)
    plain = job.ask(model, sample)
    layers = quantise(model)
    quantised = job.ask(model, sample)
    _save(model, staging, folder)
    # The memory is needed for the reloaded model.
    del model
    gc.collect()

    reloaded = ask_reloaded(job, folder, sample)
    notes: dict[str, Any] = {"form": "fp8", "layers": layers, "bytes_before": _bytes(staging)}
    comparisons = [
        equivalence.compare(
            "model and its weights in FP8", plain, quantised, _allowed(job, sample, notes)
        ),
        equivalence.compare(
            "weights in FP8 and their reloaded export", quantised, reloaded, TOLERANCE[job.dtype]
        ),
    ]
    return notes, comparisons


def _load(job: Job, folder: Path) -> Any:
    """Return the model of a folder on the job's device. No code of the folder is run."""
    model = job.result.auto_class.from_pretrained(
        folder, dtype=job.dtype, local_files_only=True, trust_remote_code=False
    )
    return model.to(job.device)


def quantise(model: Any) -> int:
    """Let a model compute with weights in FP8, which are still held in its dtype. Return the number of layers.

    Raise ModelError for a mixture whose experts are no linear layers, as they would keep most of the size.
    """
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationStatus,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    stacked = [name for name, weight in model.named_parameters() if weight.dim() > 2]
    if stacked:
        raise errors.ModelError(
            f"{stacked[0]} holds many matrices in one, as experts of a mixture do, and is not quantised to FP8. Nothing "
            "was written."
        )
    scheme = preset_name_to_scheme("FP8_DYNAMIC", ["Linear"])
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=["lm_head"],
        quantization_status=QuantizationStatus.FROZEN,
    )
    apply_quantization_config(model, config)
    # Scales follow from the weights, row by row, so no data is needed to find them.
    layers = 0
    for layer in model.modules():
        if getattr(layer, "quantization_scheme", None) is None:
            continue
        weight = layer.weight.data.float()
        smallest = weight.amin(1, keepdim=True)
        largest = weight.amax(1, keepdim=True)
        scale, _ = calculate_qparams(smallest, largest, layer.quantization_scheme.weights)
        layer.weight_scale.data.copy_(scale)
        layers += 1
    return layers


def _save(model: Any, staging: Path, folder: Path) -> None:
    """Write the model in FP8, and copy the other files of the export."""
    from compressed_tensors.compressors import ModelCompressor

    compressor = ModelCompressor.from_pretrained_model(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    fault_injection.reach("fp8.weights")
    for path in staging.iterdir():
        # Chat templates with a name have a folder of their own.
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
        elif ".safetensors" not in path.name and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)


def _bytes(folder: Path) -> int:
    """Return the size of the weights in a folder."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _allowed(job: Job, sample: Sample, notes: dict[str, Any]) -> float:
    """Return how far the logits may move: twice as far as those of the base, quantised alike."""
    try:
        base = _compare_base(job, sample)
    except (errors.KubetuneError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        notes["base_quantised_alike"] = f"not compared: {reason}"
        job.tell(f"the base is not quantised alike for comparison: {reason}")
        return WITHOUT_BASE
    notes["base_quantised_alike"] = base.difference
    return max(LEAST_ALLOWED, SHARE_OF_BASE * base.difference)


def _compare_base(job: Job, sample: Sample) -> Comparison:
    """Return how far the base moves when it is quantised alike."""
    model = job.result.config.model
    folder = hub.find_files(model, model.path, ("config.json",))["config.json"].parent
    if folder == job.result.checkpoint:
        raise errors.ModelError("it is not on this machine")
    job.tell("rounding the base alike")
    base = _load(job, folder)
    # An adapter may bring tokens that the base does not have.
    size = base.get_input_embeddings().weight.shape[0]
    batches = [batch for batch in sample.batches if int(batch.input_ids.max()) < size]
    if not batches:
        raise errors.ModelError("the rows have tokens that it does not know")
    sample = Sample(tuple(batches), sample.origin)
    plain = job.ask(base, sample)
    quantise(base)
    return equivalence.compare("the base", plain, job.ask(base, sample), 0.0)
