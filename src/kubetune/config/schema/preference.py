"""Learning that one answer is better than another: `preference`."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from kubetune.config.schema.base import Section, renamed

LOSS_NAMES: Final = {"sigmoid": "dpo", "slic": "hinge", "cdpo": "dpo", "robust_dpo": "robust"}

Loss = Literal["dpo", "ipo", "hinge", "robust", "orpo", "simpo", "cpo", "kto"]

_WITH_REFERENCE: Final = ("dpo", "ipo", "hinge", "robust")
# Losses that compare with the reference model. The others take an answer's probability as it is.
COMPARED: Final = (*_WITH_REFERENCE, "kto")
# Loss → its own defaults, from its paper.
_DEFAULTS: Final[dict[Any, dict[str, float]]] = {
    "simpo": {"beta": 2.0, "gamma": 1.0},
    "cpo": {"sft_weight": 1.0},
}
# Key → the losses that read it.
ONLY_WITH: Final[dict[str, tuple[str, ...]]] = {
    "label_smoothing": ("dpo", "robust", "cpo", "simpo"),
    "gamma": ("simpo",),
    "sft_weight": (*_WITH_REFERENCE, "cpo", "simpo"),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "reference_free": _WITH_REFERENCE,
}


class PreferenceConfig(Section):
    """The loss on pairs or on judged answers, and its strength."""

    loss: Annotated[Loss, renamed(LOSS_NAMES)] = Field(
        "dpo",
        description="`dpo` (arXiv 2305.18290; `sigmoid`), `ipo` (2310.12036), `hinge` (SLiC, 2305.10425) and `robust` "
        "(2403.00409) compare with the model before training; `orpo` (2403.07691), `simpo` (2405.14734) and `cpo` "
        "(2401.08417) need no reference; `kto` (2402.01306) takes answers one by one, each with a `label`.",
    )
    beta: float = Field(
        0.1,
        gt=0,
        description="Strength of the preference, the weight of the odds ratio in `orpo`. `simpo`: 2.0.",
    )
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=0.5,
        description="Share of pairs that are assumed to be the wrong way round; with it `dpo` is cDPO.",
    )
    gamma: float | None = Field(
        None, ge=0, description="Target reward margin of `simpo`; left out: 1.0."
    )
    sft_weight: float = Field(
        0.0,
        ge=0,
        description="Weight of the chosen answer's cross-entropy, which is added to the loss. `cpo`: 1.0.",
    )
    desirable_weight: float = Field(1.0, gt=0, description="Weight of good answers in `kto`.")
    undesirable_weight: float = Field(1.0, gt=0, description="Weight of bad answers in `kto`.")
    reference_free: bool = Field(
        False, description="Compare with a reference to which all answers are equally likely."
    )
    images: bool = Field(
        False, description="Prompts have images, which the model sees as `vision` says."
    )
    center_coefficient: float | None = Field(
        None,
        gt=0,
        description="For a reward model: how strongly the rewards of a pair are pulled towards a mean of zero.",
    )

    @property
    def needs_reference(self) -> bool:
        """True if the loss needs log-probabilities under the reference model."""
        return self.loss in COMPARED and not self.reference_free

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_loss(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        loss = value.get("loss")
        defaults = _DEFAULTS.get(loss, {}) if isinstance(loss, str) else {}
        return {**defaults, **value}

    @model_validator(mode="after")
    def _keys_fit_the_loss(self) -> PreferenceConfig:
        # A key that the loss ignores is a mistake, even if its value is harmless.
        problems = [
            f"{key} means nothing to `loss: {self.loss}`; leave it out, or take {' or '.join(losses)}"
            for key, losses in ONLY_WITH.items()
            if self.loss not in losses
            and getattr(self, key) != type(self).model_fields[key].default
        ]
        # Its formula divides by 1 - 2 × label_smoothing; with 0 it is DPO.
        if self.loss == "robust" and not self.label_smoothing:
            problems.append(
                "label_smoothing: found 0 with `loss: robust`; expected the share of wrong pairs"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self
