"""AdamW whose two moments are kept in 8 bits (arXiv 2110.02861), a quarter of the memory, by bitsandbytes' kernel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from kubetune.models.quantization import require_bitsandbytes
from kubetune.training.optimizer.adamw import AdamSettings, FlatAdamW

if TYPE_CHECKING:
    from kubetune.config.schema import TrainingConfig

BLOCK = 256  # numbers that share a scale


def make_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], training: TrainingConfig
) -> FlatAdamW:
    """The optimizer that `training.optim` names, over all trained parameters."""
    settings = AdamSettings(
        training.adam_beta1, training.adam_beta2, training.adam_epsilon, training.weight_decay
    )
    return (FlatAdamW8bit if training.optim == "adamw_8bit" else FlatAdamW)(
        named_parameters, settings
    )


class FlatAdamW8bit(FlatAdamW):
    """`FlatAdamW` with `exp_avg` and `exp_avg_sq` as codes, uint8 `[parameters]`.

    Every `BLOCK` codes share a scale; what a code means stands in two tables of 256. Decayed parameters and the rest
    are two spans, whose blocks do not overlap.
    """

    def __init__(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], settings: AdamSettings
    ) -> None:
        """Raises ConfigError when bitsandbytes is missing."""
        require_bitsandbytes("training.optim: adamw_8bit")
        super().__init__(named_parameters, settings)
        from bitsandbytes.functional import create_dynamic_map

        device, size = self.master.device, self.master.numel()
        self.codes = (
            create_dynamic_map(signed=True).to(device),
            create_dynamic_map(signed=False).to(device),
        )
        # What stands for zero differs: the table of the first moment is signed.
        self.exp_avg, self.exp_avg_sq = (
            torch.full((size,), int(code.abs().argmin()), dtype=torch.uint8, device=device)
            for code in self.codes
        )
        self._spans = [slice(0, self._decayed), slice(self._decayed, size)]
        blocks = sum(-(-(span.stop - span.start) // BLOCK) for span in self._spans)
        self.scale, self.scale_sq = (torch.zeros(blocks, device=device) for _ in range(2))

    def _watch(self, parameter: nn.Parameter, span: slice) -> None:
        """Numbers that share a scale are moved together, so no row is by itself."""

    def update(self, learning_rate: float) -> None:
        """One AdamW step from `gradient`, which is zeroed afterwards."""
        from bitsandbytes.functional import optimizer_update_8bit_blockwise

        self.step_count += 1
        step, first_block, settings = int(self.step_count), 0, self.settings
        for span, decay in zip(self._spans, (settings.weight_decay, 0.0), strict=True):
            blocks = slice(first_block, first_block + -(-(span.stop - span.start) // BLOCK))
            first_block = blocks.stop
            if span.stop > span.start:
                optimizer_update_8bit_blockwise(
                    "adam",
                    self.gradient[span],
                    self.master[span],
                    self.exp_avg[span],
                    self.exp_avg_sq[span],
                    settings.beta1,
                    settings.beta2,
                    0.0,
                    0.0,
                    settings.epsilon,
                    step,
                    learning_rate,
                    *self.codes,
                    self.scale[blocks],
                    self.scale_sq[blocks],
                    weight_decay=decay,
                )
        self.clear_gradient()
        self._refresh()

    def state(self) -> dict[str, Tensor]:
        """Tensors that a checkpoint needs to go on bit by bit."""
        return super().state() | {"scale": self.scale, "scale_sq": self.scale_sq}
