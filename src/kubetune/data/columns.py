"""The meaning of a column of records, by its name and its values: a text that answers are about, thoughts, a class, an id.

Readers refuse by it, findings name what is not used by it, and `kubetune init` chooses by it. Nothing here knows shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from kubetune.base.humanize import counted, shell_word
from kubetune.data.choices import choices_of
from kubetune.data.column_names import (
    ANSWERS,
    PROMPTS,
    QUESTIONS,
    TALKS,
    names_answer,
    names_bad_answer,
    names_form,
    names_metadata,
    names_split,
    names_subject,
    names_test,
    names_thought,
    names_weight,
    words_of_name,
)

# How readers call a key of messages.
_OF_MESSAGES: Final = "messages[]."

# A record as its file has it.
RecordValue = Mapping[str, Any]
Meaning = Literal["subject", "thought", "text", "class", "group", "number", "other"]

# Classes of a column: at most so many, in at least so many records. More numbers are counts, ages or scores.
MOST_CLASSES: Final = 20
_MOST_NAMED_CLASSES: Final = 200
FEWEST_RECORDS: Final = 30
# So many are enough to name the column; a task is guessed from more.
_FEWEST_NAMED: Final = 6
_LONGEST_CLASS: Final = 40  # characters
# Share of the values that are phrases in a column of texts; the others may be single words.
_PHRASES_OF_A_TEXT: Final = 0.5
# Share of the records in which a column says what the record says anyway.
_MOSTLY: Final = 0.9
_SOME: Final = 0.3


def count_words(value: Any) -> int:
    """Return the number of words of a text, or of all texts in a list or an object; ids, numbers and dates have none."""
    if isinstance(value, str):
        words = [word for word in value.split() if any(map(str.isalpha, word))]
        # Chinese and its like have no spaces between words.
        if not value.isascii():
            return max(len(words), sum(char > "\u2e80" for char in value) // 2)
        return len(words)
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return sum(map(count_words, value))
    return 0


def is_prose(value: Any) -> bool:
    """True if a value is a text of two words at least, or holds such texts."""
    return count_words(value) >= 2


def _is_phrase(value: Any) -> bool:
    """True for texts of several words, which a name such as `abstract_algebra` has too; an id with digits has none."""
    if isinstance(value, str) and not any(map(str.isspace, value)):
        if any(map(str.isdigit, value)):
            return False
        value = re.sub(r"[_-]", " ", value)
    return is_prose(value)


def joined_texts(value: Any) -> Any:
    """Return a list of texts as one text, a line each; anything else as it is."""
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return "\n".join(value)
    return value


def key_of(names: Sequence[str], value: RecordValue, columns: Mapping[str, str]) -> str:
    """Return the column that stands for the first of these names; empty if the record has none that holds something."""
    for name in names:
        column = columns.get(name, name)
        if not _is_empty(value.get(column)):
            return column
    return ""


def _is_empty(value: Any) -> bool:
    return value in (None, "", [], {}) or (isinstance(value, str) and value.isspace())


def with_subject(name: str, value: RecordValue, columns: Mapping[str, str]) -> dict[str, str]:
    """Return the `columns` by which a text of a record becomes part of its prompt; none if no columns can do that."""
    question = key_of(PROMPTS, value, columns)
    text = joined_texts(value.get(name))
    is_taken = "input" in columns or (value.get("input") is not None and question != "input")
    if not question or is_taken or not isinstance(text, str):
        return {}
    # A conversation has its prompt in its messages, a classifier its texts as they are.
    if key_of(TALKS, value, columns) or not columns.keys().isdisjoint(("text", "label")):
        return {}
    if question == name or names_answer(name) or not isinstance(value[question], str):
        return {}
    # One of several choices is not what a question is about, nor are choices without the letters that name them.
    right = value.get(key_of(ANSWERS, value, columns))
    choices = choices_of(value, question, right)
    if choices is not None and name in choices.columns:
        is_whole = len(choices.columns) == 1 and right in choices.texts
        if not is_whole:
            return {}
    chosen = {"instruction": question, "input": name}
    answer = key_of(ANSWERS, value, columns)
    if key_of(("chosen", "rejected"), value, columns):
        answer = ""
    if answer:
        chosen["output"] = answer
    return _whole(chosen, columns)


def _whole(chosen: Mapping[str, str], columns: Mapping[str, str]) -> dict[str, str]:
    """Return all `columns` of a run file that gets these, beside those that it has for other columns of the record."""
    whole = {key: column for key, column in chosen.items() if key != column}
    for key, column in columns.items():
        is_answer = "output" in chosen and key in ANSWERS
        if key not in chosen and column not in chosen.values() and not is_answer:
            whole[key] = column
    return whole


def _as_thought(name: str, value: RecordValue, columns: Mapping[str, str]) -> dict[str, str]:
    """Return the `columns` by which thoughts are read before the answer of a record; none where messages hold it.

    A prompt with its completion becomes a question with its answer, whose thoughts have a place.
    """
    question = key_of(PROMPTS, value, columns)
    answer = key_of(ANSWERS, value, columns)
    is_other = key_of((*TALKS, "chosen", "rejected"), value, columns) or "label" in value
    if is_other or not question or not answer or question == answer:
        return {}
    chosen = {"instruction": question, "output": answer}
    if not columns and question in QUESTIONS:
        # These names are known, whichever of them the record has.
        chosen = {}
    return _whole({**chosen, "reasoning_content": name}, columns)


def _as_answer(name: str, value: RecordValue, columns: Mapping[str, str]) -> dict[str, str]:
    """Return the `columns` by which a text is learned as the answer to what is beside it; none without a question.

    It is the answer to a plain text, or takes the place of another answer.
    """
    question = key_of(PROMPTS, value, columns)
    texts = (value.get(question), value[name])
    is_chat = key_of((*TALKS, "chosen", "rejected"), value, columns)
    if name in ANSWERS and not is_chat and all(isinstance(text, str) for text in texts):
        # Both are named, whatever they are called: there are two answers.
        chosen = {"instruction": question, "output": name}
        return {**_whole(chosen, columns), **chosen}
    others = (*PROMPTS, *ANSWERS, *TALKS, "chosen", "label", "labels")
    if columns or not isinstance(value.get("text"), str) or key_of(others, value, {}):
        return {}
    if (
        not isinstance(value[name], str)
        or not is_prose(value[name])
        or names_test(name)
        or names_form(name)
    ):
        return {}
    return {"prompt": "text", "completion": name}


def _as_system(name: str, value: RecordValue, columns: Mapping[str, str]) -> dict[str, str]:
    """Return the `columns` by which a text becomes the message of the system; none by another name, or if there is one."""
    words = re.findall(r"[a-z]+", name.lower())
    is_called = not {"sys", "system", "persona"}.isdisjoint(words)
    if not is_called or not isinstance(value[name], str) or not is_prose(value[name]):
        return {}
    if key_of(TALKS, value, columns):
        return with_system(name, value)
    question = key_of(PROMPTS, value, columns)
    answer = key_of(ANSWERS, value, columns)
    has_system = key_of(("system", "system_prompt"), value, columns)
    if has_system or not question or not answer or key_of(("chosen", "rejected"), value, columns):
        return {}
    # A plain prompt has no place for it.
    chosen = {"instruction": question, "output": answer}
    return _whole({**chosen, "system": name}, columns)


def fitting(value: RecordValue) -> dict[str, str]:
    """Return the columns of a record that may be its prompt, its answer and the thoughts before it; none in doubt."""
    texts = []
    thoughts = []
    for name, text in value.items():
        if names_thought(name) and isinstance(text, str) and is_prose(text):
            thoughts.append(name)
        is_aside = names_metadata(name) or names_bad_answer(name) or names_thought(name)
        if (
            isinstance(text, str)
            and is_prose(text)
            and not is_aside
            and not text.lstrip().startswith(("[", "{"))
        ):
            texts.append(name)
    by_name = {name.lower(): name for name in texts}
    prompt = next((by_name[name] for name in PROMPTS if name in by_name), "")
    others = [name for name in texts if name != prompt and not names_subject(name)]
    completion = next((by_name[name] for name in ANSWERS if name in by_name), "")
    if not completion and len(others) == 1 and prompt:
        completion = others[0]
    is_answer = bool(others) and not set(ANSWERS).isdisjoint(
        words_of_name(re.sub(r"\d", "", others[0]))
    )
    # A number beside two texts may be what they are compared by.
    rest = [name for name in value if name not in texts and not names_metadata(name)]
    if not prompt and not completion and len(others) == 2 and not is_answer and not rest:
        prompt = others[0]
        completion = others[1]
    if not prompt or not completion:
        return {}
    columns = {"prompt": prompt, "completion": completion}
    # A plain prompt has no place for thoughts.
    if len(thoughts) == 1:
        columns = {
            "instruction": prompt,
            "output": completion,
            "reasoning_content": thoughts[0],
        }
    return {key: name for key, name in columns.items() if key != name}


def in_yaml(columns: Mapping[str, str]) -> str:
    """Return columns as a run file has them: `columns: {input: context}`."""
    pairs = ", ".join(f"{key}: {_quoted(name)}" for key, name in columns.items())
    return f"columns: {{{pairs}}}"


def in_words(columns: Mapping[str, str]) -> str:
    """Return columns as the command line has them: `--columns input=context`."""
    pairs = " ".join(shell_word(f"{key}={name}") for key, name in columns.items())
    return f"--columns {pairs}"


def in_list(names: Sequence[str]) -> str:
    """Return names of columns in words: "`A`, `B` and `C`"."""
    *others, last = (f"`{name}`" for name in names)
    return f"{', '.join(others)} and {last}" if others else last


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_][\w-]*", name, re.ASCII) else f'"{name}"'


def left_subjects(
    value: RecordValue, columns: Mapping[str, str], *, needs_answer: bool
) -> list[tuple[str, ...]]:
    """Return the columns that a question is about and that would be left out; none if `columns` decide.

    Columns that hold a choice each stand together: [("article",), ("A", "B", "C", "D")].
    """
    # Whoever names a question or an answer has seen the other columns.
    is_decided = not columns.keys().isdisjoint((*PROMPTS, *ANSWERS, *TALKS, "chosen", "rejected"))
    question = key_of((*TALKS, *PROMPTS), value, {})
    answer = key_of(ANSWERS, value, {})
    is_talk = question in TALKS
    if is_decided or not question or (needs_answer and not answer and not is_talk):
        return []
    left = []
    choices = None if is_talk else choices_of(value, question, value.get(answer))
    if choices is not None and not _is_held(
        list(choices.texts), [value[question], value.get("input")]
    ):
        left.append(choices.columns)
    of_choices = choices.columns if choices is not None else ()
    for name, item in value.items():
        if name in (question, answer, "input", *of_choices):
            continue
        is_subject = names_subject(name) and tells_something(item)
        if not is_subject and not is_talk:
            is_subject = _is_table(name, item, value.get(answer))
        if is_subject and not _is_held(item, [value[question], value.get("input")]):
            left.append((name,))
    return left


# Words of names of lists of objects that are about an answer, or that a model is given in another way.
_NO_TABLES: Final = frozenset((
    "meta", "metadata", "info", "extra", "entity", "entitie", "span", "mention", "annotation", "citation", "label", "reward",
    "tool", "function", "call", "history", "image", "rating",
))  # fmt: skip


def _is_table(name: str, value: Any, answer: Any) -> bool:
    """True for a list of objects or rows, or an object of such, that holds the answer of a record."""
    if not isinstance(answer, str) or len(answer.strip()) < 3:
        return False
    parts = list(value.values()) if isinstance(value, Mapping) else [value]
    are_rows = any(
        isinstance(part, list) and part and isinstance(part[0], (list, Mapping)) for part in parts
    )
    is_aside = names_metadata(name) or names_answer(name) or names_thought(name)
    if not are_rows or is_aside or name in (*PROMPTS, *TALKS):
        return False
    if not _NO_TABLES.isdisjoint(words_of_name(name)):
        return False
    return any(answer.strip() in leaf for leaf in _leaves(value))


def tells_something(value: Any) -> bool:
    """True for prose, and for a table of short cells; an id or a number tells nothing."""
    if is_prose(value):
        return True
    return any(len(re.findall(r"[^\W_]+", leaf)) > 2 and "|" in leaf for leaf in _leaves(value))


def with_system(name: str, value: RecordValue) -> dict[str, str]:
    """Return the `columns` by which a text beside a conversation becomes its system message; none if it has one."""
    turns = value.get(key_of(TALKS, value, {}))
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], Mapping):
        return {}
    speaker = turns[0].get("role", turns[0].get("from"))
    has_system = speaker in ("system", "developer") or key_of(
        ("system", "system_prompt"), value, {}
    )
    return {} if has_system or not isinstance(value.get(name), str) else {"system": name}


def subject_columns(
    left: Sequence[tuple[str, ...]], value: RecordValue, columns: Mapping[str, str]
) -> dict[str, str]:
    """Return the `columns` by which what `left_subjects` returned becomes part of the prompt; none if none can do that."""
    if len(left) != 1 or len(left[0]) != 1:
        return {}
    (name,) = left[0]
    if key_of(TALKS, value, {}):
        return with_system(name, value)
    return with_subject(name, value, columns)


def require_subjects(value: RecordValue, columns: Mapping[str, str], *, needs_answer: bool) -> None:
    """Raise ValueError for a text that a question is about, and that would be left out."""
    left = left_subjects(value, columns, needs_answer=needs_answer)
    answer = key_of(ANSWERS, value, columns)
    # Of an answer that is no text the reader says so: no columns make a text of it.
    is_text = isinstance(value.get(answer, ""), str)
    if not left or (needs_answer and not is_text):
        return
    question = key_of((*TALKS, *PROMPTS), value, {})
    names = [name for group in left for name in group]
    it = "it" if len(names) == 1 else "they"
    listed = in_list(names)
    has = f"has {listed} beside `{question}`, and {it} would be left out"
    use = subject_columns(left, value, {})
    if use:
        raise ValueError(
            f"{has} of the prompt; give `{in_yaml(use)}` "
            f"(`{in_words(use)}` beside `--data`), or name only the other columns to leave it out"
        )
    answer = key_of(ANSWERS, value, {})
    if question in TALKS:
        decided = {question: question}
        into = "a message"
    else:
        decided = {"instruction": question, **({"output": answer} if answer else {})}
        into = f"`{question}`"
    its = "its text"
    them = "it"
    if len(names) > 1:
        its = "their texts"
        them = "them"
    raise ValueError(
        f"{has} of the prompt; write {its} into {into} (`kubetune init FILE` gives a program where it can), or give "
        f"`{in_yaml(decided)}` to leave {them} out"
    )


def _is_held(value: Any, texts: Sequence[Any]) -> bool:
    """True if each text in a value is a part of one of these, which may be messages."""
    held = list(_leaves(list(texts)))
    parts = [part.strip() for part in _leaves(value)]
    return bool(parts) and all(any(part in text for text in held) for part in parts)


def _leaves(value: Any) -> Iterator[str]:
    """Yield the texts within a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)


def _is_number(value: Any) -> bool:
    """True for a number, also as the text that a table holds."""
    if isinstance(value, str):
        return re.fullmatch(r"\s*-?\d+(\.\d+)?\s*", value, re.ASCII) is not None
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _as_integer(value: Any) -> Any:
    """Return 4 for 4.0, as tables and data frames write counts and grades; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


@dataclass
class ColumnFacts:
    """Counts of the values of one column."""

    records: int = 0  # that hold something in it
    words: int = 0
    phrases: int = 0  # records with several words in it
    repeated: int = 0  # records whose other texts hold it too
    numbers: int = 0  # records with a number in it
    # short values as JSON has them; one more than _MOST_NAMED_CLASSES stands for too many; of lists their items
    values: set[str] = field(default_factory=set)
    is_short: bool = True
    is_plain: bool = True  # no lists or objects
    is_list: bool = True  # nothing but lists
    # how a text of it is used, from the first record
    use: dict[str, str] = field(default_factory=dict)
    # the text that it may be a class of, and the answer beside it, from the first record
    text: str = ""
    answer: str = ""

    def add(self, value: Any, texts: Sequence[str]) -> None:
        """Count a value that is not empty. `texts`: those of the record that are used."""
        if _is_empty(value):
            return
        self.records += 1
        words = count_words(value)
        self.words += words
        self.phrases += _is_phrase(value)
        self.numbers += _is_number(value)
        if words and _is_held(value, texts):
            self.repeated += 1
        # Several classes of a record are a list of names; a list of numbers is scores.
        items = value if isinstance(value, list) else [_as_integer(value)]
        kinds = str if isinstance(value, list) else (str, int)
        self.is_list = self.is_list and isinstance(value, list)
        is_short = all(
            isinstance(item, kinds) and len(str(item)) <= _LONGEST_CLASS for item in items
        )
        self.is_short = self.is_short and is_short
        self.is_plain = self.is_plain and not isinstance(value, (list, Mapping))
        if is_short and len(self.values) <= _MOST_NAMED_CLASSES:
            self.values.update(str(item).strip() for item in items)

    def __add__(self, other: ColumnFacts) -> ColumnFacts:
        return ColumnFacts(
            self.records + other.records,
            self.words + other.words,
            self.phrases + other.phrases,
            self.repeated + other.repeated,
            self.numbers + other.numbers,
            set(sorted(self.values | other.values)[: _MOST_NAMED_CLASSES + 1]),
            self.is_short and other.is_short,
            self.is_plain and other.is_plain,
            self.is_list and other.is_list,
            self.use or other.use,
            self.text or other.text,
            self.answer or other.answer,
        )

    def meaning(self, name: str, *, records: int) -> Meaning:
        """Return what the column is. `records`: of all."""
        if not self.records:
            return "other"
        # A prompt has to be that of each record.
        share = 1.0 if name in PROMPTS else _MOSTLY
        if self.repeated >= share * self.records:
            return "other"
        mean = self.words / self.records
        # Single words are texts only if they differ: else they are efforts, kinds or languages.
        is_told = mean >= 2 or (mean >= 1 and self._differ())
        is_few = self.is_class(name, records=records)
        if names_thought(name) and is_told and not is_few:
            return "thought"
        if names_subject(name) and is_told:
            return "subject"
        is_text = self.phrases >= _PHRASES_OF_A_TEXT * self.records
        # Sentences that repeat beside an answer are instructions.
        is_said = is_text and bool(self.answer)
        if not is_said and self.is_class(name, records=records, fewest=_FEWEST_NAMED):
            return "class"
        if name in PROMPTS or name in ANSWERS:
            is_text = mean >= 1
        if names_metadata(name):
            # A language or an origin parts the records as a class does.
            is_group = name not in PROMPTS and self._has_few_values(records, _FEWEST_NAMED)
            return "group" if is_group and not name.startswith(_OF_MESSAGES) else "other"
        is_weight = bool(self.answer) and names_weight(name) and self.numbers == self.records
        if is_weight or self._may_be_predicted(records):
            return "number"
        return "text" if is_text else "other"

    def _differ(self) -> bool:
        """True if most records have a value of their own."""
        values = len(self.values)
        return not self.is_short or values > min(self.records / 2, _MOST_NAMED_CLASSES)

    def _may_be_predicted(self, records: int) -> bool:
        """True if nearly all records have a number beside a plain text, such as a score or a price."""
        is_beside_text = bool(self.text) and not self.answer
        return is_beside_text and self.numbers >= max(_FEWEST_NAMED, _MOSTLY * records)

    def is_class(self, name: str, *, records: int, fewest: int = FEWEST_RECORDS) -> bool:
        """True if the values are few, short and in nearly all records, and the name is not that of an id or a split."""
        is_aside = names_metadata(name) or name.startswith(_OF_MESSAGES)
        return not is_aside and self._has_few_values(records, fewest)

    def _has_few_values(self, records: int, fewest: int) -> bool:
        """True if the values are few, short and in nearly all records."""
        if not self.is_short or self.records < fewest:
            return False
        # No class may apply to a record, where several may.
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


def _of_messages(name: str, value: RecordValue) -> Any:
    """Return what the messages of a record hold under a key, such as `messages[].thoughts`; None where none has it."""
    key = name.removeprefix(_OF_MESSAGES)
    held = []
    for turns in value.values():
        for turn in turns if isinstance(turns, list) else ():
            if key != name and isinstance(turn, Mapping) and not _is_empty(turn.get(key)):
                held.append(turn[key])
    return joined_texts(held) if held else None


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
            if names_thought(name):
                facts.use = _as_thought(name, value, columns)
            else:
                facts.use = _as_system(name, value, columns)
                facts.use = facts.use or with_subject(name, value, columns)
                facts.use = facts.use or _as_answer(name, value, columns)
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


def lacking(column: str) -> str:
    """Return what is said of records without a column that `columns` names, and that they can do without."""
    return f"`{column}` is missing, and taken for empty"


def nowhere(absent: Mapping[str, int], records: int, path: str) -> str:
    """Return the error about a column that none of the records of a file has; empty if each is in some.

    `absent`: records that lack it, by column.
    """
    for column, number in absent.items():
        if number == records:
            return f"{path}: no record has a column {column!r}, which `columns` names"
    return ""


class LeftOut(NamedTuple):
    """A column that holds texts or classes, and that nothing reads."""

    name: str
    meaning: Meaning
    what: str  # in words: `a text`
    advice: str  # what would use it
    is_decisive: bool = False  # answers may be about it, or it is what a text is learned for
    use: Mapping[str, str] = MappingProxyType({})  # `columns` by which thoughts are read


def left_out(
    facts: Mapping[str, Mapping[str, Any]], path: str, *, is_rewarded: bool = False
) -> Iterator[LeftOut]:
    """Yield the columns that nothing reads, of what `Columns.to_json` returns. `path`: of the data.

    `is_rewarded`: the records are prompts, whose columns functions of the user's may read.
    """
    for name, of_column in facts.items():
        meaning: Meaning = of_column["meaning"]
        use = of_column["use"]
        if is_rewarded and meaning != "subject":
            yield _left_of_prompt(name, meaning, of_column["values"])
        elif meaning == "thought":
            advice = "Write them into the messages, as `reasoning_content` of the assistant's, if they are to be learned"
            if use:
                advice = (
                    f"`data.train.{in_yaml(use)}` reads them before the answer of a conversation, if the model's chat "
                    "template writes thoughts"
                )
            yield LeftOut(name, meaning, "thoughts", advice, True, use)
        elif meaning in ("class", "group"):
            is_decisive = meaning == "class" and bool(of_column["text"]) and not of_column["answer"]
            advice = _use_of_classes(name, of_column, path)
            yield LeftOut(name, meaning, f"{of_column['values']} values", advice, is_decisive)
        elif meaning == "number":
            advice = _use_of_numbers(name, of_column, path)
            is_weight = bool(of_column["answer"]) and names_weight(name)
            yield LeftOut(name, meaning, "numbers", advice, is_weight)
        else:
            is_decisive = meaning == "subject" or name in PROMPTS or name in ANSWERS
            what = "a text" if of_column["is_plain"] else "texts in lists or objects"
            advice = "Write it into the texts that are read, if they need it"
            if names_test(name):
                advice = "If it tests answers, a function of yours in `rewards` of `task: grpo` is given it: docs/grpo.md"
            elif names_answer(name):
                advice = "Write it into the answer, if it is to be learned"
            if name in (use.get("completion"), use.get("output")):
                advice = f"`data.train.{in_yaml(use)}` (`{in_words(use)}` of `kubetune init`) learns it as the answer"
                if of_column["answer"] not in ("", name):
                    advice += f", in place of `{of_column['answer']}`"
            elif use:
                advice = f"`data.train.{in_yaml(use)}` makes it part of the prompt"
                if not is_decisive:
                    advice += ", if the question is about it"
            if name in PROMPTS:
                differing = of_column["records"] - of_column["repeated"]
                what = f"a text that differs from the others in {counted(differing, 'record')}"
            yield LeftOut(name, meaning, what, advice, is_decisive)


def _left_of_prompt(name: str, meaning: Meaning, values: int) -> LeftOut:
    """Return what is said of a column beside a prompt whose answers are rewarded. `values`: how many it has."""
    advice = "A function of yours in `rewards` is given all columns: docs/grpo.md"
    what = "texts"
    if meaning in ("class", "group"):
        what = f"{values} values"
    elif meaning == "thought":
        what = "thoughts"
        advice += "; `task: causal_lm` learns thoughts before an answer"
    return LeftOut(name, meaning, what, advice)


def _use_of_numbers(name: str, of_column: Mapping[str, Any], path: str) -> str:
    """Return what would use numbers beside a text."""
    if of_column["answer"]:
        return "Every row counts the same; a whole source of `data.train` may have a `weight`"
    words = in_words({"text": of_column["text"], "label": name})
    return (
        f"`kubetune init {shell_word(path)} --task sequence_classification {words}` learns to "
        "predict them"
    )


def _use_of_classes(name: str, of_column: Mapping[str, Any], path: str) -> str:
    """Return what would use a column of few values: a verdict on the answer, a class of the text, or a part of the data."""
    if of_column["meaning"] == "class" and of_column["answer"] and of_column["are_verdicts"]:
        return (
            f"`data.train.{in_yaml({'label': name})}`, `task: preference` and `preference.loss: kto` learn by it which "
            "answers are good, if it says that"
        )
    if names_split(name):
        return "A file for each of its values can be given as `data.train` or `data.eval`"
    is_class = of_column["meaning"] == "class" or not of_column["answer"]
    if is_class and of_column["text"]:
        columns = {"text": of_column["text"]}
        if name != "label":
            columns["label"] = name
        words = f"--task sequence_classification {in_words(columns)}"
        return f"`kubetune init {shell_word(path)} {words}` makes a classifier"
    return "A file for each of its values, as sources of `data.train`, would have a `weight` and an `eval_loss` of its own"
