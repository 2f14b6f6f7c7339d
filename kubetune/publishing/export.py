"""From a checkpoint to a model that others can load: weights, tokenizer, generation config, card, provenance, proof.

    export = export_run(run_dir, "best", merge=True)

Everything is written aside and gets its name by rename, after the proof has held. The base is in memory once.
"""

from __future__ import annotations

import gc
import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from kubetune import errors
from kubetune.base import fault_injection, files
from kubetune.base.logs import scrub
from kubetune.config.load import read_config, resolved
from kubetune.config.schema import Config
from kubetune.config.schema.model import DTYPE_NAMES
from kubetune.data.reading.hub import is_local
from kubetune.data.text.tokenizer import Tokenizer, load_tokenizer
from kubetune.data.vision.image_processor import load_image_processor
from kubetune.inference.result import open_result
from kubetune.models import loading
from kubetune.models.padding_free import unwrap
from kubetune.publishing import equivalence, merge, ollama_modelfile
from kubetune.publishing.equivalence import Comparison, Sample
from kubetune.publishing.folder import PROVENANCE, check_place, checksums, is_whole, written_aside
from kubetune.publishing.model_card import CURVES, base_name, write_card
from kubetune.reporting.picture import draw
from kubetune.rundir import checkpoints as checkpoint
from kubetune.rundir import metrics
from kubetune.tasks import task_module

Kind = Literal["adapter", "merged", "model"]
Tell = Callable[[str], None]

SHARD = "5GB"
ADAPTER = ("adapter_model.safetensors", "adapter_config.json")


@dataclass(frozen=True)
class Export:
    """What was written, where, and what was proved of it. `files`: sizes in bytes by name."""

    path: Path
    kind: Kind
    facts: dict[str, Any]

    @property
    def files(self) -> dict[str, int]:
        return {name: file["bytes"] for name, file in self.facts["files"].items()}


@dataclass(frozen=True)
class _Job:
    """What one export works with."""

    config: Config
    task: ModuleType
    tokenizer: Tokenizer
    checkpoint: Path
    kind: Kind
    dtype: torch.dtype
    device: torch.device
    tell: Tell
    max_shard_bytes: int

    @property
    def auto_class(self) -> Any:
        return getattr(transformers, self.task.AUTO_CLASS)

    def load(self, folder: Path) -> Any:
        """The model of a checkpoint, or of an exported adapter, as training's code loads it."""
        settings = self.task.load_settings(self.config, folder)
        with merge.quiet():
            return loading.load_trained(self.auto_class, self.config, folder, self.device, **settings)


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
) -> Export:
    """Write the model of a run's checkpoint (`best`, `last` or a step) to `out`, and prove it.

    `merged` puts adapters into the base's weights. `dtype` is that of the weights; left out, the base's own, or the
    config's. `model`: the base, where that lies elsewhere here. No file of a model's weights is larger than
    `max_shard_size`; an adapter is one file. Raises ConfigError for what makes no sense, ModelError when the proof
    fails, EnvironmentFault when the disk is full; nothing is left in `out` then, and an export that was there before
    stays.
    """
    run_dir, result = Path(run_dir), open_result(run_dir, which, model)
    config, folder = result.config, result.checkpoint
    if problem := checkpoint.verify(folder):
        raise errors.ConfigError(f"{folder} {problem}; choose another --step. Nothing was written.")
    kind = _kind(config, merged)
    if merged and config.lora is None:
        raise errors.ConfigError(f"{run_dir} trained every weight, so there is no adapter to merge: leave --merge out")
    out = Path(out or run_dir / "exports" / f"{folder.name}-{kind}").absolute()
    check_place(out)
    job = _open(config, folder, kind, dtype, device, tell, _bytes_of(max_shard_size))
    with files.lock(run_dir / "logs" / "export.lock", wait=False), written_aside(out) as partial:
        with result.checked():
            sample = equivalence.choose_sample(job.config, _vocabulary(job))
            comparisons, notes = _WRITERS[kind](job, partial, sample)
        image_processor = load_image_processor(job.config, job.tokenizer)
        told = image_processor.tell_limits(partial) if image_processor else []
        names = equivalence.check_tokenizer(job.tokenizer, partial, sample, spared=told)
        failed = [c for c in comparisons if not c.holds]
        if failed:
            raise errors.ModelError(
                "; ".join(f"{c.what}: logits differ by {c.difference:.2g}, allowed is {c.tolerance:g}" for c in failed)
                + ". Nothing was written. `--dtype float32` rounds nothing."
            )
        fault_injection.reach("export.proved")
        facts = _facts(run_dir, job, sample, comparisons, names, notes)
        step = facts["checkpoint"]["step"]
        lines = [line for line in metrics.read_metrics(run_dir) if line["step"] <= step]
        if picture := draw(lines):
            files.write_atomic(partial / CURVES, picture)
        _write_modelfile(partial, job.config, kind, job.tokenizer)
        card = write_card(job.config, kind, facts, lines, pictured=picture is not None)
        files.write_atomic(partial / "README.md", scrub(card))
        files.share_like(partial, partial / "README.md")
        facts["files"] = checksums(partial)
        text = json.dumps(facts, indent=1, ensure_ascii=False).replace(str(Path.home()), "~")
        files.write_atomic(partial / PROVENANCE, scrub(text + "\n"))
    return Export(out, kind, facts)


def _write_modelfile(folder: Path, config: Config, kind: Kind, tokenizer: Tokenizer) -> None:
    """What Ollama wants beside weights, for models that it can run."""
    if config.task != "causal_lm":
        return
    bos = tokenizer.backend.id_to_token(tokenizer.bos_id) if tokenizer.bos_id is not None else None

    def render(turns: Sequence[tuple[str, str]]) -> str:
        messages = [{"role": role, "content": text} for role, text in turns]
        prompt = tokenizer.require_chat().render(messages, generation_prompt=True)
        return prompt.removeprefix(bos or "")  # Ollama puts it there itself

    stop = [token for id in tokenizer.eos_ids if (token := tokenizer.backend.id_to_token(id))]
    base = base_name(config.model.path) if kind == "adapter" else None
    text = ollama_modelfile.modelfile(render if tokenizer.chat else None, stop=stop, base=base)
    files.write_atomic(folder / ollama_modelfile.MODELFILE, scrub(text))


def find_export(
    run_dir: Path, which: str = "best", *, merged: bool = False, dtype: str | None = None, model: str | None = None
) -> Export | None:
    """The whole export of this very checkpoint that `export_run` would make again, if it is there."""
    config, folder = read_config(run_dir), checkpoint.choose(run_dir, which)
    kind = _kind(config, merged)
    out = run_dir / "exports" / f"{folder.name}-{kind}"
    if not is_whole(out):
        return None
    facts = json.loads((out / PROVENANCE).read_text())
    is_same = facts["checkpoint"]["manifest_sha256"] == files.sha256_file(folder / checkpoint.MANIFEST)
    is_wanted = dtype is None or facts["dtype"] == DTYPE_NAMES.get(dtype, dtype)
    is_named = model is None or facts["base"]["name"] == base_name(model)
    return Export(out.absolute(), kind, facts) if is_same and is_wanted and is_named else None


def _kind(config: Config, merged: bool) -> Kind:
    if config.lora is None:
        return "model"
    return "merged" if merged else "adapter"


def _open(
    config: Config,
    folder: Path,
    kind: Kind,
    dtype: str | None,
    device: str | None,
    tell: Tell,
    max_shard_bytes: int,
) -> _Job:
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    chosen = loading.DTYPES[_dtype_name(config, folder, dtype)]
    model = config.model.model_copy(update={"dtype": str(chosen).removeprefix("torch.")})
    config = config.model_copy(update={"model": model})
    return _Job(
        config, task_module(config), load_tokenizer(config.model), folder, kind, chosen, place, tell, max_shard_bytes
    )


def _bytes_of(size: str) -> int:
    """`5GB` or `500MB` as the hub's libraries count them. Raises ConfigError for what is no size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])B", size.strip(), re.IGNORECASE)
    number = int(float(found[1]) * 1000 ** ("KMGT".index(found[2].upper()) + 1)) if found else 0
    if not number:
        raise errors.ConfigError(f"--max-shard-size is {size!r}; expected a size such as 5GB. Nothing was written.")
    return number


def _dtype_name(config: Config, folder: Path, given: str | None) -> str:
    name = DTYPE_NAMES.get(given or "", given) or config.model.dtype
    if name == "auto":
        path, revision = (str(folder), None) if config.lora is None else (config.model.path, config.model.revision)
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


def _vocabulary(job: _Job) -> int:
    return job.tokenizer.vocab_size


def _write_adapter(job: _Job, folder: Path, sample: Sample) -> tuple[list[Comparison], dict[str, Any]]:
    job.tell(f"loading {base_name(job.config.model.path)} with its adapter")
    model = job.load(job.checkpoint)
    trained, effect = _ask_with_effect(job, model, sample)
    weights, settings = (folder / name for name in ADAPTER)
    tensors = load_file(job.checkpoint / ADAPTER[0])
    stored = next(iter(tensors.values())).dtype
    save_file(tensors, weights, metadata={"format": "pt"})
    facts = json.loads((job.checkpoint / ADAPTER[1]).read_text())
    facts |= {"base_model_name_or_path": job.config.model.path, "revision": job.config.model.revision}
    files.write_atomic(settings, json.dumps(facts, indent=2, sort_keys=True) + "\n")
    if is_local(job.config.model.path):
        job.tell("the base is a folder of this machine, which others lack: --merge makes a model that stands alone")
    if (job.checkpoint / "config.json").is_file():
        shutil.copyfile(job.checkpoint / "config.json", folder / "config.json")
    _write_companions(job, folder, unwrap(model))
    del model
    gc.collect()
    job.tell("loading the exported adapter")
    reloaded = equivalence.ask(job.task, job.load(folder), sample)
    same = equivalence.compare(
        "the trained adapter and the exported one", trained, reloaded, equivalence.TOLERANCE[job.dtype]
    )
    return [same], {"effect": effect, "dtype": str(stored).removeprefix("torch.")}


def _write_merged(job: _Job, folder: Path, sample: Sample) -> tuple[list[Comparison], dict[str, Any]]:
    job.tell(f"loading {base_name(job.config.model.path)} with its adapter")
    model = job.load(job.checkpoint)
    trained, effect = _ask_with_effect(job, model, sample)
    allowed = equivalence.TOLERANCE[job.dtype]
    if merge.is_quantised(model):
        job.tell(
            f"the base is quantised ({job.config.quantization}): dequantising it to {model_dtype(job)} before merging. "
            "The result has the weights that the adapter was trained on, not those of the original model"
        )
        if job.config.quantization == "8bit":
            allowed = max(allowed, equivalence.TOLERANCE_8BIT)
        model = merge.dequantise(model, job.checkpoint, job.dtype)
    job.tell("merging layer by layer")
    model = merge.merge_adapters(model, job.dtype)
    merged = equivalence.ask(job.task, model, sample)
    _save_model(job, folder, model)
    del model
    gc.collect()
    reloaded = _ask_reloaded(job, folder, sample)
    return [
        equivalence.compare("adapter and merged model", trained, merged, allowed),
        equivalence.compare(
            "merged model and its reloaded export", merged, reloaded, equivalence.TOLERANCE[torch.float32]
        ),
    ], {"effect": effect}


def _write_full(job: _Job, folder: Path, sample: Sample) -> tuple[list[Comparison], dict[str, Any]]:
    job.tell("loading the trained model")
    stored = transformers.AutoConfig.from_pretrained(job.checkpoint).dtype or torch.float32
    name = str(stored).removeprefix("torch.")
    as_stored = job.config.model_copy(update={"model": job.config.model.model_copy(update={"dtype": name})})
    model = loading.load_trained(job.auto_class, as_stored, job.checkpoint, job.device)
    trained = equivalence.ask(job.task, model, sample)
    if stored != job.dtype:
        del model
        gc.collect()
        model = job.load(job.checkpoint)
    _save_model(job, folder, model)
    del model
    gc.collect()
    reloaded = _ask_reloaded(job, folder, sample)
    allowed = equivalence.TOLERANCE[job.dtype]
    return [equivalence.compare("trained model and its reloaded export", trained, reloaded, allowed)], {}


_WRITERS = {"adapter": _write_adapter, "merged": _write_merged, "model": _write_full}


def _ask_with_effect(job: _Job, model: Any, sample: Sample) -> tuple[list[Tensor], float | None]:
    """Logits with the adapter, and how far it moves them: what a merge must not lose.

    None for a classifier: without its adapter its head is a random one.
    """
    trained = equivalence.ask(job.task, model, sample)
    if job.config.task == "sequence_classification":
        return trained, None
    with model.disable_adapter():
        base = equivalence.ask(job.task, model, sample)
    return trained, equivalence.compare("", trained, base, 0.0).difference


def _ask_reloaded(job: _Job, folder: Path, sample: Sample) -> list[Tensor]:
    job.tell("loading the export with plain transformers")
    trusted = job.config.model.trust_remote_code
    model = job.auto_class.from_pretrained(folder, trust_remote_code=trusted, local_files_only=True)
    return equivalence.ask(job.task, model.to(job.device), sample)


def _save_model(job: _Job, folder: Path, model: Any) -> None:
    room, needed = files.free_bytes(folder), sum(p.numel() * p.element_size() for p in model.parameters())
    if room < needed:
        raise errors.EnvironmentFault(f"{folder.parent}: the model takes {needed:,} bytes, {room:,} are free")
    job.tell(f"writing {needed / 1e9:.2f} GB")
    _write_companions(job, folder, model)
    model.save_pretrained(folder, max_shard_size=job.max_shard_bytes)
    fault_injection.reach("export.weights")


def _write_companions(job: _Job, folder: Path, model: Any) -> None:
    """The tokenizer, and the generation config with the tokens that the model was taught to end with."""
    job.tokenizer.save(folder)
    if model.can_generate():
        ends = list(job.tokenizer.eos_ids)
        model.generation_config.eos_token_id = ends if len(ends) != 1 else ends[0]
        model.generation_config.pad_token_id = job.tokenizer.pad_id
        model.generation_config.save_pretrained(folder)


def model_dtype(job: _Job) -> str:
    return str(job.dtype).removeprefix("torch.")


def _facts(
    run_dir: Path,
    job: _Job,
    sample: Sample,
    comparisons: list[Comparison],
    tokenizer_files: list[str],
    notes: dict[str, Any],
) -> dict[str, Any]:
    """provenance.json, but for the checksums of the files."""
    state = asdict(checkpoint.load_state(job.checkpoint))
    config = read_config(run_dir)
    return {
        "made_by": f"kubetune {metrics.versions().get('kubetune', '')}".strip(),
        "time": metrics.now(),
        "kind": job.kind,
        "dtype": notes.get("dtype", model_dtype(job)),
        "run": {"name": config.name, "directory": run_dir.name, "config": resolved(config)},
        "checkpoint": {
            "name": job.checkpoint.name,
            "manifest_sha256": files.sha256_file(job.checkpoint / checkpoint.MANIFEST),
            **{
                key: state[key]
                for key in "step tokens trained_tokens data_fingerprint global_batch_size global_batch_tokens".split()
            },
        },
        "base": {
            "name": base_name(job.config.model.path),
            "revision": job.config.model.revision,
            "quantization": job.config.quantization,
        },
        "proof": {
            "rows": len(sample.batches),
            "tokens": sample.tokens,
            "origin": sample.origin,
            "run_in": model_dtype(job),
            "comparisons": [asdict(comparison) for comparison in comparisons],
            "effect_of_adapter": notes.get("effect"),
            "tokenizer_files_equal": tokenizer_files,
        },
        "versions": metrics.versions(),
    }
