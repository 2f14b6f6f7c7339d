"""`compute`: what a run asks for, on any machine."""

from __future__ import annotations

from pydantic import Field

from kubetune.config.schema.base import Section
from kubetune.config.schema.quantities import Cores, Quantity


class ComputeConfig(Section):
    """Processes, nodes and their size, and what their time costs."""

    # How many processes, and where.
    nodes: int = Field(1, ge=1, le=4096, description="Machines (pods on a cluster).")
    gpus_per_node: int | None = Field(
        None,
        ge=0,
        le=64,
        description="GPUs on each node. Left out: all of this machine. Kubernetes needs a number: 0 for CPU.",
    )
    processes: int | None = Field(
        None,
        ge=1,
        le=512,
        description="Processes on each node. Left out: one for each GPU, or 1 without GPUs.",
    )
    # What the devices are, for forecasts and MFU.
    peak_tflops: float | None = Field(
        None,
        gt=0,
        description="TFLOP/s that one device can do at best, for MFU. Left out: the data sheet's for known GPUs, else "
        "measured by a matrix product.",
    )
    gpu_memory: Quantity | None = Field(
        None,
        description="Memory of one GPU, such as `80Gi`: `plan` says whether the run fits. Left out: that of the GPUs "
        "here.",
    )
    tokens_per_second: float | None = Field(
        None,
        gt=0,
        description="Tokens that one device trains in a second, from an earlier run's report: for `plan`'s hours.",
    )
    # What they cost, in no particular currency.
    price_per_gpu_hour: float | None = Field(
        None,
        ge=0,
        description="Price of one device for an hour, in your currency: `plan` and the log say what the run costs.",
    )
    cpu: Cores | None = Field(None, description="CPU cores per node, such as `16` or `500m`.")
    memory: Quantity | None = Field(None, description="Memory per node, such as `200Gi`.")
