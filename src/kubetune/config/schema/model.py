"""The model, and which parts of it learn: `model`, `lora`, `classification` and `vision`."""

from __future__ import annotations

import re
import warnings
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from kubetune.config.schema.base import AsTuple, Section, renamed

DTYPE_NAMES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
}


# Name of the built-in chat template. Other templates are files.
BUILT_IN_TEMPLATE = "chatml"
# A module's name, or the end of one. It has no sign of a regular expression except a dot.
_PLAIN_NAME = re.compile(r"[\w.-]+")


class ModelConfig(Section):
    """The model: where it is, its tokenizer and chat template, its dtype and attention."""

    # Where the model is, and what comes with it.
    path: str = Field(
        min_length=1,
        description="Hub id (`Qwen/Qwen3-8B`), a folder that holds the model, or an image in a registry "
        "(`oci://registry/name:tag`).",
    )
    revision: str | None = Field(None, description="Branch, tag or commit on the hub.")
    tokenizer: str | None = Field(
        None, description="Hub id or folder of the tokenizer, if it is not the model's."
    )
    chat_template: str | None = Field(
        None,
        description="File with a Jinja chat template that replaces the tokenizer's; or `chatml`, built in.",
    )
    # How it computes.
    dtype: Annotated[Literal["auto", "bfloat16", "float16", "float32"], renamed(DTYPE_NAMES)] = (
        Field(
            "auto",
            description="Dtype of frozen weights and of the arithmetic; what is trained is always float32. `auto`: bfloat16 "
            "if the device has instructions for it, else float16 on a GPU and float32 on a CPU. Narrow models are float32 "
            "on a CPU.",
        )
    )
    attention: Literal["auto", "padding_free", "eager", "sdpa"] = Field(
        "auto",
        description="`auto`: padding-free attention over many sequences if the self-check proves it exact, else one "
        "sequence at a time.",
    )
    # What may be fetched and run.
    local_files_only: bool = Field(
        False, description="Never ask the hub; the model must be on disk or in the cache."
    )
    trust_remote_code: bool = Field(
        False,
        description="Run Python code that comes with the model. Needs `revision` pinned to a commit; for a folder, to the "
        "digest of its Python and JSON files, which the error about a wrong one names.",
    )

    @model_validator(mode="after")
    def _pinned_code(self) -> ModelConfig:
        is_commit = re.fullmatch("[0-9a-f]{40}", self.revision or "")
        if self.trust_remote_code and not is_commit:
            raise ValueError(
                "trust_remote_code runs code from the model's repository: pin `revision` to a commit (40 hex digits)"
            )
        return self


def _split_names(value: Any) -> Any:
    """Return the names in `q_proj,v_proj`, as other tools write lists of modules. Anything else is returned unchanged."""
    if not isinstance(value, str) or "," not in value:
        return value
    parts = tuple(part.strip() for part in value.split(","))
    is_list = all(_PLAIN_NAME.fullmatch(part) for part in parts)
    return parts if is_list else value


# Rank and scale of adapters, in run files and in files of adapters. The largest scale is far above any that trains.
Rank = Annotated[int, Field(ge=1, le=4096)]
Alpha = Annotated[float, Field(gt=0, le=65_536)]


class LoraConfig(Section):
    """Adapters (LoRA, arXiv 2106.09685): their rank and scale, and the modules that get them."""

    # The adapters.
    r: Rank = Field(16, description="Rank.")
    alpha: Alpha | None = Field(None, description="Scale; left out: twice the rank.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the adapter's input.")
    # Which modules get them.
    target_modules: Annotated[
        Literal["all-linear"] | tuple[str, ...] | str, AsTuple, BeforeValidator(_split_names)
    ] = Field(
        "all-linear",
        description="`all-linear`, a list of module names, or one regular expression: matrices whose whole names it "
        "matches. Plain names with commas between them (`q_proj,v_proj`) are a list.",
    )
    target_parameters: Annotated[tuple[str, ...], AsTuple] = Field(
        (),
        description="Further tensors that get adapters, as PEFT names them, such as `mlp.experts.down_proj`.",
    )
    modules_to_save: Annotated[tuple[str, ...], AsTuple] = Field(
        (),
        description="Modules trained in full and saved with the adapter, by the ends of their names: `norm` takes "
        "`input_layernorm` too.",
    )
    # Variants of LoRA.
    use_dora: bool = Field(
        False, description="DoRA: learn magnitude and direction separately (arXiv 2402.09353)."
    )
    use_rslora: bool = Field(
        False, description="Scale by alpha/√r instead of alpha/r (arXiv 2312.03732)."
    )

    @field_validator("target_modules")
    @classmethod
    def _is_expression(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        try:
            if isinstance(value, str):
                # Python warns about `[[`, whose meaning may change. The meaning of today counts.
                with warnings.catch_warnings(action="ignore", category=FutureWarning):
                    re.compile(value)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"found {value!r}, no regular expression ({error}); expected all-linear, a list of module names, or "
                "an expression that whole names match, such as .*(q|v)_proj"
            ) from None
        return value

    @property
    def leaves_routers(self) -> bool:
        """True if the names alone show that no router of a mixture of experts learns.

        False if that is unclear: a regular expression may match a router, and so may `modules_to_save`.
        """
        modules = () if self.target_modules == "all-linear" else self.target_modules
        if isinstance(modules, str) or self.modules_to_save:
            return False
        for name in (*modules, *self.target_parameters):
            # `mlp.gate`, `router`, or a router's `mlp.gate.weight`
            if {"gate", "router", "weight"} & {*name.split(".")[-2:]}:
                return False
        return True

    @property
    def lora_alpha(self) -> float:
        """Return alpha, or its default of twice the rank."""
        return self.alpha if self.alpha is not None else 2.0 * self.r


class ClassificationConfig(Section):
    """Classes of a classifier, and the kind of problem."""

    problem_type: Literal[
        "auto", "single_label_classification", "multi_label_classification", "regression"
    ] = Field(
        "auto",
        description="One class, any number of classes, or a number; `auto`: decided by the labels.",
    )
    labels: Annotated[tuple[str, ...] | None, AsTuple] = Field(
        None,
        min_length=2,
        description="Names of the classes, in order. Left out: the model's if they fit, else those in the data.",
    )


class VisionConfig(Section):
    """Sizes of images in tokens, and the parts of a vision-language model that learn."""

    image_max_tokens: int = Field(
        1024,
        ge=1,
        le=16_384,
        description="Larger images are scaled down to at most this many tokens.",
    )
    image_min_tokens: int | None = Field(
        None,
        ge=1,
        description="Smaller images are scaled up to this many tokens. Left out: as the model's processor does.",
    )
    freeze_vision_tower: bool = Field(
        True,
        description="`false`: the vision tower learns too, with LoRA through its own adapters.",
    )
    freeze_projector: bool = Field(
        True,
        description="`false`: the projector, from the vision tower to tokens, learns too, in the same way.",
    )

    @model_validator(mode="after")
    def _budget_holds_something(self) -> VisionConfig:
        if self.image_min_tokens is not None and self.image_min_tokens > self.image_max_tokens:
            raise ValueError(
                f"image_min_tokens is {self.image_min_tokens}, image_max_tokens {self.image_max_tokens}; expected no "
                "more than that"
            )
        return self
