"""From a checkpoint to a model that others can load: weights, tokenizer, generation config, card, provenance, proof.

    export = export_run(run_dir, "best", merge=True)

Everything is written aside and gets its name by rename, after the proof has held. Weights and proof are writers.py's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
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
from kubetune.data.text.tokenizer_files import read_json
from kubetune.models import loading
from kubetune.reporting.picture import draw
from kubetune.result.inference.result import Result, default_device, open_result
from kubetune.result.publishing import base_files, equivalence, ollama_modelfile, serving
from kubetune.result.publishing.equivalence import Comparison
from kubetune.result.publishing.model_card import CURVES, base_name, write_card
from kubetune.result.publishing.provenance import PROVENANCE, facts_of
from kubetune.result.publishing.writers import WRITERS, Job, Kind, Tell
from kubetune.rundir import checkpoints, metrics
from kubetune.training.full_disk import explained_full_disk

SHARD = "5GB"


@dataclass(frozen=True)
class Export:
    """A written export: its place, its files, and what was proved of it. `files`: sizes in bytes by name."""

    path: Path
    kind: Kind
    facts: dict[str, Any]

    @property
    def files(self) -> dict[str, int]:
        """Bytes of each file, by its name."""
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
) -> Export:
    """Write the model of a run's checkpoint (`best`, `last` or a step) to `out`, and prove it.

    `merged` puts adapters into the base's weights. `dtype` is that of the weights; left out, the base's own, or the
    config's. `model`: the base, where that lies elsewhere here. `trust_code`: digest of code of the run that the user
    allows. No file of a model's weights is larger than
    `max_shard_size`; an adapter is one file. Raises ConfigError for what makes no sense, ModelError when the proof
    fails, EnvironmentFault when the disk is full; nothing is left in `out` then, and an export that was there before
    stays.
    """
    result = open_result(run_dir, which, model, trust_code)
    config = result.config  # says so at once where the base is not here
    if result.damage:
        raise errors.ConfigError(
            f"{result.checkpoint} {result.damage}; choose another --step. Nothing was written."
        )
    if merged and config.lora is None:
        raise errors.ConfigError(
            f"{run_dir} trained every weight, so there is no adapter to merge: leave --merge out"
        )
    kind = _kind(config.lora, merged=merged)
    out = (Path(out) if out else _place(result, kind)).absolute()
    _check_place(out)
    chosen = loading.DTYPES[_dtype_name(result, dtype)]
    place = torch.device(device) if device else default_device()
    job = Job(result, kind, chosen, place, tell, _bytes_of(max_shard_size))
    with (
        files.lock(result.run_dir / "logs" / "export.lock", wait=False),
        files.explained_writes(out),
    ):
        out.parent.mkdir(parents=True, exist_ok=True)
        whole_folder.remove_leftovers(out.parent, out.name)
        with whole_folder.written(out, "export") as partial, explained_full_disk(out):
            return Export(out, kind, _fill(job, partial))


def _check_place(out: Path) -> None:
    """Raise ConfigError when `out` holds anything but an earlier export, which a new one replaces."""
    if out.exists() and not out.is_dir():
        raise errors.ConfigError(
            f"{out} is a file; choose a folder with --output. Nothing was written."
        )
    if out.is_dir() and any(out.iterdir()) and not (out / PROVENANCE).is_file():
        raise errors.ConfigError(
            f"{out} holds other files; choose another folder with --output. Nothing was written."
        )


def _fill(job: Job, folder: Path) -> dict[str, Any]:
    """Write everything that makes up an export, prove it, and return its provenance."""
    result, kind = job.result, job.kind
    with result.checked():
        sample = equivalence.choose_sample(result, job.tell)
        comparisons, notes = WRITERS[kind](job, folder, sample)
    processor = result.image_processor
    changed = processor.tell_limits(folder) if processor else []
    licences, templates = base_files.copy(job, folder)
    names = sorted(
        [*equivalence.check_tokenizer(result.tokenizer, folder, sample, spared=changed), *templates]
    )
    _require_proof(comparisons)
    fault_injection.reach("export.proved")
    facts = facts_of(job, sample, comparisons, names, notes)
    facts["base"]["licence_files"] = licences
    lines = [
        line
        for line in metrics.read_metrics(result.run_dir)
        if line["step"] <= facts["checkpoint"]["step"]
    ]
    if picture := draw(lines):
        files.write_atomic(folder / CURVES, picture)
    if serving.OLLAMA in facts["served_by"]:
        _write_modelfile(folder, result, kind)
    step = facts["checkpoint"]["step"]
    verdict = metrics.read_verdict(result.run_dir, step)
    verdict["benchmarks"] = metrics.read_benchmarks(result.run_dir, step).get("compared")
    card = write_card(job.config, kind, facts, lines, pictured=picture is not None, verdict=verdict)
    files.write_atomic(folder / "README.md", scrub(card))
    whole_folder.share_like(folder, folder / "README.md")
    facts["files"] = whole_folder.checksums(folder)
    text = json.dumps(facts, indent=1, ensure_ascii=False).replace(str(Path.home()), "~")
    files.write_atomic(folder / PROVENANCE, scrub(text + "\n"))
    return facts


def _require_proof(comparisons: Sequence[Comparison]) -> None:
    failed = [c for c in comparisons if not c.holds]
    if failed:
        raise errors.ModelError(
            "; ".join(
                f"{c.what}: logits differ by {c.difference:.2g}, allowed is {c.tolerance:g}"
                for c in failed
            )
            + ". Nothing was written. `--dtype float32` rounds nothing."
        )


def _write_modelfile(folder: Path, result: Result, kind: Kind) -> None:
    """Write the Modelfile that Ollama wants beside weights."""
    tokenizer = result.tokenizer
    bos = tokenizer.backend.id_to_token(tokenizer.bos_id) if tokenizer.bos_id is not None else None

    def render(turns: Sequence[tuple[str, str]]) -> str:
        messages = [{"role": role, "content": text} for role, text in turns]
        prompt = tokenizer.require_chat().render(messages, generation_prompt=True)
        return prompt.removeprefix(bos or "")  # Ollama puts it there itself

    stop = [token for id in tokenizer.eos_ids if (token := tokenizer.backend.id_to_token(id))]
    base = base_name(result.config.model.path) if kind == "adapter" else None
    described = tokenizer.files.get("config.json") if base else folder / "config.json"
    architectures = set(read_json(described).get("architectures") or ())
    gguf = None if architectures & serving.CONVERTED_BY_OLLAMA["adapter" if base else "model"] else (
        serving.ADAPTER_GGUF if base else serving.MODEL_GGUF
    )  # fmt: skip
    text = ollama_modelfile.modelfile(
        render if tokenizer.chat else None, stop=stop, base=base, gguf=gguf
    )
    files.write_atomic(folder / ollama_modelfile.MODELFILE, scrub(text))


def find_export(
    run_dir: Path,
    which: str = "best",
    *,
    merged: bool = False,
    dtype: str | None = None,
    model: str | None = None,
) -> Export | None:
    """The whole export of this very checkpoint that `export_run` would make again, if it is there."""
    result = open_result(run_dir, which, model)
    kind = _kind(result.trained.lora, merged=merged)
    out = _place(result, kind)
    if not whole_folder.is_whole(out, PROVENANCE):
        return None
    facts = json.loads((out / PROVENANCE).read_text())
    manifest = result.checkpoint / checkpoints.MANIFEST
    is_same = facts["checkpoint"]["manifest_sha256"] == files.sha256_file(manifest)
    is_wanted = dtype is None or facts["dtype"] == DTYPE_NAMES.get(dtype, dtype)
    is_named = model is None or facts["base"]["name"] == base_name(model)
    return Export(out.absolute(), kind, facts) if is_same and is_wanted and is_named else None


def _kind(lora: LoraConfig | None, *, merged: bool) -> Kind:
    if lora is None:
        return "model"
    return "merged" if merged else "adapter"


def _place(result: Result, kind: Kind) -> Path:
    """Folder of an export that is given no other place."""
    return result.run_dir / "exports" / f"{result.checkpoint.name}-{kind}"


def _bytes_of(size: str) -> int:
    """`5GB` or `500MB` as the hub's libraries count them. Raises ConfigError for what is no size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])B", size.strip(), re.IGNORECASE)
    number = int(float(found[1]) * 1000 ** ("KMGT".index(found[2].upper()) + 1)) if found else 0
    if not number:
        raise errors.ConfigError(
            f"--max-shard-size is {size!r}; expected a size such as 5GB. Nothing was written."
        )
    return number


def _dtype_name(result: Result, wanted: str | None) -> str:
    config = result.config
    # What the run file says; what a CPU found fastest to compute with is nothing to keep weights in.
    name = DTYPE_NAMES.get(wanted or "", wanted) or read_config(result.run_dir).model.dtype
    if name == "auto":
        path, revision = (
            (str(result.checkpoint), None)
            if config.lora is None
            else (config.model.path, config.model.revision)
        )
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
