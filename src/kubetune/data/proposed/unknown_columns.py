"""Words for records of which no column is known: options that a user may paste to say which is which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kubetune.base.humanize import shell_word
from kubetune.data.choices import are_numbered, choices_of
from kubetune.data.column_names import (
    PROMPTS,
    names_answer,
    names_bad_answer,
    names_metadata,
    names_subject,
    names_test,
)
from kubetune.data.proposed.answers_as_texts import from_parts, in_several_answers
from kubetune.data.proposed.programs import records_within
from kubetune.data.proposed.seen_records import SeenRecords
from kubetune.data.reading.fields import quoted
from kubetune.data.reading.labelled import pair_in
from kubetune.data.single_messages import talk_in_words, written_talk

_MOST_COLUMNS: Final = 12  # that a sentence names


def unknown(seen: SeenRecords, path: str) -> str:
    """Return what a user should do if no column is known."""
    columns = quoted(list(seen.names.values())[:_MOST_COLUMNS])
    if seen.by_name["image"]:
        return (
            f"{path} has images ({columns}), but no question and answer about them; add a column `prompt` "
            "(such as: What is this?); the label, or `--columns completion=NAME`, is its answer"
        )
    records = [record.value for record in seen.records]
    made = records_within(records, path) or from_parts(records, path)
    if made:
        return made
    text = f"{path} has the columns {columns}"
    talk = written_talk(seen.first)
    if talk:
        return f"{text}. {talk_in_words(talk)}"

    text += ", and none is known as a question with its answer, a text, or a text with its label"
    choices = choices_of(seen.first, "", None)
    of_choices = choices.columns if choices is not None else ()
    classes = [name for name in seen.classes() if name not in of_choices]
    learned = _learned(seen, classes)
    answers = [name for name in learned if names_answer(name) or names_bad_answer(name)]
    if len(answers) > 1 or any(isinstance(seen.first.get(name), list) for name in answers):
        return f"{text}. {in_several_answers(answers)}"

    labels = list(dict.fromkeys(filter(None, (seen.by_name["label"], *classes))))
    ways = _ways(seen, learned, labels)
    if not ways:
        ways = ["`--columns prompt=NAME completion=NAME`", "`--columns text=NAME label=NAME`"]
    return f"{text}. Say which is which: {', or '.join(ways)}"


def _learned(seen: SeenRecords, classes: Sequence[str]) -> list[str]:
    """Return all columns that would be learned, so that the words that may be pasted leave none of them out."""
    learned = []
    for name, facts in seen.facts.items():
        is_class = name in classes or name == seen.by_name["label"]
        is_metadata = names_metadata(name, facts.mean_words()) or facts.medium(name) is not None
        if facts.words and not (is_class or is_metadata or names_test(name)):
            learned.append(name)
    return learned


def _ways(seen: SeenRecords, learned: Sequence[str], labels: Sequence[str]) -> list[str]:
    """Return words of the command line that say the meaning of the columns that would be learned."""
    # A question is no answer, nor is a text that it is about.
    learned = sorted(
        learned, key=lambda name: (name.lower() not in PROMPTS, not names_subject(name))
    )
    texts = [name for name in learned if name in seen.texts()]
    are_compared = len(texts) == 2 and (pair_in(texts) or are_numbered(texts))
    about = seen.text_with_subject()
    if about is not None and labels:
        texts = list(about)
        are_compared = True

    ways = []
    # Either of two such texts may contradict the other, so neither is an answer.
    if are_compared:
        ways.append(_as_pair(texts, labels))
    if not all(isinstance(seen.first.get(name), str) for name in learned):
        return ways
    if len(learned) == 2 and not are_compared and learned[1].lower() not in PROMPTS:
        # A title, a text and a class.
        if labels and len(texts) == 2:
            ways.append(_as_pair(texts, labels))
        prompt, completion = map(shell_word, learned)
        ways.append(f"`--columns prompt={prompt} completion={completion}`")
    if len(learned) == 1:
        text = shell_word(learned[0])
        if learned[0].lower() not in PROMPTS:
            ways.append(f"`--columns text={text}`")
        ways += [f"`--columns text={text} label={shell_word(name)}`" for name in labels]
    return ways


def _as_pair(texts: Sequence[str], labels: Sequence[str]) -> str:
    """Return words of the command line for two texts with a label."""
    label = shell_word(labels[0]) if labels else "NAME"
    return f"`--columns text={shell_word(texts[0])} text_pair={shell_word(texts[1])} label={label}`"
