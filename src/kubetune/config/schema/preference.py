"""Learning that one answer is better than another: `preference`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from kubetune.config.schema.base import Section, renamed

LOSS_NAMES: Final = {"sigmoid": "dpo", "slic": "hinge", "cdpo": "dpo", "robust_dpo": "robust"}

Loss = Literal["dpo", "ipo", "hinge", "robust", "orpo", "simpo", "cpo", "kto"]


@dataclass(frozen=True)
class LossTraits:
    """What a loss on answers reads and needs. Its formula has the same name in `tasks/preference_losses`."""

    # Keys of `preference` that it reads, besides `loss` and `beta`.
    keys: tuple[str, ...] = ()
    # Its own defaults, from its paper.
    defaults: Mapping[str, float] = field(default_factory=dict)
    # True if it compares with the reference model; else it takes an answer's probability as it is.
    compares: bool = False
    # True if it judges answers one by one; else it compares the two answers of a pair.
    judges: bool = False
    # True if it takes means over an answer's labels, not sums.
    per_label: bool = False
    # True if the rewards that are shown are such means too.
    rewards_per_label: bool = False


LOSSES: Final[dict[Loss, LossTraits]] = {
    "dpo": LossTraits(("label_smoothing", "sft_weight", "reference_free"), compares=True),
    "ipo": LossTraits(("sft_weight", "reference_free"), compares=True, per_label=True),
    "hinge": LossTraits(("sft_weight", "reference_free"), compares=True),
    "robust": LossTraits(("label_smoothing", "sft_weight", "reference_free"), compares=True),
    "orpo": LossTraits(per_label=True, rewards_per_label=True),
    "simpo": LossTraits(
        ("label_smoothing", "gamma", "sft_weight"),
        {"beta": 2.0, "gamma": 1.0},
        per_label=True,
        rewards_per_label=True,
    ),
    "cpo": LossTraits(("label_smoothing", "sft_weight"), {"sft_weight": 1.0}),
    "kto": LossTraits(("desirable_weight", "undesirable_weight"), compares=True, judges=True),
}
# Key that some losses ignore → the losses that read it.
ONLY_WITH: Final[dict[str, tuple[Loss, ...]]] = {
    key: tuple(loss for loss, traits in LOSSES.items() if key in traits.keys)
    for key in dict.fromkeys(key for traits in LOSSES.values() for key in traits.keys)
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
        return self.traits.compares and not self.reference_free

    @property
    def traits(self) -> LossTraits:
        """Return what the loss reads and needs."""
        return LOSSES[self.loss]

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_loss(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        # An unknown name is refused with the other wrong values.
        traits = LOSSES.get(value.get("loss", "dpo"), LossTraits())
        return {**traits.defaults, **value}

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
