"""Record what the trained model, its base, and parts of its adapter answer to the rows of a proof, while it is in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from kubetune.batching.batch import Batch
from kubetune.data.prepared.kept_rows import LONGEST
from kubetune.models import loading
from kubetune.plan.linears import part_of
from kubetune.result.inference import proof_answers
from kubetune.result.inference.proof_answers import BASE, TRAINED, WITHOUT, ProofAnswers
from kubetune.result.inference.result import Result, default_device
from kubetune.tasks.task import Task

if TYPE_CHECKING:
    from kubetune.result.inference.proof_answers import LogProbabilities

    Adapted = BaseTunerLayer | AuxiliaryTrainingWrapper


def record(result: Result, model: Any, rows: Sequence[Batch]) -> None:
    """Write what a trained model answers into the run directory; of a base with its adapter, in parts too."""
    batches = _servable(result, rows)
    if not batches:
        return
    models = {TRAINED: _log_probabilities(result.task, model, batches)}
    if isinstance(model, PeftModel):
        with model.disable_adapter():
            models[BASE] = _log_probabilities(result.task, model, batches)
        parts = _adapted(model)
        # Without its only part an adapter does nothing.
        if len(parts) > 1:
            for part, layers in sorted(parts.items()):
                with _switched_off(layers):
                    models[WITHOUT + part] = _log_probabilities(result.task, model, batches)
    ids = tuple(tuple(batch.input_ids.tolist()) for batch in batches)
    answers = ProofAnswers(ids, models, result.tokenizer.eos_ids)
    proof_answers.write(_path(result), answers, result.run_dir)


def add_base(result: Result, rows: Sequence[Batch]) -> None:
    """Add what the base answers, of a model that was trained whole, if the base is on this machine and needs no code."""
    spec = result.spec
    batches = _servable(result, rows)
    is_here = spec.model.path != str(result.checkpoint)
    if not batches or not is_here or spec.model.trust_remote_code:
        return
    with result.checked(base=True):
        base: Any = loading.load_pretrained(result.auto_class, spec, default_device())
    base.eval()
    # Training may have added tokens.
    known = base.get_input_embeddings().num_embeddings
    if max(int(batch.input_ids.max()) for batch in batches) >= known:
        return
    answers = proof_answers.read(_path(result))
    of_base = _log_probabilities(result.task, base, batches)
    answers = replace(answers, models={**answers.models, BASE: of_base})
    proof_answers.write(_path(result), answers, result.run_dir)


def _servable(result: Result, rows: Sequence[Batch]) -> list[Batch]:
    """Return the rows of text that a server can be asked about; none of a classifier, which has no next tokens."""
    if result.trained.classifies:
        return []
    batches = []
    for row in rows:
        batch = _without_images(row)
        if 1 < batch.num_tokens <= LONGEST:
            batches.append(batch)
    return batches


def _without_images(row: Batch) -> Batch:
    """Return what follows the last image of a row, and the token that ends it: servers are asked about texts alone."""
    if row.pictures is None:
        return row
    ids = row.input_ids
    places = row.pictures.is_image.nonzero()
    if len(places):
        ids = ids[int(places.max()) + 2 :]
    return replace(
        row,
        input_ids=ids,
        position_ids=torch.arange(len(ids)),
        cu_seqlens=(0, len(ids)),
        pictures=None,
    )


@torch.inference_mode()
def _log_probabilities(task: Task, model: Any, batches: Sequence[Batch]) -> LogProbabilities:
    """Return the log-probability of each token but the first of its row, of all rows end to end."""
    device = next(model.parameters()).device
    rows = []
    for batch in batches:
        logits = task.plain_logits(model, batch.to(device))[:-1].float()
        following = batch.input_ids[1:].to(logits.device, torch.int64)
        chosen = logits.log_softmax(1).gather(1, following[:, None])
        rows.append(chosen[:, 0].cpu().tolist())
    return proof_answers.joined(rows)


def _adapted(model: nn.Module) -> dict[str, list[Adapted]]:
    """Return the layers that have an adapter, or are trained whole beside it, by the part of the model that they are in."""
    parts: dict[str, list[Adapted]] = {}
    for name, module in model.named_modules():
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            parts.setdefault(part_of(f"{name}.weight"), []).append(module)
    return parts


@contextmanager
def _switched_off(layers: Sequence[Adapted]) -> Iterator[None]:
    """Take the adapters of these layers away within it."""
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def _path(result: Result) -> Path:
    # `best` is a link to a checkpoint.
    return proof_answers.path_of(result.run_dir, result.checkpoint.resolve().name)
