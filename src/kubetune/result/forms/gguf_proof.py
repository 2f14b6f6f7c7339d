"""Proof of a GGUF file: which rows and models are asked, and what is allowed. llama_proof.py compares the answers.

The file lies in the draft's folder, and the export for transformers that it was made of in its staging folder.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kubetune import errors
from kubetune.base import processes
from kubetune.result.forms import equivalence, llama_proof
from kubetune.result.forms.draft import ExportDraft, ExportSource
from kubetune.result.gguf_files import llama_cpp, quantise
from kubetune.result.gguf_files.model_file import facts_of, write_model
from kubetune.result.gguf_files.weight_types import file_name, plain_type


def plain_path(draft: ExportDraft) -> Path:
    """Return the file of plain weights: the one that was asked for, or one beside the weights that go afterwards."""
    plain = plain_type(draft.source.dtype_name)
    folder = draft.folder if draft.source.gguf == plain else draft.staging
    return folder / file_name(plain)


def prove_model(draft: ExportDraft) -> dict[str, Any]:
    """Return what llama.cpp says of a whole model beside transformers. Raise ModelError for a fault."""
    source = draft.source
    source.tell("asking transformers, then llama.cpp")
    plain = plain_path(draft)
    draft, request = _asked(draft, plain, draft.notes["context"])

    dtype = _dtype_to_ask_in(source, plain)
    allowed = llama_proof.ALLOWED[plain_type(source.dtype_name)]
    other = None
    if dtype != torch.float32:
        allowed = llama_proof.ALLOWED_ROUNDED
    elif source.dtype != torch.float32:
        other = partial(source.load_plain, draft.staging, source.dtype)

    load = partial(source.load_plain, draft.staging, dtype)
    reference = _ask_transformers(draft, load, request.prompts)
    proof = llama_proof.LlamaProof()
    answer = _check_plain(draft, proof, "transformers", request, reference, allowed, other)
    tokenizer = source.result.tokenizer

    llama_proof.check_tokens(proof, tokenizer, request.texts, answer)
    llama_proof.note_chats(proof, tokenizer, answer)
    proof.notes["llama_cpp_python"] = answer.version

    # What quantisation costs says nothing of a file with a fault.
    path = draft.folder / draft.notes["file"]
    if path != plain and not proof.faults:
        allowed = _allowed(draft, proof.notes)
        quantised = replace(request, model=str(path))
        what = f"transformers and llama.cpp, {source.gguf}"
        llama_proof.check_quantised(proof, what, quantised, reference, allowed)
    return proof.facts()


def why_no_base(draft: ExportDraft) -> str | None:
    """Return why no GGUF file can be made of an adapter's base; None if one can."""
    base = draft.source.result.base_folder
    if facts_of(base, any_weights=True).get("quantization_config"):
        return "the base's own weights are quantised, and no GGUF file is made of those"
    if not any(base.glob("*.safetensors")):
        return "the base has no weights in safetensors"
    return None


def prove_adapter(draft: ExportDraft) -> dict[str, Any]:
    """Return what llama.cpp says of base and adapter beside transformers and PEFT. Raise ModelError for a fault."""
    source = draft.source
    source.tell("asking PEFT, then llama.cpp with the adapter beside its base")

    kind = plain_type(source.dtype_name)
    ends = list(source.result.tokenizer.eos_ids)
    plain = draft.staging / file_name(kind)
    written = write_model(source.result.base_folder, plain, kind, {}, ends)
    draft, request = _asked(draft, plain, written.context)
    adapter = str(draft.folder / draft.notes["file"])
    request = replace(request, adapter=adapter, texts=[], chats=[])

    # A GGUF file of the base has its own weights, not those of 4 bits that training may have had.
    quantization = source.result.spec.quantization
    if quantization != "none":
        source.tell(
            f"the adapter was trained beside a base in {quantization}; the proof takes the base's own weights, "
            "as a GGUF file of the base has them"
        )

    load = partial(source.load, draft.staging, quantized=False)
    reference = _ask_transformers(draft, load, request.prompts)
    allowed = llama_proof.ALLOWED_ROUNDED
    other = None
    if kind == "f32":
        allowed = llama_proof.ALLOWED[kind]
    elif _dtype_to_ask_in(source, plain) == torch.float32:
        in_full = replace(source, dtype=torch.float32, device=torch.device("cpu"))
        other = partial(in_full.load, draft.staging, quantized=False)
    proof = llama_proof.LlamaProof()
    answer = _check_plain(draft, proof, "PEFT", request, reference, allowed, other)
    proof.notes["llama_cpp_python"] = answer.version
    return proof.facts()


def _asked(
    draft: ExportDraft, model: Path, context: int
) -> tuple[ExportDraft, llama_cpp.LlamaRequest]:
    """Return the draft with the rows that fit into the context of a file, and what llama.cpp is asked about the file.

    Raise ModelError if no row fits.
    """
    vocabulary = draft.source.result.tokenizer.vocab_size
    fitting = equivalence.within(draft.sample, context, vocabulary)
    if not fitting.batches:
        raise errors.ModelError(
            f"no row of the proof is as short as {context} tokens, the context of the file. Nothing was written."
        )
    draft = replace(draft, sample=fitting)
    return draft, _request(draft, model, context)


def _check_plain(
    draft: ExportDraft,
    proof: llama_proof.LlamaProof,
    who: str,
    request: llama_cpp.LlamaRequest,
    reference: llama_proof.Reference,
    allowed: float,
    other: Callable[[], Any] | None,
) -> llama_cpp.LlamaAnswer:
    """Compare a file of plain weights with `who`. `other` loads the model in the other one of 16 and 32 bits."""

    def rounding() -> float:
        """Return how far the model in 16 bits is from itself in 32."""
        assert other is not None
        draft.source.tell(f"asking what {draft.source.dtype_name} costs without llama.cpp")
        others = draft.source.ask(other(), draft.sample)
        return llama_proof.compare("rounding", reference.logits, others, 0.0).difference

    what = f"{who} and llama.cpp, {plain_type(draft.source.dtype_name)}"
    return llama_proof.check_plain(
        proof, what, request, reference, allowed, None if other is None else rounding
    )


def _dtype_to_ask_in(source: ExportSource, plain: Path) -> torch.dtype:
    """Return float32 if the memory holds the model in it; else the export's dtype. `plain`: its file of plain weights."""
    dtype = torch.float32
    # The plain file has about as many bytes as the model in its own dtype.
    needed = plain.stat().st_size // source.dtype.itemsize * dtype.itemsize
    if processes.free_memory_bytes() < needed:
        source.tell(
            f"in float32 the model would take {needed / 1e9:.1f} GB, so transformers is asked in {source.dtype_name}"
        )
        return source.dtype
    return dtype


def _ask_transformers(
    draft: ExportDraft,
    load: Callable[[], Any],
    prompts: list[list[int]],
) -> llama_proof.Reference:
    """Return what transformers says of the rows and of prompts. The model goes then: llama.cpp's needs the memory."""
    source = draft.source
    model = load()
    logits = source.ask(model, draft.sample)
    ends = source.result.tokenizer.eos_ids
    greedy = [llama_proof.follow_greedily(model, prompt, ends) for prompt in prompts]

    del model
    gc.collect()
    return llama_proof.Reference(logits, greedy)


def _request(draft: ExportDraft, model: Path, context: int) -> llama_cpp.LlamaRequest:
    """Return what llama.cpp is asked about a file."""
    tokenizer = draft.source.result.tokenizer
    sample = draft.sample
    # As a row begins: after a special token, or not.
    first = int(sample.batches[0].input_ids[0])
    texts = [tokenizer.added_tokens.get(first, "") + llama_proof.PROBE]
    for batch in sample.batches:
        texts.append(tokenizer.decode(batch.input_ids.tolist(), skip_special_tokens=False))
    template = ""
    chats: list[list[tuple[str, str]]] = []
    if tokenizer.chat is not None:
        template = tokenizer.require_chat().source
        chats = [list(chat) for chat in llama_proof.CHATS]
    return llama_cpp.LlamaRequest(
        str(model),
        llama_proof.rows_of(sample),
        prompts=llama_proof.prompts_of(tokenizer, sample, context),
        length=llama_proof.LENGTH,
        texts=texts,
        template=template,
        chats=chats,
        vocabulary=tokenizer.vocab_size,
        threads=torch.get_num_threads(),
    )


def _allowed(draft: ExportDraft, notes: dict[str, Any]) -> float:
    """Return how far a quantised model may be from the trained one: four times as far as its base, quantised alike."""
    try:
        base = _compare_base(draft)
    except (errors.KubetuneError, OSError) as error:
        reason = " ".join(str(error).split())
        notes["base_quantised_alike"] = f"not compared: {reason}"
        draft.source.tell(f"the base is not quantised alike for comparison: {reason}")
        # q4_k_m, iq3_s → 4, 3
        bits = int(re.sub(r"\D", "", draft.source.gguf or "")[0])
        return llama_proof.WITHOUT_BASE[bits]

    notes["base_quantised_alike"] = base
    lost: float = base["difference"]
    return max(llama_proof.LEAST_ALLOWED, llama_proof.SHARE_OF_BASE * lost)


def _compare_base(draft: ExportDraft) -> dict[str, Any]:
    """Return what the base loses when it is quantised alike, for provenance.json."""
    source = draft.source
    base = source.require_base()
    source.tell("quantising the base alike")
    vocabulary = facts_of(base)["vocab_size"]
    folder = draft.staging / "base"
    folder.mkdir()
    plain = folder / "plain.gguf"
    path = folder / "base.gguf"
    written = write_model(base, plain, plain_type(source.dtype_name), {})
    quantise.write(base, plain, path, source.gguf or "", {}, [])

    # The base may lack tokens that were added for training.
    sample = equivalence.known_rows(draft.sample, vocabulary, written.context)
    draft = replace(draft, sample=sample)
    request = _request(draft, path, written.context)
    prompts = [ids for ids in request.prompts if max(ids) < vocabulary]
    answer = llama_cpp.ask(replace(request, prompts=prompts, texts=[], chats=[]))
    load = partial(source.load_plain, base, _dtype_to_ask_in(source, plain))
    reference = _ask_transformers(draft, load, prompts)
    compared = llama_proof.compare("the base", reference.logits, answer.logits, 0.0)
    parted = llama_proof.partings(reference.greedy, answer.continuations)
    return {
        "difference": compared.difference,
        "agreement": compared.agreement,
        "greedy": llama_proof.noted(parted),
    }
