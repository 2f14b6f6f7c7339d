"""Routers of a mixture of experts: the choices they make in a step, and the loss that keeps them even if they learn.

The balance loss is transformers' `load_balancing_loss_func` (Switch Transformers, arXiv 2101.03961): E Σₑ Fₑ Pₑ, where
Fₑ is how often expert e is chosen and Pₑ its mean probability, both over all layers and tokens. Here these are all
tokens of the global batch, so that loss and gradient do not depend on how that is split over micro-batches and ranks.
A z-loss (arXiv 2202.08906) is the mean of logsumexp², which adds up.

F is known only when all tokens have been through the model, and the gradient of P needs it. So a step of several
micro-batches runs these twice:

    without a gradient     micro-batches 0, 1, 2     count the choices; F of all ranks
    with a gradient        micro-batches 0, 1, 2     P, and the loss by this F

A step of one micro-batch on one rank runs it once: F is known before its backward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kubetune.base import logs
from kubetune.distributed.process_group import World, sum_
from kubetune.errors import ConfigError
from kubetune.models.mixtures.stacked_experts import routers_of, stacks_of
from kubetune.models.mixtures.tokens_by_expert import ExpertLoad

if TYPE_CHECKING:
    from kubetune.batching.batch import Batch
    from kubetune.batching.feed import Work
    from kubetune.config.schema import TrainingConfig


@dataclass
class Routing:
    """Choices of a mixture's routers in the step under way; for a model without experts, nothing.

    Example: one layer of 4 experts, 2 for each of 3 tokens, which chose (0, 1), (0, 2) and (0, 1):

        counts [[3, 2, 1, 0]]    F = counts / 3 = 1, 2/3, 1/3, 0    loss = 4 · Σ Fₑ · (mean probability of expert e)
    """

    # int64 [layers, experts] tokens of this rank that each expert got; None without experts
    counts: Tensor | None = None
    coefficients: tuple[float, float] = (0.0, 0.0)  # weights of balance and z-loss
    choices: int = 0  # experts that a token goes to
    routers: int = 0  # how many routers are balanced
    load: ExpertLoad = field(default_factory=ExpertLoad)  # of all steps since the start

    # For the step under way:
    _logits: list[Tensor] = field(default_factory=list)  # [tokens, experts] of each router
    _chosen_ahead: Tensor | None = None  # int64 [experts] counted while it runs without a gradient
    _frequencies: Tensor | None = None  # [experts] F of the global batch
    _losses: Tensor | None = None  # fp64 [2] balance and z-loss of this rank
    _rows: float = 0.0  # tokens of the global batch, times routers
    _divisor: float = 1.0  # what the language model's loss is divided by
    _is_in_backward: bool = False  # True while recomputed layers run a second time

    @property
    def balances(self) -> bool:
        """True if a part of the loss is the routers' own."""
        return any(self.coefficients)

    def begin(
        self,
        work: Work,
        world: World,
        evaluate: Callable[[Batch], Any],
    ) -> bool:
        """Begin a step. If its routers are balanced, find out how often each expert is chosen in all of it.

        Return True if the model was run for that.
        """
        if self.counts is None:
            return False
        self.counts.zero_()
        self._logits.clear()
        if not self.balances:
            return False

        # Drawn answers that nothing is learnt from do not go through the model, and have no router's choice.
        tokens = work.computed or work.tokens
        self._rows = max(1.0, float(tokens * self.routers))
        self._divisor = max(work.divisor, 1)
        self._losses = None
        self._frequencies = None
        if world.size == 1 and len(work.batches) == 1:
            return False  # `_balanced` counts the choices of its only forward

        # Every rank runs all its micro-batches without a gradient, and all ranks add up what they chose.
        chosen = torch.zeros_like(self.counts[0])
        self._chosen_ahead = chosen  # `_keep` adds to it
        torch.manual_seed(0)  # dropout may matter, and must be the same as in the uninterrupted run
        for batch in work.batches:
            evaluate(batch.to(world.device))
        self._chosen_ahead = None
        self._frequencies = sum_(chosen, world) / self._rows
        return True

    def backward(self, value: Tensor, scale: float) -> None:
        """Run the backward of a micro-batch's loss, times `scale`, with its part of the routers' own losses."""
        loss = self._balanced(value, scale)
        # Recomputed layers route the same tokens again, which must not count twice.
        self._is_in_backward = True
        try:
            loss.backward()
        finally:
            self._is_in_backward = False

    def _balanced(self, value: Tensor, scale: float) -> Tensor:
        """Return the loss of a micro-batch, times `scale`, with its part of the routers' own losses.

        `value` is divided by the labels of the step (`scale` does that), the routers' losses by their rows. So `scale`
        is taken back for these: what is left of it is the scale of fp16, if there is one.
        """
        logits = list(self._logits)
        self._logits.clear()
        if not logits:
            return value
        # Example: 2 routers, 6 tokens in the global batch, 2 of 4 experts for each token. Then rows = 12 = 2 · 6.
        # For one micro-batch with 3 tokens, with F known from the whole batch:
        #
        #     probability_sums    [2.1, 1.8, 1.2, 0.9]    over its 3 tokens and both routers
        #     balance             4 · Σ F · probability_sums / 12. The parts of all micro-batches add up to the
        # batch's loss.
        #
        # A trial before the first step has no rows yet: it counts its own.
        rows = self._rows or float(sum(map(len, logits)))
        if self._frequencies is None:
            chosen = [self._chosen(of_router) for of_router in logits]
            self._frequencies = torch.stack(chosen).sum(0) / rows

        probabilities = []
        squares = []
        for of_router in logits:
            probabilities.append(torch.softmax(of_router, -1).float().sum(0))
            squares.append(of_router.float().logsumexp(-1).square().sum())

        probability_sums = torch.stack(probabilities).sum(0)
        balance = len(probability_sums) * (self._frequencies * probability_sums).sum() / rows
        z = torch.stack(squares).sum() / rows

        losses = torch.stack([balance, z]).detach().double()
        if self._losses is not None:
            losses = self._losses + losses
        self._losses = losses
        weighted = self.coefficients[0] * balance + self.coefficients[1] * z
        return value + scale * self._divisor * weighted

    def measured(self, world: World) -> dict[str, float]:
        """Return the load of the experts in the step that is done, and the routers' own losses, of all ranks."""
        if self.counts is None:
            return {}
        losses = self._losses
        if losses is None:
            losses = self.counts.new_zeros(2, dtype=torch.float64)
        # One sum over the ranks for all of it.
        numbers = sum_(torch.cat([self.counts.double().flatten(), losses]), world)
        *flat_counts, balance, z = numbers.tolist()

        # Whole numbers again: fp64 holds every one up to 2⁵³.
        counts = torch.tensor(flat_counts, dtype=torch.int64).view(self.counts.shape)
        values = self.load.add(counts.tolist())
        balance_weight, z_weight = self.coefficients
        if balance_weight:
            values["router_aux_loss"] = balance
        if z_weight:
            values["router_z_loss"] = z
        return values

    def _chosen(self, logits: Tensor) -> Tensor:
        """Return how many tokens chose each expert, int64 `[experts]`."""
        probabilities = torch.softmax(logits.detach(), -1)
        chosen = torch.topk(probabilities, self.choices, dim=-1).indices.flatten()
        # With 4 experts, the choices 0 1 0 2 are counted as 2 1 1 0.
        return chosen.new_zeros(logits.shape[-1]).index_add_(0, chosen, torch.ones_like(chosen))

    def _count(self, layer: int) -> Callable[..., None]:
        """Return a hook that counts the choices in a stack of experts, once for each token that is trained."""

        def hook(
            module: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
        ) -> None:
            if not (module.training and torch.is_grad_enabled()) or self._is_in_backward:
                return
            # The choices come by name or as the second argument, `[tokens, choices]`.
            if "top_k_index" in kwargs:
                chosen = kwargs["top_k_index"]
            else:
                chosen = args[1]

            chosen = chosen.flatten()
            assert self.counts is not None, "it is hooked only if there are experts"
            self.counts[layer].index_add_(0, chosen, torch.ones_like(chosen))

        return hook

    def _keep(
        self,
        module: nn.Module,
        _: Any,
        output: tuple[Tensor, ...],
    ) -> None:
        """Keep the logits of a router, or count its choices if the step is run ahead without a gradient."""
        if not module.training or self._is_in_backward:
            return
        logits = output[0].view(-1, output[0].shape[-1])
        if torch.is_grad_enabled():
            self._logits.append(logits)
        elif self._chosen_ahead is not None:
            self._chosen_ahead += self._chosen(logits)


def watch(lm: Any, training: TrainingConfig) -> Routing:
    """Return the routing of a transformers model from now on.

    Raise ConfigError for losses that its routers cannot have.
    """
    stacks = stacks_of(lm)
    routers = list(routers_of(lm).values())
    coefficients = _coefficients(lm, routers, training, is_stacked=bool(stacks))
    if not stacks:
        return Routing()
    config = lm.config.get_text_config()

    first_stack = next(iter(stacks.values()))
    weight = next(p for p in first_stack.parameters() if p.dim() == 3)  # [experts, …, …]
    balanced_routers = [router for router in routers if not _goes_by_ids(router)]
    routing = Routing(
        counts=torch.zeros(len(stacks), len(weight), dtype=torch.int64, device=weight.device),
        coefficients=coefficients,
        choices=getattr(config, "num_experts_per_tok", 0) or 0,
        routers=len(balanced_routers),
        load=ExpertLoad(tuple(stacks)),
    )

    # The choices of every stack are counted; the logits of routers are kept only if a loss needs them.
    for layer, name in enumerate(stacks):
        lm.get_submodule(name).register_forward_pre_hook(routing._count(layer), with_kwargs=True)
    if routing.balances:
        for router in balanced_routers:
            router.register_forward_hook(routing._keep)
    return routing


def _goes_by_ids(router: Any) -> bool:
    """True if a router chooses experts by a table of tokens, which no loss moves (DeepSeek-V4's first layers)."""
    base = router.get_base_layer() if hasattr(router, "get_base_layer") else router
    return "input_ids" in signature(base.forward).parameters


def _coefficients(
    lm: Any,
    routers: list[nn.Module],
    training: TrainingConfig,
    *,
    is_stacked: bool,
) -> tuple[float, float]:
    """Return the weights of balance and z-loss; zeros if no router learns, or if the family has no balance loss.

    `is_stacked`: the experts are, so that choices can be counted. Raise ConfigError for a weight that has no effect.
    """
    is_known = is_stacked and _has_balance_loss(lm)
    learns = any(_learns(router) for router in routers)
    wanted = training.router_aux_loss_coef
    z = training.router_z_loss_coef
    if not (learns and is_known):
        for name, value in (("router_aux_loss_coef", wanted), ("router_z_loss_coef", z)):
            if value:
                raise ConfigError(_refusal(name, value, routers, is_known=is_known))
    if not learns:
        return 0.0, 0.0

    balance = wanted
    if balance is None and is_known:
        # The weight that the family was trained with.
        balance = getattr(lm.config.get_text_config(), "router_aux_loss_coef", None)
    balance = float(balance or 0.0)

    balancing = "and nothing balances the load of the experts"
    if balance:
        balancing = f"balanced by a loss of weight {balance:g}"
    of_z = f"; their z-loss has weight {z:g}" if z else ""
    logs.MODEL.info("the routers learn, %s%s", balancing, of_z)
    return balance, z


def _has_balance_loss(lm: Any) -> bool:
    """True if transformers has a balance loss for the family of a model."""
    # Sharding makes a class of its own from the model's: so all classes that it inherits from are asked.
    modules = [sys.modules[kind.__module__] for kind in type(lm).__mro__]
    return any(hasattr(module, "load_balancing_loss_func") for module in modules)


def _learns(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _refusal(
    name: str,
    value: float,
    routers: list[nn.Module],
    *,
    is_known: bool,
) -> str:
    """Return why a loss of the routers cannot be had, and what to do."""
    reason = "no router learns here"
    if routers and not is_known:
        reason = "there is none for this family here"
    advice = ""
    if routers and is_known:
        advice = ", or name the router in lora.target_parameters ([mlp.gate.weight])"
    return f"training.{name}: found {value:g}, but {reason}; leave it out{advice}"
