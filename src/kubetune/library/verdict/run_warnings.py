"""What may keep a run from training on this machine as it is now, and is no problem: a plan may be for another one."""

from __future__ import annotations

from collections.abc import Mapping

from kubetune.base.gpus import visible_gpus
from kubetune.base.humanize import counted
from kubetune.config.schema import Config
from kubetune.config.schema.compute import ComputeConfig


def warnings_of(config: Config, environ: Mapping[str, str]) -> list[str]:
    """Return as sentences what a run lacks here now: GPUs, and servers that somebody may start yet."""
    if config.kubernetes is not None:
        return []
    missing = missing_gpus(config.compute, environ)
    warnings = [missing] if missing else []
    if config.task in ("grpo", "distill"):
        from kubetune.library.verdict.servers import unreachable_servers

        warnings += unreachable_servers(config)
    return warnings


def missing_gpus(compute: ComputeConfig, environ: Mapping[str, str]) -> str:
    """Return what to do about GPUs that a run here wants and this machine has not; empty where it has them."""
    # Without `gpus_per_node` a run takes those that are here.
    if not compute.gpus_per_node:
        return ""
    wanted = compute.processes or compute.gpus_per_node
    here = visible_gpus(environ)
    if wanted <= here:
        return ""
    fewer = f"compute.gpus_per_node={here}, or " if here else ""
    return (
        f"compute.gpus_per_node: the run wants {counted(wanted, 'GPU')} on this machine, which has {here}, so it "
        f"starts only on another one; set {fewer}compute.gpus_per_node=0 to train on the CPU"
    )
