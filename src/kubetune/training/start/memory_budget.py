"""The memory of a rank's device: how much there is, what the forecast expects, and what makes a run fit."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from kubetune import errors
from kubetune.base.humanize import size
from kubetune.config.schema.quantities import quantity_bytes
from kubetune.models import acceleration
from kubetune.plan.costs import RunWeights
from kubetune.plan.fitting import remedies
from kubetune.plan.memory import USABLE_SHARE

if TYPE_CHECKING:
    from kubetune.config.schema import Config
    from kubetune.plan.costs import Costs
    from kubetune.plan.plan import Plan

# Share of the device that advice counts on after memory ran out although the forecast fitted.
SHARE_AFTER_WRONG_FORECAST = 0.9


class MemoryBudget:
    """How much memory a rank may take, and how much the run is expected to take."""

    device_bytes: int  # the rank may take so much
    owner: str  # what sets that limit, for messages: a GPU's name, `compute.memory`, this machine
    forecast_bytes: int | None  # None if the model's files say too little for a forecast

    def __init__(self, config: Config, costs: Costs, device: torch.device) -> None:
        self._config = config
        self._facts = costs.facts
        self._forecast = costs.memory
        memory = config.compute.memory
        self.device_bytes, self.owner = rank_memory(memory, costs.facts.plan, device)
        self.forecast_bytes = None
        if self._forecast is not None:
            self.forecast_bytes = self._forecast.allocated_bytes

    def outlook(self) -> str:
        """Return the forecast in words, to log before anything is tried: on a CPU the kernel may kill without a word."""
        if self._forecast is None:
            return "unknown"
        text = f"{size(self.forecast_bytes or 0)} of {size(self.device_bytes)} ({self.owner})"
        if not self._forecast.fits:
            text += f", which is not enough: {self.advice(1.0)}"
        return text

    def verdict(self, peak: int, reserved: int | None) -> str:
        """Compare the measured peak, and what PyTorch reserved on a GPU, with the forecast and the device."""
        text = f"peak memory {size(peak)}"
        if reserved is not None:
            text += f" allocated, {size(reserved)} reserved"
        if self.forecast_bytes:
            error = peak / self.forecast_bytes - 1  # positive if the forecast was too low
            text += f", forecast {size(self.forecast_bytes)} ({error:+z.0%})"
        # What PyTorch reserves counts, because other processes cannot have it.
        share = (reserved or peak) / self.device_bytes
        text += f"; {share:.0%} of {size(self.device_bytes)} ({self.owner})"
        if share > USABLE_SHARE:
            text += f", which leaves little for surprises; {self.advice(1.0, peak)}"
        return text

    def require(self, peak: int, content: str) -> None:
        """Raise OutOfMemory if the largest peak of all ranks exceeds the device. `content`: of the batch, in words."""
        if peak > self.device_bytes:
            what = f"the longest batch ({content}), an evaluation and a save"
            raise self.fault(what, f"take {size(peak)}", peak)

    def fault(
        self,
        what: str,
        problem: str,
        peak: int | None = None,
    ) -> errors.OutOfMemory:
        """Return the error for work that does not fit, with the changes that help."""
        return errors.OutOfMemory(
            f"preflight: {what} {problem}, there are {size(self.device_bytes)} ({self.owner}); "
            f"{self.advice(SHARE_AFTER_WRONG_FORECAST, peak)}. Nothing was trained or saved."
        )

    def advice(self, share: float, peak: int | None = None) -> str:
        """Return the changes with which the run would fit, in words.

        A measured peak corrects the forecast. Without one, only this share of the device is counted on.
        """
        # Without a forecast it is unknown how much each change saves.
        if self._forecast is None:
            return "lower training.per_device_train_batch_size or data.max_length, or recompute activations"
        # The forecast of a changed run is taken to be wrong by the same factor, so the device looks that much smaller.
        wrong_by = 1 / share
        if peak and self.forecast_bytes:
            wrong_by = max(1.0, peak / self.forecast_bytes)
        usable = int(self.device_bytes / wrong_by)
        models = RunWeights.of(self._config, os.environ)
        facts = self._facts
        changes = remedies(self._config, facts.plan, models, usable, facts.data.longest)
        # Each one alone would be enough, the mildest first.
        if not changes:
            return "no single change would make it fit; several together may, or a larger device"
        texts = [f"{text} (about {size(after.peak_bytes)})" for text, after in changes]
        return f"it would fit with {', or '.join(texts)}"


def rank_memory(
    compute_memory: str | None,
    plan: Plan,
    device: torch.device,
) -> tuple[int, str]:
    """Return how much memory a rank may take, and what sets that limit."""
    if device.type == "cuda":
        return acceleration.device_bytes(device), torch.cuda.get_device_name(device)
    # On a CPU the limit is the pod's, which its processes share.
    if compute_memory:
        process_bytes = quantity_bytes(compute_memory) // plan.processes_per_node
        return process_bytes, "compute.memory of each process"
    return acceleration.device_bytes(device), "this machine's, of each process"
