"""Jobs and pods beside the trainer of a run on a cluster."""

from __future__ import annotations

from pydantic import Field

from kubetune.config.schema.base import Section
from kubetune.config.schema.quantities import Cores, Quantity


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
    """Pods with vLLM that draw the answers of `task: grpo`, beside the trainer."""

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
