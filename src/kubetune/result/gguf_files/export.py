"""An export as GGUF: from the safetensors of an ordinary export to the file, and its proof.

    prepare     before a model is loaded: everything that can be refused
    write       plain file → llama.cpp beside transformers → quantised file → beside the base quantised alike

The ordinary export lies in a folder that goes afterwards. It was proved before (publishing/writers.py), so what differs
here is the fault of the file. For `--gguf q4_0` of a run in bf16 there are meanwhile:

    .STEP-gguf-q4_0.1a2b.tmp/
        model-q4_0.gguf                    stays
        transformers/
            model.safetensors, …           the ordinary export
            model-bf16.gguf                the plain file
            base/{plain, base}.gguf        the base, plain and quantised alike

A kill leaves nothing else, and the next export of that name deletes the folder.
"""

from __future__ import annotations

import gc
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from kubetune import errors
from kubetune.base import processes
from kubetune.config.schema import ModelConfig
from kubetune.data.reading import hub
from kubetune.result.fits import GGUF_ADAPTER, require_gguf, require_gguf_type
from kubetune.result.gguf_files import card, llama_cpp, quantise
from kubetune.result.gguf_files import proof as proofs
from kubetune.result.inference.result import Result
from kubetune.result.publishing.equivalence import Sample
from kubetune.result.publishing.model_card import base_name
from kubetune.result.publishing.writers import Job

# Plain types, and the dtype of weights that they hold exactly.
DTYPES: Final = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def dtype_of(kind: str, dtype: str | None) -> str | None:
    """Return the dtype of the weights that the file is made of. Raise ConfigError for an unknown type, or another dtype."""
    require_gguf_type(kind)
    if kind not in DTYPES:
        return dtype
    if dtype is not None:
        raise errors.ConfigError(
            f"--gguf {kind} says the type of the weights already: leave --dtype out. Nothing was written."
        )
    return str(DTYPES[kind]).removeprefix("torch.")


def file_name(kind: str) -> str:
    """Return the name of the file."""
    return "adapter.gguf" if kind == GGUF_ADAPTER else f"model-{kind}.gguf"


def prepare(result: Result, kind: str, *, merged: bool) -> bool:
    """Return whether adapters are merged for this file.

    Raise an error for whatever makes no GGUF file of this result, before its model is loaded.
    """
    lora = result.trained.lora
    if kind == GGUF_ADAPTER and merged:
        raise errors.ConfigError(
            "--gguf adapter writes the adapter alone: leave --merge out. Nothing was written."
        )
    config = result.config
    require_gguf(
        kind,
        lora,
        config.model,
        config.task_name,
        answers_text=config.answers_text,
    )
    _require_known(result)
    return kind != GGUF_ADAPTER and lora is not None


def _require_known(result: Result) -> None:
    """Raise ModelError where llama.cpp does not have the model's family, a setting of it, or its tokenizer."""
    from kubetune.result.gguf_files.families import family_of, keys_of
    from kubetune.result.gguf_files.vocabulary import read_vocabulary
    from kubetune.result.gguf_files.writer import facts_of

    # The weights are not read: config and tokenizer say it all.
    described = _folder_of(result) / "config.json"
    with tempfile.TemporaryDirectory(prefix="kubetune-gguf-") as name:
        folder = Path(name)
        (folder / "config.json").write_bytes(described.read_bytes())
        result.tokenizer.save(folder)
        facts = facts_of(folder, any_weights=True)
        keys_of(facts, family_of(facts))
        rows = max(facts["vocab_size"], result.tokenizer.vocab_size)
        read_vocabulary(folder, rows)


def _folder_of(result: Result) -> Path:
    """Return the folder on this machine that holds the config of the model: the base's, or the checkpoint."""
    if result.trained.lora is None:
        return result.checkpoint
    return _base_folder(result)


def _base_folder(result: Result) -> Path:
    model = result.config.model
    return hub.find_files(model, model.path, ("config.json",))["config.json"].parent


def write(
    job: Job,
    staging: Path,
    folder: Path,
    sample: Sample,
    kind: str,
) -> dict[str, Any]:
    """Write the GGUF file of the ordinary export in `staging` to `folder`; prove it, and return the facts of both.

    Raise ModelError where llama.cpp says otherwise than transformers.
    """
    about = _about(job)
    if kind == GGUF_ADAPTER:
        return _write_adapter(job, staging, folder, sample, about)
    return _write_model(job, staging, folder, sample, kind, about)


def _about(job: Job) -> dict[str, str]:
    """Return the keys of `general.` that say what the model is."""
    base = base_name(job.config.model.path)
    about = {
        "name": job.result.trained.name or base,
        "finetune": "kubetune",
        **_licence_of(job.config.model),
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


def plain_kind(dtype: torch.dtype) -> str:
    """Return the plain type that holds weights of a dtype exactly."""
    return next(kind for kind, held in DTYPES.items() if held == dtype)


def _write_model(
    job: Job,
    staging: Path,
    folder: Path,
    sample: Sample,
    kind: str,
    about: dict[str, str],
) -> dict[str, Any]:
    """Write the file of a whole model, and prove it."""
    from kubetune.result.gguf_files.writer import write_model

    path = folder / file_name(kind)
    plain = plain_kind(job.dtype)
    # Beside the weights that go afterwards, unless it is what was asked for.
    plain_path = path if kind == plain else staging / file_name(plain)
    ends = list(job.result.tokenizer.eos_ids)
    job.tell(f"writing {plain_path.name}")
    written = write_model(staging, plain_path, plain, about, ends)
    facts = {
        "file": path.name,
        "type": kind,
        "architecture": written.arch,
        "tensors": written.tensors,
        "context": written.context,
    }
    asked = proofs.asked_to_think(job.result.tokenizer)
    if asked is not None:
        facts["asked_to_think"] = asked
        job.tell(
            "llama.cpp's programs ask the chat template to think, which training did not: run them with "
            f"{card.WITHOUT_THINKING}"
        )
    longest = job.config.data.max_length
    if written.context < longest:
        job.tell(
            f"llama.cpp has no window of attention in this family, so the file is for {written.context:,} tokens, as "
            f"many as the window; the run trained on up to {longest:,}"
        )
    if kind != plain:
        job.tell(f"writing {path.name}")
        facts["kept_in_16_bits"] = list(
            quantise.write(staging, plain_path, path, kind, about, ends)
        )

    reason = llama_cpp.missing()
    if reason is not None:
        job.tell(f"not proved by running it: {reason}")
        return {**facts, "not_proved": reason}
    files = Files(staging, plain_path, path, kind, written.context)
    return {**facts, "proof": _prove_model(job, sample, files)}


@dataclass(frozen=True)
class Files:
    """What is compared: a folder that transformers loads, and what was made of it."""

    folder: Path
    plain: Path  # weights as they are
    path: Path  # weights of the type `kind`
    kind: str
    context: int  # tokens that both are made for


def _prove_model(job: Job, sample: Sample, files: Files) -> dict[str, Any]:
    """Return what llama.cpp says of the files beside transformers. Raise ModelError for a fault."""
    job.tell("asking transformers, then llama.cpp")
    tokenizer = job.result.tokenizer
    sample = _fitting(sample, files.context, tokenizer.vocab_size)
    request = _request(job, sample, files.plain, files.context)
    dtype = _dtype_to_ask_in(job, files.plain)
    model = _load_plain(job, files.folder, dtype)
    reference = _ask_transformers(job, model, sample, request.prompts)
    # llama.cpp's model needs the memory.
    del model
    gc.collect()

    plain = plain_kind(job.dtype)
    allowed = proofs.ALLOWED[plain]
    rounding = None
    if dtype != torch.float32:
        allowed = proofs.ALLOWED_ROUNDED
    elif job.dtype != torch.float32:
        load = partial(_load_plain, job, files.folder, job.dtype)
        rounding = partial(_rounding, job, sample, reference.logits, load)
    what = f"transformers and llama.cpp, {plain}"
    proof = proofs.Proof()
    answer = proofs.check_plain(proof, what, request, reference, allowed, rounding)
    proofs.check_tokens(proof, tokenizer, request.texts, answer)
    proofs.note_chats(proof, tokenizer, answer)
    proof.notes["llama_cpp_python"] = answer.version

    # What quantisation costs says nothing of a file with a fault.
    if files.kind != plain and not proof.faults:
        allowed = _allowed(job, sample, files, proof.notes)
        quantised = replace(request, model=str(files.path))
        what = f"transformers and llama.cpp, {files.kind}"
        proofs.check_quantised(proof, what, quantised, reference, allowed)
    _require(proof.faults)
    return proof.facts()


def _fitting(sample: Sample, context: int, vocabulary: int) -> Sample:
    """Return the rows that fit into the context of the file. Raise ModelError if there is none."""
    fitting = proofs.within(sample, context, vocabulary)
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


def _dtype_to_ask_in(job: Job, plain: Path) -> torch.dtype:
    """Return float32 if the memory holds the model in it; else the export's dtype. `plain`: its file of plain weights."""
    dtype = torch.float32
    # The plain file has about as many bytes as the model in its own dtype.
    needed = plain.stat().st_size // job.dtype.itemsize * dtype.itemsize
    if processes.free_memory_bytes() < needed:
        job.tell(
            f"in float32 the model would take {needed / 1e9:.1f} GB, so transformers is asked in {job.dtype_name}"
        )
        return job.dtype
    return dtype


def _load_plain(job: Job, folder: Path, dtype: torch.dtype) -> Any:
    """Load a whole model with plain transformers."""
    return job.result.auto_class.from_pretrained(
        folder, dtype=dtype, local_files_only=True, trust_remote_code=False
    )


def _rounding(
    job: Job,
    sample: Sample,
    logits: list[Tensor],
    load: Callable[[], Any],
) -> float:
    """Return how far the model in 16 bits is from itself in 32.

    `logits` are of one of the two, and `load` loads the other.
    """
    job.tell(f"asking what {job.dtype_name} costs without llama.cpp")
    others = job.ask(load(), sample)
    return proofs.compare("rounding", logits, others, 0.0).difference


def _ask_transformers(
    job: Job,
    model: Any,
    sample: Sample,
    prompts: list[list[int]],
) -> proofs.Reference:
    """Return what transformers says of rows and prompts."""
    logits = job.ask(model, sample)
    ends = job.result.tokenizer.eos_ids
    greedy = [proofs.follow_greedily(model, prompt, ends) for prompt in prompts]
    return proofs.Reference(logits, greedy)


def _request(
    job: Job,
    sample: Sample,
    model: Path,
    context: int,
) -> llama_cpp.Request:
    """Return what llama.cpp is asked about a file."""
    tokenizer = job.result.tokenizer
    # As a row begins: behind a special token, or not.
    first = int(sample.batches[0].input_ids[0])
    texts = [tokenizer.added_tokens.get(first, "") + proofs.PROBE]
    for batch in sample.batches:
        texts.append(tokenizer.decode(batch.input_ids.tolist(), skip_special_tokens=False))
    template = ""
    chats: list[list[tuple[str, str]]] = []
    if tokenizer.chat is not None:
        template = tokenizer.require_chat().source
        chats = [list(chat) for chat in proofs.CHATS]
    return llama_cpp.Request(
        str(model),
        proofs.rows_of(sample),
        prompts=proofs.prompts_of(tokenizer, sample, context),
        length=proofs.LENGTH,
        texts=texts,
        template=template,
        chats=chats,
        vocabulary=tokenizer.vocab_size,
        threads=torch.get_num_threads(),
    )


def _allowed(
    job: Job,
    sample: Sample,
    files: Files,
    notes: dict[str, Any],
) -> float:
    """Return how far a quantised model may be from the trained one: four times as far as its base, quantised alike."""
    try:
        base = _compare_base(job, sample, files)
    except (errors.KubetuneError, OSError) as error:
        reason = " ".join(str(error).split())
        notes["base_quantised_alike"] = f"not compared: {reason}"
        job.tell(f"the base is not quantised alike for comparison: {reason}")
        # q4_k_m, iq3_s → 4, 3
        bits = int(re.sub(r"\D", "", files.kind)[0])
        return proofs.WITHOUT_BASE[bits]

    notes["base_quantised_alike"] = base
    lost: float = base["difference"]
    return max(proofs.LEAST_ALLOWED, proofs.SHARE_OF_BASE * lost)


def _compare_base(job: Job, sample: Sample, files: Files) -> dict[str, Any]:
    """Return what the base loses when it is quantised alike, for provenance.json."""
    from kubetune.result.gguf_files.writer import facts_of, write_model

    base = _base_folder(job.result)
    if base == job.result.checkpoint:
        raise errors.ModelError("it is not on this machine")
    job.tell("quantising the base alike")
    vocabulary = facts_of(base)["vocab_size"]
    folder = files.folder / "base"
    folder.mkdir()
    plain = folder / "plain.gguf"
    path = folder / "base.gguf"
    written = write_model(base, plain, plain_kind(job.dtype), {})
    quantise.write(base, plain, path, files.kind, {}, [])

    # The base may lack tokens that were added for training.
    sample = proofs.within(sample, written.context, vocabulary)
    if not sample.batches:
        raise errors.ModelError("the rows have tokens that it does not know")
    request = _request(job, sample, path, written.context)
    prompts = [ids for ids in request.prompts if max(ids) < vocabulary]
    answer = llama_cpp.ask(replace(request, prompts=prompts, texts=[], chats=[]))
    model = _load_plain(job, base, _dtype_to_ask_in(job, plain))
    reference = _ask_transformers(job, model, sample, prompts)
    compared = proofs.compare("the base", reference.logits, answer.logits, 0.0)
    parted = proofs.partings(reference.greedy, answer.continuations)
    return {
        "difference": compared.difference,
        "agreement": compared.agreement,
        "greedy": proofs.noted(parted),
    }


def _write_adapter(
    job: Job,
    staging: Path,
    folder: Path,
    sample: Sample,
    about: dict[str, str],
) -> dict[str, Any]:
    """Write the file of an adapter, and prove it beside its base."""
    from kubetune.result.gguf_files.adapter import write_adapter
    from kubetune.result.gguf_files.writer import facts_of

    base = _base_folder(job.result)
    described = facts_of(base, any_weights=True)
    path = folder / file_name(GGUF_ADAPTER)
    job.tell(f"writing {path.name}")
    pairs = write_adapter(staging, described, path, about)
    facts = {"file": path.name, "type": GGUF_ADAPTER, "pairs": pairs}

    reason = llama_cpp.missing()
    if reason is None and described.get("quantization_config"):
        reason = "the base's own weights are quantised, and no GGUF file is made of those"
    if reason is None and not any(base.glob("*.safetensors")):
        reason = "the base has no weights in safetensors"
    if reason is not None:
        job.tell(f"not proved by running it: {reason}")
        return {**facts, "not_proved": reason}
    return {**facts, "proof": _prove_adapter(job, staging, sample, base, path)}


def _prove_adapter(
    job: Job,
    staging: Path,
    sample: Sample,
    base: Path,
    path: Path,
) -> dict[str, Any]:
    """Return what llama.cpp says of base and adapter beside transformers and PEFT. Raise ModelError for a fault."""
    from kubetune.result.gguf_files.writer import write_model

    job.tell("asking PEFT, then llama.cpp with the adapter beside its base")
    kind = plain_kind(job.dtype)
    tokenizer = job.result.tokenizer
    plain = staging / file_name(kind)
    written = write_model(base, plain, kind, {}, list(tokenizer.eos_ids))
    sample = _fitting(sample, written.context, tokenizer.vocab_size)
    request = _request(job, sample, plain, written.context)
    request = replace(request, adapter=str(path), texts=[], chats=[])
    # A GGUF file of the base has its own weights, not those of 4 bits that training may have had.
    if job.config.quantization != "none":
        job.tell(
            f"the adapter was trained beside a base in {job.config.quantization}; the proof takes the base's own weights, "
            "as a GGUF file of the base has them"
        )
    model = job.load(staging, quantized=False)
    reference = _ask_transformers(job, model, sample, request.prompts)
    del model
    gc.collect()

    allowed = proofs.ALLOWED_ROUNDED
    rounding = None
    if kind == "f32":
        allowed = proofs.ALLOWED[kind]
    elif _dtype_to_ask_in(job, plain) == torch.float32:
        in_full = replace(job, dtype=torch.float32, device=torch.device("cpu"))
        load = partial(in_full.load, staging, quantized=False)
        rounding = partial(_rounding, job, sample, reference.logits, load)
    proof = proofs.Proof()
    what = f"PEFT and llama.cpp, {kind}"
    answer = proofs.check_plain(proof, what, request, reference, allowed, rounding)
    proof.notes["llama_cpp_python"] = answer.version
    _require(proof.faults)
    return proof.facts()
