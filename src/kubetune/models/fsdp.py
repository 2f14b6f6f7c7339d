"""One model over all ranks: each holds a slice of every weight and borrows the rest while a layer runs (FSDP2).

So is a model that is trained in full; a frozen base is cut in bytes (sharded_base). What both have to do is asked for here.
Layers are cut by `torch.distributed.fsdp.fully_shard`; transformers reads only a rank's slices. Two ranks:

                          rank 0                     rank 1
    layer 0, q_proj       rows of the first half     rows of the second half
    while layer 0 runs    all rows                   all rows

How slices are saved and put together is in optimizer/shards.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any, TypeVar, cast

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from kubetune import errors
from kubetune.base import logs
from kubetune.base.files import StrPath
from kubetune.config.schema import TrainingConfig
from kubetune.distributed import process_group
from kubetune.distributed.main_rank import raise_first
from kubetune.distributed.process_group import World
from kubetune.models import loading, patches, slice_patches, weight_files
from kubetune.models.model_spec import ModelSpec
from kubetune.models.sharded_base import base_shards
from kubetune.plan.model_shapes import TOWERS

Result = TypeVar("Result")

# Name of a decoder's head that classifies. transformers does not draw a new one: it is drawn as on one rank.
SCORE = "score"
# Matches no name.
NOTHING = "$^"
# transformers' method that gives a module its first values.
INIT_WEIGHTS = "_init_weights"


def is_wanted(parallelism: str, world: World) -> bool:
    """True if the model is to be sharded: a single rank has nobody to share with."""
    return parallelism != "ddp" and world.size > 1


def is_sharded(model: nn.Module) -> bool:
    """True if a model, or the one inside a PEFT model, is cut over the ranks."""
    if base_shards.of(model) is not None:
        return True
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def load(
    auto_class: Any,
    spec: ModelSpec,
    training: TrainingConfig,
    world: World,
    frozen: Callable[[Any], str | None] = lambda _: None,
    **labels: Any,
) -> nn.Module:
    """Return the model of `loading.load_pretrained`, sharded if training asks for it.

    Sharded, it is on no rank ever whole, if the patches of transformers fit (patches.py). Under adapters it is frozen, and
    cut in bytes (sharded_base).

    `frozen`: an expression for the names of what does not learn of a model trained in full, which every rank has whole.
    `labels`: settings of a classifier.
    """
    is_cut = is_wanted(training.parallelism, world)
    if is_cut and spec.lora is not None:
        spec = replace(spec, cut_over=world)
    read = partial(
        loading.load_pretrained,
        auto_class,
        spec,
        world.device,
        require_finite=partial(_require_finite_everywhere, world),
        **labels,
    )
    if not is_cut or spec.lora is not None:
        return read()

    # Weights that learn are fp32 masters; those that do not have the dtype that is computed with.
    arithmetic = loading.choose_dtype(spec.model.dtype, world.device)
    read_masters = partial(read, dtype=torch.float32, draw=partial(_draw, training.seed))
    mesh = _mesh(training, world)
    model: Any = _read(read_masters, partial(_cut_for, arithmetic, frozen, mesh), world)
    for parameter in model.parameters():
        # Whole parameters do not learn, but were read in fp32 like those that do.
        if not isinstance(parameter, DTensor):
            parameter.requires_grad_(False).data = parameter.data.to(arithmetic)

    # The saved model states the dtype of the arithmetic, and not how many ranks there were.
    model.config.dtype = arithmetic
    model.config.distributed_config = None
    return cast(nn.Module, model)


def _mesh(training: TrainingConfig, world: World) -> DeviceMesh:
    """Return the ranks as FSDP sees them. With `fsdp_size` 2, four ranks have two copies of the weights (HSDP):

    ranks 0 1    a copy, cut in two
    ranks 2 3    another one; gradients are summed within a copy, then between 0 and 2, and 1 and 3
    """
    sharing = training.ranks_of_copy(world.size)
    if sharing == world.size:
        return init_device_mesh(world.device.type, (world.size,))
    sizes = (world.size // sharing, sharing)
    return init_device_mesh(world.device.type, sizes, mesh_dim_names=("copy", "slice"))


def _require_finite_everywhere(
    world: World,
    origin: StrPath,
    weights: Iterable[tuple[str, Tensor]],
) -> None:
    """Raise ModelError on all ranks if one rank has numbers that are not finite.

    They may be in the slice of one rank only. If only that rank raised, the others would continue, and wait for it.
    """
    failure: errors.KubetuneError | None = None
    try:
        weight_files.require_finite(origin, weights)
    except errors.ModelError as error:
        failure = error
    raise_first(process_group.gather(failure, world))


def _read(read: Callable[..., Any], cut_by: Callable[[Any], Any], world: World) -> Any:
    """Return what `read` reads, cut: in slices if transformers can be made to, else whole first."""
    why_whole = patches.why_whole()
    if not why_whole:
        with cutting(cut_by, world.size) as settings:
            return read(**settings)
    logs.MODEL.info(
        "this kubetune cannot shard a model while transformers %s reads it (%s): at the start each rank holds all of it "
        "once",
        transformers.__version__,
        why_whole,
    )
    return cut_by(read())


@contextmanager
def cutting(cut_by: Callable[[Any], Any], world_size: int) -> Iterator[dict[str, Any]]:
    """Yield settings for `from_pretrained` that make a sharded model. Each rank reads its slices only.

    transformers builds the model on the meta device, cuts it, and reads what is left. The choice of modules to
    shard is replaced: its own plans know some architectures only, and give the output head, which our loss uses, a
    group of its own.
    """
    from transformers.distributed.configuration_utils import DistributedConfig

    with patches.cutting_by(lambda model, *_: cut_by(model)), slice_patches.reading_slices(SCORE):
        yield {"distributed_config": DistributedConfig(fsdp_size=world_size)}


def _cut_for(
    compute_dtype: torch.dtype,
    frozen: Callable[[Any], str | None],
    mesh: DeviceMesh,
    lm: Any,
) -> Any:
    """Shard a model. Slices are fp32 masters, cast to `compute_dtype` when they are borrowed."""
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if compute_dtype != torch.float32:
        policy = MixedPrecisionPolicy(
            compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    return cut(lm, policy, frozen(lm) or NOTHING, mesh)


def cut(
    lm: Any,
    policy: MixedPrecisionPolicy,
    whole: str = NOTHING,
    mesh: DeviceMesh | None = None,
) -> Any:
    """Shard each decoder layer, and the rest of the model (embeddings, last norm, head) as one group around them.

    A layer that shares a weight with others belongs to that group too. Parameters whose names match `whole` stay whole
    on every rank: what does not learn of a vision tower. The rest of a tower belongs to the group around the layers,
    which all ranks borrow whether they have an image or not. `mesh`: of the ranks; None for one over all of them.
    """
    lm.tie_weights()
    layers = _decoder_layers(lm)
    # How many layers have a parameter. Zamba's layers share some.
    holders: Counter[nn.Parameter] = Counter()
    for layer in layers:
        holders.update(layer.parameters())
    for layer in layers:
        if all(holders[parameter] == 1 for parameter in layer.parameters()):
            fully_shard(layer, mp_policy=policy, mesh=mesh)

    # Inner groups first: the group around the layers takes what they leave.
    whole_parameters = set()
    for name, parameter in lm.named_parameters():
        if re.fullmatch(whole, name) or not parameter.requires_grad:
            whole_parameters.add(parameter)
    fully_shard(lm, mp_policy=policy, mesh=mesh, ignored_params=whole_parameters)
    for module in lm.modules():
        if isinstance(module, FSDPModule):
            # The loss is divided once for the whole global batch, so gradients are summed, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    # FSDP wraps a method by its name. Nothing else is hung on a model here.
    lm.call_inside = MethodType(_call, lm)
    register_fsdp_forward_method(lm, "call_inside")
    return lm


def _decoder_layers(lm: nn.Module) -> Sequence[nn.Module]:
    """Return the layers of a model's text: the longest list of modules outside of its towers."""
    in_towers: set[nn.Module] = set()
    for name, module in lm.named_modules():
        if name.rpartition(".")[2] in TOWERS:
            in_towers.update(module.modules())
    lists: list[Any] = []
    for module in lm.modules():
        if isinstance(module, nn.ModuleList) and module not in in_towers:
            lists.append(module)
    return max(lists, key=len, default=())


def _draw(seed: int, model: Any, names: Collection[str]) -> None:
    """Draw the weights of a new head as one rank without others does, however many share the model."""
    head = getattr(model, SCORE, None)
    if head is None or f"{SCORE}.weight" not in names:
        return
    # Built without a device, as nn.Linear's own values would be drawn from the generator first.
    with torch.device("meta"):
        whole_head = nn.Linear(head.in_features, head.out_features, bias=head.bias is not None)

    whole_head.to_empty(device="cpu")
    torch.manual_seed(seed)
    # transformers' method for the first values of a family's modules. Most families take these.
    init_weights = getattr(model, INIT_WEIGHTS, None)
    if init_weights is not None:
        init_weights(whole_head)
    else:
        logs.MODEL.info(
            "transformers %s has no %s: the new head is drawn by initializer_range of config.json",
            transformers.__version__,
            INIT_WEIGHTS,
        )
        std = getattr(model.config.get_text_config(), "initializer_range", 0.02)
        nn.init.normal_(whole_head.weight, std=std)
        if whole_head.bias is not None:
            nn.init.zeros_(whole_head.bias)

    with torch.no_grad():
        for parameter, drawn in zip(head.parameters(), whole_head.parameters(), strict=True):
            value = drawn.to(parameter.device, parameter.dtype)
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)

            parameter.copy_(value)


def _call(_: nn.Module, function: Callable[..., Result], *args: Any) -> Result:
    return function(*args)


class _Reaching(torch.autograd.Function):
    """Return a tensor as it is, and give parameters that it was not computed from gradients of zero."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *parameters: Tensor) -> Tensor:
        ctx.forms = [(p.shape, p.dtype, p.device) for p in parameters]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        zeros = []
        for shape, dtype, device in ctx.forms:
            zeros.append(torch.zeros(shape, dtype=dtype, device=device))
        return gradient, *zeros


def reaching(lm: Any, tensor: Tensor) -> Tensor:
    """Return `tensor`, from which all that learns in a sharded model gets a gradient, if only zeros.

    Ranks sum the gradients that they have. A vision tower has none on a rank without an image in its share, and that
    rank would sum others than the rest does:

        rank 0, with an image       tower: its gradient      decoder: its gradient
        rank 1, without             tower: zeros, by this    decoder: its gradient
    """
    if not isinstance(lm, FSDPModule) or not torch.is_grad_enabled():
        return tensor
    model = cast(Any, lm)
    of_text: set[nn.Parameter] = set()
    for part in (model.get_decoder(), model.get_output_embeddings()):
        of_text.update(part.parameters())
    others = []
    for parameter in model.parameters():
        is_whole = not isinstance(parameter, DTensor)
        if is_whole and parameter.requires_grad and parameter not in of_text:
            others.append(parameter)

    return _Reaching.apply(tensor, *others)  # type: ignore[no-any-return, no-untyped-call]


def saved_beside(lm: nn.Module) -> dict[str, Tensor]:
    """Return what a saved model has besides what is trained: frozen parameters and buffers, whole on every rank."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in lm.named_parameters():
        if not parameter.requires_grad:
            tensors[name] = parameter
    # A state dict lacks the buffers that a module makes each time it is built.
    saved = lm.state_dict()
    for path, module in lm.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            name_in_model = f"{path}.{name}".removeprefix(".")
            if name_in_model in saved:
                tensors[name_in_model] = buffer
    return tensors


def inside(lm: Any, function: Callable[..., Result], *args: Any) -> Result:
    """Return `function(*args)`, run as if it were the model's forward: with embeddings and head whole."""
    if not isinstance(lm, FSDPModule):
        return function(*args)
    result: Result = cast(Any, lm).call_inside(function, *args)
    return result


@contextmanager
def whole(lm: nn.Module) -> Iterator[None]:
    """Hold all weights of a sharded model on every rank while the block runs, so that no forward takes other ranks.

    All ranks begin the block together, and leave it together. Two ranks that draw answers of different lengths:

        gathered once      layer 0, layer 1, … whole on both ranks
        within             rank 0: 9 forwards    rank 1: 40 forwards
        at the end each rank has only its slices again

    On a device this takes the memory of all weights, in the dtype that is computed with.
    """
    shards = base_shards.of(lm)
    if shards is not None:
        shards.keep()
        try:
            yield
        finally:
            shards.close()
        return
    if not isinstance(lm, FSDPModule):
        yield
        return
    groups = [module for module in lm.modules() if isinstance(module, FSDPModule)]
    for module in groups:
        # Else the first forward would give the layers back.
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        close(lm)
        for module in groups:
            # As `fully_shard` has it: only the group around the layers stays until the backward.
            module.set_reshard_after_forward(module is not lm, recurse=False)
            module.reshard()


@contextmanager
def drawing(
    lm: nn.Module, decoder: nn.Module, along: Callable[[], object], world: World
) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Yield what a rank draws its answers in. All ranks begin the block together, and leave it together.

    The weights are `whole` meanwhile, but for a frozen base that has no room on one of the GPUs: that stays in parts,
    and ranks whose answers are all drawn go `along` (see `BaseShards.apart`).
    """
    shards = base_shards.of(lm)
    if shards is None or shards.has_room(world):
        with whole(lm):
            yield nullcontext
    else:
        yield partial(shards.apart, decoder, along, world)


def gathered(lm: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield the weights of a sharded model as a forward computes with them, by name, one group after the other.

    All ranks iterate together, between two steps. Each group takes the memory that it takes in a forward.
    """
    for path, group in lm.named_modules():
        if not isinstance(group, FSDPModule):
            continue
        module: Any = group
        slices = {name for name, p in module.named_parameters() if isinstance(p, DTensor)}
        module.unshard()
        weights = {}
        for name, parameter in module.named_parameters():
            if name in slices and not isinstance(parameter, DTensor):
                weights[f"{path}.{name}".removeprefix(".")] = parameter.detach()
        yield weights
        module.reshard()
    close(lm)


def close(lm: nn.Module) -> None:
    """Give back what forwards without a backward have borrowed, also after one that failed."""
    shards = base_shards.of(lm)
    if shards is not None:
        shards.close()
    if isinstance(lm, FSDPModule):
        lm.reset_iter_state()


def borrow(lm: nn.Module, module: nn.Module) -> None:
    """Have the weights of a part of a model here that runs without a call of its layer, or of itself as a head."""
    shards = base_shards.of(lm)
    if shards is not None:
        for weight in module.parameters():
            shards.borrow(weight)
