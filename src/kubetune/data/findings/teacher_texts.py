"""What a teacher is asked in place of the prompt that the model answers, as `task: distill` may have it.

    record             {"prompt": "2 + 2?", "solution": "4"}
    teacher_prompt     "{prompt} The answer is {answer}."
    the model reads    2 + 2? <answer>
    the teacher        2 + 2? The answer is 4. <the same answer>

A column `teacher_prompt` of a record comes before the template of the run file. In a conversation the text stands in place
of the last message of the user.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kubetune.config.schema import DistillConfig, SourceConfig
from kubetune.config.schema.distill import COLUMN
from kubetune.data.findings.finding import Finding
from kubetune.data.findings.references import asked_of
from kubetune.data.reading.record_problems import Problems
from kubetune.data.reading.taken import read_taken
from kubetune.data.spec import DataSpec


def teacher_text(
    record: Mapping[str, Any], prompt: Any, answer: str | None, template: str | None
) -> str | None:
    """Return what the teacher is asked, None if it is asked what the model is.

    Raise LookupError, whose text says what the record lacks, or ValueError for what is no text, or cannot be put in one.
    """
    of_record = record.get(COLUMN)
    if of_record is not None and not isinstance(of_record, str):
        kind = type(of_record).__name__
        raise ValueError(f"their column `{COLUMN}` holds a {kind}; expected a text")
    if of_record is not None and of_record.strip():
        return of_record
    if template is None:
        return None
    question = prompt
    if not isinstance(question, str):
        users = [turn["content"] for turn in question if turn["role"] == "user"]
        question = users[-1] if users else ""
    fields = {**record, "prompt": question}
    if answer is not None:
        fields["answer"] = answer
    try:
        return template.format_map(fields)
    except AttributeError as error:
        raise LookupError(str(error)) from None


def of_distillation(spec: DataSpec, rows: int, unanswered_rows: int) -> Iterator[Finding]:
    """Yield errors for what distillation takes from the records of training, and they lack.

    `rows`: those of training; `unanswered_rows`: of these, the ones without an answer.
    """
    if spec.task != "distill":
        return
    yield from _without_given_answers(rows, unanswered_rows, spec.distill)
    must_show = spec.distill.has_for_teacher(spec.model) and spec.distill.lmbda == 1
    yield from _without_teacher_text(
        spec.data.train, spec.distill.teacher_prompt, spec.seed, must_show=must_show
    )


def _without_teacher_text(
    sources: Sequence[SourceConfig], template: str | None, seed: int, *, must_show: bool
) -> Iterator[Finding]:
    """Yield an error where records of training lack what the teacher is to be shown. Records are read once more.

    `template`: distill.teacher_prompt. `must_show`: the teacher is the model, which learns nothing from the same prompt.
    """
    if template is None and not must_show:
        return
    records = 0
    lacking: dict[str, int] = {}
    for source in sources:
        for record in read_taken(source, seed, Problems(0)):
            try:
                asked = asked_of(record.value, source)
            except ValueError:
                continue  # it is named among the records that cannot be used
            records += 1
            what = ""
            try:
                text = teacher_text(asked.record, asked.prompt, asked.answer, template)
                if text is None and must_show:
                    what = f"lack a column `{COLUMN}`, which the teacher is to be shown"
            except LookupError as error:
                what = f"lack {error}, which the teacher is to be shown"
            except ValueError as error:
                what = f"cannot be shown to the teacher: {error}"
            if what:
                lacking[what] = lacking.get(what, 0) + 1
    for what, number in lacking.items():
        sentence = f"{number:,} of {records:,} records of data.train {what}"
        advice = (
            f"Expected what distill.teacher_prompt names in each record, or a column `{COLUMN}`"
        )
        if template is None:
            advice = "Expected that column, or distill.teacher_prompt: a model learns nothing from itself otherwise"
        yield Finding("no_teacher_prompt", "error", "train", sentence, number, advice=advice)


def _without_given_answers(
    rows: int, unanswered_rows: int, settings: DistillConfig
) -> Iterator[Finding]:
    """Yield an error where some steps learn from answers of the data, which rows of training do not have."""
    if not unanswered_rows or not 0 < settings.lmbda < 1:
        return
    sentence = (
        f"{unanswered_rows:,} of {rows:,} rows of data.train have no answer, and with distill.lmbda {settings.lmbda:g} "
        "some steps learn from answers of the data"
    )
    advice = "Take only records with answers, or set lmbda to 1"
    yield Finding("no_answers", "error", "train", sentence, unanswered_rows, advice=advice)
