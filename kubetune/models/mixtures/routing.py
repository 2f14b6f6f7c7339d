"""Routers of a mixture of experts: the load they give each expert, and the loss that keeps it even where they learn.

The balance loss is transformers' `load_balancing_loss_func` (Switch Transformers, arXiv 2101.03961): E Σₑ Fₑ Pₑ, where
Fₑ is how often expert e is chosen and Pₑ its mean probability, both over all layers and tokens. Here these are all
tokens of the global batch, so that loss and gradient do not depend on how that is split over micro-batches and ranks.
Since F is known only when all have been through the model, a step of several micro-batches runs these twice, once
without a gradient; a step of one needs nothing besides. A z-loss (arXiv 2202.08906) is the mean of logsumexp², which
adds up.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kubetune.base import logs
from kubetune.base.files import write_atomic
from kubetune.distributed.process_group import World, sum_
from kubetune.errors import ConfigError
from kubetune.models.mixtures.experts import routers_of, stacks_of
from kubetune.rundir import metrics

if TYPE_CHECKING:
    from kubetune.batching.batch import Batch
    from kubetune.batching.feed import Work
    from kubetune.config.schema import TrainingConfig


@dataclass
class Routing:
    """Choices of a mixture's routers in the step under way; of a model without experts, nothing.

    Example: one layer of 4 experts, 2 for each of 3 tokens, which chose (0, 1), (0, 2) and (0, 1):

        counts [[3, 2, 1, 0]]    F = counts / 3 = 1, 2/3, 1/3, 0    loss = 4 · Σ Fₑ · (mean probability of expert e)
    """

    counts: Tensor | None = (
        None  # int64 [layers, experts] tokens of this rank that each expert was given
    )
    coefficients: tuple[float, float] = (0.0, 0.0)  # of balance and z-loss
    choices: int = 0  # experts that a token goes to
    layers: tuple[str, ...] = ()  # names of the stacks of experts
    routers: int = 0  # how many routers are balanced
    load: Tensor | None = None  # int64 [layers, experts] tokens of all ranks since the start
    steps: int = 0  # steps since the start
    dropped: int = 0  # tokens that an expert had no room for
    _logits: list[Tensor] = field(
        default_factory=list
    )  # [tokens, experts] of each router in this micro-batch
    _chosen_ahead: Tensor | None = None  # int64 [experts] counted in a run without a gradient
    _frequencies: Tensor | None = None  # [experts] F of the global batch
    _losses: Tensor | None = None  # fp64 [2] balance and z-loss of this rank's step
    _rows: float = 0.0  # tokens of the global batch, times routers
    _divisor: float = 1.0  # what the language model's loss is divided by

    @property
    def balances(self) -> bool:
        """Part of the loss that is the routers' own."""
        return any(self.coefficients)

    def begin(self, work: Work, world: World, evaluate: Callable[[Batch], Any]) -> bool:
        """Begin a step; where its routers are balanced, find out how often each expert is chosen in all of it.

        Returns whether the model was run for that.
        """
        if self.counts is None:
            return False
        self.counts.zero_()
        self._logits.clear()
        if not self.balances:
            return False
        self._rows, self._divisor = (
            max(1.0, float(work.tokens * self.routers)),
            max(work.divisor, 1),
        )
        self._losses, self._frequencies = None, None
        if world.size == 1 and len(work.batches) == 1:
            return False  # known when its forward is done
        chosen = self._chosen_ahead = torch.zeros_like(self.counts[0])
        torch.manual_seed(0)  # dropout may matter, and must be that of the uninterrupted run
        for batch in work.batches:
            evaluate(batch.to(world.device))
        self._frequencies, self._chosen_ahead = sum_(chosen, world) / self._rows, None
        return True

    def balanced(self, value: Tensor, scale: float) -> Tensor:
        """The loss of a micro-batch, times `scale`, with its part of the routers' own, whose divisor is theirs."""
        logits = list(self._logits)
        self._logits.clear()
        if not logits:
            return value
        rows = self._rows or float(sum(map(len, logits)))  # of a trial before the first step
        if self._frequencies is None:
            self._frequencies = torch.stack([self._chosen(each) for each in logits]).sum(0) / rows
        probabilities = torch.stack(
            [torch.softmax(each, -1).float().sum(0) for each in logits]
        ).sum(0)
        balance = len(probabilities) * (self._frequencies * probabilities).sum() / rows
        z = torch.stack([each.float().logsumexp(-1).square().sum() for each in logits]).sum() / rows
        found = torch.stack([balance, z]).detach().double()
        self._losses = found if self._losses is None else self._losses + found
        return value + scale * self._divisor * (
            self.coefficients[0] * balance + self.coefficients[1] * z
        )

    def measured(self, world: World) -> dict[str, float]:
        """Load of the experts in the step that is done, and the routers' own losses, of all ranks."""
        if self.counts is None:
            return {}
        losses = (
            self.counts.new_zeros(2, dtype=torch.float64) if self._losses is None else self._losses
        )
        numbers = sum_(torch.cat([self.counts.double().flatten(), losses]), world)
        *counts, balance, z = numbers.tolist()
        counted = torch.tensor(counts, dtype=torch.int64).view(self.counts.shape)
        self.load, self.steps = (
            counted if self.load is None else self.load + counted,
            self.steps + 1,
        )
        width = self.counts.shape[1]
        values = summary([counts[start : start + width] for start in range(0, len(counts), width)])
        self.dropped += int(values["dropped_tokens"])
        names = ("router_aux_loss", "router_z_loss")
        own = zip(names, (balance, z), self.coefficients, strict=True)
        return values | {name: value for name, value, coefficient in own if coefficient}

    def write_load(self, run_dir: Path, step: int, world: World) -> None:
        """Write how many tokens each expert was given in the steps of this start, up to `step`."""
        if self.load is not None and world.is_main:
            layers = dict(zip(self.layers, self.load.tolist(), strict=True))
            found = {
                "steps": [step - self.steps + 1, step],
                "dropped_tokens": self.dropped,
                "layers": layers,
            }
            write_atomic(run_dir / metrics.EXPERTS, json.dumps(found) + "\n")

    def _chosen(self, logits: Tensor) -> Tensor:
        """Number of tokens that each expert is among the likeliest of: int64 `[experts]`."""
        likeliest = torch.topk(
            torch.softmax(logits.detach(), -1), self.choices, dim=-1
        ).indices.flatten()
        return likeliest.new_zeros(logits.shape[-1]).index_add_(
            0, likeliest, torch.ones_like(likeliest)
        )

    def _count(self, layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if module.training and torch.is_grad_enabled() and not _in_backward():
                chosen = (kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]).flatten()
                assert self.counts is not None
                self.counts[layer].index_add_(0, chosen, torch.ones_like(chosen))

        return hook

    def _keep(self, module: nn.Module, _: Any, output: tuple[Tensor, ...]) -> None:
        if not module.training or _in_backward():
            return
        if torch.is_grad_enabled():
            self._logits.append(output[0].view(-1, output[0].shape[-1]))
        elif self._chosen_ahead is not None:
            self._chosen_ahead += self._chosen(output[0].view(-1, output[0].shape[-1]))


def watch(lm: Any, training: TrainingConfig) -> Routing:
    """The routing of a transformers model from now on; raises ConfigError for losses that its routers cannot have."""
    stacks, routers = stacks_of(lm), list(routers_of(lm).values())
    coefficients = _coefficients(lm, routers, training, is_known=bool(stacks))
    if not stacks:
        return Routing()
    config = lm.config.get_text_config()
    tensor = next(p for p in next(iter(stacks.values())).parameters() if p.dim() == 3)
    counts = torch.zeros(len(stacks), tensor.shape[0], dtype=torch.int64, device=tensor.device)
    choosing = [router for router in routers if not _goes_by_ids(router)]
    choices = getattr(config, "num_experts_per_tok", 0) or 0
    routing = Routing(counts, coefficients, choices, tuple(stacks), len(choosing))
    for layer, name in enumerate(stacks):
        lm.get_submodule(name).register_forward_pre_hook(routing._count(layer), with_kwargs=True)
    if routing.balances:
        for router in choosing:
            router.register_forward_hook(routing._keep)
    return routing


def _goes_by_ids(router: Any) -> bool:
    """Choice of experts by a table of tokens, which no loss moves (DeepSeek-V4's first layers)."""
    base = router.get_base_layer() if hasattr(router, "get_base_layer") else router
    return "input_ids" in signature(base.forward).parameters


def _coefficients(
    lm: Any, routers: list[nn.Module], training: TrainingConfig, *, is_known: bool
) -> tuple[float, float]:
    """Weights of balance and z-loss: none where no router learns, or none `is_known` for the family."""
    wanted, z = training.router_aux_loss_coef, training.router_z_loss_coef
    # Sharding makes a class of its own from the model's.
    sources = (sys.modules[kind.__module__] for kind in type(lm).__mro__)
    known = is_known and any(hasattr(source, "load_balancing_loss_func") for source in sources)
    learn = any(parameter.requires_grad for router in routers for parameter in router.parameters())
    for name, value in (("router_aux_loss_coef", wanted), ("router_z_loss_coef", z)):
        if value and not (learn and known):
            why = (
                "no router learns here"
                if known or not routers
                else "there is none for this family here"
            )
            raise ConfigError(
                f"training.{name}: found {value:g}, but {why}; leave it out"
                + (
                    ", or name the router in lora.target_parameters ([mlp.gate.weight])"
                    if known and routers
                    else ""
                )
            )
    if not learn:
        return 0.0, 0.0
    own = getattr(lm.config.get_text_config(), "router_aux_loss_coef", None) if known else None
    chosen = float(own or 0.0) if wanted is None else wanted
    logs.MODEL.info(
        "the routers learn, %s%s",
        f"balanced by a loss of weight {chosen:g}"
        if chosen
        else "and nothing balances the load of the experts",
        f"; their z-loss has weight {z:g}" if z else "",
    )
    return chosen, z


def summary(counts: list[list[float]]) -> dict[str, float]:
    """Load of experts by layer in a few numbers.

    `expert_load_max`: of the fullest expert, as a multiple of the mean, in the worst layer; `expert_load_cv`: standard
    deviation over mean, the layers' mean; `experts_unused`: share of all that no token went to; `dropped_tokens`: none,
    as transformers gives experts no capacity that could be exceeded.
    """
    means = [math.fsum(layer) / len(layer) or 1.0 for layer in counts]
    pairs = list(zip(counts, means, strict=True))
    spreads = [
        math.sqrt(math.fsum((n - mean) ** 2 for n in layer) / len(layer)) / mean
        for layer, mean in pairs
    ]
    return {
        "expert_load_max": max(max(layer) / mean for layer, mean in pairs),
        "expert_load_cv": math.fsum(spreads) / len(spreads),
        "experts_unused": sum(n == 0 for layer in counts for n in layer) / sum(map(len, counts)),
        "dropped_tokens": 0,
    }


def _in_backward() -> bool:
    """Recomputation of activations, in which layers run a second time."""
    return bool(torch._C._current_graph_task_id() != -1)
