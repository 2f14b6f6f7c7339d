"""One model over all ranks: each holds a slice of every weight and borrows the rest while a layer runs (FSDP2).

Layers are cut by `torch.distributed.fsdp.fully_shard`; reading only one's own slices is left to transformers. LoRA
adapters stay whole on every rank: they are small, and so their gradient, optimizer and checkpoint are those of DDP.
How slices are saved and put together is in optimizer/shards.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, TypeVar, cast

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from kubetune.base import logs
from kubetune.config.schema import TrainingConfig
from kubetune.distributed.process_group import World
from kubetune.models import loading, patches
from kubetune.models.spec import ModelSpec
from kubetune.plan.model_shapes import TOWERS

Result = TypeVar("Result")
SCORE = "score"
"""Name of a decoder's head that classifies. An adapter trains a copy of it, which no slices are borrowed for."""
ADAPTED = rf"{SCORE}\..*|(.*\.)?({'|'.join(TOWERS)})\..*"
"""Names of what stays whole on every rank beside adapters: a rank that has no image in its share never runs a tower."""


def is_wanted(parallelism: str, world: World) -> bool:
    """True if the model is to be sharded: one rank alone has nobody to share with."""
    return parallelism == "fsdp" and world.size > 1


def is_sharded(model: nn.Module) -> bool:
    """True if a model, or the one inside a PEFT model, is cut over the ranks."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def load(
    auto_class: Any,
    spec: ModelSpec,
    training: TrainingConfig,
    world: World,
    frozen: Callable[[Any], str | None] = lambda _: None,
    **labels: Any,
) -> nn.Module:
    """Return `loading.load_pretrained`, sharded where training asks for it; then no rank ever holds the whole model.

    `frozen`: an expression for the names of what does not learn of a model trained in full, which every rank has whole.
    `labels`: settings of a classifier.
    """
    if not is_wanted(training.parallelism, world):
        return loading.load_pretrained(auto_class, spec, world.device, **labels)
    arithmetic = loading.choose_dtype(spec.model.dtype, world.device)
    trained = spec.lora is None
    read = partial(
        loading.load_pretrained,
        auto_class,
        spec,
        world.device,
        **labels,
        dtype=torch.float32 if trained else arithmetic,
        draw=partial(_draw, training.seed),
    )
    cut_by = partial(_cut_for, arithmetic, frozen, trained=trained)
    model: Any
    if patches.can_shard_while_loading():
        with cutting(cut_by, world.size) as settings:
            model = read(**settings)
    else:
        logs.MODEL.info(
            "transformers %s is none that kubetune shards a model with while it is read: each rank holds all of it once, "
            "when training begins",
            transformers.__version__,
        )
        model = cut_by(read())
    if trained:
        for parameter in model.parameters():
            # What is whole does not learn, but was read in fp32 as what does.
            if not isinstance(parameter, DTensor):
                parameter.requires_grad_(False).data = parameter.data.to(arithmetic)
    # What is saved says what is computed with, and nothing of how many ranks there were.
    model.config.dtype = arithmetic
    model.config.distributed_config = None
    return cast(nn.Module, model)


@contextmanager
def cutting(cut_by: Callable[[Any], Any], world_size: int) -> Iterator[dict[str, Any]]:
    """Within, `from_pretrained` with the settings yielded gives a sharded model and reads only this rank's slices.

    transformers builds the model on the meta device, cuts it, and reads what is left. Where it cuts is replaced: its
    own plans know some architectures only, and give the output head, which our loss uses, a group of its own.
    """
    from transformers.distributed.configuration_utils import DistributedConfig

    with patches.cutting_by(lambda model, *_: cut_by(model)), patches.reading_slices():
        yield {"distributed_config": DistributedConfig(fsdp_size=world_size)}


def _cut_for(
    compute_dtype: torch.dtype, frozen: Callable[[Any], str | None], lm: Any, *, trained: bool
) -> Any:
    """Shard a model for what learns of it.

    `trained`: slices are fp32 masters, cast to `compute_dtype` when they are borrowed; else they have that dtype.
    """
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if trained and compute_dtype != torch.float32:
        policy = MixedPrecisionPolicy(
            compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    whole = ADAPTED
    if trained:
        whole = frozen(lm) or "$^"
    return cut(lm, policy, whole)


def cut(lm: Any, policy: MixedPrecisionPolicy, whole: str = ADAPTED) -> Any:
    """Shard every decoder layer that shares no weight with others, and the rest of the model (embeddings, last norm,
    head) as one group around them.

    Parameters whose names match `whole` stay so on every rank: what adapters may lie in, as these are whole, and what
    does not learn of a vision tower. The rest of a tower belongs to the group around the layers, which all ranks borrow
    whether they have an image or not.
    """
    lm.tie_weights()
    if hasattr(lm, SCORE):
        lm.score._is_hf_initialized = (
            True  # for transformers to leave alone, where it is new: `_draw` does that
        )
    towers = [m for name, m in lm.named_modules() if name.rpartition(".")[2] in TOWERS]
    in_towers = {id(module) for tower in towers for module in tower.modules()}
    lists = (m for m in lm.modules() if isinstance(m, nn.ModuleList) and id(m) not in in_towers)
    layers = max(lists, key=len, default=())
    holders = Counter(parameter for layer in layers for parameter in layer.parameters())
    for layer in layers:
        if all(
            holders[parameter] == 1 for parameter in layer.parameters()
        ):  # Zamba's share some of theirs
            fully_shard(layer, mp_policy=policy)
    is_whole = re.compile(whole).fullmatch
    still = {p for name, p in lm.named_parameters() if is_whole(name) or not p.requires_grad}
    fully_shard(lm, mp_policy=policy, ignored_params=still)
    for module in lm.modules():
        if isinstance(module, FSDPModule):
            # The loss is divided once for the whole global batch, so gradients are summed, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    # FSDP wants a method to wrap, by name; it is the one thing that is hung on a model here.
    lm.call_inside = MethodType(_call, lm)
    register_fsdp_forward_method(lm, "call_inside")
    return lm


def _draw(seed: int, model: Any, names: Collection[str]) -> None:
    """Draw what is new of a classifier as a rank that has it whole does: alike, however many share the model."""
    head = getattr(model, SCORE, None)
    if head is None or f"{SCORE}.weight" not in names:
        return
    with torch.device("meta"):
        drawn = nn.Linear(head.in_features, head.out_features, bias=head.bias is not None)
    drawn.to_empty(device="cpu")
    torch.manual_seed(seed)
    model._init_weights(drawn)
    with torch.no_grad():
        for ours, new in zip(head.parameters(), drawn.parameters(), strict=True):
            value = new.to(ours.device, ours.dtype)
            if isinstance(ours, DTensor):
                value = distribute_tensor(value, ours.device_mesh, ours.placements)
            ours.copy_(value)


def _call(_: nn.Module, function: Callable[..., Result], *args: Any) -> Result:
    return function(*args)


class _Reaching(torch.autograd.Function):
    """A tensor as it is, of which parameters that it was not computed from have gradients of zero."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *parameters: Tensor) -> Tensor:
        ctx.forms = [(p.shape, p.dtype, p.device) for p in parameters]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *(
            torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.forms
        )


def reaching(lm: Any, tensor: Tensor) -> Tensor:
    """`tensor`, with gradients for all that learns outside of the text of a sharded model, if only zeros.

    FSDP sums the gradients that a rank has: one without an image in its share would sum other ones than the others.
    """
    if not isinstance(lm, FSDPModule) or not torch.is_grad_enabled():
        return tensor
    model = cast(Any, lm)
    text = {
        id(p)
        for part in (model.get_decoder(), model.get_output_embeddings())
        for p in part.parameters()
    }
    others = [
        p
        for p in model.parameters()
        if p.requires_grad and id(p) not in text and not isinstance(p, DTensor)
    ]
    return _Reaching.apply(tensor, *others)  # type: ignore[no-any-return, no-untyped-call]


def saved_beside(lm: nn.Module) -> dict[str, Tensor]:
    """Buffers and frozen parameters, which a saved model has besides what is trained, whole on every rank."""
    frozen = {
        name: parameter for name, parameter in lm.named_parameters() if not parameter.requires_grad
    }
    return frozen | {
        f"{path}.{name}".removeprefix("."): buffer
        for path, module in lm.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def inside(lm: Any, function: Callable[..., Result], *args: Any) -> Result:
    """`function(*args)` as if it were the model's forward: with embeddings and head whole. Plain where not sharded."""
    result: Result = (
        cast(Any, lm).call_inside(function, *args)
        if isinstance(lm, FSDPModule)
        else function(*args)
    )
    return result


def close(lm: nn.Module) -> None:
    """Give back what forwards without a backward have borrowed, also after one that failed."""
    if isinstance(lm, FSDPModule):
        lm.reset_iter_state()
