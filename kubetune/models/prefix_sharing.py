"""Proof on the model at hand that rows may share their beginnings: that each goes on as if it stood alone.

Attention sees to that; what mixes tokens in another way (recurrent states, convolutions), or draws dropout once for
all rows of a beginning, is found here, and such a model computes every row whole.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kubetune.batching.batch import Batch, collate
from kubetune.batching.shared_batches import collate_shared
from kubetune.kernels.attention.blockwise import paths
from kubetune.models import fsdp
from kubetune.models.attention_hooks import CannotRunPaddingFree, packed
from kubetune.models.classifier_pooling import pools_last
from kubetune.models.learner import Learner
from kubetune.models.padding_free import FOREIGN_ERRORS, TOLERANCE, examples


def why_not(learner: Learner) -> str:
    """Reason why a model, as it trains, cannot compute shared beginnings once; empty where it can."""
    if not learner.route.padding_free:
        return f"it takes one sequence at a time ({learner.route.why_not})"
    if learner.labels is not None and not pools_last(learner.lm):
        return "it is an encoder, of which a beginning sees what comes after it"
    if learner.routing.balances:
        return "the balance loss of its routers is over every token of every row"
    if any(isinstance(module, nn.Dropout) and module.p > 0 and module.training for module in learner.model.modules()):
        return "it has dropout, of which a shared beginning would have one draw for all its rows"
    try:
        _require_same(learner)
    except FOREIGN_ERRORS as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    finally:
        fsdp.close(learner.lm)
    return ""


@torch.no_grad()
def _require_same(learner: Learner) -> None:
    device = next(learner.lm.parameters()).device
    first, second, third = examples(learner.lm.config.get_text_config().vocab_size)
    trunk = torch.cat([torch.from_numpy(ids.astype("int64")) for ids in (second, first, third, second, third)]).numpy()
    rows = [(ids.astype("uint32"), ids > 0) for ids in (trunk, trunk[:50], trunk[:40], trunk[:33], second)]
    rows[1][0][34:], rows[2][0][17:] = rows[1][0][34:][::-1], rows[2][0][17:][::-1]
    shared, plain = collate_shared(rows), collate(rows)
    found, expected = (_hidden(learner, batch.to(device)) for batch in (shared, plain))
    ends = {tuple(ids.tolist()): end for (ids, _), end in zip(rows, plain.cu_seqlens[1:], strict=True)}
    for path in paths(shared.cu_seqlens, shared.parents):
        ids = torch.cat([shared.input_ids[span] for span in path])
        if (end := ends.get(tuple(ids.tolist()))) is None:
            continue  # a beginning, and no row
        ours, theirs = torch.cat([found[span] for span in path]), expected[end - len(ids) : end]
        if not float((ours - theirs).norm() / theirs.norm()) <= TOLERANCE.get(theirs.dtype, TOLERANCE[torch.bfloat16]):
            raise CannotRunPaddingFree("rows that share beginnings come out of it otherwise than alone")


def _hidden(learner: Learner, batch: Batch) -> Tensor:
    with packed(batch.cu_seqlens, parents=batch.parents):
        return fsdp.inside(learner.lm, learner.hidden, learner, batch)
