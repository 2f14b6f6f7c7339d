"""Verdicts of a trained classifier on texts, and rewards of answers: what `kubetune generate` does for such models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kubetune.base import logs
from kubetune.base.humanize import counted
from kubetune.batching.batch import Batch, collate, collate_labelled
from kubetune.data.prepared.data_facts import known
from kubetune.data.prepared.micro_batches import pack
from kubetune.data.reading.fields import text_of
from kubetune.data.reading.formats import Example, Judged, Preference, read
from kubetune.data.reading.preferences import likely_kind
from kubetune.data.reading.problems import Problems
from kubetune.data.text.encode import Encoder
from kubetune.data.text.encode_labelled import frame, most_tokens
from kubetune.result.inference.result import default_device, open_result
from kubetune.tasks import reward_model
from kubetune.tasks import sequence_classification as task

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kubetune.config.schema import Config

TOKENS_AT_ONCE = 8192
_log = logs.family_logger("DATA")


def classify_texts(
    run_dir: Path,
    which: str,
    texts: Sequence[tuple[str, str | None]],
    model: str | None = None,
    trust_code: str | None = None,
) -> list[dict[str, Any]]:
    """Verdict of a run's classifier on each text, or pair of texts; overlong ones are cut as in training.

    `model`: its base, where that lies elsewhere here. Raises DataError naming what is no text.
    """
    result = open_result(run_dir, which, model, trust_code)
    problems = Problems()
    for number, text in enumerate(texts, 1):
        try:
            for part in filter(None, text):
                text_of(part, "it")
        except ValueError as error:
            problems.add(f"texts:{number}", str(error))
    problems.raise_if_any()
    device = default_device()
    with result.checked():
        learner = task.TASK.load(result.config, result.checkpoint, device)
        tokenizer = result.tokenizer
    limit = most_tokens(result.config.data.max_length, tokenizer)
    framed = [frame(tokenizer, text, second, limit) for text, second in texts]
    if not framed:
        return []
    _say_cut(sum(is_cut for _, _, is_cut in framed), len(framed), limit)
    lengths = np.array([len(ids) for ids, *_ in framed])
    budget = TOKENS_AT_ONCE if learner.route.padding_free else 1
    groups = pack(np.arange(len(framed)), lengths, budget)
    return task.classify(learner, [_batch(framed, group.tolist()).to(device) for group in groups])


def answer_record(run_dir: Path, config: Config, prompt: str, answer: str) -> dict[str, Any]:
    """A prompt and its answer as a record of what the run was trained on: a conversation, or plain texts."""
    if not known(run_dir, config.data.train[0], config.record_kind).is_chat:
        return {"prompt": prompt, "completion": answer}
    return {
        "messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    }


def answer_of(record: dict[str, Any]) -> Example:
    """The answer of a record that is to be scored; a verdict on it decides nothing. Raises ValueError for two."""
    example = read(record, kind=likely_kind(record)).example
    if isinstance(example, Preference):
        raise ValueError(
            "has two answers, which are scored one at a time; `kubetune data convert --to judged` makes two records of "
            "each"
        )
    return example.answer if isinstance(example, Judged) else example


def score_answers(
    run_dir: Path,
    which: str,
    records: Sequence[tuple[str, dict[str, Any]]],
    model: str | None = None,
    trust_code: str | None = None,
) -> list[float]:
    """Reward of each answer by a run's reward model; overlong ones are cut as in training.

    `records`: where each stands, and a prompt with its completion, or messages that end in an answer, judged or not.
    Raises DataError naming those that are neither.
    """
    result = open_result(run_dir, which, model, trust_code)
    problems = Problems()
    config, examples = result.config, list[Example]()
    for where, record in records:
        try:
            examples.append(answer_of(record))
        except ValueError as error:
            problems.add(where, str(error))
    problems.raise_if_any()
    device = default_device()
    with result.checked():
        learner = reward_model.TASK.load(config, result.checkpoint, device)
        encoder = Encoder(
            result.tokenizer,
            add_special_tokens=config.data.add_special_tokens,
            keeps_prompts=True,  # as in training
        )
    rows: list[tuple[NDArray[np.uint32], NDArray[np.bool_]]] = []
    longer: list[bool] = []
    for (where, _), found in zip(records, encoder.encode_batch(examples), strict=True):
        if isinstance(found, str):
            problems.add(where, found)
            continue
        ids = np.array(found.ids[: config.data.max_length], np.uint32)
        longer.append(len(found.ids) > len(ids))
        rows.append((ids, np.zeros(len(ids), bool)))
    problems.raise_if_any()
    _say_cut(sum(longer), len(rows), config.data.max_length)
    lengths = np.array([len(ids) for ids, _ in rows])
    groups = (
        pack(np.arange(len(rows)), lengths, TOKENS_AT_ONCE if learner.route.padding_free else 1)
        if rows
        else []
    )
    batches = [collate([rows[i] for i in group], group.tolist()).to(device) for group in groups]
    return reward_model.score(learner, batches)


def _say_cut(number: int, of: int, limit: int) -> None:
    """A note of texts that are judged without their end, as training may have cut them or left them out."""
    if number:
        _log.warning(
            "%s of %s longer than %s tokens (data.max_length): cut there, and judged by that",
            f"{number:,}", counted(of, "text"), f"{limit:,}",
        )  # fmt: skip


def _batch(framed: Sequence[tuple[list[int], list[int], bool]], chosen: Sequence[int]) -> Batch:
    ids = [np.array(framed[i][0], np.uint32) for i in chosen]
    segments = [np.array(framed[i][1], np.uint8) for i in chosen]
    return collate_labelled(ids, segments, np.zeros((len(chosen), 1), np.float32), chosen)
