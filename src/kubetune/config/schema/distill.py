"""Learning from a teacher's probabilities: `distill`."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field, model_validator

from kubetune.config.schema.base import Section

# The name of a teacher that is the model itself, as it was before training.
ITSELF: Final = "self"


class DistillConfig(Section):
    """The teacher, and how far the model is from it. Names and defaults are those of TRL where it has them."""

    teacher: str | None = Field(
        None,
        description="The model whose probabilities are learnt: a hub id, a folder, or a run directory, whose best "
        "checkpoint it is. Its tokenizer must have the same tokens.",
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a teacher on the hub.")
    beta: float = Field(
        1.0,
        ge=0,
        le=1,
        description="0: forward divergence KL(teacher ‖ student). 1: reverse divergence KL(student ‖ teacher). Between: the "
        "generalised Jensen-Shannon divergence (docs/distillation.md has the formula).",
    )
    temperature: float = Field(
        1.0, gt=0, le=100, description="Temperature of both models' probabilities."
    )
    support: Literal["all", "teacher_k", "student_k"] = Field(
        "all",
        description="The tokens that are compared: the whole vocabulary, or at each place the `top_k` likeliest of the "
        "teacher or of the student.",
    )
    top_k: int = Field(
        64, ge=1, description="Tokens that are compared with `teacher_k` and `student_k`."
    )
    rest: Literal["tail", "renormalise"] = Field(
        "tail",
        description="What becomes of all other tokens: `tail` compares their probability as if they were one token, as TRL "
        "does; `renormalise` leaves them out, so that those compared have a sum of 1, as ms-swift does.",
    )
    sft_weight: float = Field(
        0.0,
        ge=0,
        description="Weight of the cross-entropy of the given answers, which is added to the loss.",
    )

    @model_validator(mode="after")
    def _keys_fit_the_support(self) -> DistillConfig:
        if self.support == "all":
            for key in ("top_k", "rest"):
                if key in self.changed_keys:
                    raise ValueError(
                        f"{key} means nothing to `support: all`; leave it out, or take teacher_k or student_k"
                    )
        return self
