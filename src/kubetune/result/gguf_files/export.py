"""An export as GGUF: from the safetensors of an ordinary export to the file, and its proof.

    prepare     before a model is loaded: everything that can be refused
    write       plain file → llama.cpp beside transformers → quantised file → beside the base quantised alike

The ordinary export lies in a folder that goes afterwards. It was proved before (publishing/writers.py), so what differs
here is the fault of the file.
"""

from __future__ import annotations

import gc
import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from kubetune import errors
from kubetune.base import processes
from kubetune.config.schema import LoraConfig, ModelConfig
from kubetune.data.reading import hub
from kubetune.result.fits import GGUF_ADAPTER, GGUF_TYPES, require_gguf
from kubetune.result.gguf_files import llama_cpp, quantise
from kubetune.result.gguf_files import proof as proofs
from kubetune.result.inference.result import Result
from kubetune.result.publishing.equivalence import Comparison, Sample
from kubetune.result.publishing.model_card import base_name
from kubetune.result.publishing.writers import Job

# Plain types, and the dtype of weights that they hold exactly.
DTYPES: Final = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def dtype_of(kind: str, dtype: str | None) -> str | None:
    """Return the dtype of the weights that the file is made of. Raise ConfigError for an unknown type, or another dtype."""
    if kind not in GGUF_TYPES:
        raise errors.ConfigError(
            f"--gguf is {kind!r}; expected one of {', '.join(GGUF_TYPES)}. Nothing was written."
        )
    if kind not in DTYPES:
        return dtype
    if dtype is not None:
        raise errors.ConfigError(
            f"--gguf {kind} says the type of the weights already: leave --dtype out. Nothing was written."
        )
    return str(DTYPES[kind]).removeprefix("torch.")


def _merges(kind: str, lora: LoraConfig | None, *, merged: bool) -> bool:
    """True if adapters are merged for this file. Raise ConfigError where `--merge` is asked for beside an adapter."""
    if kind != GGUF_ADAPTER:
        return lora is not None
    if merged:
        raise errors.ConfigError(
            "--gguf adapter writes the adapter alone: leave --merge out. Nothing was written."
        )
    return False


def file_name(kind: str) -> str:
    """Return the name of the file."""
    return "adapter.gguf" if kind == GGUF_ADAPTER else f"model-{kind}.gguf"


def prepare(result: Result, kind: str, *, merged: bool) -> bool:
    """Return whether adapters are merged for this file.

    Raise an error for whatever makes no GGUF file of this result, before its model is loaded.
    """
    merged = _merges(kind, result.trained.lora, merged=merged)
    config = result.config
    require_gguf(
        kind,
        result.trained.lora,
        config.model,
        config.task_name,
        answers_text=config.answers_text,
    )
    from kubetune.result.gguf_files.families import family_of, keys_of
    from kubetune.result.gguf_files.vocabulary import read_vocabulary
    from kubetune.result.gguf_files.writer import facts_of

    # The model's config and tokenizer say whether llama.cpp has both.
    with tempfile.TemporaryDirectory(prefix="kubetune-gguf-") as folder:
        described = _folder_of(result) / "config.json"
        (Path(folder) / "config.json").write_bytes(described.read_bytes())
        result.tokenizer.save(Path(folder))
        facts = facts_of(Path(folder), any_weights=True)
        family = family_of(facts)
        keys_of(facts, family)
        size = max(facts["vocab_size"], result.tokenizer.vocab_size)
        read_vocabulary(Path(folder), size)
    return merged


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
    config = job.result.trained
    base = base_name(job.config.model.path)
    about = {"name": config.name or base, "finetune": "kubetune"}
    if "/" in base:
        about["base_model.0.name"] = base.rpartition("/")[2]
        about["base_model.0.organization"] = base.partition("/")[0]
        about["base_model.0.repo_url"] = f"https://huggingface.co/{base}"
    return about | _licence_of(job.config.model)


def _licence_of(model: ModelConfig) -> dict[str, str]:
    """Return the licence that the base's card names; nothing if it has no card, or none can be asked for."""
    try:
        card = hub.find_files(model, model.path, ("README.md",)).get("README.md")
    except errors.KubetuneError:
        return {}
    if card is None:
        return {}
    # The card's head is YAML between two lines of dashes.
    head = card.read_text("utf-8", errors="replace").split("---")[1:2]
    licence = {}
    for name, value in re.findall(
        r"^(license|license_name|license_link): *(\S.*)$", "".join(head), re.MULTILINE
    ):
        licence[name.replace("license_", "license.")] = value.strip().strip("\"'")
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
    sample = proofs.within(sample, files.context, tokenizer.vocab_size)
    if not sample.batches:
        raise errors.ModelError(
            f"no row of the proof is as short as {files.context} tokens, the context of the file. Nothing was written."
        )
    request = _request(job, sample, files.plain, files.context)
    model, allowed = _load_plain(job, files.folder, files.plain)
    reference = _ask_transformers(job, model, sample, request.prompts)
    del model
    gc.collect()
    proof = proofs.Proof()
    plain = plain_kind(job.dtype)
    what = f"transformers and llama.cpp, {plain}"
    answer = proofs.check_plain(proof, what, request, reference, allowed)
    proofs.check_tokens(proof, tokenizer, request.texts, answer)
    proofs.note_chats(proof, tokenizer, answer)
    proof.notes["llama_cpp_python"] = answer.version
    # What quantisation costs says nothing of a file with a fault.
    if files.kind != plain and not proof.faults:
        allowed = _allowed(job, sample, files.kind, proof.notes)
        quantised = replace(request, model=str(files.path))
        what = f"transformers and llama.cpp, {files.kind}"
        proofs.check_quantised(proof, what, quantised, reference.logits, allowed)
    _require(proof.faults)
    return proof.facts()


def _require(faults: list[str]) -> None:
    if faults:
        raise errors.ModelError(
            f"the GGUF file does not say what the trained model says: {'; '.join(faults)}. Nothing was written."
        )


def _load_plain(job: Job, folder: Path, plain: Path) -> tuple[Any, float]:
    """Load a whole model with plain transformers, in fp32 if the memory holds that. `plain`: its file of plain weights.

    Return how far llama.cpp may be from it, too.
    """
    dtype = torch.float32
    allowed = proofs.ALLOWED[plain_kind(job.dtype)]
    # The plain file has about as many bytes as the model in its own dtype.
    needed = plain.stat().st_size // job.dtype.itemsize * dtype.itemsize
    if processes.free_memory_bytes() < needed:
        job.tell(
            f"in float32 the model would take {needed / 1e9:.1f} GB, so transformers is asked in {job.dtype_name}"
        )
        dtype = job.dtype
        allowed = proofs.ALLOWED_ROUNDED
    model = job.result.auto_class.from_pretrained(
        folder, dtype=dtype, local_files_only=True, trust_remote_code=False
    )
    return model, allowed


def _ask_transformers(
    job: Job,
    model: Any,
    sample: Sample,
    prompts: list[list[int]],
) -> proofs.Reference:
    """Return what transformers says of rows and prompts."""
    logits = job.ask(model, sample)
    greedy = [proofs.follow_greedily(model, prompt) for prompt in prompts]
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
    kind: str,
    notes: dict[str, Any],
) -> float:
    """Return how far a quantised model may be from the trained one: four times as far as its base, quantised alike."""
    try:
        base = _compare_base(job, sample, kind)
    except (errors.KubetuneError, OSError) as error:
        reason = " ".join(str(error).split())
        notes["base_quantised_alike"] = f"not compared: {reason}"
        job.tell(f"the base is not quantised alike for comparison: {reason}")
        bits = int(next(sign for sign in kind if sign.isdigit()))
        return proofs.WITHOUT_BASE[bits]

    notes["base_quantised_alike"] = {"difference": base.difference, "agreement": base.agreement}
    return max(proofs.LEAST_ALLOWED, proofs.SHARE_OF_BASE * base.difference)


def _compare_base(job: Job, sample: Sample, kind: str) -> Comparison:
    """Return what the base loses when it is quantised alike."""
    from kubetune.result.gguf_files.writer import facts_of, write_model

    base = _base_folder(job.result)
    if base == job.result.checkpoint:
        raise errors.ModelError("it is not on this machine")
    facts = facts_of(base)
    job.tell("quantising the base alike")
    with tempfile.TemporaryDirectory(prefix=".kubetune-gguf-", dir=_scratch(job)) as folder:
        plain = Path(folder) / "plain.gguf"
        path = Path(folder) / "base.gguf"
        written = write_model(base, plain, plain_kind(job.dtype), {})
        quantise.write(base, plain, path, kind, {}, [])
        sample = proofs.within(sample, written.context, facts["vocab_size"])
        if not sample.batches:
            raise errors.ModelError("the rows have tokens that it does not know")
        request = _request(job, sample, path, written.context)
        answer = llama_cpp.ask(replace(request, prompts=[], texts=[], chats=[]))
        model, _ = _load_plain(job, base, plain)
        logits = job.ask(model, sample)
    return proofs.compare("the base", logits, answer.logits, 0.0)


def _scratch(job: Job) -> Path:
    """Return where large files that go again may lie: on the disk of the run, as the system's folder may be memory."""
    folder = job.result.run_dir / "exports"
    folder.mkdir(exist_ok=True)
    return folder


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
    elif reason is None and not any(base.glob("*.safetensors")):
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

    kind = plain_kind(job.dtype)
    proof = proofs.Proof()
    with tempfile.TemporaryDirectory(prefix=".kubetune-gguf-", dir=_scratch(job)) as folder:
        plain = Path(folder) / "base.gguf"
        job.tell("asking PEFT, then llama.cpp with the adapter beside its base")
        tokenizer = job.result.tokenizer
        written = write_model(base, plain, kind, {}, list(tokenizer.eos_ids))
        sample = proofs.within(sample, written.context, tokenizer.vocab_size)
        request = _request(job, sample, plain, written.context)
        request = replace(request, adapter=str(path), texts=[], chats=[])
        model = job.load(staging)
        reference = _ask_transformers(job, model, sample, request.prompts)
        del model
        gc.collect()
        allowed = proofs.ALLOWED[kind] if kind == "f32" else proofs.ALLOWED_ROUNDED
        what = f"PEFT and llama.cpp, {kind}"
        answer = proofs.check_plain(proof, what, request, reference, allowed)
        proof.notes["llama_cpp_python"] = answer.version
    _require(proof.faults)
    return proof.facts()
