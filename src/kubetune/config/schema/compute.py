"""What a run asks for: `compute`, on any machine; on a cluster also Jobs and pods beside the trainer."""

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


class PreprocessConfig(Section):
    """The Job without GPUs that prepares the run."""

    cpu: Cores | None = Field(
        None, description="CPU cores of the job; left out: 8, or 2 for data that travels with it."
    )
    memory: Quantity | None = Field(
        None, description="Memory of the job; left out: 32Gi, or 4Gi for data that travels with it."
    )
    command: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="What it runs; left out: `kubetune data prepare` with this config.",
    )


class SamplersConfig(Section):
    """Pods with vLLM beside the trainer, which draw answers or are the teacher."""

    replicas: int = Field(1, ge=1, le=256, description="Servers, a pod each.")
    gpus: int = Field(
        1, ge=0, le=64, description="GPUs of each, which share the model; 0 for an image for CPUs."
    )
    cpu: Cores = Field(8, description="CPU cores of each.")
    memory: Quantity = Field("64Gi", description="Memory of each.")
    image: str = Field(
        "vllm/vllm-openai:v0.33.0", min_length=1, description="Image with `vllm serve`."
    )


class JupyterConfig(Section):
    """A pod with JupyterLab beside a run."""

    cpu: Cores = Field(4, description="CPU cores.")
    memory: Quantity = Field("16Gi", description="Memory.")
    gpus: int = Field(0, ge=0, le=64, description="GPUs it holds while it lives.")
    image: str | None = Field(
        None,
        min_length=1,
        description="Another image with JupyterLab; left out: `tools_image`, or the run's.",
    )
    hours: int = Field(
        8, ge=1, le=720, description="The pod ends after this time, so that it cannot be forgotten."
    )
