"""gguf: one file for llama.cpp and Ollama, made of an export for transformers that was proved before.

    require    settings and names of files; `require_known` reads the model's config and tokenizer
    write      plain file → quantised file
    prove      llama.cpp beside transformers → beside the base quantised alike (gguf_proof)

A difference from the export for transformers is a fault of the file. For `--gguf q4_0` of a run in bf16 there are
meanwhile:

    .STEP-gguf-q4_0.1a2b.tmp/
        model-q4_0.gguf                    stays
        transformers/
            model.safetensors, …           the export for transformers
            model-bf16.gguf                the plain file
            base/{plain, base}.gguf        the base, plain and quantised alike

A kill leaves nothing else, and the next export of that name deletes the folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kubetune import errors, extras
from kubetune.config.schema import LoraConfig, ModelConfig
from kubetune.data.reading import hub
from kubetune.result.forms import gguf_words, programs
from kubetune.result.forms.form import CardModel, CardParts, Form
from kubetune.result.forms.wanted import Kind, TrainedModel, WantedExport, base_name
from kubetune.result.gguf_files import llama_cpp, quantise
from kubetune.result.gguf_files.weight_types import (
    ADAPTER,
    DTYPES,
    file_name,
    plain_type,
    require_type,
)

if TYPE_CHECKING:
    from kubetune.result.forms.draft import ExportDraft
    from kubetune.result.inference.result import Result


class GgufForm(Form):
    """The form of a GGUF file."""

    key = "gguf"
    label = "GGUF"
    about = "One file for llama.cpp and Ollama, proved by llama.cpp if it is installed."

    def require(self, trained: TrainedModel, wanted: WantedExport) -> None:
        """Raise an error for a type or a model that no GGUF file of ours has."""
        kind = wanted.gguf or ""
        require_type(kind)
        if kind == ADAPTER and wanted.merged:
            raise errors.ConfigError(
                "--gguf adapter writes the adapter alone: leave --merge out. Nothing was written."
            )
        if kind in DTYPES and wanted.dtype is not None:
            raise errors.ConfigError(
                f"--gguf {kind} says the type of the weights already: leave --dtype out. Nothing was written."
            )
        extras.require(f"--gguf {kind}", "gguf")
        if not trained.answers_text:
            raise errors.ModelError(
                f"{trained.task} is not written as GGUF, only models that answer text with text. Nothing was written."
            )
        if trained.model.trust_remote_code:
            raise errors.ModelError(
                "a model with code of its own is not written as GGUF, since llama.cpp has code for each family. Nothing "
                "was written."
            )
        quantise.require(kind)
        if kind == ADAPTER:
            require_loadable(trained.lora)

    def require_known(self, result: Result) -> None:
        """Raise ModelError if llama.cpp lacks the model's family, a setting of it, or its tokenizer."""
        from kubetune.result.gguf_files.model_file import require_known

        described = result.base_folder
        if result.trained.lora is None:
            described = result.checkpoint
        require_known(described / "config.json", result.tokenizer)

    def kind(self, lora: LoraConfig | None, wanted: WantedExport) -> Kind:
        """Return the weights that the file is made of."""
        if wanted.gguf == ADAPTER:
            return "adapter"
        return super().kind(lora, wanted)

    def dtype(self, wanted: WantedExport) -> str | None:
        """Return the dtype that a plain type of weights holds exactly."""
        return DTYPES.get(wanted.gguf or "", wanted.dtype)

    def served_by(self, draft: ExportDraft) -> tuple[str, ...]:
        """Return the programs that load it."""
        del draft
        return (programs.GGUF, programs.OLLAMA)

    def write(self, draft: ExportDraft) -> ExportDraft:
        """Write the file, and keep the licence of the export that it is made of."""
        notes = _write_adapter(draft) if draft.source.gguf == ADAPTER else _write_model(draft)
        for name in draft.licences:
            (draft.staging / name).rename(draft.folder / name)
        return replace(draft, notes=notes, gguf_file=notes["file"])

    def prove(self, draft: ExportDraft) -> ExportDraft:
        """Run the file in llama.cpp. If that cannot be, note why. Raise ModelError for a fault of the file."""
        from kubetune.result.forms import gguf_proof

        reason = llama_cpp.missing()
        if reason is None and draft.source.gguf == ADAPTER:
            reason = gguf_proof.why_no_base(draft)
        if reason is not None:
            draft.source.tell(f"not proved by running it: {reason}")
            return replace(draft, notes={**draft.notes, "not_proved": reason})
        if draft.source.gguf == ADAPTER:
            proof = gguf_proof.prove_adapter(draft)
        else:
            proof = gguf_proof.prove_model(draft)
        return replace(draft, notes={**draft.notes, "proof": proof})

    def describe(self, facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield what the file is, and the results of running it in llama.cpp."""
        file = facts[self.key]["file"]
        yield "weights", f"{file}, {facts['kind']}, {facts['files'][file]['bytes']:,} bytes"
        yield from gguf_words.lines(facts[self.key])

    def card(self, facts: Mapping[str, Any], model: CardModel) -> CardParts:
        """Return how to run the file, and the proof by llama.cpp."""
        del model
        notes = facts[self.key]
        return CardParts(
            f"a GGUF file ({notes['file']})",
            (f"## How to run\n\n{gguf_words.how_to_run(notes)}",),
            (gguf_words.proof_by_llama_cpp(notes),),
        )


def require_loadable(lora: LoraConfig | None) -> None:
    """Raise ModelError for a run whose adapter llama.cpp does not load."""
    reason = None
    if lora is None:
        reason = "the run trained every weight, so there is no adapter"
    elif lora.use_dora:
        reason = "llama.cpp loads no adapters with weights of DoRA"
    elif lora.modules_to_save:
        reason = f"llama.cpp loads no adapters with modules trained whole ({', '.join(lora.modules_to_save)})"
    if reason is not None:
        raise errors.ModelError(
            f"{reason}; `--gguf bf16` writes the whole model. Nothing was written."
        )


def _write_model(draft: ExportDraft) -> dict[str, Any]:
    """Write the file of a whole model. Return notes for provenance.json."""
    from kubetune.result.forms import gguf_proof, llama_proof
    from kubetune.result.gguf_files.model_file import write_model

    source = draft.source
    kind = source.gguf or ""
    about = _general_keys(source.result.trained.name, source.model)
    ends = list(source.result.tokenizer.eos_ids)
    path = draft.folder / file_name(kind)
    plain = gguf_proof.plain_path(draft)
    source.tell(f"writing {plain.name}")
    written = write_model(draft.staging, plain, plain_type(source.dtype_name), about, ends)
    notes = {
        "file": path.name,
        "type": kind,
        "architecture": written.arch,
        "tensors": written.tensors,
        "context": written.context,
    }
    asked = llama_proof.asked_to_think(source.result.tokenizer)
    if asked is not None:
        notes["asked_to_think"] = asked
        source.tell(
            "llama.cpp's programs ask the chat template to think, which training did not: run them with "
            f"{gguf_words.WITHOUT_THINKING}"
        )
    longest = source.result.trained.data.max_length
    if written.context < longest:
        source.tell(
            f"llama.cpp has no window of attention in this family, so the file is for {written.context:,} tokens, as "
            f"many as the window; the run trained on up to {longest:,}"
        )
    if path != plain:
        source.tell(f"writing {path.name}")
        kept = quantise.write(draft.staging, plain, path, kind, about, ends)
        notes["kept_in_16_bits"] = list(kept)
    return notes


def _write_adapter(draft: ExportDraft) -> dict[str, Any]:
    """Write the file of an adapter. Return notes for provenance.json."""
    from kubetune.result.gguf_files.lora_file import write_adapter
    from kubetune.result.gguf_files.model_file import facts_of

    source = draft.source
    path = draft.folder / file_name(ADAPTER)
    described = facts_of(source.result.base_folder, any_weights=True)
    source.tell(f"writing {path.name}")
    pairs = write_adapter(
        draft.staging, described, path, _general_keys(source.result.trained.name, source.model)
    )
    return {"file": path.name, "type": ADAPTER, "pairs": pairs}


def _general_keys(name_of_run: str | None, model: ModelConfig) -> dict[str, str]:
    """Return the keys of `general.` that say what the model is. `model`: its base."""
    base = base_name(model.path)
    about = {
        "name": name_of_run or base,
        "finetune": "kubetune",
        **_licence_of(model),
    }
    # Qwen/Qwen3-8B; a folder of this machine has one part.
    organization, _, name = base.rpartition("/")
    if organization:
        about["base_model.0.name"] = name
        about["base_model.0.organization"] = organization
        about["base_model.0.repo_url"] = f"https://huggingface.co/{base}"
    return about


def _licence_of(model: ModelConfig) -> dict[str, str]:
    """Return the licence that the base's card names; nothing if it has no card, or none can be asked for."""
    try:
        card = hub.find_files(model, model.path, ("README.md",)).get("README.md")
    except errors.KubetuneError:
        return {}
    if card is None:
        return {}
    # The card's head is YAML between two lines of dashes, such as
    #     ---
    #     license: other
    #     license_name: "qwen"         → license.name
    #     ---
    parts = card.read_text("utf-8", errors="replace").split("---")
    licence = {}
    for line in "".join(parts[1:2]).splitlines():
        match = re.match(r"(license|license_name|license_link): *(\S.*)", line)
        if match is not None:
            key = match[1].replace("license_", "license.")
            licence[key] = match[2].strip().strip("\"'")
    return licence


FORM = GgufForm()
