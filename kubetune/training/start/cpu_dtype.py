"""The dtype of a run without a GPU where `model.dtype` is auto: measured once a month, kept for the whole run.

Some CPUs multiply bf16 four times as fast as fp32, others at half the speed, and their flags do not tell which.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kubetune.base import logs
from kubetune.config.schema import Config
from kubetune.plan import measured
from kubetune.rundir import metrics

if TYPE_CHECKING:
    from kubetune.distributed.process_group import World

LEAD = 1.2
"""Speed-up that bf16 has to bring: what is gained must show beside what is not a product."""


def decide(config: Config, run_dir: Path, world: World, width: int | None = None) -> Config:
    """The config with `model.dtype: auto` replaced by what that means on this CPU; all ranks call it and agree.

    A run that was begun goes on as it began. `width`: the model's hidden size, where it is known.
    """
    if config.model.dtype != "auto" or world.device.type == "cuda":
        return config
    from kubetune.distributed import process_group

    chosen = process_group.broadcast(_choose(run_dir, width) if world.is_main else None, world)
    return _with(config, chosen)


def as_trained(run_dir: Path, config: Config) -> Config:
    """The config of a run with `model.dtype: auto` as it was decided when the run began, if that was without a GPU."""
    kept = _kept(run_dir) if config.model.dtype == "auto" else None
    return config if kept is None else _with(config, kept)


def _with(config: Config, dtype: str) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})


def _kept(run_dir: Path) -> str | None:
    """The dtype of the last start; None where there was none, or it had a GPU."""
    starts = [
        event for event in metrics.read_events(run_dir) if event["event"] in ("start", "resume")
    ]
    if not starts or starts[-1].get("device", "CPU") != "CPU":
        return None
    return str(
        starts[-1].get("dtype", "float32")
    )  # as all runs on CPUs had before it was written down


def _choose(run_dir: Path, width: int | None) -> str:
    if (kept := _kept(run_dir)) is not None:
        logs.MODEL.info("model.dtype: auto -> %s, as this run began", kept)
        return kept
    if (known := measured.cpu_dtype(width)) is not None:
        logs.MODEL.info("model.dtype: auto -> %s, because %s", *known)
        return known[0]
    from kubetune.kernels import product_speed

    speed, agrees = product_speed.of_core()
    chosen = "bfloat16" if speed["bfloat16"] >= LEAD * speed["float32"] else "float32"
    why = "a core multiplies matrices at {:.3g} GFLOP/s here in bfloat16, {:.3g} in float32".format(
        *(1000 * speed[name] for name in ("bfloat16", "float32"))
    )
    if agrees:
        measured.keep(None, dtype=chosen, why=why)
    kept = "" if agrees else "; these readings differed widely, so they hold for this run alone"
    logs.MODEL.info("model.dtype: auto -> %s, because %s%s", chosen, why, kept)
    return chosen
