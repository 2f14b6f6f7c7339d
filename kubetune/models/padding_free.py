"""Running an unmodified Hugging Face causal LM on packed batches, and proving on the model at hand that this is exact.

`choose_attention` tries the padding-free route and checks it against the model's own code on short sequences. Where the
result differs, recurrent modules get the sequences as rows (`recurrences`) and it is checked again. Where it
differs still (ALiBi, chunked attention …) the model keeps its own attention and gets one sequence per micro-batch:
still without padding, still exact, only slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from kubetune import errors
from kubetune.batching.batch import Batch, collate
from kubetune.kernels.attention.varlen import longest, on_device
from kubetune.kernels.cross_entropy import LogitRule
from kubetune.models import fsdp, recurrences
from kubetune.models.attention_hooks import CURRENT, CannotRunPaddingFree, packed

if TYPE_CHECKING:
    from numpy.typing import NDArray

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
"""Largest allowed norm of a difference of outputs, relative to them, by the dtype of the weights."""
LEAK = 1e-6
FOREIGN_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    KeyError,
    IndexError,
    AssertionError,
)
"""Errors of a model that others wrote at inputs that it was not made for."""


@dataclass(frozen=True)
class Route:
    """How sequences go through the model."""

    padding_free: bool  # many per packed batch, instead of one at a time
    why_not: str = ""  # what refused packed batches
    difference: float = 0.0  # largest relative difference of outputs, packed and one by one
    in_rows: tuple[str, ...] = ()  # classes of recurrent modules that run on rows of padded batches


def unwrap(model: nn.Module) -> Any:
    """The transformers model inside a PEFT model, or the model itself."""
    inner = getattr(
        model, "get_base_model", None
    )  # PEFT's: where nobody has imported it, there is none
    return model if inner is None else inner()


def backbone(lm: Any) -> nn.Module:
    """The causal LM without its head. Some classes name a prefix that does not exist (Llama 4)."""
    found = (
        getattr(lm, lm.base_model_prefix, None) or getattr(lm, "model", None) or lm.get_decoder()
    )
    return cast(nn.Module, found)


def language_model(lm: Any) -> nn.Module:
    """The part of a model that makes text, without the vision tower, where it has one."""
    return cast(nn.Module, getattr(backbone(lm), "language_model", lm))


def logit_rule(lm: Any) -> LogitRule:
    """Read the rule from the config, by the names that families have for it; `require_head` refuses any other."""
    config = lm.config.get_text_config()

    def stated(*names: str) -> float:
        return float(next((value for name in names if (value := getattr(config, name, None))), 0.0))

    scale = stated("logit_scale", "lm_head_multiplier") or 1.0  # Cohere; Falcon-H1
    divisor = stated("logits_scaling", "logits_mup_width_multiplier") or 1.0  # Granite; Inkling
    return LogitRule(
        scale / divisor,
        stated("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"),
    )


def hidden_states(lm: Any, batch: Batch, *, always_packed: bool = False) -> Tensor:
    """Final hidden states `[tokens, hidden]` of one packed batch. Call inside `attention.packed(...)`.

    A lone sequence is packed only where it is `always_packed`: without kernels, linear attention refuses packed input.
    """
    packs = len(batch.cu_seqlens) > 2 or always_packed
    kwargs = varlen_kwargs(batch.cu_seqlens, batch.input_ids.device) if packs else {}
    out = backbone(lm)(
        input_ids=batch.input_ids[None],
        position_ids=batch.position_ids[None],
        use_cache=False,
        **kwargs,
    )
    return cast(Tensor, out[0][0])


@lru_cache(maxsize=2)
def varlen_kwargs(cu_seqlens: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    """Arguments by which kernels of others know where the sequences of a packed batch begin and end."""
    cu = on_device(cu_seqlens, device)
    numbers = torch.from_numpy(
        np.repeat(np.arange(len(cu) - 1, dtype=np.int32), np.diff(cu_seqlens))
    )
    length = longest(cu_seqlens)
    return {
        "cu_seq_lens_q": cu,
        "cu_seq_lens_k": cu,
        "max_length_q": length,
        "max_length_k": length,
        "seq_idx": numbers[None].to(device),
    }


def self_check(model: nn.Module) -> float:
    """Compare the padding-free run of a causal LM with its own attention, as `check_padding_free` does."""
    rule = logit_rule(unwrap(model))

    def run_packed(lm: Any, batch: Batch) -> Sequence[Tensor]:
        with packed(batch.cu_seqlens):
            logits = rule.apply(fsdp.inside(lm, raw_logits, lm, batch).float())
        return list(logits.split([stop - start for start, stop in pairwise(batch.cu_seqlens)]))

    def raw_logits(lm: Any, batch: Batch) -> Tensor:
        return cast(Tensor, lm.get_output_embeddings()(hidden_states(lm, batch)))

    return check_padding_free(model, lay, run_packed, plain_logits)


def plain_logits(lm: Any, batch: Batch) -> Tensor:
    """Logits `[tokens, vocabulary]` of a single sequence, by the model's own code."""
    return cast(Tensor, lm(input_ids=batch.input_ids[None], use_cache=False).logits[0])


def lay(sequences: Sequence[NDArray[np.uint32]]) -> Batch:
    """A packed batch of sequences of ids."""
    return collate([(ids, np.ones(len(ids), bool)) for ids in sequences])


def require_head(
    model: nn.Module,
    batch: Batch | None = None,
    hidden: Callable[[Any, Batch], Tensor] = hidden_states,
    plain: Callable[[Any, Batch], Tensor] = plain_logits,
) -> None:
    """Raise ModelError where hidden states, head and rule do not give the logits of the model's own code.

    `batch`: one sequence, of which `hidden` and `plain` give both; left out, one of random ids.
    """
    lm = unwrap(model)
    batch = batch or lay(examples(lm.config.get_text_config().vocab_size)[1:2])
    batch = batch.to(next(lm.parameters()).device)

    def logits() -> Tensor:
        return cast(Tensor, lm.get_output_embeddings()(hidden(lm, batch)))

    was_training = lm.training
    lm.eval()
    try:
        with torch.no_grad():
            ours = logit_rule(lm).apply(fsdp.inside(lm, logits).float())
            theirs = plain(lm, batch)
    finally:
        fsdp.close(lm)
        lm.train(was_training)
    if (
        ours.shape != theirs.shape
        or not (ours - theirs.float()).norm() <= TOLERANCE[theirs.dtype] * theirs.norm()
    ):
        raise errors.ModelError(
            f"model {lm.name_or_path}: {type(lm).__name__} makes its logits of its hidden states by a rule that is not "
            "known here, so its loss would be another one. Nothing was trained; choose another model"
        )


@torch.no_grad()
def check_padding_free(
    model: nn.Module,
    lay: Callable[[Sequence[NDArray[np.uint32]]], Batch],
    run_packed: Callable[[Any, Batch], Sequence[Tensor]],
    run_lone: Callable[[Any, Batch], Tensor],
) -> float:
    """Run three short sequences in one packed batch and one by one; return the largest relative difference.

    `lay` puts ids end to end; `run_packed` gives an output for each sequence of a packed batch, `run_lone` that of a
    single one by the model's own code, from which the dtype of the arithmetic is taken. Raises CannotRunPaddingFree
    where they differ, where tokens of the first sequence change the others, or on NaN.
    """
    lm = unwrap(model)
    was_training, device = lm.training, next(lm.parameters()).device
    sequences = examples(lm.config.get_text_config().vocab_size)
    changed = [sequences[0][::-1], *sequences[1:]]
    lm.eval()
    try:
        set_attention(lm, "padding_free")
        if implementation(lm) != "padding_free" and not getattr(
            lm, "_is_stateful", False
        ):  # what is recurrent alone attends to nothing
            raise CannotRunPaddingFree("its attention is code of its own that takes no other")
        together, other = (
            [t.float() for t in run_packed(lm, lay(parts).to(device))]
            for parts in (sequences, changed)
        )
        set_attention(lm, "eager")
        alone = [run_lone(lm, lay([ids]).to(device)) for ids in sequences]
    finally:
        fsdp.close(lm)
        lm.train(was_training)
    if [t.shape for t in together] != [t.shape for t in alone]:
        raise CannotRunPaddingFree(
            f"a packed batch gives {tuple(together[0].shape)} where one sequence gives {tuple(alone[0].shape)}"
        )
    differences = [
        float((a - b.float()).norm() / b.float().norm())
        for a, b in zip(together, alone, strict=True)
    ]
    leak = torch.cat(other[1:]).sub(torch.cat(together[1:])).norm() / torch.cat(together).norm()
    return require_exact(differences, float(leak), alone[0].dtype)


def examples(vocabulary: int) -> list[NDArray[np.uint32]]:
    """Ids of three short sequences drawn from a vocabulary, the same each time."""
    generator = torch.Generator().manual_seed(0)
    low = min(5, vocabulary - 2)
    drawn = [torch.randint(low, vocabulary, (n,), generator=generator) for n in (7, 19, 12)]
    return [ids.numpy().astype(np.uint32) for ids in drawn]


def require_exact(differences: Sequence[float], leak: float, dtype: torch.dtype) -> float:
    """Largest of the relative differences; CannotRunPaddingFree when one, or the leak, is too large or NaN."""
    # `not (<=)` instead of `>`: NaN must refuse too.
    if not leak <= LEAK:
        raise CannotRunPaddingFree(f"sequences see each other (relative change {leak:.0e})")
    if not all(d <= TOLERANCE[dtype] for d in differences):
        raise CannotRunPaddingFree(
            f"the padding-free run differs from one by one ({max(differences):.0e})"
        )
    return max(differences)


def set_attention(lm: Any, name: str) -> None:
    """Set the attention of a model; the vision tower, where it has one, keeps transformers' own."""
    towers = [key for key in getattr(lm.config, "sub_configs", {}) if key != "text_config"]
    if getattr(lm.config, "vision_config", None) is None:
        lm.set_attn_implementation(name)
    else:
        lm.set_attn_implementation({"text_config": name, **dict.fromkeys(towers, "sdpa")})


def implementation(lm: Any) -> str | None:
    """Name of the attention that a language model runs by; None where it has no choice."""
    # Old models only warn in set_attn_implementation and keep what they had.
    return cast("str | None", getattr(lm.config.get_text_config(), "_attn_implementation", None))


def choose_attention(
    model: nn.Module, wanted: str = "auto", check: Callable[[nn.Module], float] = self_check
) -> Route:
    """Set the model's attention: padding-free where `check` proves it exact, else its own.

    `wanted` is `model.attention`. Raises CannotRunPaddingFree only when "padding_free" was asked for by name.
    """
    lm = unwrap(model)
    CURRENT.cu_seqlens = None
    if wanted in ("eager", "sdpa"):
        set_attention(lm, wanted)
        return Route(False, f"model.attention is {wanted}")
    try:
        route = _proved(model, check)
    except CannotRunPaddingFree as refusal:
        reason: Exception = refusal
    except FOREIGN_ERRORS as error:
        # Whatever a foreign model does with an unknown mask or packed input, its own attention is the safe way.
        reason = error
    else:
        set_attention(lm, "padding_free")
        return route
    if wanted == "padding_free":
        raise CannotRunPaddingFree(f"model.attention is padding_free, but {reason}") from reason
    _restore(lm)
    return Route(False, errors.first_line(reason))


def _proved(model: nn.Module, check: Callable[[nn.Module], float]) -> Route:
    """Return the route of packed batches where `check` finds them exact, if need be with recurrent modules in rows."""
    try:
        return Route(True, difference=check(model))
    except FOREIGN_ERRORS:
        kept_apart = recurrences.keep_apart(decoder_layers(model), partial(check, model))
        if not kept_apart.modules:
            raise
    try:
        return Route(True, difference=check(model), in_rows=kept_apart.in_rows)
    except BaseException:
        kept_apart.undo()
        raise


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The layers of a language model: the longest of its lists of modules."""
    lists = (m for m in language_model(unwrap(model)).modules() if isinstance(m, nn.ModuleList))
    return max(lists, key=len, default=nn.ModuleList())


def recomputable_layers(model: nn.Module) -> list[Any]:
    """The layers of a model that can run again in the backward instead of keeping what they computed."""
    try:
        from transformers.modeling_layers import GradientCheckpointingLayer
    except ImportError:  # a version that calls them otherwise
        lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
        return list(max(lists, key=len, default=()))
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


@contextmanager
def own_attention(lm: Any) -> Iterator[None]:
    """Within, the model attends by transformers' own code, as one that generates with a cache must."""
    before = implementation(lm)
    if before == "padding_free":
        _restore(lm)
    try:
        yield
    finally:
        if before == "padding_free":
            set_attention(lm, before)


def _restore(lm: Any) -> None:
    for implementation in ("sdpa", "eager"):
        try:
            set_attention(lm, implementation)
            return
        except (ValueError, ImportError):
            continue
