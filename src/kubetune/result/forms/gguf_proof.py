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
from torch import Tensor

from kubetune import errors
from kubetune.base import processes
from kubetune.result.forms import equivalence, llama_proof
from kubetune.result.forms.draft import ExportDraft, ExportSource
from kubetune.result.forms.equivalence import Sample
from kubetune.result.gguf_files import llama_cpp, quantise
from kubetune.result.gguf_files.model_file import facts_of, write_model
from kubetune.result.gguf_files.weight_types import file_name, plain_type


def plain_path(draft: ExportDraft) -> Path:
    """Return the file of plain weights: the one that was asked for, or one beside the weights that go afterwards."""
    assert draft.staging is not None
    plain = plain_type(draft.source.dtype_name)
    folder = draft.folder if draft.source.gguf == plain else draft.staging
    return folder / file_name(plain)


def prove_model(draft: ExportDraft) -> dict[str, Any]:
    """Return what llama.cpp says of a whole model beside transformers. Raise ModelError for a fault."""
    source = draft.source
    assert draft.staging is not None
    source.tell("asking transformers, then llama.cpp")
    tokenizer = source.result.tokenizer
    context = draft.notes["context"]
    sample = _fitting(draft.sample, context, tokenizer.vocab_size)
    plain = plain_path(draft)
    request = _request(source, sample, plain, context)
    dtype = _dtype_to_ask_in(source, plain)
    model = source.load_plain(draft.staging, dtype)
    reference = _ask_transformers(source, model, sample, request.prompts)
    # llama.cpp's model needs the memory.
    del model
    gc.collect()

    kind = plain_type(source.dtype_name)
    allowed = llama_proof.ALLOWED[kind]
    rounding = None
    if dtype != torch.float32:
        allowed = llama_proof.ALLOWED_ROUNDED
    elif source.dtype != torch.float32:
        load = partial(source.load_plain, draft.staging, source.dtype)
        rounding = partial(_rounding, source, sample, reference.logits, load)
    proof = llama_proof.LlamaProof()
    what = f"transformers and llama.cpp, {kind}"
    answer = llama_proof.check_plain(proof, what, request, reference, allowed, rounding)
    llama_proof.check_tokens(proof, tokenizer, request.texts, answer)
    llama_proof.note_chats(proof, tokenizer, answer)
    proof.notes["llama_cpp_python"] = answer.version

    # What quantisation costs says nothing of a file with a fault.
    if source.gguf != kind and not proof.faults:
        allowed = _allowed(draft, sample, proof.notes)
        quantised = replace(request, model=str(draft.folder / file_name(source.gguf or "")))
        what = f"transformers and llama.cpp, {source.gguf}"
        llama_proof.check_quantised(proof, what, quantised, reference, allowed)
    _require(proof.faults)
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
    assert draft.staging is not None
    source.tell("asking PEFT, then llama.cpp with the adapter beside its base")
    kind = plain_type(source.dtype_name)
    tokenizer = source.result.tokenizer
    plain = draft.staging / file_name(kind)
    written = write_model(source.result.base_folder, plain, kind, {}, list(tokenizer.eos_ids))
    sample = _fitting(draft.sample, written.context, tokenizer.vocab_size)
    request = _request(source, sample, plain, written.context)
    adapter = str(draft.folder / draft.notes["file"])
    request = replace(request, adapter=adapter, texts=[], chats=[])
    # A GGUF file of the base has its own weights, not those of 4 bits that training may have had.
    quantization = source.result.spec.quantization
    if quantization != "none":
        source.tell(
            f"the adapter was trained beside a base in {quantization}; the proof takes the base's own weights, "
            "as a GGUF file of the base has them"
        )
    model = source.load(draft.staging, quantized=False)
    reference = _ask_transformers(source, model, sample, request.prompts)
    del model
    gc.collect()

    allowed = llama_proof.ALLOWED_ROUNDED
    rounding = None
    if kind == "f32":
        allowed = llama_proof.ALLOWED[kind]
    elif _dtype_to_ask_in(source, plain) == torch.float32:
        in_full = replace(source, dtype=torch.float32, device=torch.device("cpu"))
        load = partial(in_full.load, draft.staging, quantized=False)
        rounding = partial(_rounding, source, sample, reference.logits, load)
    proof = llama_proof.LlamaProof()
    what = f"PEFT and llama.cpp, {kind}"
    answer = llama_proof.check_plain(proof, what, request, reference, allowed, rounding)
    proof.notes["llama_cpp_python"] = answer.version
    _require(proof.faults)
    return proof.facts()


def _fitting(sample: Sample, context: int, vocabulary: int) -> Sample:
    """Return the rows that fit into the context of the file. Raise ModelError if there is none."""
    fitting = equivalence.within(sample, context, vocabulary)
    if not fitting.batches:
        raise errors.ModelError(
            f"no row of the proof is as short as {context} tokens, the context of the file. Nothing was written."
        )
    return fitting


def _require(faults: list[str]) -> None:
    if faults:
        raise errors.ModelError(
            f"the GGUF file does not say what the trained model says: {'; '.join(faults)}. Nothing was written."
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


def _rounding(
    source: ExportSource,
    sample: Sample,
    logits: list[Tensor],
    load: Callable[[], Any],
) -> float:
    """Return how far the model in 16 bits is from itself in 32.

    `logits` are of one of the two, and `load` loads the other.
    """
    source.tell(f"asking what {source.dtype_name} costs without llama.cpp")
    others = source.ask(load(), sample)
    return llama_proof.compare("rounding", logits, others, 0.0).difference


def _ask_transformers(
    source: ExportSource,
    model: Any,
    sample: Sample,
    prompts: list[list[int]],
) -> llama_proof.Reference:
    """Return what transformers says of rows and prompts."""
    logits = source.ask(model, sample)
    ends = source.result.tokenizer.eos_ids
    greedy = [llama_proof.follow_greedily(model, prompt, ends) for prompt in prompts]
    return llama_proof.Reference(logits, greedy)


def _request(
    source: ExportSource,
    sample: Sample,
    model: Path,
    context: int,
) -> llama_cpp.LlamaRequest:
    """Return what llama.cpp is asked about a file."""
    tokenizer = source.result.tokenizer
    # As a row begins: behind a special token, or not.
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


def _allowed(draft: ExportDraft, sample: Sample, notes: dict[str, Any]) -> float:
    """Return how far a quantised model may be from the trained one: four times as far as its base, quantised alike."""
    try:
        base = _compare_base(draft, sample)
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


def _compare_base(draft: ExportDraft, sample: Sample) -> dict[str, Any]:
    """Return what the base loses when it is quantised alike, for provenance.json."""
    source = draft.source
    assert draft.staging is not None
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
    sample = equivalence.known_rows(sample, vocabulary, written.context)
    request = _request(source, sample, path, written.context)
    prompts = [ids for ids in request.prompts if max(ids) < vocabulary]
    answer = llama_cpp.ask(replace(request, prompts=prompts, texts=[], chats=[]))
    model = source.load_plain(base, _dtype_to_ask_in(source, plain))
    reference = _ask_transformers(source, model, sample, prompts)
    compared = llama_proof.compare("the base", reference.logits, answer.logits, 0.0)
    parted = llama_proof.partings(reference.greedy, answer.continuations)
    return {
        "difference": compared.difference,
        "agreement": compared.agreement,
        "greedy": llama_proof.noted(parted),
    }
