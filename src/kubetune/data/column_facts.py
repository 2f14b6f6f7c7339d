"""The contents of a column, counted over all records: a text that answers are about, thoughts, a class, an id.

Findings name by it what nothing reads, and `kubetune init` chooses by it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from kubetune.data.column_names import (
    ANSWERS,
    PROMPTS,
    TALKS,
    names_metadata,
    names_origin,
    names_subject,
    names_thought,
    names_weight,
)
from kubetune.data.column_uses import use_of
from kubetune.data.media import Medium, is_on_web, medium_of
from kubetune.data.record_values import (
    RecordValue,
    as_integer,
    count_words,
    is_empty,
    is_held,
    is_number,
    is_phrase,
    joined_texts,
    key_of,
)

# How readers call a key of messages.
_OF_MESSAGES: Final = "messages[]."

Meaning = Literal["subject", "thought", "text", "class", "group", "number", "medium", "other"]

# Classes of a column: at most so many, in at least so many records. More numbers are counts, ages or scores.
MOST_CLASSES: Final = 20
_MOST_NAMED_CLASSES: Final = 200
FEWEST_RECORDS: Final = 30
# A column of so many records is named in a finding; `init` guesses a task from FEWEST_RECORDS.
_FEWEST_NAMED: Final = 6
_LONGEST_CLASS: Final = 40  # characters
# Share of the values that are phrases in a column of texts; the others may be single words.
_PHRASES_OF_A_TEXT: Final = 0.5
# "Nearly all records" are this share of them.
_MOSTLY: Final = 0.9
# A list of classes is in at least this share of the records, since no class may apply to one.
_SOME: Final = 0.3


@dataclass
class ColumnFacts:
    """Counts of the values of one column."""

    records: int = 0  # that hold something in it
    words: int = 0
    phrases: int = 0  # records with several words in it
    repeated: int = 0  # records whose other texts hold it too
    numbers: int = 0  # records with a number in it
    # records with an image or the like in it
    media: Counter[Medium] = field(default_factory=Counter)
    on_web: int = 0  # records whose image or the like lies on the web
    # short values as JSON has them; one more than _MOST_NAMED_CLASSES stands for too many; of lists their items
    values: set[str] = field(default_factory=set)
    is_short: bool = True
    is_plain: bool = True  # no lists or objects
    is_list: bool = True  # nothing but lists
    # how a text of it is used, from the first record
    use: dict[str, str] = field(default_factory=dict)
    # the text that it may be a class of, and the record's answer, from the first record
    text: str = ""
    answer: str = ""

    def add(self, value: Any, texts: Sequence[str]) -> None:
        """Count a value that is not empty. `texts`: those of the record that are used."""
        if is_empty(value):
            return
        self.records += 1
        words = count_words(value)
        self.words += words
        self.phrases += is_phrase(value)
        self.numbers += is_number(value)
        self._add_medium(value)
        if words and is_held(value, texts):
            self.repeated += 1
        # Several classes of a record are a list of names; a list of numbers is scores.
        items = value if isinstance(value, list) else [as_integer(value)]
        kinds = str if isinstance(value, list) else (str, int)
        self.is_list = self.is_list and isinstance(value, list)
        is_short = all(
            isinstance(item, kinds) and len(str(item)) <= _LONGEST_CLASS for item in items
        )
        self.is_short = self.is_short and is_short
        self.is_plain = self.is_plain and not isinstance(value, (list, Mapping))
        if is_short and len(self.values) <= _MOST_NAMED_CLASSES:
            self.values.update(str(item).strip() for item in items)

    def _add_medium(self, value: Any) -> None:
        medium = medium_of(value)
        if medium is None:
            return
        is_away = is_on_web(value)
        # An address of a document says where a text is from.
        if not (is_away and medium == "document"):
            self.media[medium] += 1
            self.on_web += is_away

    def __add__(self, other: ColumnFacts) -> ColumnFacts:
        return ColumnFacts(
            records=self.records + other.records,
            words=self.words + other.words,
            phrases=self.phrases + other.phrases,
            repeated=self.repeated + other.repeated,
            numbers=self.numbers + other.numbers,
            media=self.media + other.media,
            on_web=self.on_web + other.on_web,
            values=set(sorted(self.values | other.values)[: _MOST_NAMED_CLASSES + 1]),
            is_short=self.is_short and other.is_short,
            is_plain=self.is_plain and other.is_plain,
            is_list=self.is_list and other.is_list,
            use=self.use or other.use,
            text=self.text or other.text,
            answer=self.answer or other.answer,
        )

    def meaning(self, name: str, *, records: int) -> Meaning:
        """Return what the column is: the first of these that holds. `records`: of all.

        medium    images and the like
        other     it repeats the record's texts
        thought   it is called so, and has texts that differ
        subject   it is called like a text that a question is about, and has words
        class     it has few short values; sentences beside an answer are instructions
        group     it is called like metadata, and has few values; other metadata are `other`
        number    a weight of rows, or a number beside a plain text
        text      phrases; of a prompt or an answer one word is enough
        """
        if self._are_media():
            return "medium" if self.medium(name) else "other"
        if self._repeats_record(name):
            return "other"
        if self._is_thought(name, records):
            return "thought"
        if names_subject(name) and (self._has_words() or self.answer):
            return "subject"
        are_instructions = self._has_phrases() and bool(self.answer)
        if not are_instructions and self.is_class(name, records=records, fewest=_FEWEST_NAMED):
            return "class"
        if names_metadata(name, self.mean_words()):
            return "group" if self._is_group(name, records) else "other"
        if self._is_number(name, records):
            return "number"
        return "text" if self._is_text(name) else "other"

    def _repeats_record(self, name: str) -> bool:
        """True if the other texts of records hold the values too: of nearly all records, or of all for a prompt."""
        share = 1.0 if name in PROMPTS else _MOSTLY
        return self.repeated >= share * self.records

    def _is_thought(self, name: str, records: int) -> bool:
        """True if the column is called like thoughts, and holds texts or formulas that differ."""
        # Formulas have no words, and numbers are counts of tokens.
        is_written = self._has_words() or (self._differ() and self.numbers < self.records)
        return names_thought(name) and is_written and not self.is_class(name, records=records)

    def _is_group(self, name: str, records: int) -> bool:
        """True if metadata part the records as a class does, such as a language or an origin."""
        is_of_record = name not in PROMPTS and not name.startswith(_OF_MESSAGES)
        return is_of_record and self._has_few_values(records, _FEWEST_NAMED)

    def _is_number(self, name: str, records: int) -> bool:
        """True if the column weighs rows with an answer, or has a number beside nearly each plain text."""
        if self.answer and names_weight(name) and self.numbers == self.records:
            return True
        is_beside_text = bool(self.text) and not self.answer
        return is_beside_text and self.numbers >= max(_FEWEST_NAMED, _MOSTLY * records)

    def _is_text(self, name: str) -> bool:
        """True if the column holds phrases; of a prompt or an answer one word is enough."""
        if name in PROMPTS or name in ANSWERS:
            return self.mean_words() >= 1
        return self._has_phrases()

    def _has_words(self) -> bool:
        """True if values are texts. Single words are only if they differ: else they are efforts, kinds or languages."""
        mean = self.mean_words()
        return mean >= 2 or (mean >= 1 and self._differ())

    def _has_phrases(self) -> bool:
        return self.phrases >= _PHRASES_OF_A_TEXT * self.records

    def medium(self, name: str) -> Medium | None:
        """Return what most records have in the column: an image or the like; None for texts and their origins."""
        if not self._are_media():
            return None
        medium = self.media.most_common(1)[0][0]
        return None if medium == "document" and names_origin(name) else medium

    def _are_media(self) -> bool:
        return 2 * self.media.total() >= max(self.records, 1)

    @property
    def is_mostly_on_web(self) -> bool:
        """True if most of the images and the like are to be loaded from the web."""
        return 2 * self.on_web > self.records

    def mean_words(self) -> float:
        """Return the words of a value, on average."""
        return self.words / max(self.records, 1)

    def _differ(self) -> bool:
        """True if most records have a value of their own."""
        values = len(self.values)
        return not self.is_short or values > min(self.records / 2, _MOST_NAMED_CLASSES)

    def is_class(self, name: str, *, records: int, fewest: int = FEWEST_RECORDS) -> bool:
        """True if the values are few, short and in nearly all records, and the name is no id or split."""
        is_aside = names_metadata(name) or name.startswith(_OF_MESSAGES)
        return not is_aside and self._has_few_values(records, fewest)

    def _has_few_values(self, records: int, fewest: int) -> bool:
        """True if the values are few, short and in nearly all records."""
        if not self.is_short or self.records < fewest:
            return False
        share = _SOME if self.is_list else _MOSTLY
        if self.records < share * records or not 2 <= len(self.values) <= self._most_classes():
            return False
        # Few rows with a value each are names; numbers with a fraction and dates are no classes.
        if len(self.values) > self.records / 3:
            return False
        return not any(re.fullmatch(r"-?\d+\.\d+|\d{4}-\d\d.*", value) for value in self.values)

    def are_verdicts(self) -> bool:
        """True if the values are yes and no, as JSON and tables write them."""
        return {value.lower() for value in self.values} in ({"true", "false"}, {"0", "1"})

    def _most_classes(self) -> int:
        is_number = all(re.fullmatch(r"-?\d+", value) for value in self.values)
        return MOST_CLASSES if is_number else _MOST_NAMED_CLASSES


class Columns(dict[str, ColumnFacts]):
    """Counts of the values of columns that nothing reads."""

    def note(
        self,
        name: str,
        value: RecordValue,
        columns: Mapping[str, str],
        texts: Sequence[str],
    ) -> None:
        """Count one column of a record. `texts`: those of the record that are used."""
        if name in value:
            item = value[name]
        else:
            item = _of_messages(name, value)
        if item is None:
            return
        facts = self.setdefault(name, ColumnFacts())
        if not facts.records and name in value:
            facts.use = use_of(name, value, columns)
            text = key_of(("text", "sentence", *PROMPTS), value, columns)
            facts.text = text if isinstance(value.get(text), str) else ""
            facts.answer = key_of((*ANSWERS, *TALKS, "chosen"), value, columns)
        facts.add(item, texts)

    def __add__(self, other: Columns) -> Columns:
        """Return what was seen of both."""
        merged = Columns(self)
        for name, facts in other.items():
            merged[name] = merged[name] + facts if name in merged else facts
        return merged

    def to_json(self, records: int) -> dict[str, dict[str, Any]]:
        """Return what each column is, how many records hold it and how it is used."""
        facts = {}
        for name, of_column in self.items():
            meaning = of_column.meaning(name, records=records)
            if meaning != "other":
                facts[name] = {
                    "meaning": meaning,
                    "medium": of_column.medium(name),
                    "is_on_web": of_column.is_mostly_on_web,
                    "records": of_column.records,
                    "values": len(of_column.values),
                    "repeated": of_column.repeated,
                    "is_plain": of_column.is_plain,
                    "are_verdicts": of_column.are_verdicts(),
                    "use": of_column.use,
                    "text": of_column.text,
                    "answer": of_column.answer,
                }
        return facts


def _of_messages(name: str, value: RecordValue) -> Any:
    """Return what the messages of a record hold under a key, such as `messages[].thoughts`; None if no message has it."""
    key = name.removeprefix(_OF_MESSAGES)
    held = []
    for turns in value.values():
        for turn in turns if isinstance(turns, list) else ():
            if key != name and isinstance(turn, Mapping) and not is_empty(turn.get(key)):
                held.append(turn[key])
    return joined_texts(held) if held else None
