"""Words for records of which no column is known: what a user may paste to say which is which."""

from __future__ import annotations

from collections.abc import Sequence

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


def unknown(seen: SeenRecords, path: str) -> str:
    """Return what a user should do where no column is known."""
    columns = list(seen.names.values())
    text = f"{path} has the columns {quoted(columns[:12])}"
    if seen.by_name["image"]:
        return (
            f"{path} has images ({quoted(columns[:12])}), but no question and answer about them; add a column `prompt` "
            "(such as: What is this?); the label, or `--columns completion=NAME`, is its answer"
        )
    records = [record.value for record in seen.records]
    made = records_within(records, path) or from_parts(records, path)
    if made:
        return made
    talk = written_talk(seen.first)
    if talk:
        return f"{text}. {talk_in_words(talk)}"
    text += ", and none is known as a question with its answer, a text, or a text with its label"
    choices = choices_of(seen.first, "", None)
    of_choices = choices.columns if choices is not None else ()
    classes = [name for name in seen.classes() if name not in of_choices]
    # All that would be learned: what may be pasted leaves none of it out.
    held = []
    for name, facts in seen.facts.items():
        is_class = name in classes or name == seen.by_name["label"]
        is_metadata = names_metadata(name, facts.mean_words()) or facts.medium(name) is not None
        if facts.words and not is_metadata and not is_class and not names_test(name):
            held.append(name)
    answers = [name for name in held if names_answer(name) or names_bad_answer(name)]
    lists = [name for name in answers if isinstance(seen.first.get(name), list)]
    if len(answers) > 1 or lists:
        return f"{text}. {in_several_answers(answers)}"
    labels = list(dict.fromkeys(filter(None, (seen.by_name["label"], *classes))))
    ways = _ways(seen, held, labels)
    if not ways:
        return f"{text}. Say which is which: `--columns prompt=NAME completion=NAME`, or `--columns text=NAME label=NAME`"
    return f"{text}. Say which is which: {', or '.join(ways)}"


def _ways(seen: SeenRecords, held: Sequence[str], labels: Sequence[str]) -> list[str]:
    """Return words of the command line that say what columns are. `held`: those that would be learned."""
    ways = []
    are_texts = all(isinstance(seen.first.get(name), str) for name in held)
    # A question is no answer, nor is what it is about.
    held = sorted(held, key=lambda name: (name.lower() not in PROMPTS, not names_subject(name)))
    texts = [name for name in held if name in seen.texts()]
    about = seen.text_with_subject()
    if about is not None and labels:
        texts = list(about)
    if len(texts) == 2 and (pair_in(texts) or are_numbered(texts) or (about and labels)):
        # Either may contradict the other, so none is an answer.
        ways.append(_as_pair(texts, labels))
    elif len(held) == 2 and are_texts and held[1].lower() not in PROMPTS:
        ways.append(f"`--columns prompt={shell_word(held[0])} completion={shell_word(held[1])}`")
        # A title, a text and a class.
        if labels and len(texts) == 2:
            ways.insert(0, _as_pair(texts, labels))
    if len(held) == 1 and are_texts:
        if held[0].lower() not in PROMPTS:
            ways.append(f"`--columns text={shell_word(held[0])}`")
        for name in labels:
            ways.append(f"`--columns text={shell_word(held[0])} label={shell_word(name)}`")
    return ways


def _as_pair(texts: Sequence[str], labels: Sequence[str]) -> str:
    """Return words of the command line for two texts with a label."""
    label = shell_word(labels[0]) if labels else "NAME"
    return f"`--columns text={shell_word(texts[0])} text_pair={shell_word(texts[1])} label={label}`"
