"""From a checkpoint to a model that others can load: weights, tokenizer, generation config, card, provenance, proof.

    export = export_run(run_dir, "best", merge=True)

Everything is written into another folder, which is renamed after the proof has held. writers.py writes the weights and
proves them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from kubetune import errors
from kubetune.base import fault_injection, files, whole_folder
from kubetune.base.logs import scrub
from kubetune.config.load import read_config
from kubetune.config.schema import LoraConfig
from kubetune.config.schema.model import DTYPE_NAMES
from kubetune.data.reading.hub import is_local
from kubetune.data.text.tokenizer_files import read_json
from kubetune.models import loading
from kubetune.reporting.picture import draw
from kubetune.result import fits
from kubetune.result.fits import PROVENANCE
from kubetune.result.gguf_files import export as gguf_export
from kubetune.result.inference.result import Result, default_device, open_result
from kubetune.result.publishing import (
    base_files,
    equivalence,
    fp8,
    ollama_modelfile,
    serving,
)
from kubetune.result.publishing.equivalence import Comparison, Sample
from kubetune.result.publishing.model_card import CURVES, base_name, write_card
from kubetune.result.publishing.provenance import facts_of
from kubetune.result.publishing.writers import WRITERS, Job, Kind, Tell
from kubetune.rundir import checkpoints, metrics
from kubetune.training.saving.full_disk import explained_full_disk

SHARD = "5GB"


@dataclass(frozen=True)
class Export:
    """A written export."""

    path: Path
    kind: Kind
    facts: dict[str, Any]  # its provenance.json: files, and what was proved

    @property
    def files(self) -> dict[str, int]:
        """The sizes of the files in bytes, by name."""
        return {name: file["bytes"] for name, file in self.facts["files"].items()}


def export_run(
    run_dir: files.StrPath,
    which: str = "best",
    *,
    merged: bool = False,
    dtype: str | None = None,
    out: files.StrPath | None = None,
    device: str | None = None,
    max_shard_size: str = SHARD,
    tell: Tell = print,
    model: str | None = None,
    trust_code: str | None = None,
    gguf: str | None = None,
    quantize: str | None = None,
) -> Export:
    """Write the model of a run's checkpoint (`best`, `last` or a step) to `out`, and prove it.

    `merged` puts adapters into the base's weights. `dtype` is that of the weights; left out, the base's own, or the
    config's. No file of a model's weights is larger than `max_shard_size`; an adapter is one file. `model`: the base,
    where that lies elsewhere here. `trust_code`: digest of code of the run that the user allows. `gguf`: the type of
    the weights of one GGUF file, with adapters merged, or `adapter`. `quantize`: `fp8`, with adapters merged.

    Raise ConfigError for what makes no sense, ModelError when the proof fails, EnvironmentFault when the disk is full.
    Nothing is left in `out` then, and an export that was there before stays.
    """
    result = open_result(run_dir, which, model, trust_code)
    # Everything that can be refused is refused before the model is loaded.
    lora = result.config.lora
    _require_sense(result, merged=merged)
    form = None
    if gguf is not None:
        form = f"gguf-{gguf}"
        dtype = gguf_export.dtype_of(gguf, dtype)
        merged = gguf_export.prepare(result, gguf, merged=merged)
    if quantize is not None:
        form = _require_quantize(result, quantize, gguf)
        merged = lora is not None
    kind = _kind(lora, merged=merged)
    folder = _place(result, form or kind, out)
    job = Job(
        result,
        kind,
        dtype=loading.DTYPES[_dtype_name(result, dtype)],
        device=torch.device(device) if device else default_device(),
        tell=tell,
        max_shard_bytes=_bytes_of(max_shard_size),
        gguf=gguf,
        quantize=quantize,
    )

    # One export of a run at a time; others would remove each other's leftovers.
    with (
        files.lock(result.run_dir / "logs" / "export.lock", wait=False),
        files.explained_writes(folder),
    ):
        folder.parent.mkdir(parents=True, exist_ok=True)
        whole_folder.remove_leftovers(folder.parent, folder.name)
        with whole_folder.written(folder, "export") as partial, explained_full_disk(folder):
            return Export(folder, kind, _fill(job, partial))


def _require_sense(result: Result, *, merged: bool) -> None:
    """Raise ConfigError for a damaged checkpoint, and for a merge where there is no adapter."""
    if result.damage:
        raise errors.ConfigError(
            f"{result.checkpoint} {result.damage}; choose another --step. Nothing was written."
        )
    if merged:
        fits.require_adapter(result.config.lora, result.run_dir)


def _fill(job: Job, folder: Path) -> dict[str, Any]:
    """Write everything that makes up an export, prove it, and return its provenance."""
    result = job.result
    if job.gguf is None and job.quantize is None:
        facts, _ = _fill_weights(job, folder)
        if serving.OLLAMA in facts["served_by"]:
            _write_modelfile(folder, result, job.kind)
    elif job.gguf is not None:
        facts = _fill_gguf(job, folder, job.gguf)
    else:
        facts = _fill_fp8(job, folder)

    # The card and its picture show what came before the checkpoint; the run may have gone on.
    step = facts["checkpoint"]["step"]
    lines = [line for line in metrics.read_metrics(result.run_dir) if line["step"] <= step]
    picture = draw(lines)
    if picture is not None:
        files.write_atomic(folder / CURVES, picture)
    verdict = metrics.read_verdict(result.run_dir, step)
    verdict["benchmarks"] = metrics.read_benchmarks(result.run_dir, step).get("compared")
    pictured = picture is not None
    card = write_card(
        job.config,
        job.kind,
        facts,
        lines,
        pictured=pictured,
        verdict=verdict,
    )
    files.write_atomic(folder / "README.md", scrub(card))

    # provenance.json comes last, since it has the checksums of all other files.
    whole_folder.share_like(folder, folder / "README.md")
    facts["files"] = whole_folder.checksums(folder)
    text = json.dumps(facts, indent=1, ensure_ascii=False).replace(str(Path.home()), "~")
    files.write_atomic(folder / PROVENANCE, scrub(text + "\n"))
    return facts


def _fill_weights(job: Job, folder: Path) -> tuple[dict[str, Any], Sample]:
    """Write weights, tokenizer, licence and templates, and prove them. Return provenance, and the rows of the proof."""
    # The weights, and whether the exported model computes what the trained one did.
    result = job.result
    with result.checked():
        sample = equivalence.choose_sample(result, job.tell)
        comparisons, notes = WRITERS[job.kind](job, folder, sample)

    # The other files. That of the image processor gets the limits of training.
    changed = []
    if result.image_processor is not None:
        changed = result.image_processor.tell_limits(folder)
    licences, templates = base_files.copy(job, folder)
    names = equivalence.check_tokenizer(
        result.tokenizer,
        folder,
        sample,
        changed_files=changed,
    )
    names = sorted([*names, *templates])
    _require_proof(comparisons)
    fault_injection.reach("export.proved")

    facts = facts_of(job, sample, comparisons, names, notes)
    facts["base"]["licence_files"] = licences
    return facts, sample


def _fill_gguf(job: Job, folder: Path, gguf: str) -> dict[str, Any]:
    """Write an export's GGUF file, Modelfile and licence. Its weights as transformers reads them come first, and go."""
    staging = folder / "transformers"
    staging.mkdir()
    facts, sample = _fill_weights(job, staging)
    with job.result.checked():
        facts["gguf"] = gguf_export.write(job, staging, folder, sample, gguf)
    facts["served_by"] = [serving.GGUF, serving.OLLAMA]
    for name in facts["base"]["licence_files"]:
        (staging / name).rename(folder / name)
    shutil.rmtree(staging)
    _write_modelfile(folder, job.result, job.kind, gguf=facts["gguf"]["file"])
    return facts


def _fill_fp8(job: Job, folder: Path) -> dict[str, Any]:
    """Write an export with weights in FP8. Its weights as they were trained come first, and go."""
    staging = folder / "transformers"
    staging.mkdir()
    facts, sample = _fill_weights(job, staging)
    with job.result.checked():
        notes, comparisons = fp8.write(job, staging, folder, sample)
    _require_proof(comparisons)
    shutil.rmtree(staging)
    facts["quantised"] = notes
    facts["proof"]["comparisons"] += [asdict(comparison) for comparison in comparisons]
    facts["served_by"] = [serving.VLLM]
    return facts


def _require_quantize(result: Result, quantize: str, gguf: str | None) -> str:
    """Return the form of an export with quantised weights. Raise an error for what cannot be quantised."""
    if gguf is not None:
        raise errors.ConfigError(
            "--gguf and --quantize write two kinds of files: ask for one. Nothing was written."
        )
    config = result.config
    fits.require_quantized(
        quantize,
        config.model,
        config.task_name,
        answers_text=config.answers_text,
    )
    return quantize


def _require_proof(comparisons: Sequence[Comparison]) -> None:
    """Raise ModelError if two models that should be the same differ too much."""
    problems = []
    for comparison in comparisons:
        if not comparison.holds:
            problems.append(
                f"{comparison.what}: logits differ by {comparison.difference:.2g}, "
                f"allowed is {comparison.tolerance:g}"
            )
    if problems:
        reason = "; ".join(problems)
        raise errors.ModelError(
            f"{reason}. Nothing was written. Nothing is rounded by "
            "`--dtype float32`, or by `--gguf f32`."
        )


def _write_modelfile(
    folder: Path,
    result: Result,
    kind: Kind,
    gguf: str | None = None,
) -> None:
    """Write the Modelfile that Ollama wants beside weights. `gguf`: the file that lies there already."""
    tokenizer = result.tokenizer
    # Ollama puts BOS before a prompt if the tokenizer puts it before a text. With others the template writes it: SmolLM2's
    # BOS is `<|im_start|>`, which its tokenizer does not add.
    bos = ""
    if tokenizer.bos_id is not None and tokenizer.bos_id in tokenizer.prefix:
        bos = tokenizer.backend.id_to_token(tokenizer.bos_id) or ""

    def render(turns: Sequence[tuple[str, str]]) -> str:
        messages = [{"role": role, "content": text} for role, text in turns]
        prompt = tokenizer.require_chat().render(messages, generation_prompt=True)
        return prompt.removeprefix(bos)

    stop = [tokenizer.backend.id_to_token(token_id) for token_id in tokenizer.eos_ids]

    base = None
    if kind == "adapter":
        base = _base_for_ollama(result)
    is_made = gguf is not None
    if gguf is None:
        gguf = _gguf_to_make(folder, kind)
    text = ollama_modelfile.modelfile(
        render if tokenizer.chat else None,
        stop=list(filter(None, stop)),
        base=base,
        gguf=gguf,
        is_made=is_made,
    )
    files.write_atomic(folder / ollama_modelfile.MODELFILE, scrub(text))


def _base_for_ollama(result: Result) -> ollama_modelfile.Base:
    """Return what a Modelfile says of the base of an adapter."""
    path = result.config.model.path
    base = ollama_modelfile.Base(base_name(path))
    architectures = read_json(result.tokenizer.files.get("config.json")).get("architectures") or ()
    if not is_local(path) or serving.CONVERTED_BY_OLLAMA.isdisjoint(architectures):
        return base
    # Files of the hub's cache are links to places outside of their folder, which Ollama refuses.
    folder = Path(path).expanduser().absolute()
    weights = list(folder.glob("model*.safetensors"))
    if not weights or any(file.is_symlink() for file in weights):
        return base
    return replace(base, folder=folder)


def _gguf_to_make(folder: Path, kind: Kind) -> str | None:
    """Return the GGUF file that Ollama wants of this export; None if it converts the weights itself."""
    if kind == "adapter":
        return serving.ADAPTER_GGUF
    # It converts few architectures. Of the others it takes a file that llama.cpp makes.
    architectures = read_json(folder / "config.json").get("architectures") or ()
    if serving.CONVERTED_BY_OLLAMA.isdisjoint(architectures):
        return serving.MODEL_GGUF
    return None


def _place(result: Result, form: str, out: files.StrPath | None) -> Path:
    """Return the folder to write. Raise ConfigError if it holds something else."""
    folder = Path(out or fits.place_of(result.run_dir, result.checkpoint.name, form)).absolute()
    fits.require_place(folder)
    return folder


def find_export(
    run_dir: Path,
    which: str = "best",
    *,
    merged: bool = False,
    dtype: str | None = None,
    model: str | None = None,
) -> Export | None:
    """Return the whole export of this very checkpoint that `export_run` would make again, if it is there."""
    result = open_result(run_dir, which, model)
    # The same kind in the same place, and whole.
    kind = _kind(result.trained.lora, merged=merged)
    out = fits.place_of(result.run_dir, result.checkpoint.name, kind)
    if not whole_folder.is_whole(out, PROVENANCE):
        return None
    # A later run may have written another checkpoint of the same step.
    facts = json.loads((out / PROVENANCE).read_text())
    manifest = result.checkpoint / checkpoints.MANIFEST
    is_same = facts["checkpoint"]["manifest_sha256"] == files.sha256_file(manifest)
    is_wanted = dtype is None or facts["dtype"] == DTYPE_NAMES.get(dtype, dtype)
    is_named = model is None or facts["base"]["name"] == base_name(model)
    if is_same and is_wanted and is_named:
        return Export(out.absolute(), kind, facts)
    return None


def _kind(lora: LoraConfig | None, *, merged: bool) -> Kind:
    """Return what an export of a run is. `merged`: adapters are put into the weights."""
    if lora is None:
        return "model"
    return "merged" if merged else "adapter"


def _bytes_of(size: str) -> int:
    """Return `5GB` or `500MB` in bytes, as the hub's libraries count them. Raise ConfigError for other texts."""
    number = 0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])B", size.strip(), re.IGNORECASE)
    if match is not None:
        # 5 GB are 5 × 1000³ bytes.
        power = "KMGT".index(match[2].upper()) + 1
        number = int(float(match[1]) * 1000**power)
    if not number:
        raise errors.ConfigError(
            f"--max-shard-size is {size!r}; expected a size such as 5GB. Nothing was written."
        )
    return number


def _dtype_name(result: Result, wanted: str | None) -> str:
    """Return the dtype to write weights in: the wanted one, the run file's, or that of the model's own weights."""
    config = result.config
    # Read from the run file itself: `config` may have the dtype that a CPU computes with best.
    name = DTYPE_NAMES.get(wanted or "", wanted) or read_config(result.run_dir).model.dtype
    if name == "auto":
        path = config.model.path
        revision = config.model.revision
        if config.lora is None:
            path = str(result.checkpoint)
            revision = None
        # config.json says in what dtype the weights lie, without reading them.
        with loading.explain(config.model):
            facts = transformers.AutoConfig.from_pretrained(
                path, revision=revision, trust_remote_code=config.model.trust_remote_code
            )

        name = str(facts.dtype or torch.float32).removeprefix("torch.")

    if name not in loading.DTYPES:
        raise errors.ConfigError(
            f"--dtype is {name}; expected one of {', '.join(loading.DTYPES)}. Nothing was written."
        )

    return name
