"""Proof on the model at hand that rows may share their beginnings: that each row continues as if it had its own
beginning.

Attention sees to that. A model that mixes tokens in another way (recurrent states, convolutions), or that draws dropout
once for all rows of a beginning, is found here and computes every row whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from kubetune import errors
from kubetune.batching.batch import Batch, collate
from kubetune.batching.shared_beginnings import collate_shared
from kubetune.kernels.attention.blockwise import paths
from kubetune.models import fsdp
from kubetune.models.attention_hooks import CannotRunPaddingFree, packed
from kubetune.models.classifier_pooling import pools_last
from kubetune.models.learner import Learner
from kubetune.models.padding_free import FOREIGN_ERRORS, TOLERANCE, examples

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Row = tuple[NDArray[np.uint32], NDArray[np.bool_]]  # ids, and which of them are trained


def why_not(learner: Learner) -> str:
    """Return the reason why a model, as it trains, cannot compute shared beginnings once; empty if it can."""
    # From what is known at once to what has to be tried.
    if not learner.route.padding_free:
        return f"it takes one sequence at a time ({learner.route.why_not})"
    if learner.labels is not None and not pools_last(learner.lm):
        return "it is an encoder, of which a beginning sees what comes after it"
    if learner.routing.balances:
        return "the balance loss of its routers is over every token of every row"
    if _draws_dropout(learner.model):
        return "it has dropout, of which a shared beginning would have one draw for all its rows"
    try:
        _require_same(learner)
    except FOREIGN_ERRORS as error:
        return errors.first_line(error)
    finally:
        fsdp.close(learner.lm)

    return ""


def _draws_dropout(model: nn.Module) -> bool:
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p > 0 and module.training:
            return True
    return False


@torch.no_grad()
def _require_same(learner: Learner) -> None:
    """Raise CannotRunPaddingFree if a row comes out otherwise when its beginning is shared."""
    device = next(learner.lm.parameters()).device
    rows = _rows_that_share(learner.lm.config.get_text_config().vocab_size)
    shared = collate_shared(rows)
    plain = collate(rows)
    shared_hidden = _hidden(learner, shared.to(device))
    plain_hidden = _hidden(learner, plain.to(device))

    # The two batches have the rows in another order, so each is looked up by its ids.
    ends = {}  # where each row ends in the plain batch, by its ids
    for (row_ids, _), stop in zip(rows, plain.cu_seqlens[1:], strict=True):
        ends[tuple(row_ids.tolist())] = stop

    # A path is a row: the spans of its beginning, of what continues that, and of its own end.
    for path in paths(shared.cu_seqlens, shared.parents):
        ids = torch.cat([shared.input_ids[span] for span in path])
        end = ends.get(tuple(ids.tolist()))
        if end is None:
            continue  # a beginning, and no row

        ours = torch.cat([shared_hidden[span] for span in path])
        theirs = plain_hidden[end - len(ids) : end]
        most = TOLERANCE.get(theirs.dtype, TOLERANCE[torch.bfloat16])
        # `not (<=)` instead of `>`: NaN must refuse too.
        if not float((ours - theirs).norm() / theirs.norm()) <= most:
            raise CannotRunPaddingFree("its output for a row changes if rows share their beginning")


def _rows_that_share(vocabulary: int) -> Sequence[Row]:
    """Return five rows that share beginnings of 16 and of 32 tokens, some of which lie in others.

    x marks tokens as in row 0, o others. Whole grains of 16 tokens are shared:

        row 0   xxxxxxxxxxxxxxxx xxxxxxxxxxxxxxxx xxxxxx …   69 tokens
        row 1   xxxxxxxxxxxxxxxx xxxxxxxxxxxxxxxx xxoooo …   50, shares 32 with rows 0 and 3
        row 2   xxxxxxxxxxxxxxxx xooooooooooooooo oooooooo   40, shares 16 with all
        row 3   xxxxxxxxxxxxxxxx xxxxxxxxxxxxxxxx x          33, shares 32 with rows 0 and 1
        row 4   xxxxxxxxxxxxxxxx xxx                         19, shares 16 with all
    """
    first, second, third = examples(vocabulary)  # of 7, 19 and 12 tokens
    trunk = np.concatenate([second, first, third, second, third])
    sequences = [trunk, trunk[:50].copy(), trunk[:40].copy(), trunk[:33], second]
    # Turned round, the rest of a row is other tokens of the same vocabulary.
    sequences[1][34:] = sequences[1][34:][::-1].copy()
    sequences[2][17:] = sequences[2][17:][::-1].copy()
    return [(ids, ids > 0) for ids in sequences]


def _hidden(learner: Learner, batch: Batch) -> Tensor:
    with packed(batch.cu_seqlens, parents=batch.parents):
        return fsdp.inside(learner.lm, learner.hidden, learner, batch)
