"""Where a run reports: trackers, hooks, the hub and the console (`tracking`, `hooks`, `push` and `logging`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kubetune.config.schema.base import AsTuple, Section, section_of, switched

# Key of `tracking` → the module that it needs, which an extra of kubetune brings.
MODULES = {
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "wandb": "wandb",
    "trackio": "trackio",
    "prometheus": "prometheus_client",
}


class MlflowConfig(Section):
    """MLflow: where it is, and what it gets besides numbers."""

    # Where.
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
    """Weights & Biases. The key comes from the environment (WANDB_API_KEY, WANDB_BASE_URL)."""

    project: str = Field("kubetune", min_length=1, description="Name of the project.")
    entity: str | None = Field(None, description="User or team; left out: the key's.")
    mode: Literal["online", "offline"] = Field(
        "online",
        description="`offline` only writes files into the run directory. `WANDB_MODE` takes precedence.",
    )
    group: str | None = Field(None, description="Group of runs.")
    tags: Annotated[tuple[str, ...], AsTuple] = Field((), description="More tags on the run.")
    log_model: bool = Field(
        False, description="Upload the best checkpoint at the end as an artifact."
    )


class TrackioConfig(Section):
    """Trackio: files on this machine, unless the section names a Space or a server."""

    project: str = Field("kubetune", min_length=1, description="Name of the project.")
    group: str | None = Field(None, description="Group of runs.")
    dir: str | None = Field(None, description="Folder of its files; left out: Trackio's.")
    space_id: str | None = Field(
        None, pattern=r"^[\w.-]+/[\w.-]+$", description="Space on the Hugging Face hub: `ORG/NAME`."
    )
    private: bool = Field(
        True, description="Nobody else sees the Space; one that is there already stays as it is."
    )
    server_url: str | None = Field(None, description="Address of your own Trackio server.")

    @model_validator(mode="after")
    def _has_one_place(self) -> TrackioConfig:
        if self.space_id and self.server_url:
            raise ValueError("space_id and server_url are two places; name one")
        return self


class PrometheusConfig(Section):
    """Numbers at `/metrics` of each node's agent, and objects for the Prometheus operator."""

    port: int = Field(
        9464, ge=1024, le=65535, description="Port; on loopback another one if it is in use."
    )
    pod_monitor: bool = Field(
        False, description="Render a PodMonitor, through which Prometheus finds the pods."
    )
    alerts: bool = Field(
        False,
        description="Render alert rules: hung, no checkpoint for an hour, diverging, one rank slow.",
    )
    dashboard: bool = Field(
        False, description="Render a ConfigMap with a dashboard that Grafana's sidecar loads."
    )
    labels: dict[str, str] = Field(
        default_factory=dict,
        description="Labels of these objects that operators select by, such as `release`.",
    )


class TrackingConfig(Section):
    """Trackers that get a copy of a run's numbers."""

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
    """A command that is called for events of a run, such as one that writes to a chat."""

    on_event: str | None = Field(
        None,
        min_length=1,
        description="Command that node 0 calls for each event, without a shell. The event is JSON on its standard input. "
        "The run goes on if the command fails.",
    )
    events: tuple[str, ...] = Field(
        (), description="Events that the command is called for; left out: all."
    )
    timeout_seconds: float = Field(
        10, gt=0, le=600, description="Seconds after which the command is killed."
    )


class PushConfig(Section):
    """Upload of the best checkpoint after a successful end."""

    repo: str = Field(
        pattern=r"^[\w.-]+/[\w.-]+$", description="Repository on the Hugging Face hub: `ORG/NAME`."
    )
    merge: bool = Field(False, description="Upload merged weights instead of the adapter.")
    private: bool = Field(True, description="Make a new repository private.")


as_push = section_of("repo")


class LoggingConfig(Section):
    """What a run prints and shows."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="Level from which lines are shown."
    )
    batches: Literal["all", "first-last", "none"] = Field(
        "first-last", description="Which batches get a `[BATCH]` line at DEBUG."
    )
    before_after: int = Field(
        0,
        ge=0,
        le=100,
        description="After the run, let the model before training and each kept checkpoint answer this many rows of the "
        "evaluation data, and the teacher of a distillation: `before_after.jsonl`, shown in the report.",
    )
    report_json: str | None = Field(None, description="File to which report.json is copied.")
