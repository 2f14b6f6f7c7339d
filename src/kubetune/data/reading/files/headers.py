"""The first line of a table: the names of its columns, or a record of a table that has no names.

    ham,Are you coming to the game tonight?      `ham` stands below too, and the other is a text as those below are
    spam,You have won a prize. Call now.
    ham,I will be late.

Taken for names, the first record would be lost in silence.
"""

from __future__ import annotations

import codecs
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Literal

from kubetune.base.humanize import shell_word
from kubetune.data.column_names import ANSWERS, OUTPUTS, PROMPTS, RIGHT_ANSWERS, words_of_name
from kubetune.data.reading.files.packed import is_packed, opened
from kubetune.data.record_values import count_words, is_number

# So many records are looked at, of so many characters together.
SAMPLE: Final = 1_000
SAMPLE_CHARACTERS: Final = 2**22
# Below fewer records nothing is said, and below a few only that it may be so.
_FEWEST: Final = 3
_SURE: Final = 10
# Share of the values of a column that are of one kind.
_MOST: Final = 0.9
# Words of a text that hardly any column is named by; and characters.
_WORDS_OF_A_TEXT: Final = 4
_CHARACTERS_OF_A_TEXT: Final = 80
# Words that names of columns are made of.
_OF_NAMES: Final = frozenset((
    *PROMPTS, *ANSWERS, *OUTPUTS, *RIGHT_ANSWERS, "text", "sentence", "review", "comment", "body", "content", "document",
    "article", "message", "label", "class", "category", "sentiment", "intent", "topic", "title", "description", "name",
    "id", "column",
))  # fmt: skip
_MOST_WORDS_OF_A_NAME: Final = 3
# How a sentence ends, perhaps within quotes or brackets.
_END: Final = re.compile(r"([.!…。！]|[?？])[\"'”’»)\]]*$")

# How the name of a column compares with the values below it:
#   value      it stands there as a value
#   number     it is a number, as all of them are
#   sentence   it is a sentence, or JSON, as all of them are
#   text       it has several words, as they have
#   spoken     a text in small letters, as they are
#   unsure     either may be
#   name       it is nothing like them
_Likeness = Literal["value", "number", "sentence", "text", "spoken", "unsure", "name"]
Verdict = Literal["header", "doubtful", "record"]


def judge(header: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[Verdict, str]:
    """Return what the first line of a table is, and for a record why. `rows`: the first ones below it."""
    rows = [row for row in rows if len(row) == len(header)]
    if len(rows) < _FEWEST or any(map(_is_known, header)):
        return "header", ""

    columns: list[tuple[str, _Likeness]] = []
    for name, *values in zip(header, *rows, strict=True):
        name = name.strip()
        likeness = _likeness(name, [value.strip() for value in values if value.strip()])
        if likeness == "name":
            return "header", ""
        columns.append((name, likeness))

    def of(*kinds: _Likeness) -> list[str]:
        return [name for name, likeness in columns if likeness in kinds]

    values = of("value", "number")
    sentences = of("sentence")
    texts = of("sentence", "text", "spoken")
    if values and texts:
        return "record", f"`{_cut(values[0])}` is a value as those below it are"
    if sentences and len(rows) >= _SURE:
        return "record", f"`{_cut(sentences[0])}` is a text as those below it are"
    if texts and list(header) in rows:
        return "record", "a line below it is the same"
    if of("value", "sentence", "spoken"):
        return "doubtful", ""
    return "header", ""


def _is_known(name: str) -> bool:
    """True for a name of few words of which one is made for columns: `text`, `Input Text`, `review_body`."""
    words = words_of_name(name)
    is_short = len(words) <= _MOST_WORDS_OF_A_NAME and not _END.search(name)
    return is_short and not _OF_NAMES.isdisjoint(words)


def _likeness(name: str, values: Sequence[str]) -> _Likeness:
    """Return how the name of a column compares with the values below it, of which none is blank."""
    if not name or not values:
        return "unsure"
    if _share(map(is_number, values)) >= _MOST:
        return "number" if is_number(name) else "name"
    if all(value[0] in "[{" for value in values):
        return "sentence" if name[0] in "[{" else "name"
    lengths = list(map(count_words, values))
    are_texts = statistics.fmean(lengths) >= 2 and len(set(values)) > len(values) / 3
    if are_texts:
        return _likeness_to_texts(name, values)
    if name in values:
        return "value"
    # Names of classes and ids are as short as those of columns; a question is longer than its answers.
    has_digits = _share(any(map(str.isdigit, value)) for value in values) >= _MOST
    is_unlike = count_words(name) > max(lengths) + 1 or (
        has_digits and not any(map(str.isdigit, name))
    )
    return "name" if is_unlike else "unsure"


def _likeness_to_texts(name: str, values: Sequence[str]) -> _Likeness:
    """Return how the name of a column compares with texts below it."""
    # Names of one word over texts that have several, and names shorter than any text. Chinese has no spaces.
    are_longer = _share(len(value.split()) > 1 for value in values)
    is_one_word = len(name.split()) == 1 and name.isascii()
    if len(name) < min(map(len, values)) or (is_one_word and are_longer > 0.95):
        return "name"

    end = _end_of(name)
    ends = [_end_of(value) for value in values]
    # A question as the name, whose answers are below it.
    if end == "?" and ends.count("?") < len(values) / 2:
        return "name"
    if end and not is_one_word and sum(map(bool, ends)) >= _MOST * len(values):
        return "sentence"
    if is_one_word or (count_words(name) < _WORDS_OF_A_TEXT and len(name) < _CHARACTERS_OF_A_TEXT):
        return "unsure"
    are_small = name[0].islower() and _share(value[0].islower() for value in values) >= _MOST
    return "spoken" if are_small or len(name) >= _CHARACTERS_OF_A_TEXT else "text"


def _end_of(text: str) -> str:
    """Return `?` for a question, `.` for another sentence; empty for what ends without a mark."""
    end = _END.search(text)
    if end is None:
        return ""
    return "?" if end[1] in "?？" else "."


def _share(truths: Iterable[bool]) -> float:
    return statistics.fmean(truths)


def _cut(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:39]}…"


def naming_command(file: Path, rows: Sequence[Sequence[str]], delimiter: str) -> str:
    """Return a command that writes names above the first line of a table. `rows`: with the first line."""
    names = _names_for(rows)
    written = ("\\t" if delimiter == "\t" else delimiter).join(names)
    read = f"gunzip -c {shell_word(file)}" if is_packed(file) else f"cat {shell_word(file)}"
    with opened(file) as stream:
        # The mark would stand within the file then.
        if stream.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
            read += f" | tail -c +{len(codecs.BOM_UTF8) + 1}"
    made = file.with_name(f"named-{file.name.removesuffix('.gz')}")
    return f"(printf '{written}\\n'; {read}) > {shell_word(made)}"


def _names_for(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return names for columns without any: `label` and `text`, `prompt` and `completion` where their values say it."""
    names = []
    texts = []
    classes = []
    for index, values in enumerate(zip(*rows, strict=True)):
        names.append(f"column_{index + 1}")
        held = [value.strip() for value in values if value.strip()]
        number = len(set(held))
        if held and statistics.fmean(map(count_words, held)) >= 2 and number > len(held) / 3:
            texts.append(index)
        elif 2 <= number <= len(held) / 3:
            classes.append(index)
    if len(texts) == 1:
        names[texts[0]] = "text"
    if len(classes) == 1:
        names[classes[0]] = "label"
    if len(texts) == 2 and not classes:
        names[texts[0]] = "prompt"
        names[texts[1]] = "completion"
    return names
