"""Run an unmodified Hugging Face classifier on packed batches, and prove on the model at hand that this is exact.

An encoder's head looks at the first token of each sequence, a decoder's at the last. In a packed batch these are
anywhere, so hooks hand the head exactly these rows, as a batch of sequences of one token. Sequences a a a and b b:

    packed batch        a0 a1 a2 b0 b1
    encoder's head      a0 and b0, as [2 sequences, 1 token, hidden]
    decoder's head      a2 and b1

What pools otherwise (means, the end of an encoder-decoder) does not pass the self-check, and runs one sequence at a
time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from kubetune import errors
from kubetune.batching.batch import Batch, collate_labelled
from kubetune.models import fsdp
from kubetune.models.attention_hooks import CURRENT, CannotRunPaddingFree, packed
from kubetune.models.padding_free import (
    FOREIGN_ERRORS,
    LEAK,
    Route,
    backbone,
    check_padding_free,
    choose_attention,
    examples,
    hidden_states,
    unwrap,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


def prepare_pooling(model: nn.Module, wanted: str) -> Route:
    """Set a classifier's attention, padding-free if that is proved exact. `wanted` is `model.attention`.

    Raise ModelError for a model that cannot be run on only a text.
    """
    lm = unwrap(model)
    if not pools_last(lm):
        _hook_pooling(lm)
    route = choose_attention(model, wanted, self_check)
    if not route.padding_free:
        _require_runs(lm)
    return route


@torch.no_grad()
def _require_runs(lm: Any) -> None:
    """Raise ModelError for a model that wants more than a text (pictures, boxes), or texts of one length.

    Without this check it would fail at step 1, as if by a bug of ours.
    """
    if lm.config.model_type == "big_bird":
        return  # BigBird gives up its sparse attention for good at the first text that is too short for it
    config = lm.config.get_text_config()
    ids = examples(config.vocab_size)[1]
    end_id = getattr(config, "eos_token_id", None)
    if isinstance(end_id, int) and 0 <= end_id < config.vocab_size:
        ids[-1] = end_id  # heads of encoder-decoders look for it
    batch = _lay([ids]).to(next(lm.parameters()).device)

    problem = ""
    try:
        shape = list(lone_logits(lm, batch).shape)
    except torch.OutOfMemoryError:
        raise
    except FOREIGN_ERRORS as error:
        problem = errors.first_line(error)
    else:
        fsdp.close(lm)
        expected = [1, lm.config.num_labels]
        if shape != expected:
            problem = f"it gives {shape} for one text, expected {expected}"

    if problem:
        raise errors.ModelError(
            f"model {lm.name_or_path}: {type(lm).__name__} cannot classify a text of {batch.num_tokens} tokens by "
            f"itself ({problem}); choose a model that takes only texts, of any length"
        )


def name_padding(model: nn.Module, pad_id: int) -> None:
    """Tell a decoder which token is padding. Without one transformers refuses to run it on several texts."""
    lm = unwrap(model)
    config = lm.config.get_text_config()
    if pools_last(lm) and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = pad_id


def read_at_end(model: nn.Module, end_id: int) -> None:
    """Let a decoder read its output at `end_id`, the last token of every text, also if that is its padding token."""
    # transformers looks for the last token that is no padding. Here that is one token too early:
    #
    #     text                       the answer </s>
    #     padding is </s>                ^ read here
    #     no padding token                      ^ read here; texts go one by one
    lm = unwrap(model)
    config = lm.config.get_text_config()
    if pools_last(lm) and getattr(config, "pad_token_id", None) == end_id:
        config.pad_token_id = None


def heads(lm: Any) -> list[str]:
    """Return the names of the modules after the backbone. They are new when a pretrained model learns to classify."""
    names = []
    for name, child in lm.named_children():
        has_parameters = next(child.parameters(), None) is not None
        if name != lm.base_model_prefix and has_parameters:
            names.append(name)
    return names


def pools_last(lm: Any) -> bool:
    """True if a classifier reads the last token, as decoders do: only there they know all of a text."""
    return "score" in dict(lm.named_children())


def flow(lm: Any, batch: Batch) -> AbstractContextManager[None]:
    """Return the context in which a packed batch goes forward and backward."""
    cu_seqlens = torch.tensor(batch.cu_seqlens, device=batch.input_ids.device)
    if not pools_last(lm):
        # The first token of each sequence.
        rows = cu_seqlens[:-1]
    elif batch.tree is not None:
        # Rows share prefixes, so they end elsewhere than sequences do.
        rows = batch.tree.ends
    else:
        # The last token of each sequence.
        rows = cu_seqlens[1:] - 1

    return packed(batch.cu_seqlens, rows, pools_last(lm), batch.parents)


def packed_logits(lm: Any, batch: Batch) -> Tensor:
    """Return logits `[sequences, labels]` of a packed batch. Call inside `flow`."""
    if pools_last(lm):
        return cast(Tensor, lm.score(hidden_states(lm, batch)[CURRENT.rows]))
    positions = batch.position_ids + _first_position(lm)
    types = _token_types(lm, batch)
    output = lm(input_ids=batch.input_ids[None], position_ids=positions[None], **types)
    return cast(Tensor, output.logits)


def lone_logits(lm: Any, batch: Batch) -> Tensor:
    """Return logits `[1, labels]` of a single sequence, by the model's own code."""
    output = lm(input_ids=batch.input_ids[None], **_token_types(lm, batch))
    return cast(Tensor, output.logits)


def _token_types(lm: Any, batch: Batch) -> dict[str, Tensor]:
    """Return `token_type_ids` for a model that tells two texts of a pair apart by them; else nothing."""
    if batch.segments is None or "token_type_ids" not in _parameters(type(lm).forward):
        return {}
    config = lm.config.get_text_config()
    number_of_types = getattr(config, "type_vocab_size", 0)
    if config.model_type == "xlnet":
        number_of_types = 2  # XLNet compares types and needs no table
    # What else has no table (GPT-2, CTRL, XLM) would take types for words.
    if pools_last(lm) or not number_of_types:
        return {}
    types = batch.segments
    if number_of_types == 1:
        types = torch.zeros_like(types)  # RoBERTa has a table of one row
    return {"token_type_ids": types[None]}


@lru_cache(maxsize=8)
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _first_position(lm: Any) -> int:
    """Return the position of the first token: RoBERTa and its kin count from after the padding's."""
    embeddings: Any = getattr(backbone(lm), "embeddings", None)
    if hasattr(embeddings, "create_position_ids_from_input_ids"):
        return int(embeddings.padding_idx) + 1
    return 0


def _hook_pooling(lm: Any) -> None:
    """Hand an encoder's pooler and head the first token of each sequence while a packed batch is run."""

    def pick(hidden: Tensor) -> Tensor:
        """Return `[sequences, 1, hidden]` of `[1, tokens, hidden]`."""
        rows = CURRENT.rows
        if rows is None or CURRENT.cu_seqlens is None or hidden.shape[1] != CURRENT.cu_seqlens[-1]:
            return hidden
        return hidden[0, rows][:, None]

    def pick_input(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return pick(args[0]), *args[1:]

    def pick_output(_: nn.Module, __: Any, output: Any) -> Any:
        output["last_hidden_state"] = pick(output[0])
        return output

    trunk = backbone(lm)
    pooler = getattr(trunk, "pooler", None)
    if isinstance(pooler, nn.Module):
        pooler.register_forward_pre_hook(pick_input)
    # Whichever of the two gives the hidden states first: what was picked is too short to be picked from again.
    for module in {getattr(trunk, "encoder", trunk), trunk}:
        module.register_forward_hook(pick_output)


def self_check(model: nn.Module) -> float:
    """Compare the padding-free run of a classifier with its own code, as `padding_free.check_padding_free` does.

    The inputs of the head are compared, not its outputs: a new head gives numbers near zero, which half precision
    rounds too much to tell right from wrong.
    """
    # A hook in front of the head catches what each run hands to it:
    #
    #     packed    [sequences, 1, hidden], or [sequences, hidden] if it is pooled in front of the head
    #     lone      [1, tokens, hidden], of which the head has to look at one token only; or [1, hidden]
    lm = unwrap(model)
    if not heads(lm):
        raise CannotRunPaddingFree("nothing stands after its backbone")
    head_inputs: list[Tensor] = []
    hook = lm.get_submodule(heads(lm)[0]).register_forward_pre_hook(
        lambda _, args: head_inputs.append(args[0]), prepend=True
    )

    def run_packed(lm: Any, batch: Batch) -> Sequence[Tensor]:
        with flow(lm, batch):
            logits = fsdp.inside(lm, packed_logits, lm, batch)
        pooled = head_inputs[-1]
        number = len(batch.cu_seqlens) - 1
        # One row of logits and one state a sequence, or the head pools in another way.
        if logits.shape[0] != number or pooled.numel() != number * pooled.shape[-1]:
            raise CannotRunPaddingFree(
                f"its head gives {tuple(logits.shape)} for {number} packed sequences"
            )

        return list(pooled.reshape(number, -1).split(1))

    def run_lone(lm: Any, batch: Batch) -> Tensor:
        logits = lone_logits(lm, batch)
        states = head_inputs[-1]
        if states.dim() == 2:  # [1, hidden], pooled in front of the head
            return states
        row = -1 if pools_last(lm) else 0
        # A head that means over all tokens gives something else once all but one are zero.
        with _only_row(backbone(lm), row):
            logits_of_row = lone_logits(lm, batch)
        if not (logits_of_row - logits).norm() <= LEAK * logits.norm():
            raise CannotRunPaddingFree("its head looks at all tokens of a sequence")
        return states[:, row]

    try:
        return check_padding_free(model, _lay, run_packed, run_lone)
    finally:
        hook.remove()


@contextmanager
def _only_row(trunk: nn.Module, row: int) -> Iterator[None]:
    """Set the trunk's final hidden states to zero for all tokens but one while the block runs."""

    def blank(_: nn.Module, __: Any, output: Any) -> Any:
        states = torch.zeros_like(output[0])
        states[:, row] = output[0][:, row]
        output["last_hidden_state"] = states
        return output

    hook = trunk.register_forward_hook(blank)
    try:
        yield
    finally:
        hook.remove()


def _lay(sequences: Sequence[NDArray[np.uint32]]) -> Batch:
    """Return a packed batch of sequences of ids, the second half of each marked as the second text of a pair."""
    segments = []
    for ids in sequences:
        is_second = np.arange(len(ids)) > len(ids) // 2
        segments.append(is_second.astype(np.uint8))
    labels = np.zeros((len(sequences), 1), np.float32)
    return collate_labelled(sequences, segments, labels)
