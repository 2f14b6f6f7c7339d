"""The weights of an export: an adapter, the base with it merged, or a model trained whole, each with its proof.

`WRITERS[kind](job, folder, sample)` writes weights, tokenizer and generation config into `folder`, and compares what it
wrote with what was trained. The base is in memory once:

    adapter   load base + adapter, ask → write → load base + exported adapter, ask          trained ≈ exported
    merged    load base + adapter, ask → merge, ask → write → load plain model, ask         trained ≈ merged = exported
    model     load the trained model, ask → write → load plain model, ask                   trained ≈ exported

What else lies in an export, and its name, is export.py's.
"""

from __future__ import annotations

import gc
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from kubetune import errors
from kubetune.base import fault_injection, files
from kubetune.config.schema import Config
from kubetune.data.reading.hub import is_local
from kubetune.data.text.tokenizer_files import read_json
from kubetune.models import loading, weight_files
from kubetune.models.padding_free import TOLERANCE, unwrap
from kubetune.models.spec import ModelSpec
from kubetune.result.inference.result import Result
from kubetune.result.publishing import equivalence, merge, serving
from kubetune.result.publishing.equivalence import Comparison, Sample
from kubetune.result.publishing.model_card import base_name

Kind = Literal["adapter", "merged", "model"]

# Called with a line for the user.
Tell = Callable[[str], None]

# Comparisons that prove an export, and notes: `effect` of the adapter, `dtype` of what is stored, kind of the `base`.
Proof = tuple[list[Comparison], dict[str, Any]]

# PEFT's names of an adapter's files.
WEIGHTS = "adapter_model.safetensors"
SETTINGS = "adapter_config.json"


@dataclass(frozen=True)
class Job:
    """One export: of which result, as what, and where it runs."""

    result: Result
    kind: Kind
    dtype: torch.dtype  # of the weights that are written
    device: torch.device
    tell: Tell  # called with a line for the user before each long part
    max_shard_bytes: int  # of a file of a model's weights; an adapter is one file
    gguf: str | None = None  # type of the GGUF file that is made of it
    quantize: str | None = None  # form of the weights that are made of it

    @property
    def config(self) -> Config:
        """Return the run's config, whose model is loaded in the dtype of the export."""
        model = self.spec_in(self.dtype).model
        return self.result.config.model_copy(update={"model": model})

    @property
    def dtype_name(self) -> str:
        """Return the dtype of what is written, as configs name it."""
        return _name(self.dtype)

    def spec_in(self, dtype: torch.dtype) -> ModelSpec:
        """Return the run's model, to be loaded in this dtype."""
        spec = self.result.spec
        return replace(spec, model=spec.model.model_copy(update={"dtype": _name(dtype)}))

    def load(self, folder: Path, *, quantized: bool = True) -> Any:
        """Load the model of a checkpoint, or of an exported adapter, with training's code.

        `quantized`: the base has as few bits as it had in training.
        """
        spec = self.spec_in(self.dtype)
        if not quantized:
            spec = replace(spec, quantization="none")
        settings = self.result.task.load_settings(spec, folder)
        with merge.quiet():
            return loading.load_trained(
                self.result.auto_class,
                spec,
                folder,
                self.device,
                **settings,
            )

    def ask(self, model: Any, sample: Sample) -> list[Tensor]:
        """Return the logits of a model on the rows of the proof."""
        return equivalence.ask(self.result.task, model, sample)


def _name(dtype: torch.dtype) -> str:
    """Return a dtype as configs name it."""
    return str(dtype).removeprefix("torch.")


def _write_adapter(job: Job, folder: Path, sample: Sample) -> Proof:
    """Write the adapter for the base as others call it, and prove that it is the trained one."""
    model, trained, effect = _load_and_ask(job, sample)

    # The weights are the checkpoint's. The settings name a base of this machine, which may be a cache.
    checkpoint = job.result.checkpoint
    tensors = weight_files.read(checkpoint / WEIGHTS)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    settings = json.loads((checkpoint / SETTINGS).read_text())
    settings["base_model_name_or_path"] = job.config.model.path
    settings["revision"] = job.config.model.revision
    _write_settings(folder, settings)
    if is_local(job.config.model.path):
        job.tell(
            "the base is a folder of this machine, which others lack: --merge makes a model that stands alone"
        )
    # A classifier's, with its labels.
    if (checkpoint / "config.json").is_file():
        shutil.copyfile(checkpoint / "config.json", folder / "config.json")
    _write_companions(job, folder, unwrap(model))

    # One model is in memory at a time.
    del model
    gc.collect()
    job.tell("loading the exported adapter")
    reloaded = job.ask(job.load(folder), sample)
    comparison = equivalence.compare(
        "the trained adapter and the exported one",
        trained,
        reloaded,
        TOLERANCE[job.dtype],
    )

    base = _kind_of_base(job, tensors, settings)
    if base["text_of"] in serving.NAMES_IN_VLLM:
        _write_for_vllm(job, folder, tensors, settings, base["text_of"])
    # Adapters keep the dtype that they were trained in.
    dtype = _name(next(iter(tensors.values())).dtype)
    return [comparison], {"effect": effect, "dtype": dtype, "base": base}


def _kind_of_base(
    job: Job,
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what serving.served_by asks about the base of an adapter."""
    described = read_json(job.result.tokenizer.files.get("config.json"))
    kind = str(described.get("model_type", "unknown"))
    # transformers trains the text model alone of a model that sees, and leaves its part of the names out.
    names_language_model = any("language_model" in name for name in tensors)
    is_of_text = "text_config" in described and not names_language_model
    return {
        "experts_of": kind if settings.get("target_parameters") else None,
        "text_of": kind if is_of_text else None,
    }


def _write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write adapter_config.json."""
    content = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    files.write_atomic(folder / SETTINGS, content)


def _write_for_vllm(
    job: Job,
    parent: Path,
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    kind: str,
) -> None:
    """Write an adapter once more, under the names that vLLM's model of this kind has.

    transformers' text model    base_model.model.model.layers.0…
    vLLM's model that sees      base_model.model.model.language_model.layers.0…
    """
    prefix = serving.NAMES_IN_VLLM[kind]
    first = "base_model.model."
    renamed = {}
    for name, tensor in tensors.items():
        renamed[name.replace(f"{first}model.", first + prefix, 1)] = tensor
    folder = parent / serving.FOR_VLLM
    folder.mkdir()
    save_file(renamed, folder / WEIGHTS, metadata={"format": "pt"})

    # The settings name what the adapter is on. Stacked experts are parameters, all else modules.
    parameters = []
    for name in settings["target_parameters"] or ():
        parameters.append(re.sub(r"^model\.", prefix, name))
    stacks = tuple(name.rpartition(".")[0] for name in parameters)
    # Each by its whole name: a pattern would miss the new ones, or hit layers that see.
    modules = set()
    for name in renamed:
        module = re.sub(r"(\.base_layer)?\.lora_.*", "", name.removeprefix(first))
        if not module.endswith(stacks):
            modules.add(module)

    targets = {"target_modules": sorted(modules), "target_parameters": parameters or None}
    _write_settings(folder, {**settings, **targets})
    job.tell(
        f"vLLM reads this adapter in {serving.FOR_VLLM}/, under the names of all of {kind}; from the hub it takes "
        "what lies at the top and leaves that out without a word, so push --merge"
    )


def _write_merged(job: Job, folder: Path, sample: Sample) -> Proof:
    """Write the base with the adapter in its weights, and prove that it computes what the two did."""
    model, trained, effect = _load_and_ask(job, sample)
    allowed = TOLERANCE[job.dtype]
    if merge.is_quantised(model):
        job.tell(
            f"the base is quantised ({job.config.quantization}): dequantising it to {job.dtype_name} before merging. "
            "The result has the weights that the adapter was trained on, not those of the original model"
        )
        if job.config.quantization == "8bit":
            allowed = max(allowed, equivalence.TOLERANCE_8BIT)
        model = merge.dequantise(model, job.result.checkpoint, job.dtype)

    job.tell("merging layer by layer")
    model = merge.merge_adapters(model, job.dtype)
    # Asked before it is written, so that merging and writing are judged apart.
    merged = job.ask(model, sample)
    _save_model(job, folder, model)
    del model
    gc.collect()
    reloaded = ask_reloaded(job, folder, sample)

    # Merging rounds the weights once more. Writing and reading changes nothing.
    of_merge = equivalence.compare(
        "adapter and merged model",
        trained,
        merged,
        allowed,
    )
    of_file = equivalence.compare(
        "merged model and its reloaded export",
        merged,
        reloaded,
        TOLERANCE[torch.float32],
    )
    return [of_merge, of_file], {"effect": effect}


def _write_full(job: Job, folder: Path, sample: Sample) -> Proof:
    """Write a model that was trained whole, and prove that it computes what the checkpoint does."""
    # The checkpoint is asked in the dtype that it is stored in, and then loaded anew in that of the export.
    job.tell("loading the trained model")
    facts = transformers.AutoConfig.from_pretrained(
        job.result.checkpoint, trust_remote_code=job.config.model.trust_remote_code
    )
    stored = facts.dtype or torch.float32
    model = loading.load_trained(
        job.result.auto_class,
        job.spec_in(stored),
        job.result.checkpoint,
        job.device,
    )
    trained = job.ask(model, sample)
    if stored != job.dtype:
        del model
        gc.collect()
        model = job.load(job.result.checkpoint)

    _save_model(job, folder, model)
    del model
    gc.collect()
    reloaded = ask_reloaded(job, folder, sample)
    comparison = equivalence.compare(
        "trained model and its reloaded export",
        trained,
        reloaded,
        TOLERANCE[job.dtype],
    )
    return [comparison], {}


def _load_and_ask(job: Job, sample: Sample) -> tuple[Any, list[Tensor], float | None]:
    """Return the base with its adapter, its logits, and how far the adapter moves them: what a merge must not lose.

    How far is None for a classifier: without its adapter its head is a random one.
    """
    job.tell(f"loading {base_name(job.config.model.path)} with its adapter")
    model = job.load(job.result.checkpoint)
    trained = job.ask(model, sample)
    if job.config.classifies:
        return model, trained, None
    with model.disable_adapter():
        base = job.ask(model, sample)
    return model, trained, equivalence.compare("", trained, base, 0.0).difference


def ask_reloaded(
    job: Job,
    folder: Path,
    sample: Sample,
) -> list[Tensor]:
    """Return the logits of an export, loaded as anybody would load it."""
    job.tell("loading the export with plain transformers")
    trusted = job.config.model.trust_remote_code
    model = job.result.auto_class.from_pretrained(
        folder, trust_remote_code=trusted, local_files_only=True
    )
    return job.ask(model.to(job.device), sample)


def _save_model(job: Job, folder: Path, model: Any) -> None:
    """Write a whole model. Raise EnvironmentFault, before anything is written, if the disk lacks room for it."""
    needed = 0
    for parameter in model.parameters():
        needed += parameter.numel() * parameter.element_size()

    free = files.free_bytes(folder)
    if free < needed:
        raise errors.EnvironmentFault(
            f"{folder.parent}: the model takes {needed:,} bytes, {free:,} are free"
        )

    job.tell(f"writing {needed / 1e9:.2f} GB")
    _write_companions(job, folder, model)
    model.save_pretrained(folder, max_shard_size=job.max_shard_bytes)
    fault_injection.reach("export.weights")


def _write_companions(job: Job, folder: Path, model: Any) -> None:
    """Write the tokenizer, and the generation config with the tokens that the model was taught to end with."""
    job.result.tokenizer.save(folder)
    if model.can_generate():
        # A lone token is a number there, not a list of one.
        ends = list(job.result.tokenizer.eos_ids)
        model.generation_config.eos_token_id = ends if len(ends) != 1 else ends[0]
        model.generation_config.pad_token_id = job.result.tokenizer.pad_id
        model.generation_config.save_pretrained(folder)


WRITERS: Final = {
    "adapter": _write_adapter,
    "merged": _write_merged,
    "model": _write_full,
}
