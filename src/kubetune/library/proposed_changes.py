"""What to change so that a run fits the GPUs there are: asked by `kubetune plan --propose`, and written in the run file."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from kubetune.base.files import write_atomic
from kubetune.base.humanize import counted, duration, size
from kubetune.base.yaml_reader import FileText
from kubetune.config.load import load_config
from kubetune.config.schema import Config, TrainingConfig
from kubetune.data.reading.hub import is_local
from kubetune.errors import ConfigError, ModelError
from kubetune.library.plan_forecast import plan_of, totals_of
from kubetune.library.plans import measure_data
from kubetune.plan.base_model import require_fitting_codes
from kubetune.plan.costs import Costs, DeviceFacts, RunWeights, costs_of
from kubetune.plan.devices import gpu_here
from kubetune.plan.model_shapes import ModelFiles
from kubetune.plan.plan import Plan
from kubetune.plan.proposals import (
    Changes,
    GpuPool,
    Proposals,
    RunToPlace,
    Way,
    least_gpu_bytes,
    least_gpus,
    propose,
)

COLUMNS = ("TRAINING", "ROWS AT A TIME", "A GPU TAKES", "TIME", "CHANGES")


@dataclass(frozen=True)
class Proposed:
    """The ways to train a run on a pool of GPUs, in words and numbers."""

    run: RunToPlace
    proposals: Proposals

    def headline(self) -> str:
        """Return what was asked: `Qwen/Qwen3-8B on 2 GPUs of 22.4 GiB`."""
        pool = self.proposals.pool
        gpus = f"{counted(pool.gpus, 'GPU')} of {size(pool.gpu_bytes)}"
        return f"{self.run.config.model.path} on {gpus}"

    def rows(self) -> Iterator[Sequence[str]]:
        """Yield a line of the table for each way, the best first. Columns are `COLUMNS`."""
        for way in self.proposals.ways:
            config = way.config
            memory = size(way.memory.peak_bytes)
            if not way.fits:
                memory += ", does not fit"
            yield (
                _name(config.lora, config.quantization, config.training),
                str(way.plan.per_device_train_batch_size),
                memory,
                _time(way.costs),
                self._remark(way),
            )

    def parts(self) -> Iterator[tuple[str, str]]:
        """Yield the memory of the best way, part by part."""
        if self.proposals.best is None:
            return
        for name, part_bytes in self.proposals.best.memory.parts.items():
            yield size(part_bytes), name

    def problem(self) -> str | None:
        """Return what is wrong if no way fits."""
        if self.proposals.best is not None:
            return None
        return f"{self.headline()}: no way to train it fits; the table says what each would take"

    def _remark(self, way: Way) -> str:
        """Return what to write for a way that fits, else what would make it fit."""
        if way.fits:
            text = written(way.changes) or "none"
            return text if way.gives_same else f"{text} (another result)"
        needed = f"fits GPUs of {size(least_gpu_bytes(self.run, way))}"
        more = least_gpus(self.run, way, self.proposals.pool)
        if more is not None:
            needed += f", or {more.gpus:,} of these"
            if more.samples is not None:
                needed += f" with a larger batch: {more.samples:,} samples or more"
        return needed

    def to_json(self) -> dict[str, Any]:
        """Return the same facts as numbers."""
        pool = self.proposals.pool
        ways = []
        for way in self.proposals.ways:
            bill = way.costs.bill
            more = None if way.fits else least_gpus(self.run, way, pool)
            ways.append(
                {
                    "changes": dict(way.changes),
                    "gives_same": way.gives_same,
                    "fits": way.fits,
                    "peak_bytes": way.memory.peak_bytes,
                    "parts": dict(way.memory.parts),
                    "needed_gpu_bytes": None if way.fits else least_gpu_bytes(self.run, way),
                    "needed_gpus": more and more.gpus,
                    "needed_batch": more and more.samples,
                    "per_device_train_batch_size": way.plan.per_device_train_batch_size,
                    "steps": way.plan.num_steps,
                    "hours": None if bill is None else bill.hours,
                    "price": None if bill is None else bill.price,
                }
            )
        refused = [
            {"changes": dict(changes), "why": why} for changes, why in self.proposals.refused
        ]
        return {**asdict(pool), "ways": ways, "refused": refused}


def proposed(config: Config, pool: GpuPool, environ: Mapping[str, str]) -> Proposed:
    """Return the ways to train a run on a pool of GPUs.

    Raise ModelError for a model whose sizes are not known here, and ConfigError or DataError for a run of which no plan
    can be made.
    """
    model_files = ModelFiles(config.model.path, environ)
    weights = model_files.weights
    if weights is None:
        path = config.model.path
        remedy = "expected a folder with a config.json"
        if not is_local(path):
            remedy = f"at least its config.json must be on this machine (`hf download {path} config.json`)"
        raise ModelError(f"model {path}: its sizes are not known; {remedy}")
    data = measure_data(config, environ, model_files)
    models = RunWeights.of(config, environ, weights)

    def planned_costs(changed: Config, plan: Plan, gpu_bytes: int) -> Costs:
        require_fitting_codes(changed.quantization, changed.lora, changed.model.path, weights)
        totals = totals_of(data, changed, plan)
        device = DeviceFacts(gpu_here(plan.device), gpu_bytes)
        return costs_of(changed, plan, totals, device, models)

    run = RunToPlace(config, partial(plan_of, data), planned_costs)
    ways = propose(run, pool)
    if not ways.ways and not ways.refused:
        raise ModelError(f"model {config.model.path}: its config.json does not name its sizes")
    if not ways.ways:
        # Where nothing can be, it is mostly for one reason: the number of GPUs, or the rows of a step.
        raise ConfigError(list(dict.fromkeys(why for _, why in ways.refused)))
    return Proposed(run, ways)


def _name(lora: object, quantization: str, training: TrainingConfig) -> str:
    """Return how a way trains: `LoRA, 4bit base, ddp`."""
    parts = ["LoRA" if lora else "full"]
    if quantization not in ("none", "auto"):
        parts.append(f"{quantization} base")
    if training.optim != "adamw":
        parts.append(training.optim)
    parts.append(training.parallelism)
    return ", ".join(parts)


def _time(costs: Costs) -> str:
    """Return time and price of a way, as far as they are known."""
    bill = costs.bill
    if bill is None or bill.hours is None:
        return "–"
    text = duration(bill.hours * 3600)
    if bill.price is not None:
        text += f", {bill.price:.2f}"
    return text


def written(changes: Changes) -> str:
    """Return changes as they are typed after a run file: `training.parallelism=fsdp lora.r=16`."""
    words = []
    for key, value in changes.items():
        if isinstance(value, Mapping):
            words += [f"{key}.{name}={inner}" for name, inner in value.items()]
        elif value is None:
            words.append(f"{key}=null")
        else:
            words.append(f"{key}={value}")
    return " ".join(words)


def write_way(file: Path, way: Way, pool: GpuPool) -> None:
    """Write a way in a run file, with its GPUs. Comments, and the order of keys, stay.

    Raise ConfigError for a file that cannot be changed key by key, or would be another run then. It stays as it was.
    """
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 4096
    text = file.read_text("utf-8")
    try:
        tree = yaml.load(text)
    except YAMLError as error:
        raise ConfigError(f"{file}: {error}") from None
    for key, value in {**pool.placement, **way.changes}.items():
        _set(tree, key, value, file)
    stream = io.StringIO()
    yaml.dump(tree, stream)
    _require_same(stream.getvalue(), way, file)
    write_atomic(file, stream.getvalue())


def _set(tree: Any, key: str, value: Any, file: Path) -> None:
    """Set a dotted key of a run file, or remove it if the value is None."""
    section, _, name = key.partition(".")
    if name:
        inner = tree.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(
                f"{file}: {section} is no section with keys; write {key}: {value} yourself"
            )
        tree = inner
    if value is None:
        tree.pop(name or section, None)
    else:
        tree[name or section] = value


def _require_same(text: str, way: Way, file: Path) -> None:
    """Raise ConfigError if a changed run file says something else than the way. Other sources may say more."""
    config = load_config(FileText(file, text))
    for section in ("training", "lora", "quantization", "compute"):
        if getattr(config, section) != getattr(way.config, section):
            raise ConfigError(
                f"{file}: a variable or an option says otherwise than the file; write {written(way.changes)} yourself"
            )
