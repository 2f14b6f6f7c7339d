"""Trackers, the hub and the console, to which a run tells of itself: `tracking`, `push` and `logging`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kubetune.config.schema.base import AsTuple, Section, section_of, switched

MODULES = {
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "wandb": "wandb",
    "trackio": "trackio",
    "prometheus": "prometheus_client",
}
"""Module that each key of `tracking` needs, which an extra of kubetune brings."""


class MlflowConfig(Section):
    """Place of MLflow, and what it gets besides numbers."""

    uri: str = Field(
        "./mlruns", description="Folder, `sqlite:///…` or address of a tracking server."
    )
    experiment: str = Field("kubetune", description="Name of the experiment.")
    tags: dict[str, str] = Field(default_factory=dict, description="More tags on the run.")
    log_model: bool = Field(
        False, description="Upload the best checkpoint at the end: the adapter, or whole weights."
    )
    registered_model_name: str | None = Field(
        None,
        min_length=1,
        description="Register what `log_model` uploads under this name in the model registry.",
    )

    @model_validator(mode="after")
    def _registers_what_is_there(self) -> MlflowConfig:
        if self.registered_model_name and not self.log_model:
            raise ValueError(
                "registered_model_name is for what log_model uploads; set log_model to true"
            )
        return self


class WandbConfig(Section):
    """Place in Weights & Biases; its key is the environment's (WANDB_API_KEY, WANDB_BASE_URL)."""

    project: str = Field("kubetune", min_length=1, description="Name of the project.")
    entity: str | None = Field(
        None, description="User or team; the key's own where it is left out."
    )
    mode: Literal["online", "offline"] = Field(
        "online",
        description="`offline` only writes files into the run directory; `WANDB_MODE` wins.",
    )
    group: str | None = Field(None, description="Group of runs.")
    tags: Annotated[tuple[str, ...], AsTuple] = Field((), description="More tags on the run.")
    log_model: bool = Field(
        False, description="Upload the best checkpoint at the end as an artifact."
    )


class TrackioConfig(Section):
    """Place in Trackio: a file on this machine unless it names a Space or a server."""

    project: str = Field("kubetune", min_length=1, description="Name of the project.")
    group: str | None = Field(None, description="Group of runs.")
    dir: str | None = Field(
        None, description="Folder of its files; Trackio's own where it is left out."
    )
    space_id: str | None = Field(
        None, pattern=r"^[\w.-]+/[\w.-]+$", description="Space on the Hugging Face hub: `ORG/NAME`."
    )
    server_url: str | None = Field(None, description="Address of a Trackio server of one's own.")

    @model_validator(mode="after")
    def _has_one_place(self) -> TrackioConfig:
        if self.space_id and self.server_url:
            raise ValueError("space_id and server_url are two places; name one")
        return self


class PrometheusConfig(Section):
    """Numbers at `/metrics` of each node's agent, and what Kubernetes' operator for Prometheus makes of them."""

    port: int = Field(
        9464, ge=1024, le=65535, description="Port; on loopback another one where it is taken."
    )
    pod_monitor: bool = Field(
        False, description="Render a PodMonitor, by which Prometheus finds the pods."
    )
    alerts: bool = Field(
        False,
        description="Render alert rules: hung, no checkpoint for an hour, diverging, one rank slow.",
    )
    dashboard: bool = Field(
        False, description="Render a ConfigMap with a board that Grafana's sidecar loads."
    )
    labels: dict[str, str] = Field(
        default_factory=dict,
        description="Labels of these objects that operators select by, such as `release`.",
    )


class TrackingConfig(Section):
    """Copies of a run's numbers, for trackers."""

    tensorboard: bool = Field(False, description="Write TensorBoard events into the run directory.")
    mlflow: Annotated[MlflowConfig | None, switched(MlflowConfig)] = Field(
        None, description="`true` or a section: log to MLflow."
    )
    wandb: Annotated[WandbConfig | None, switched(WandbConfig)] = Field(
        None, description="`true` or a section: log to Weights & Biases."
    )
    trackio: Annotated[TrackioConfig | None, switched(TrackioConfig)] = Field(
        None, description="`true` or a section: log to Trackio."
    )
    prometheus: Annotated[PrometheusConfig | None, switched(PrometheusConfig)] = Field(
        None, description="`true` or a section: serve numbers for Prometheus."
    )


class HooksConfig(Section):
    """A command of one's own for events of a run, such as one that writes to a chat."""

    on_event: str | None = Field(
        None,
        min_length=1,
        description="Command that node 0 calls, without a shell, for each event, which stands as JSON on its standard "
        "input. That it fails ends nothing.",
    )
    events: tuple[str, ...] = Field(
        (), description="Events it is called for; all where it is left out."
    )
    timeout_seconds: float = Field(10, gt=0, le=600, description="Seconds after which it is ended.")


class PushConfig(Section):
    """Upload of the best checkpoint after a good end."""

    repo: str = Field(
        pattern=r"^[\w.-]+/[\w.-]+$", description="Repository on the Hugging Face hub: `ORG/NAME`."
    )
    merge: bool = Field(False, description="Upload merged weights instead of the adapter.")
    private: bool = Field(True, description="Make a new repository private.")


as_push = section_of("repo")


class LoggingConfig(Section):
    """Lines that a run prints, and answers that it shows."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="Least important line shown."
    )
    batches: Literal["all", "first-last", "none"] = Field(
        "first-last", description="Which batches get a `[BATCH]` line at DEBUG."
    )
    before_after: int = Field(
        0,
        ge=0,
        le=100,
        description="After the run, let the model answer so many rows of the evaluation data, as it was before "
        "training and at each checkpoint kept: `before_after.jsonl`, shown in the report.",
    )
    report_json: str | None = Field(
        None, description="Where to copy the report JSON besides the run directory."
    )
