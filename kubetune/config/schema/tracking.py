"""Where the numbers and the result of a run go besides its directory: trackers, the hub, the console.

The sections of schema.py's Config that are about this.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Outlet(BaseModel):
    """A part of the config: immutable, and a key it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=True, allow_inf_nan=False)


class MlflowConfig(Outlet):
    uri: str = Field("./mlruns", description="Folder, `sqlite:///…` or address of a tracking server.")
    experiment: str = Field("kubetune", description="Name of the experiment.")
    tags: dict[str, str] = Field(default_factory=dict, description="More tags on the run.")
    log_model: bool = Field(False, description="Upload the best checkpoint at the end: the adapter, or whole weights.")
    registered_model_name: str | None = Field(
        None, min_length=1, description="Register what `log_model` uploads under this name in the model registry."
    )

    @model_validator(mode="after")
    def _registers_what_is_there(self) -> MlflowConfig:
        if self.registered_model_name and not self.log_model:
            raise ValueError("registered_model_name is for what log_model uploads; set log_model to true")
        return self


class TrackingConfig(Outlet):
    tensorboard: bool = Field(False, description="Write TensorBoard events into the run directory.")
    mlflow: MlflowConfig | None = Field(None, description="Log to MLflow.")


class PushConfig(Outlet):
    repo: str = Field(pattern=r"^[\w.-]+/[\w.-]+$", description="Repository on the Hugging Face hub: `ORG/NAME`.")
    merge: bool = Field(False, description="Upload merged weights instead of the adapter.")
    private: bool = Field(True, description="Whether a repository that is made for it is private.")


def as_push(value: Any) -> Any:
    """`ORG/NAME` as the section it is short for."""
    return {"repo": value} if isinstance(value, str) else value


class LoggingConfig(Outlet):
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="Least important line shown.")
    batches: Literal["all", "first-last", "none"] = Field(
        "first-last", description="Which batches get a `[BATCH]` line at DEBUG."
    )
    samples: int = Field(
        0,
        ge=0,
        le=100,
        description="After the run, let the model answer so many rows of the evaluation data, before and after "
        "training: `samples.jsonl`, shown in the report.",
    )
    report_json: str | None = Field(None, description="Where to copy the report JSON besides the run directory.")
