"""Adapter: the weights of LoRA as PEFT loads them, and for some bases once more under vLLM's names.

write    load base + adapter, ask → write
prove    load base + exported adapter, ask         trained ≈ exported
"""

from __future__ import annotations

import gc
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kubetune.base import files
from kubetune.data.reading.hub import is_local
from kubetune.data.text.tokenizer_files import read_json
from kubetune.result.forms import programs
from kubetune.result.forms.plain import PlainForm

if TYPE_CHECKING:
    from torch import Tensor

    from kubetune.result.forms.draft import ExportDraft, ExportSource

# PEFT's names of an adapter's files.
WEIGHTS: Final = "adapter_model.safetensors"
SETTINGS: Final = "adapter_config.json"


class AdapterForm(PlainForm):
    """The form of an adapter on its own."""

    own_kind = "adapter"
    label = "Adapter"
    about = "Small; for PEFT, and for vLLM beside the base."

    def write(self, draft: ExportDraft) -> ExportDraft:
        """Write the adapter for the base by the name that others know."""
        from safetensors.torch import save_file

        from kubetune.models import weight_files
        from kubetune.models.padding_free import unwrap
        from kubetune.result.forms import weights
        from kubetune.result.forms.draft import name_of

        source = draft.source
        model, trained, effect = weights.load_and_ask(draft)
        # The weights are the checkpoint's. The settings name a base of this machine, which may be a cache.
        checkpoint = source.result.checkpoint
        tensors = weight_files.read(checkpoint / WEIGHTS)
        save_file(tensors, draft.folder / WEIGHTS, metadata={"format": "pt"})
        settings = json.loads((checkpoint / SETTINGS).read_text())
        settings["base_model_name_or_path"] = source.model.path
        settings["revision"] = source.model.revision
        _write_settings(draft.folder, settings)
        if is_local(source.model.path):
            source.tell(
                "the base is a folder of this machine, which others lack: --merge makes a model that stands alone"
            )
        # A classifier's, with its labels.
        if (checkpoint / "config.json").is_file():
            shutil.copyfile(checkpoint / "config.json", draft.folder / "config.json")
        weights.save_companions(draft, unwrap(model))

        base = _facts_on_base(source, tensors, settings)
        if base["text_of"] in programs.NAMES_IN_VLLM:
            _write_for_vllm(draft, tensors, settings, base["text_of"])
        return replace(
            draft,
            logits={"trained": trained},
            effect=effect,
            # Adapters keep the dtype that they were trained in.
            dtype=name_of(next(iter(tensors.values())).dtype),
            base=base,
        )

    def prove(self, draft: ExportDraft) -> ExportDraft:
        """Compare the trained adapter with the exported one."""
        from kubetune.models.padding_free import TOLERANCE
        from kubetune.result.forms import equivalence

        source = draft.source
        # The model that was written may still be in memory, in a circle of objects.
        gc.collect()
        source.tell("loading the exported adapter")
        reloaded = source.ask(source.load(draft.folder), draft.sample)
        comparison = equivalence.compare(
            "the trained adapter and the exported one",
            draft.logits["trained"],
            reloaded,
            TOLERANCE[source.dtype],
        )
        return draft.proved_by(comparison)


def _facts_on_base(
    source: ExportSource,
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the facts on the base that `programs.served_by` asks for."""
    described = read_json(source.result.tokenizer.files.get("config.json"))
    kind = str(described.get("model_type", "unknown"))
    # transformers trains only the text model of a model that sees, and leaves its part of the names out.
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
    draft: ExportDraft,
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    kind: str,
) -> None:
    """Write an adapter once more, under the names that vLLM's model of this kind has.

    transformers' text model    base_model.model.model.layers.0…
    vLLM's model that sees      base_model.model.model.language_model.layers.0…
    """
    from safetensors.torch import save_file

    prefix = programs.NAMES_IN_VLLM[kind]
    first = "base_model.model."
    renamed = {}
    for name, tensor in tensors.items():
        renamed[name.replace(f"{first}model.", first + prefix, 1)] = tensor
    folder = draft.folder / programs.FOR_VLLM
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
    draft.source.tell(
        f"vLLM reads this adapter in {programs.FOR_VLLM}/, under the names of all of {kind}; from the hub it takes "
        "what lies at the top and leaves that out without a word, so push --merge"
    )


FORM = AdapterForm()
