"""Proof that an exported model computes what the trained one did: logits of both on held-out rows, by transformers.

Models are run one after the other, never two at a time. Nothing here loads or writes a model (exporting.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kubetune import errors
from kubetune.base import files
from kubetune.batching.batch import Batch, collate, collate_labelled
from kubetune.batching.image_batches import collate_pictured
from kubetune.data.prepared import kept_rows
from kubetune.data.prepared.kept_rows import PROOF_ROWS, KeptRow
from kubetune.data.prepared.prepare import prepare
from kubetune.data.text.tokenizer import Tokenizer, joined
from kubetune.data.vision.image_processor import ImageProcessor
from kubetune.result.inference.result import Result
from kubetune.tasks.task import Task

# Positions of a row whose logits are kept. Those of all tokens, with a vocabulary of 150,000, would fill the memory.
POSITIONS = 32

# An 8-bit base rounds what goes through it as well as its weights; plain weights do not.
TOLERANCE_8BIT = 5e-2


@dataclass(frozen=True)
class Comparison:
    """Two models on the same rows."""

    what: str  # which two
    difference: float  # relative, of the worst row
    tolerance: float
    agreement: float  # share of the positions at which both choose the same token first

    @property
    def holds(self) -> bool:
        """True if the difference is within the tolerance. NaN never is."""
        return self.difference <= self.tolerance  # False for NaN


@dataclass(frozen=True)
class Sample:
    """The rows that models are asked about."""

    batches: tuple[Batch, ...]  # of one row each
    origin: str  # where they come from, in words

    @property
    def tokens(self) -> int:
        """The number of tokens of all batches."""
        return sum(batch.num_tokens for batch in self.batches)


def choose_sample(result: Result, tell: Callable[[str], None]) -> Sample:
    """Return the rows that the run kept for this; of a run that kept none, the same ones from its data.

    Without the data at hand, return random tokens. Raise EnvironmentFault if what was kept is damaged.
    """
    config = result.config
    kept = kept_rows.read(result.run_dir, kept_rows.PROOF)
    # Every run keeps such rows since its data may be gone when it is exported.
    if kept is None:
        tell("the run keeps no rows to prove its export on: they are chosen from its data")
        try:
            kept = kept_rows.proof_rows(prepare(config))
        except (errors.KubetuneError, OSError) as error:
            reason = " ".join(str(error).split())
            origin = f"rows of random tokens, as the data are not at hand ({reason})"
            return Sample(_random(config.task, result.tokenizer.vocab_size), origin)

    path = result.run_dir / kept_rows.PROOF
    ids = [row.ids for row in kept.rows]
    kept_rows.require_vocabulary(path, ids, result.tokenizer.vocab_size)
    batches = tuple(_batch(row, result.image_processor) for row in kept.rows)
    return Sample(batches, kept.origin)


def within(sample: Sample, context: int, vocabulary: int) -> Sample:
    """Return the rows that fit a model with this context and vocabulary."""
    batches = []
    for batch in sample.batches:
        if batch.num_tokens <= context and int(batch.input_ids.max()) < vocabulary:
            batches.append(batch)
    return Sample(tuple(batches), sample.origin)


def known_rows(sample: Sample, vocabulary: int, context: int = sys.maxsize) -> Sample:
    """Return the rows that a base can be asked about, which may lack tokens. Raise ModelError if there is none."""
    known = within(sample, context, vocabulary)
    if not known.batches:
        raise errors.ModelError("the rows have tokens that it does not know")
    return known


def require_equal(comparisons: Sequence[Comparison]) -> None:
    """Raise ModelError if two models that should be the same differ too much."""
    problems = []
    for comparison in comparisons:
        if not comparison.holds:
            problems.append(
                f"{comparison.what}: logits differ by {comparison.difference:.2g}, "
                f"allowed is {comparison.tolerance:g}"
            )
    if problems:
        reason = "; ".join(problems)
        raise errors.ModelError(
            f"{reason}. Nothing was written. Nothing is rounded by "
            "`--dtype float32`, or by `--gguf f32`."
        )


def _batch(row: KeptRow, processor: ImageProcessor | None) -> Batch:
    """Return a row as a batch: of a classifier, of a model that sees, or of plain tokens."""
    if row.target is not None and row.segments is not None:
        return collate_labelled(
            [row.ids],
            [row.segments],
            row.target[None],
            [row.number],
        )

    if processor is not None:
        pictures = [processor.process(image) for image in row.images]
        return collate_pictured(
            [(row.ids, row.trained)],
            [pictures],
            processor,
            [row.number],
        )

    return collate([(row.ids, row.trained)], [row.number])


def _random(task: str, vocabulary: int) -> tuple[Batch, ...]:
    """Return rows of random tokens, the same ones each time."""
    # With a seed, so that both models are asked the same.
    generator = np.random.default_rng(0)
    batches = []
    for length in generator.integers(8, 64, PROOF_ROWS):
        ids = generator.integers(0, vocabulary, int(length)).astype(np.uint32)
        if task == "sequence_classification":
            segments = np.zeros(len(ids), np.uint8)
            target = np.zeros((1, 1), np.float32)
            batches.append(collate_labelled([ids], [segments], target))
        else:
            batches.append(collate([(ids, np.ones(len(ids), bool))]))

    return tuple(batches)


@torch.inference_mode()
def ask(
    task: Task,
    model: nn.Module,
    sample: Sample,
) -> list[Tensor]:
    """Return the logits of each row in fp32 in main memory, `[positions, outputs]`.

    They are of POSITIONS tokens at most, spread evenly over the row.
    """
    device = next(model.parameters()).device
    model.eval()
    kept_logits = []
    for batch in sample.batches:
        # By the model's own code: whoever loads the export has nothing of ours.
        logits = task.plain_logits(model, batch.to(device))

        kept = torch.linspace(0, len(logits) - 1, min(POSITIONS, len(logits))).long()
        kept_logits.append(logits[kept.to(logits.device)].float().cpu())

    return kept_logits


def compare(
    what: str,
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    tolerance: float,
) -> Comparison:
    """Return how much two models differ, by what `ask` returned for each."""
    differences = []
    same_choices = []
    for a, b in zip(first, second, strict=True):
        # Relative to the logits of the first model, whose size differs between families.
        differences.append(float((a - b).norm() / a.norm()))
        same_choices.append(a.argmax(1) == b.argmax(1))

    agreement = float(torch.cat(same_choices).float().mean())
    # numpy's maximum is NaN if one of the values is; Python's may pass over it.
    return Comparison(what, float(np.max(differences)), tolerance, agreement)


def check_tokenizer(
    tokenizer: Tokenizer,
    folder: Path,
    sample: Sample,
    changed_files: Collection[str] = (),
) -> list[str]:
    """Return the names of the tokenizer's files in `folder`, after checking them.

    Their bytes must be those of the files used in training, but for `changed_files`, which were changed on purpose.
    `AutoTokenizer` must make the same ids of texts and have the template that conversations were rendered with. Raise
    ModelError naming what is not.
    """
    wrong = []
    names = []
    # Files that were written again have other bytes; what transformers makes of them is compared below.
    for name, file in tokenizer.files.items():
        if name in tokenizer.files_not_copied or name in changed_files:
            continue
        names.append(name)
        if files.sha256_file(folder / name) != files.sha256_file(file):
            wrong.append(f"{name} is not the one that was trained with")

    if tokenizer.given_template is not None:
        names.append("chat_template.jinja")

    # The behaviour of transformers counts more than bytes.
    loaded = _load_plain(folder)
    if loaded is not None:
        if not _has_same_template(loaded.chat_template, tokenizer):
            wrong.append("the chat template is not the one that was trained with")
        for batch in sample.batches:
            text = tokenizer.decode(batch.input_ids.tolist())
            ids = loaded(text, add_special_tokens=False).input_ids
            if ids != tokenizer.encode_text(text, special=False):
                wrong.append("AutoTokenizer makes other ids of the same text")
                break

    if wrong:
        raise errors.ModelError(
            f"the exported tokenizer differs: {'; '.join(wrong)}. Nothing was written."
        )

    return sorted(names)


def _has_same_template(template: str | dict[str, str] | None, tokenizer: Tokenizer) -> bool:
    """True if transformers has read the chat template that was trained with. `template`: what it has read."""
    if tokenizer.chat is None:
        return True
    is_in_processors_file = "chat_template.json" in tokenizer.files
    if template is None and is_in_processors_file and tokenizer.given_template is None:
        # A tokenizer does not read a processor's file, whose bytes were compared above.
        return True
    if isinstance(template, dict):
        # Several templates by name are one template here, as in training.
        template = joined(template)
    return template == tokenizer.chat.source


def _load_plain(folder: Path) -> Any:
    """Return `AutoTokenizer`'s tokenizer of a folder; None for an adapter whose tokenizer only its model can name."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError):
        # A folder with a model's config says all that its tokenizer needs.
        if (folder / "config.json").exists():
            raise
        return None
