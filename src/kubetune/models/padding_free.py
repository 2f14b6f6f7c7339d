"""Run an unmodified Hugging Face causal LM on packed batches, and prove on the model at hand that this is exact.

`choose_attention` takes the first of these that gives what the model's own code gives for three short sequences:

    1. packed batches, by the attention of attention_hooks.py
    2. the same, and recurrent modules get the sequences as rows (recurrences.py)
    3. the model's own attention, one sequence per micro-batch (ALiBi, chunked attention …): no padding either, exact
       too, only slower
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
import torch.nn.functional as F
from torch import Tensor, nn

from kubetune import errors
from kubetune.batching.batch import Batch, collate
from kubetune.kernels.attention.varlen import longest, on_device
from kubetune.kernels.cross_entropy import LogitRule
from kubetune.models import fsdp, recurrences
from kubetune.models.attention_hooks import CURRENT, CannotRunPaddingFree, packed

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Largest allowed norm of a difference of outputs, relative to them, by the dtype of the weights.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
# Largest relative change of what one sequence gives when another one changes. It should be none at all.
LEAK = 1e-6
# Errors of a model that others wrote, at inputs that it was not made for.
FOREIGN_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    KeyError,
    IndexError,
    AssertionError,
)


@dataclass(frozen=True)
class Route:
    """How sequences go through the model."""

    padding_free: bool  # many per packed batch, instead of one at a time
    why_not: str = ""  # what refused packed batches
    difference: float = 0.0  # largest relative difference of outputs, packed and one by one
    in_rows: tuple[str, ...] = ()  # classes of recurrent modules that run on rows of padded batches
    # The last of the decoder layers is run once in a forward, after all others. Some models run layers in loops.
    ends_in_last_layer: bool = False


def unwrap(model: nn.Module) -> Any:
    """Return the transformers model inside a PEFT model, or the model itself."""
    get_base_model = getattr(model, "get_base_model", None)
    return model if get_base_model is None else get_base_model()


def backbone(lm: Any) -> nn.Module:
    """Return the causal LM without its head."""
    # Some classes name a prefix that does not exist (Llama 4).
    for name in (lm.base_model_prefix, "model"):
        module = getattr(lm, name, None)
        if module:
            return cast(nn.Module, module)
    return cast(nn.Module, lm.get_decoder())


def language_model(lm: Any) -> nn.Module:
    """Return the part of a model that makes text: if it has a vision tower, without that."""
    return cast(nn.Module, getattr(backbone(lm), "language_model", lm))


def logit_rule(lm: Any) -> LogitRule:
    """Return what a model does with its raw logits, by the names that families have for it in their configs.

    A rule under a name that is not known here is noticed by `require_head` and `self_check`.
    """
    # Granite divides its logits by `logits_scaling`, Gemma 2 bends them to ±30 by `final_logit_softcapping`.
    config = lm.config.get_text_config()

    def first_stated(*names: str) -> float:
        for name in names:
            value = getattr(config, name, None)
            if value:
                return float(value)

        return 0.0

    # Names of Cohere and Falcon-H1, then of Granite and Inkling.
    factor = first_stated("logit_scale", "lm_head_multiplier") or 1.0
    divisor = first_stated("logits_scaling", "logits_mup_width_multiplier") or 1.0
    cap = first_stated("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    return LogitRule(factor / divisor, cap)


def hidden_states(
    lm: Any,
    batch: Batch,
    *,
    always_packed: bool = False,
) -> Tensor:
    """Return the final hidden states `[tokens, hidden]` of one packed batch. Call inside `packed(...)`.

    `always_packed`: also tell kernels where a lone sequence begins and ends, as compiled layers expect.
    """
    kwargs: dict[str, Any] = {}
    # Without these kernels, linear attention refuses the arguments; a lone sequence it can run.
    if len(batch.cu_seqlens) > 2 or always_packed:
        kwargs = varlen_kwargs(batch.cu_seqlens, batch.input_ids.device)
    out = backbone(lm)(
        input_ids=batch.input_ids[None],
        position_ids=batch.position_ids[None],
        use_cache=False,
        **kwargs,
    )
    return cast(Tensor, out[0][0])


@lru_cache(maxsize=2)
def varlen_kwargs(cu_seqlens: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    """Return the arguments that tell kernels of other libraries the sequences of a packed batch."""
    # For a a a | b b: `cu_seq_lens_q` is (0, 3, 5), `max_length_q` 3, `seq_idx` [[0, 0, 0, 1, 1]].
    cu = on_device(cu_seqlens, device)
    number_of_sequences = len(cu_seqlens) - 1
    numbers = np.repeat(np.arange(number_of_sequences, dtype=np.int32), np.diff(cu_seqlens))
    length = longest(cu_seqlens)
    return {
        "cu_seq_lens_q": cu,
        "cu_seq_lens_k": cu,
        "max_length_q": length,
        "max_length_k": length,
        "seq_idx": torch.from_numpy(numbers)[None].to(device),
    }


def self_check(model: nn.Module) -> float:
    """Compare the padding-free run of a causal LM with its own attention, as `check_padding_free` does."""
    return check_padding_free(
        model,
        lay,
        partial(packed_logits, hidden_states),
        plain_logits,
    )


def packed_logits(
    hidden: Callable[[Any, Batch], Tensor],
    lm: Any,
    batch: Batch,
) -> list[Tensor]:
    """Return the logits `[tokens, vocabulary]` of each sequence of a packed batch, by its `hidden` states."""

    def raw_logits() -> Tensor:
        return cast(Tensor, lm.get_output_embeddings()(hidden(lm, batch)))

    with packed(batch.cu_seqlens):
        logits = logit_rule(lm).apply(fsdp.inside(lm, raw_logits).float())
    return [logits[start:stop] for start, stop in pairwise(batch.cu_seqlens)]


def plain_logits(lm: Any, batch: Batch) -> Tensor:
    """Return the logits `[tokens, vocabulary]` of a single sequence, by the model's own code."""
    return cast(Tensor, lm(input_ids=batch.input_ids[None], use_cache=False).logits[0])


def lay(sequences: Sequence[NDArray[np.uint32]]) -> Batch:
    """Return sequences of ids as a packed batch. All tokens are trained."""
    return collate([(ids, np.ones(len(ids), bool)) for ids in sequences])


def require_head(
    model: nn.Module,
    batch: Batch | None = None,
    hidden: Callable[[Any, Batch], Tensor] = hidden_states,
    plain: Callable[[Any, Batch], Tensor] = plain_logits,
) -> None:
    """Raise ModelError if hidden states, head and rule do not give the logits of the model's own code.

    The loss is computed of the former. `batch`: one sequence, of which `hidden` gives the hidden states and `plain` the
    logits; without it, one of random ids.
    """
    lm = unwrap(model)
    if batch is None:
        batch = lay(examples(lm.config.get_text_config().vocab_size)[1:2])
    batch = batch.to(next(lm.parameters()).device)

    head = lm.get_output_embeddings()
    bias = getattr(head, "bias", None)

    def logits() -> Tensor:
        # Not by calling the head: the loss takes its weight and bias. Dory's has a scale for each token besides.
        states = hidden(lm, batch).to(head.weight.dtype)
        fsdp.borrow(lm, head)
        return F.linear(states, head.weight, bias)

    was_training = lm.training
    lm.eval()
    try:
        with torch.no_grad():
            ours = logit_rule(lm).apply(fsdp.inside(lm, logits).float())
            expected = plain(lm, batch)
    finally:
        fsdp.close(lm)
        lm.train(was_training)

    is_same = ours.shape == expected.shape
    if is_same:
        # Relative to the logits, as everywhere here.
        difference = (ours - expected.float()).norm()
        is_same = bool(difference <= TOLERANCE[expected.dtype] * expected.norm())
    # Another parameter that learns would get no gradient, even if it changes nothing yet.
    learns = {name.rpartition(".")[2] for name, p in head.named_parameters() if p.requires_grad}
    if learns - {"weight", "bias"} or not is_same:
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
    """Run three short sequences in packed batches and one by one; return the largest relative difference.

    `lay` puts ids end to end; `run_packed` returns an output for each sequence of a packed batch, `run_lone` the
    output of a single one. Its dtype is the dtype of the arithmetic. Raise CannotRunPaddingFree for differences,
    and for NaN.
    """
    # With the sequences a, b and c, of 7, 19 and 12 tokens:
    #
    #     packed     a b c               must give what a, b and c give separately, by the model's own code
    #     changed    reversed(a) b c     must give the very same for b and c as before, or these see a
    lm = unwrap(model)
    was_training = lm.training
    device = next(lm.parameters()).device
    sequences = examples(lm.config.get_text_config().vocab_size)
    changed_sequences = [sequences[0][::-1], *sequences[1:]]
    lm.eval()
    try:
        set_attention(lm, "padding_free")
        # A model that is only recurrent attends to nothing.
        is_recurrent = getattr(lm, "_is_stateful", False)
        if implementation(lm) != "padding_free" and not is_recurrent:
            raise CannotRunPaddingFree("its attention is code of its own that takes no other")
        packed_outputs = [t.float() for t in run_packed(lm, lay(sequences).to(device))]
        changed_outputs = [t.float() for t in run_packed(lm, lay(changed_sequences).to(device))]
        set_attention(lm, "eager")
        lone_outputs = [run_lone(lm, lay([ids]).to(device)) for ids in sequences]
    finally:
        fsdp.close(lm)
        lm.train(was_training)

    differences = []
    for packed_output, lone_output in zip(packed_outputs, lone_outputs, strict=True):
        if packed_output.shape != lone_output.shape:
            raise CannotRunPaddingFree(
                f"a packed batch gives {tuple(packed_output.shape)} where one sequence gives {tuple(lone_output.shape)}"
            )
        expected = lone_output.float()
        differences.append(float((packed_output - expected).norm() / expected.norm()))

    change = torch.cat(changed_outputs[1:]) - torch.cat(packed_outputs[1:])
    leak = change.norm() / torch.cat(packed_outputs).norm()
    return require_exact(differences, float(leak), lone_outputs[0].dtype)


def examples(vocabulary: int) -> list[NDArray[np.uint32]]:
    """Return ids of three short sequences drawn from a vocabulary, the same each time."""
    generator = torch.Generator().manual_seed(0)
    lowest = min(5, vocabulary - 2)  # the first ids are mostly special tokens
    sequences = []
    for length in (7, 19, 12):
        ids = torch.randint(lowest, vocabulary, (length,), generator=generator)
        sequences.append(ids.numpy().astype(np.uint32))
    return sequences


def require_exact(
    differences: Sequence[float],
    leak: float,
    dtype: torch.dtype,
) -> float:
    """Return the largest of some relative differences.

    Raise CannotRunPaddingFree if one of them, or the leak, is too large or NaN.
    """
    # `not (<=)` instead of `>`: NaN must refuse too.
    if not leak <= LEAK:
        raise CannotRunPaddingFree(f"sequences see each other (relative change {leak:.0e})")
    if not all(d <= TOLERANCE[dtype] for d in differences):
        raise CannotRunPaddingFree(
            f"the padding-free run differs from one by one ({max(differences):.0e})"
        )

    return max(differences)


def set_attention(lm: Any, name: str) -> None:
    """Set the attention of a model by its name in transformers. A vision tower keeps transformers' own."""
    if getattr(lm.config, "vision_config", None) is None:
        lm.set_attn_implementation(name)
        return

    # Other parts, such as the tower, keep transformers' own.
    names = {"text_config": name}
    for part in getattr(lm.config, "sub_configs", {}):
        names.setdefault(part, "sdpa")
    lm.set_attn_implementation(names)


def implementation(lm: Any) -> str | None:
    """Return the name of the attention that a language model runs by; None if it has no choice."""
    # Old models only warn in set_attn_implementation and keep what they had.
    return cast("str | None", getattr(lm.config.get_text_config(), "_attn_implementation", None))


def choose_attention(
    model: nn.Module,
    wanted: str = "auto",
    check: Callable[[nn.Module], float] = self_check,
) -> Route:
    """Set the model's attention: padding-free if `check` proves it exact, else its own.

    `wanted` is `model.attention`. Raise CannotRunPaddingFree only if that asks for padding_free by name.
    """
    lm = unwrap(model)
    CURRENT.cu_seqlens = None
    if wanted in ("eager", "sdpa"):
        set_attention(lm, wanted)
        return Route(False, f"model.attention is {wanted}")
    try:
        # Whatever goes wrong with packed batches, the model's own attention is still there.
        route = _proved(model, check)
    except CannotRunPaddingFree as refusal:
        reason: Exception = refusal
    except FOREIGN_ERRORS as error:
        # Whatever a foreign model does with an unknown mask or packed input: its own attention is the safe way.
        reason = error
    else:
        set_attention(lm, "padding_free")
        return route

    if wanted == "padding_free":
        raise CannotRunPaddingFree(f"model.attention is padding_free, but {reason}") from reason
    _restore(lm)
    return Route(False, errors.first_line(reason))


def _proved(model: nn.Module, check: Callable[[nn.Module], float]) -> Route:
    """Return the route of packed batches, with recurrent modules in rows if `check` is content only then."""
    try:
        difference, ends = _watched(model, check)
        return Route(True, difference=difference, ends_in_last_layer=ends)
    except FOREIGN_ERRORS:
        kept_apart = recurrences.keep_apart(decoder_layers(model), partial(check, model))
        if not kept_apart.modules:
            raise  # nothing in it was recurrent

    try:
        difference, ends = _watched(model, check)
        return Route(
            True, difference=difference, in_rows=kept_apart.in_rows, ends_in_last_layer=ends
        )
    except BaseException:
        kept_apart.undo()
        raise


def _watched(model: nn.Module, check: Callable[[nn.Module], float]) -> tuple[float, bool]:
    """Return what `check` does, and whether each of its forwards ended in the last decoder layer, which ran once.

    A forward begins with the embeddings E. Two stacks that take turns, and layers 1 and 2 that run in a loop:

        as usual      E 0 1 2    E 0 1 2        layers are lists of modules, of whatever class
        two stacks    E a0 a1 b0 b1 a0 a1       refused: the last list's b1 is not the end
        a loop        E 0 1 2 1 2               refused: 2 runs twice
    """
    lm = unwrap(model)
    layers = decoder_layers(model)
    if not layers:
        return check(model), False
    last = layers[-1]
    embeddings = lm.get_input_embeddings()
    entries = {embeddings}
    for module in language_model(lm).modules():
        if isinstance(module, nn.ModuleList):
            entries.update(entry for entry in module if type(entry) is type(last))

    calls: list[nn.Module] = []
    hooks = []
    for entry in entries:
        hooks.append(entry.register_forward_hook(lambda module, *_: calls.append(module)))
    try:
        difference = check(model)
    finally:
        for hook in hooks:
            hook.remove()

    ends = bool(calls)
    for number, module in enumerate(calls):
        is_end = number + 1 == len(calls) or calls[number + 1] is embeddings
        ends = ends and (module is last) == is_end
    return difference, ends


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the layers of a language model: the longest of its lists of modules."""
    return _longest_list(language_model(unwrap(model)))


# How torch.utils.checkpoint keeps only the inputs of layers.
RECOMPUTING: dict[str, Any] = {"use_reentrant": False}


def recomputable_layers(model: nn.Module) -> list[Any]:
    """Return the layers of a model that can run again in the backward instead of keeping what they computed."""
    try:
        from transformers.modeling_layers import GradientCheckpointingLayer
    except ImportError:  # a version that has another name for them
        return list(_longest_list(model))
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _longest_list(model: nn.Module) -> nn.ModuleList:
    # Layers are the longest list; shorter ones are heads, blocks of a tower, and the like.
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=nn.ModuleList())


@contextmanager
def own_attention(lm: Any) -> Iterator[None]:
    """Use transformers' own attention while the block runs, since generating with a cache needs it."""
    # A cache holds keys and values of sequences, which a packed batch has no place for.
    before = implementation(lm)
    if before == "padding_free":
        _restore(lm)
    try:
        yield
    finally:
        if before == "padding_free":
            set_attention(lm, before)


def _restore(lm: Any) -> None:
    """Give a model the fastest attention of its own that it takes."""
    for name in ("sdpa", "eager"):
        try:
            set_attention(lm, name)
            return
        except (ValueError, ImportError):
            continue
