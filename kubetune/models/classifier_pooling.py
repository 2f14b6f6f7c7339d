"""Running an unmodified Hugging Face classifier on packed batches, and proving on the model at hand that this is exact.

An encoder's head looks at the first token of each sequence, a decoder's at the last. In a packed batch those stand
anywhere, so hooks hand the head exactly these rows as a batch of sequences of one token. What pools otherwise (means,
the end of an encoder-decoder) does not pass the self-check and runs one sequence at a time.
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
    """Set a classifier's attention, padding-free where it is proved exact. `wanted` is `model.attention`.

    Raises ModelError for a model that cannot be run on a text alone.
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
    """Some want more than a text (pictures, boxes), or texts of one length: said now, not as a bug at step 1."""
    if lm.config.model_type == "big_bird":
        return  # BigBird gives up its sparse attention for good at the first text that is too short for it
    facts, wanted = lm.config.get_text_config(), (1, lm.config.num_labels)
    ids = examples(facts.vocab_size)[1]
    if isinstance(end := getattr(facts, "eos_token_id", None), int) and 0 <= end < facts.vocab_size:
        ids[-1] = end  # where those with a decoder look
    batch = _lay([ids]).to(next(lm.parameters()).device)
    try:
        found = tuple(lone_logits(lm, batch).shape)
    except torch.OutOfMemoryError:
        raise
    except FOREIGN_ERRORS as error:
        said = errors.first_line(error)
    else:
        fsdp.close(lm)
        said = (
            ""
            if found == wanted
            else f"it gives {list(found)} for one text, expected {list(wanted)}"
        )
    if said:
        raise errors.ModelError(
            f"model {lm.name_or_path}: {type(lm).__name__} cannot classify a text of {batch.num_tokens} tokens by "
            f"itself ({said}); choose a model that takes texts alone, of any length"
        )


def name_padding(model: nn.Module, pad_id: int) -> None:
    """Tell a decoder what fills up batches, as without it transformers would refuse to run it on several texts."""
    facts = unwrap(model).config.get_text_config()
    if pools_last(unwrap(model)) and getattr(facts, "pad_token_id", None) is None:
        facts.pad_token_id = pad_id


def read_at_end(model: nn.Module, end_id: int) -> None:
    """Have a decoder read its output at `end_id`, which ends all texts, where that stands in for padding too.

    transformers takes it for padding then, and reads the output one token before. Without a token for padding it reads
    the last one, and takes texts one by one.
    """
    facts = unwrap(model).config.get_text_config()
    if pools_last(unwrap(model)) and getattr(facts, "pad_token_id", None) == end_id:
        facts.pad_token_id = None


def heads(lm: Any) -> list[str]:
    """Names of the modules behind the backbone, which are new when a pretrained model learns to classify."""
    children = (
        (name, child) for name, child in lm.named_children() if name != lm.base_model_prefix
    )
    return [name for name, child in children if next(child.parameters(), None) is not None]


def pools_last(lm: Any) -> bool:
    """Pooling at the last token, as of decoders, which know all of a text only there."""
    return "score" in dict(lm.named_children())


def flow(lm: Any, batch: Batch) -> AbstractContextManager[None]:
    """Declaration of a packed batch, to stand around its forward and backward."""
    cu_seqlens = torch.tensor(batch.cu_seqlens, device=batch.input_ids.device)
    ends = cu_seqlens[1:] - 1 if batch.tree is None else batch.tree.ends
    rows = ends if pools_last(lm) else cu_seqlens[:-1]
    return packed(batch.cu_seqlens, rows, pools_last(lm), batch.parents)


def packed_logits(lm: Any, batch: Batch) -> Tensor:
    """Logits `[sequences, labels]` of a packed batch. Call inside `flow`."""
    if pools_last(lm):
        return cast(Tensor, lm.score(hidden_states(lm, batch)[CURRENT.rows]))
    positions = batch.position_ids + _first_position(lm)
    return cast(
        Tensor,
        lm(
            input_ids=batch.input_ids[None], position_ids=positions[None], **_types(lm, batch)
        ).logits,
    )


def lone_logits(lm: Any, batch: Batch) -> Tensor:
    """Logits `[1, labels]` of a single sequence, by the model's own code."""
    return cast(Tensor, lm(input_ids=batch.input_ids[None], **_types(lm, batch)).logits)


def _types(lm: Any, batch: Batch) -> dict[str, Tensor]:
    """Token types for a model that has a table of them; one with a single row (RoBERTa) calls all tokens alike."""
    if batch.segments is None or "token_type_ids" not in _parameters(type(lm).forward):
        return {}
    facts = lm.config.get_text_config()
    # XLNet compares types and needs no table. What else has none (GPT-2, CTRL, XLM) takes them for words.
    kinds = 2 if facts.model_type == "xlnet" else getattr(facts, "type_vocab_size", 0)
    if pools_last(lm) or not kinds:
        return {}
    return {
        "token_type_ids": (batch.segments if kinds > 1 else torch.zeros_like(batch.segments))[None]
    }


@lru_cache(maxsize=8)
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _first_position(lm: Any) -> int:
    """RoBERTa and its kin count positions from behind the padding's."""
    embeddings = getattr(backbone(lm), "embeddings", None)
    counts_from_padding = hasattr(embeddings, "create_position_ids_from_input_ids")
    return int(cast(Any, embeddings).padding_idx) + 1 if counts_from_padding else 0


def _hook_pooling(lm: Any) -> None:
    def pick(hidden: Tensor) -> Tensor:
        """`[1, tokens, hidden]` -> `[sequences, 1, hidden]` while a packed batch is run."""
        rows, tokens = CURRENT.rows, (CURRENT.cu_seqlens or (0,))[-1]
        return hidden if rows is None or hidden.shape[1] != tokens else hidden[0, rows][:, None]

    def pick_output(_: nn.Module, __: Any, output: Any) -> Any:
        output["last_hidden_state"] = pick(output[0])
        return output

    trunk = backbone(lm)
    if isinstance(pooler := getattr(trunk, "pooler", None), nn.Module):
        pooler.register_forward_pre_hook(lambda _, args: (pick(args[0]), *args[1:]))
    for module in {getattr(trunk, "encoder", trunk), trunk}:
        module.register_forward_hook(pick_output)


def self_check(model: nn.Module) -> float:
    """Compare the padding-free run of a classifier with its own code, as `padding_free.check_padding_free` does.

    What is compared is what the head is given: a head that is new gives numbers near zero, which half precision rounds
    too much to tell right from wrong.
    """
    lm = unwrap(model)
    given: list[Tensor] = []
    if not heads(lm):
        raise CannotRunPaddingFree("nothing stands behind its backbone")
    hook = lm.get_submodule(heads(lm)[0]).register_forward_pre_hook(
        lambda _, args: given.append(args[0]), prepend=True
    )

    def run_packed(lm: Any, batch: Batch) -> Sequence[Tensor]:
        with flow(lm, batch):
            said = fsdp.inside(lm, packed_logits, lm, batch)
        sequences = len(batch.cu_seqlens) - 1
        if said.shape[0] != sequences or given[-1].numel() != sequences * given[-1].shape[-1]:
            raise CannotRunPaddingFree(
                f"its head gives {tuple(said.shape)} for {sequences} packed sequences"
            )
        return list(given[-1].reshape(sequences, -1).split(1))

    def run_lone(lm: Any, batch: Batch) -> Tensor:
        said = lone_logits(lm, batch)
        states, row = given[-1], -1 if pools_last(lm) else 0
        if states.dim() == 2:
            return states
        with _only_row(backbone(lm), row):
            again = lone_logits(lm, batch)
        if not (again - said).norm() <= LEAK * said.norm():
            raise CannotRunPaddingFree("its head looks at all tokens of a sequence")
        return states[:, row]

    try:
        return check_padding_free(model, _lay, run_packed, run_lone)
    finally:
        hook.remove()


@contextmanager
def _only_row(trunk: nn.Module, row: int) -> Iterator[None]:
    """Within, the trunk hands on its final hidden states with zeros for all tokens but one."""

    def blank(_: nn.Module, __: Any, output: Any) -> Any:
        kept = torch.zeros_like(output[0])
        kept[:, row] = output[0][:, row]
        output["last_hidden_state"] = kept
        return output

    hook = trunk.register_forward_hook(blank)
    try:
        yield
    finally:
        hook.remove()


def _lay(sequences: Sequence[NDArray[np.uint32]]) -> Batch:
    segments = [(np.arange(len(ids)) > len(ids) // 2).astype(np.uint8) for ids in sequences]
    return collate_labelled(sequences, segments, np.zeros((len(sequences), 1), np.float32))
