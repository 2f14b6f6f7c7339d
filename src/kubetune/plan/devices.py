"""The device of a rank, as a plan sees it: its name, how much memory it has, and what compiles for it."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Mapping

from kubetune.base.gpus import gpu_use, visible_gpus
from kubetune.base.humanize import counted
from kubetune.config.schema.compute import ComputeConfig
from kubetune.config.schema.quantities import quantity_bytes
from kubetune.errors import ConfigError
from kubetune.plan.forecast import MIB
from kubetune.plan.plan import Plan


def gpu_here(device: str) -> str | None:
    """Return the name of this machine's first GPU; None where there is none, or the run is on a CPU."""
    if device != "cuda":
        return None
    for gpu in gpu_use():
        return str(gpu["name"])
    return None


def device_bytes(compute: ComputeConfig, plan: Plan) -> int | None:
    """Return the memory of one device, or None if it is not known.

    The config comes first. Without it, a GPU's memory is the least among the GPUs here.
    """
    if plan.device == "cpu":
        # The processes of a node share its memory.
        if compute.memory is None:
            return None
        return quantity_bytes(compute.memory) // plan.processes_per_node
    return gpu_bytes(compute)


def gpu_bytes(compute: ComputeConfig) -> int | None:
    """Return the memory of a GPU: as the config says, else the least among those here, None if none tells it."""
    if compute.gpu_memory:
        return quantity_bytes(compute.gpu_memory)
    sizes = []
    for gpu in gpu_use():
        if gpu.get("memory_total_mib"):
            sizes.append(int(gpu["memory_total_mib"]) * MIB)
    return min(sizes, default=None)


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


def missing_compiler(device: str) -> str | None:
    """Return None if torch.compile can work here on a kind of device, `cuda` or `cpu`, else what is missing."""
    if device == "cuda":
        # Triton compiles its binding to the driver on first use; container images often come without a compiler.
        if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
            return "there is no C compiler (gcc)"
        if not os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h")):
            return "there are no headers of Python (Python.h; Debian: python3-dev)"
        return None
    if not (shutil.which("g++") or shutil.which("clang++")):
        return "there is no C++ compiler (g++)"
    return None


def require_compiler(setting: bool | str, device: str) -> None:
    """Raise ConfigError if `training.compile` asks by name for a compiler that is missing here."""
    missing = missing_compiler(device) if setting and setting != "auto" else None
    if missing is not None:
        raise ConfigError(
            f"training.compile is {str(setting).lower()}, but {missing}; install one, or leave it at auto"
        )
