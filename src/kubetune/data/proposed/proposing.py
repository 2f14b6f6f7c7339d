"""Looks at data of which nothing is known, and proposes the run that they are for: task, shape, columns.

It reads with the readers of training and understands records as `data check` does; what the names of columns mean when
they are not ours is guessed in this package, and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from kubetune.base.humanize import counted
from kubetune.config.schema import RecordKind, SourceConfig
from kubetune.data.column_words import lacking
from kubetune.data.findings.group_findings import of_names
from kubetune.data.findings.split_files import located_sources
from kubetune.data.inspect.estimate import taken_by
from kubetune.data.proposed.bare_images import require_no_bare_images
from kubetune.data.proposed.column_choices import columns_of, require_whole_conversations, taken_as
from kubetune.data.proposed.media_columns import require_shown
from kubetune.data.proposed.proposal import Proposal, ReasonedChoice, values_of
from kubetune.data.proposed.record_kind import kind_of
from kubetune.data.proposed.seen_records import SeenRecords
from kubetune.data.proposed.task_choices import (
    answers_to_compare,
    labels_in_words,
    problem_type_of,
    reward_for,
    task_for,
)
from kubetune.data.proposed.trial_reading import (
    in_sentences,
    is_chat,
    is_plain,
    read_all,
    use_of_thoughts,
)
from kubetune.data.reading.examples import Example, images_of
from kubetune.data.reading.record_problems import Problems
from kubetune.data.reading.sources import read_source
from kubetune.errors import DataError

# So many records are looked at.
_LOOKED_AT: Final = 1_000

# The kind of records that a task learns from, if that is not `text`.
_KIND_OF_TASK: Final[dict[str, RecordKind]] = {
    "preference": "pair",
    "reward_model": "graded",
    "sequence_classification": "labelled",
    "grpo": "prompt",
}


def propose(source: SourceConfig, task: str | None = None) -> Proposal:
    """Return the run that the data of a source are for. Raise DataError, in words, if they are for none.

    `source.columns` are names that the user gives, `task` is the user's too; what is left out is guessed.
    """
    require_no_bare_images(Path(os.path.expanduser(source.path)))
    problems = Problems()
    records = list(islice(read_source(source, problems), _LOOKED_AT))
    if not records:
        problems.raise_if_any()
        raise DataError(f"{source.path} holds no records. Nothing was written.")

    # From what records are to what their columns are called, and only then to reading them.
    seen = SeenRecords.of(records)
    kind = kind_of(seen, source.columns)
    if task is not None and not (task == "preference" and kind == "judged"):
        of_task = _KIND_OF_TASK.get(task, "text")
        if of_task != kind:
            # Columns mean something else then.
            seen = SeenRecords.of(records)
        kind = of_task
    elif not source.columns:
        require_whole_conversations(seen, kind)
    if not source.columns:
        require_shown(seen, kind, source.path)
    columns = columns_of(kind, seen, source)
    reading = read_all(records, source, kind, values_of(columns))
    if kind == "text" and not source.columns:
        use = use_of_thoughts(reading)
        if use:
            columns = {key: taken_as(key, name) for key, name in use.items()}
            reading = read_all(records, source, kind, use)

    # The first record stands for all, but for counts.
    examples = reading.examples
    first = examples[0]
    choice = task_for(kind, examples)
    if task is not None:
        choice = ReasonedChoice(task, "as given")
    proposal = Proposal(source.path, choice, kind, records, columns=columns)
    proposal.rows = taken_by(source)
    proposal.plain_prompts = is_plain(first)
    proposal.conversations = is_chat(first)
    _settle(proposal, kind, examples)
    if kind == "text":
        _settle_names(proposal, source)
    if problems.total:
        proposal.remarks.append(f"{counted(problems.total, 'record')} cannot be read")
    proposal.remarks += problems.doubts
    settle_format(proposal, has_template=None)
    return proposal


def settle_format(proposal: Proposal, *, has_template: bool | None) -> None:
    """Choose the shape of records that has to be named, and say what nothing reads of records in this shape.

    Plain prompts go through the chat template of the model, unless it has none.
    """
    proposal.format = None
    if proposal.plain_prompts and has_template is not False:
        reason = "prompts go through the chat template, as in `chat` and `generate`"
        is_compared = proposal.task.value in ("preference", "reward_model")
        shape = "messages" if is_compared else "question_answer"
        proposal.format = ReasonedChoice(shape, reason)
    source = SourceConfig(path=proposal.path)
    if proposal.format is not None:
        source = source.model_copy(update={"format": proposal.format.value})
    reading = read_all(proposal.records, source, proposal.kind, values_of(proposal.columns))
    proposal.unused = in_sentences(reading.unused)
    proposal.unused += proposal.of_names
    proposal.explained = [column.name for column in reading.unused if column.meaning != "other"]
    for column, number in sorted(reading.absent.items()):
        proposal.unused.append(f"{lacking(column)}, in {counted(number, 'record')}")
    bad = reading.problems
    if bad.total:
        proposal.unused.append(
            f"{bad.total:,} of the first {counted(len(proposal.records), 'record')} cannot be used. {bad.sentences()[0]}"
        )


def _settle_names(proposal: Proposal, source: SourceConfig) -> None:
    """Keep what names of files say and nothing reads. Raise DataError if they call some of the answers bad."""
    named = source.model_copy(update={"columns": values_of(proposal.columns)})
    for finding in of_names(located_sources([named])):
        if finding.severity == "error":
            raise DataError(finding.line)
        proposal.of_names.append(finding.line)


def _settle(proposal: Proposal, kind: RecordKind, examples: Sequence[Example]) -> None:
    """Add what only records of one kind need: a loss, a reward, a kind of labels."""
    if kind == "judged":
        proposal.loss = ReasonedChoice("kto", "answers are judged one by one, not compared")
    if kind in ("pair", "judged") and any(images_of(example) for example in examples):
        proposal.images = ReasonedChoice(True, "the rows have images")
    if kind == "text":
        proposal.answers = answers_to_compare(examples)
    if kind == "prompt":
        proposal.reward = reward_for(examples, proposal.path)
    if kind == "labelled":
        proposal.problem_type = problem_type_of(examples)
        proposal.remarks.append(labels_in_words(examples, proposal.problem_type))
