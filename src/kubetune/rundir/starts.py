"""What all starts of one run have in common: the settings that move a number, and the date that chat templates write."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetune.base.humanize import place

if TYPE_CHECKING:
    from kubetune.config.schema import DataConfig

# Keys, or whole sections, that may differ between two starts of one run: none moves a number by more than rounding.
# `data.date` may differ in the file, but the run keeps what its first start had.
_FREE_TO_CHANGE = (
    "name",
    "output",
    "push",
    "mirror",
    "compute",
    "kubernetes",
    "logging",
    "tracking",
    "hooks",
    "data.cache",
    "data.date",
    "data.num_proc",
    "training.resume",
    "training.save_total_limit",
    "training.timeout_seconds",
    "training.pause_at_step",
    "training.async_save",
    "training.parallelism",
    "distill.timeout_seconds",
    "training.fsdp_size",
)


def moved_numbers(
    old: Mapping[str, Any], new: Mapping[str, Any], *, with_addresses: bool = False
) -> list[tuple[str, str, str]]:
    """Return (key, old value, new value) of what makes two runs of two configs, given as dotted values.

    `with_addresses`: also of a teacher on servers, which may move. A start asks them whether they have the same weights.
    """
    differences = []
    for key in sorted(old.keys() | new.keys()):
        # By whole names: `compute` frees compute.nodes, but no key that only begins alike.
        is_free = any(f"{key}.".startswith(f"{free}.") for free in _FREE_TO_CHANGE)
        if key == "distill.teacher" and not with_addresses:
            is_free = all("://" in str(of.get(key)) for of in (old, new))
        if old.get(key) != new.get(key) and not is_free:
            differences.append((key, json.dumps(old.get(key)), json.dumps(new.get(key))))
    return differences


def train_again(run_dir: Path) -> list[str]:
    """Return the arguments of `kubetune` that continue a run: its file, and the overrides of its first start.

    Raise ConfigError for a folder that is no run.
    """
    from kubetune.config.load import load_config
    from kubetune.config.resolved import dotted_values, read_config, resolved
    from kubetune.rundir import metrics

    run_file = run_dir / metrics.CONFIG
    output = f"output={run_dir}"
    at_first = read_config(run_dir)
    by_file = load_config(run_file, overrides=[output], environ=os.environ)

    # What the file alone does not say was typed at the first start.
    now = dict(dotted_values(resolved(by_file)))
    then = dict(dotted_values(resolved(at_first)))
    moved = moved_numbers(now, then, with_addresses=True)
    overrides = [f"{key}={_as_typed(value, run_dir)}" for key, _, value in moved]
    return ["train", str(run_file), output, *overrides]


def _as_typed(value: str, run_dir: Path) -> str:
    """Return a value of an override as somebody would type it: a source without settings of its own by its path.

    '[{"path": "/data/a.jsonl", "weight": 1.0, …}]' → /data/a.jsonl
    """
    from kubetune.config.schema import SourceConfig

    known = json.loads(value)
    if isinstance(known, list) and len(known) == 1 and isinstance(known[0], dict):
        path = known[0].get("path")
        if path and known[0] == SourceConfig(path=path).model_dump(mode="json"):
            known = path
    # Any other text might be read as something else than a text.
    if isinstance(known, str) and re.fullmatch(r"/[\w./+-]*", known):
        # Below a run that is named from the current directory, so are its files.
        return known if run_dir.is_absolute() else place(known)
    return value


def today() -> str:
    """Return today's date in this time zone."""
    return date.today().isoformat()


def day_of(data: DataConfig) -> str:
    """Return `data.date`, or today if no start of the run has filled it in yet."""
    return data.date or today()


def dated(data: DataConfig, first_start: Any) -> DataConfig:
    """Return the section with the date that the run keeps: that of its first start, else its own, else today's.

    `first_start`: what was resolved then; None if this is the first start.
    """
    day: str | None
    if first_start is None:
        day = data.date or today()
    else:
        day = (first_start.get("data") or {}).get("date") or data.date
    # What nobody set stays out of files that are written from the section.
    if day == data.date:
        return data
    return data.model_copy(update={"date": day})
