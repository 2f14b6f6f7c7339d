"""Learning from a teacher's probabilities: `distill`."""

from __future__ import annotations

import re
from string import Formatter
from typing import Annotated, Any, Final, Literal

from pydantic import Field, field_validator, model_validator

from kubetune.config.schema.base import AsTuple, Section
from kubetune.config.schema.grpo import GrpoConfig
from kubetune.config.schema.model import ModelConfig
from kubetune.config.vllm import problems_of_addresses

# The name of a teacher that is the model itself, as it was before training.
ITSELF: Final = "self"

# The column of a record that says what the teacher is asked.
COLUMN: Final = "teacher_prompt"

# Each rank holds a teacher's kept numbers in memory. Where they would take more, the teacher is asked at each step.
MOST_KEPT_BYTES: Final = 4 << 30

# Keys that say how answers are drawn.
_OF_DRAWING: Final = ("max_completion_length", "num_generations", "generation_batch_size")


class DistillConfig(Section):
    """The teacher, and how far the model is from it. Names and defaults are those of TRL where it has them."""

    teacher: Annotated[str | tuple[str, ...] | None, AsTuple] = Field(
        None,
        description="The model whose probabilities are learnt: a hub id, a folder, a run directory (its best checkpoint), "
        "`self` (the model before training), or addresses of vLLM servers that have it, such as `http://10.0.0.7:8000`.",
    )
    timeout_seconds: float = Field(
        600.0,
        ge=1,
        description="The run ends if a server that is the teacher does not answer, in spite of retries, within this time.",
    )
    teacher_prompt: str | None = Field(
        None,
        min_length=1,
        description="What the teacher is asked in place of the prompt, such as `{prompt} The answer is {answer}.`, with any "
        "column by its name. A column `teacher_prompt` of a record comes before it.",
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
    lmbda: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of the steps that learn from answers which the model draws itself. The others learn from those "
        "of the data; 0: all do.",
    )
    max_completion_length: int = Field(
        512,
        ge=1,
        le=1_000_000,
        description="Longest drawn answer in tokens; a longer one is cut off.",
    )
    num_generations: int = Field(
        1, ge=1, le=1024, description="Answers that are drawn to each prompt."
    )
    generation_batch_size: int = Field(
        64, ge=1, description="Answers that a rank draws at a time; at least those to one prompt."
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
        description="Weight of the cross-entropy of the answers of the data, which is added to the loss.",
    )

    @property
    def keeps_teacher(self) -> bool:
        """True if the teacher is asked once: rows are given, and few numbers of each label are needed."""
        return self.lmbda == 0 and self.support == "teacher_k"

    @property
    def shown_columns(self) -> set[str]:
        """Return the columns of a record of training that the teacher of drawn answers is shown."""
        if self.lmbda == 0:
            return set()
        columns = {COLUMN}
        for _, field, _, _ in Formatter().parse(self.teacher_prompt or ""):
            # {a.b} and {a[b]} are parts of the column a.
            columns.update(re.findall(r"^[^.\[]+", field or ""))
        return columns

    @property
    def urls(self) -> tuple[str, ...]:
        """Return the addresses of the servers that are the teacher; none of a teacher that is a model here."""
        names = (self.teacher or "",) if not isinstance(self.teacher, tuple) else self.teacher
        return names if any("://" in name for name in names) else ()

    @property
    def model(self) -> str | None:
        """Return the hub id or folder of the teacher, or `self`; None of servers, of which only addresses are known."""
        return None if self.urls or not isinstance(self.teacher, str) else self.teacher

    @property
    def drawing(self) -> GrpoConfig:
        """Return how answers are drawn, in the form that `task: grpo` has for it."""
        keys: dict[str, Any] = {key: getattr(self, key) for key in (*_OF_DRAWING, "temperature")}
        # Without validation: one answer is no group, but here nothing compares answers.
        return GrpoConfig().model_copy(update=keys)

    @field_validator("teacher_prompt")
    @classmethod
    def _is_a_template(cls, value: str | None) -> str | None:
        try:
            fields = [field for _, field, _, _ in Formatter().parse(value or "")]
        except ValueError as error:
            raise ValueError(
                f"{error}; expected names in braces, and {{{{ and }}}} for braces of the text"
            ) from None
        for field in fields:
            # Numbers, and braces that hold nothing, would be places and no names.
            if field is not None and re.match(r"\d*([.\[]|$)", field):
                raise ValueError(
                    f"found {{{field}}}; expected {{prompt}}, {{answer}} or the name of a column"
                )
        return value

    @model_validator(mode="after")
    def _addresses_are_some(self) -> DistillConfig:
        problems = problems_of_addresses("teacher", self.urls)
        if isinstance(self.teacher, tuple) and not self.urls:
            problems.append("teacher: found a list; expected one model, or addresses of servers")
        if self.urls and self.revision is not None:
            problems.append(
                "revision means nothing to a server, which has the model already; leave it out"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def problems_of_servers(self) -> list[str]:
        """Return the settings that a teacher on servers cannot answer for, each as a problem."""
        problems = []
        if self.support == "all":
            problems.append(
                "distill.support: found all with a teacher on vLLM servers, which answer for some tokens of the vocabulary; "
                "expected student_k, or teacher_k for servers without --enable-scale-out"
            )
        elif self.temperature != 1 and self.rest == "tail":
            problems.append(
                f"distill.temperature is {self.temperature:g} with a teacher on vLLM servers, which answer at 1, so the "
                "probability of all other tokens is not known; expected `rest: renormalise`, or a temperature of 1"
            )
        return problems

    def has_for_teacher(self, model: ModelConfig) -> bool:
        """True if the teacher is this model before training, by `self` or by its own name."""
        is_same = self.teacher == model.path and self.revision == model.revision
        return is_same or self.teacher == ITSELF

    @model_validator(mode="after")
    def _keys_fit_each_other(self) -> DistillConfig:
        problems = []
        if self.lmbda < 1 and (self.teacher == ITSELF or self.teacher_prompt is not None):
            problems.append(
                f"lmbda is {self.lmbda:g}; expected 1 with `teacher: self` and with teacher_prompt, since only drawn "
                "answers are shown to a teacher under another prompt"
            )
        if self.lmbda == 0:
            why = "to `lmbda: 0`, which draws no answers; leave it out, or raise lmbda"
            problems += self.set_in_vain(_OF_DRAWING, why)
        if self.lmbda == 1 and self.sft_weight:
            problems.append(
                "sft_weight is for the answers of the data, and `lmbda: 1` uses none; leave it out, or lower lmbda"
            )
        if self.support == "all":
            why = "to `support: all`; leave it out, or take teacher_k or student_k"
            problems += self.set_in_vain(("top_k", "rest"), why)
        elif self.rest == "renormalise" and self.top_k == 1:
            problems.append(
                "top_k is 1 with `rest: renormalise`, which gives that token a probability of 1 in both models, so there is "
                "nothing to learn; expected 2 or more, or `rest: tail`"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self
