"""AdamW with both moments in 8 bits (arXiv 2110.02861), a quarter of their memory, by bitsandbytes' kernel."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from kubetune.models.quantization import require_bitsandbytes
from kubetune.training.optimizer.adam_step import AdamSettings
from kubetune.training.optimizer.adamw import FlatAdamW

BLOCK = 256  # numbers that share a scale


class FlatAdamW8bit(FlatAdamW):
    """`FlatAdamW` with `exp_avg` and `exp_avg_sq` as codes, uint8 `[parameters]`.

    A number of the first moment is `codes[0][exp_avg[i]] * scale[block]`. Parameters that decay and the others are two
    spans, and no block lies in both. With blocks of 4, 6 numbers that decay and 3 that do not:

        numbers   . . . . | . . || . . .
        block     0         1      2
    """

    codes: tuple[Tensor, Tensor]  # for each moment, fp32 [256]: what a code means
    scale: Tensor  # fp32 [blocks], of the first moment
    scale_sq: Tensor  # fp32 [blocks], of the second moment

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        settings: AdamSettings,
    ) -> None:
        """Raise ConfigError if bitsandbytes is missing."""
        require_bitsandbytes("training.optim: adamw_8bit")
        super().__init__(named_parameters, settings)
        from bitsandbytes.functional import create_dynamic_map

        device = self.master.device
        size = self.master.numel()
        self.codes = (
            create_dynamic_map(signed=True).to(device),
            create_dynamic_map(signed=False).to(device),
        )
        # The code for zero differs: only the first moment's table is signed.
        zero, zero_sq = (int(code.abs().argmin()) for code in self.codes)
        self._zero = zero
        self.exp_avg = torch.full(
            (size,),
            zero,
            dtype=torch.uint8,
            device=device,
        )
        self.exp_avg_sq = torch.full(
            (size,),
            zero_sq,
            dtype=torch.uint8,
            device=device,
        )
        # A scale of 0 makes every code mean zero.
        blocks = _num_blocks(self._decayed) + _num_blocks(size - self._decayed)
        self.scale = torch.zeros(blocks, device=device)
        self.scale_sq = torch.zeros(blocks, device=device)

    def _watch(self, parameter: nn.Parameter, span: slice) -> None:
        """Do nothing: numbers that share a scale are updated together, so rows cannot be updated alone."""

    def moments_of(self, state: dict[str, Tensor], span: slice) -> Tensor:
        """Return, for each number of a stretch, whether it has moments."""
        return state["exp_avg"][span] != self._zero

    def update(self, learning_rate: float) -> None:
        """Make one AdamW step from `gradient`, then set that to zero."""
        self.step_count += 1
        # Two calls, since the kernel has one weight decay for all that it gets.
        blocks = _num_blocks(self._decayed)
        decayed = slice(0, self._decayed)
        others = slice(self._decayed, self.master.numel())
        self._move_span(
            decayed,
            slice(0, blocks),
            learning_rate,
            self.settings.weight_decay,
        )
        self._move_span(
            others,
            slice(blocks, len(self.scale)),
            learning_rate,
            0.0,
        )
        self.clear_gradient()
        self.copies.refresh(self.tables)

    def _move_span(
        self,
        span: slice,
        blocks: slice,
        learning_rate: float,
        decay: float,
    ) -> None:
        from bitsandbytes.functional import optimizer_update_8bit_blockwise

        if span.stop == span.start:
            return  # an adapter may have no bias, or only biases
        settings = self.settings
        optimizer_update_8bit_blockwise(
            "adam",
            self.gradient[span],
            self.master[span],
            self.exp_avg[span],
            self.exp_avg_sq[span],
            settings.beta1,
            settings.beta2,
            0.0,  # beta3 and alpha are of another optimizer
            0.0,
            settings.epsilon,
            int(self.step_count),
            learning_rate,
            *self.codes,
            self.scale[blocks],
            self.scale_sq[blocks],
            weight_decay=decay,
        )

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint needs to continue bit for bit."""
        # The tables of codes are constants, and need not be kept.
        return super().state() | {"scale": self.scale, "scale_sq": self.scale_sq}


def _num_blocks(size: int) -> int:
    """Return the number of blocks of a span; its last one may be shorter."""
    return math.ceil(size / BLOCK)
