"""What `kubetune generate` does for models that write nothing: classes of texts, and rewards of answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kubetune.base import logs
from kubetune.base.humanize import counted
from kubetune.batching.batch import collate, collate_labelled
from kubetune.data.prepared.data_facts import known
from kubetune.data.prepared.micro_batches import pack
from kubetune.data.reading.examples import Example, Judged, Preference
from kubetune.data.reading.fields import text_of
from kubetune.data.reading.formats import read
from kubetune.data.reading.preferences import likely_kind
from kubetune.data.reading.record_problems import Problems
from kubetune.data.text.encode import Encoder
from kubetune.data.text.encode_labelled import frame, most_tokens
from kubetune.result.inference.result import default_device, open_result
from kubetune.tasks import reward_model
from kubetune.tasks import sequence_classification as task

if TYPE_CHECKING:
    from kubetune.config.schema import RecordKind, SourceConfig

TOKENS_AT_ONCE = 8192  # of a batch
_log = logs.family_logger("DATA")


def classify_texts(
    run_dir: Path,
    which: str,
    texts: Sequence[tuple[str, str | None]],
    model: str | None = None,
    trust_code: str | None = None,
) -> list[dict[str, Any]]:
    """Return the verdict of a run's classifier on each text, or pair of texts; overlong ones are cut as in training.

    `model`: its base, if that lies elsewhere here. Raise DataError that names all that are not texts.
    """
    # All texts are checked before the model is loaded.
    result = open_result(run_dir, which, model, trust_code)
    problems = Problems()
    for number, (text, second) in enumerate(texts, 1):
        try:
            for part in (text, second):
                if part:
                    text_of(part, "it")
        except ValueError as error:
            problems.add(f"texts:{number}", str(error))

    problems.raise_if_any()

    device = default_device()
    with result.checked():
        learner = task.TASK.load(result.spec, result.checkpoint, device)
        tokenizer = result.tokenizer

    # Each text becomes token ids and segments: 0 for the first text of a pair, 1 for the second.
    limit = most_tokens(result.trained.data.max_length, tokenizer)
    rows = []
    cut_count = 0
    for text, second in texts:
        ids, segments, is_cut = frame(tokenizer, text, second, limit)
        rows.append((np.array(ids, np.uint32), np.array(segments, np.uint8)))
        cut_count += is_cut

    _warn_of_cuts(cut_count, len(texts), limit)

    batches = []
    for group in _groups([len(ids) for ids, _ in rows], learner.route.padding_free):
        all_ids = [rows[number][0] for number in group]
        all_segments = [rows[number][1] for number in group]
        unknown_labels = np.zeros((len(group), 1), np.float32)
        batch = collate_labelled(all_ids, all_segments, unknown_labels, group)
        batches.append(batch.to(device))

    if not batches:
        return []
    return task.classify(learner, batches)


def _groups(lengths: Sequence[int], padding_free: bool) -> list[list[int]]:
    """Return the numbers of rows that are run together. Without padding-free batches, each goes alone.

    Example: of rows with 5000, 2000 and 6000 tokens, the first two go together.
    """
    if not lengths:
        return []
    # No two rows fit into one token.
    budget = TOKENS_AT_ONCE if padding_free else 1
    groups = pack(np.arange(len(lengths)), np.array(lengths), budget)
    return [group.tolist() for group in groups]


def answer_record(
    run_dir: Path,
    source: SourceConfig,
    kind: RecordKind,
    prompt: str,
    answer: str,
) -> dict[str, Any]:
    """Return a prompt and its answer as a record like those of the training data: a conversation, or plain texts.

    `source`, `kind`: of the training data.
    """
    # The template of a model that was taught conversations puts roles around both.
    if not known(run_dir, source, kind).is_chat:
        return {"prompt": prompt, "completion": answer}
    question = {"role": "user", "content": prompt}
    return {"messages": [question, {"role": "assistant", "content": answer}]}


def answer_of(record: dict[str, Any]) -> Example:
    """Return the answer of a record that is to be scored, without its verdict. Raise ValueError for two answers."""
    # A record with a verdict is read as judged, and the verdict dropped.
    example = read(record, kind=likely_kind(record)).example
    if isinstance(example, Preference):
        raise ValueError(
            "has two answers, which are scored one at a time; `kubetune data convert --to judged` makes two records of "
            "each"
        )
    if isinstance(example, Judged):
        return example.answer
    return example


def score_answers(
    run_dir: Path,
    which: str,
    records: Sequence[tuple[str, dict[str, Any]]],
    model: str | None = None,
    trust_code: str | None = None,
) -> list[float]:
    """Return the reward of each answer by a run's reward model; overlong ones are cut as in training.

    `records`: where each is, and a prompt with its completion, or messages that end in an answer, judged or not.
    Raise DataError naming those that are neither.
    """
    result = open_result(run_dir, which, model, trust_code)
    data = result.trained.data

    # Answers are read as in training. All that cannot be used are named at once.
    problems = Problems()
    examples: list[Example] = []
    for place, record in records:
        try:
            examples.append(answer_of(record))
        except ValueError as error:
            problems.add(place, str(error))
    problems.raise_if_any()

    device = default_device()
    with result.checked():
        learner = reward_model.TASK.load(result.spec, result.checkpoint, device)
        encoder = Encoder(
            result.tokenizer,
            add_special_tokens=data.add_special_tokens,
            keeps_prompts=True,  # as in training
        )

    # What the template refuses is only known now.
    encoded: list[list[int]] = []
    for (place, _), row in zip(records, encoder.encode_batch(examples), strict=True):
        if isinstance(row, str):
            problems.add(place, row)
        else:
            encoded.append(list(row.ids))
    problems.raise_if_any()

    # Only the reward is computed, so no token is a label.
    limit = data.max_length
    rows = []
    cut_count = 0
    for all_ids in encoded:
        ids = np.array(all_ids[:limit], np.uint32)
        rows.append((ids, np.zeros(len(ids), bool)))  # no token is trained
        cut_count += len(all_ids) > limit
    _warn_of_cuts(cut_count, len(encoded), limit)
    batches = []
    for group in _groups([len(ids) for ids, _ in rows], learner.route.padding_free):
        of_group = [rows[number] for number in group]
        batches.append(collate(of_group, group).to(device))
    return reward_model.score(learner, batches)


def _warn_of_cuts(number: int, total: int, limit: int) -> None:
    """Log how many texts are judged without their end."""
    if number:
        _log.warning(
            "%s of %s longer than %s tokens (data.max_length): cut there, and judged by that",
            f"{number:,}",
            counted(total, "text"),
            f"{limit:,}",
        )
