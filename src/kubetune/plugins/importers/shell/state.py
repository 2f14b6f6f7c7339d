"""Variables of a script, as far as they are known without running it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kubetune.plugins.importers.shell.script_folder import UNKNOWN

_NUMBER = re.compile(r"-?[\d.]+(e-?\d+)?")


@dataclass(frozen=True)
class Word:
    """A text of a script, filled in as far as it is known; what is not known stays as `$NAME` or `$(…)`."""

    text: str
    why: str = ""  # why it may be another one, or not be there at all


# A variable has one text, an array has several.
Value = Word | tuple[Word, ...]


@dataclass(frozen=True)
class Command:
    """One command that the script calls."""

    line: int
    words: tuple[Word, ...]  # NAME=value before the command counts as a word
    exported: dict[str, str]  # variables of its environment
    condition: str  # what it depends on and is not known, such as `[ -d data ]`; empty where it is surely called
    folder: str = ""  # in which it is called, from where the script began; has a $ if nobody knows


@dataclass
class Script:
    """What was learnt of a script."""

    commands: list[Command] = field(default_factory=list)
    unclear: dict[str, str] = field(default_factory=dict)  # why a variable's value is not certain
    # A file that a redirection writes, and in which line.
    written: dict[str, int] = field(default_factory=dict)
    # By line: what the script does and is not followed.
    unread: dict[int, str] = field(default_factory=dict)
    # Functions and aliases, with their lines.
    functions: dict[str, int] = field(default_factory=dict)


@dataclass
class ShellState:
    """The variables at one place of the script."""

    values: dict[str, Value] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)  # where each was set last
    exported: frozenset[str] = frozenset()
    has_ended: bool = False  # after an exit nothing is called
    folder: str = ""  # see `files`

    def copy(self) -> ShellState:
        """Return a state that a branch may change."""
        return replace(self, values=dict(self.values), lines=dict(self.lines))


def merged(before: ShellState, ends: Sequence[ShellState]) -> ShellState:
    """Return what is known after branches. One that ends the script says nothing of what follows.

    if [ -d data ]; then        ends:    A is 1, B is 1
      A=1 B=1                            A is 1, B is 2
    elif [ -d old ]; then                A is 9, but the script has ended
      A=1 B=2                   merged:  A is 1
    else                                 B is 1 or 2: Alternatives
      A=9; exit
    fi
    """
    alive = [state for state in ends if not state.has_ended]
    if not alive:
        return ends[0]
    result = before.copy()
    folders = {state.folder for state in alive}
    result.folder = UNKNOWN if len(folders) > 1 else folders.pop()
    names: dict[str, None] = {}
    for state in alive:
        result.exported |= state.exported
        names.update(dict.fromkeys(state.values))
    for name in names:
        _merge(name, alive, result)
    return result


def _merge(name: str, ends: Sequence[ShellState], result: ShellState) -> None:
    """Put what branches leave of one variable into the result."""
    values = [state.values.get(name) for state in ends]
    first = values[0]
    if first is not None and values.count(first) == len(values):
        result.values[name] = first
        return
    lines = sorted({state.lines[name] for state in ends if name in state.lines})
    listed = ", ".join(str(line) for line in lines)
    unit = "line"
    if len(lines) > 1:
        unit = "lines"
    result.values[name] = _choice(values, f"is set in branches ({unit} {listed})")
    result.lines[name] = max(lines, default=1)


def _choice(values: Sequence[Value | None], why: str) -> Value:
    """Return the value of a variable that branches set differently."""
    lists = [value for value in values if isinstance(value, tuple)]
    if lists:
        if len(lists) < len(values):
            lists.append(())
        return _words_of_any(lists, why)
    # All that it may hold, options first.
    texts = dict.fromkeys(value.text for value in values if isinstance(value, Word))
    return Word(" ".join(sorted(texts, key=holds_options, reverse=True)), why)


def holds_options(text: str) -> bool:
    """Return True if a text stands for options, such as `--bf16 true`, rather than for one value."""
    # -1 and -1e-4 are values.
    first = text.strip().partition(" ")[0]
    return first.startswith("-") and not _NUMBER.fullmatch(first)


def _words_of_any(lists: Sequence[tuple[Word, ...]], why: str) -> tuple[Word, ...]:
    """Return the words that all lists begin with, and then all others, which may not be there.

    (--a 1), (--a 1 --b 2)   →   --a 1, and --b 2 which may not be there
    """
    same = 0
    for words in zip(*lists, strict=False):
        if words.count(words[0]) < len(words):
            break
        same += 1
    result = list(lists[0][:same])
    for rest in dict.fromkeys(words[same:] for words in lists):
        result += [doubted_word(word, why) for word in rest]
    return tuple(result)


def doubted(value: Value, why: str) -> Value:
    """Return a value that may be another one."""
    if isinstance(value, tuple):
        return tuple(doubted_word(word, why) for word in value)
    return doubted_word(value, why)


def doubted_word(word: Word, why: str) -> Word:
    """Return a word that may be another one, or not be there."""
    return Word(word.text, word.why or why)


def first_of(value: Value | None) -> Word | None:
    """Return what $NAME stands for: of an array the first word, and of one that is not set, nothing."""
    if isinstance(value, tuple):
        return value[0] if value else None
    return value


def added(earlier: Value, value: Value) -> Value:
    """Return the value of NAME+=value. A text is added to the first word of an array."""
    if isinstance(value, tuple):
        if isinstance(earlier, Word):
            earlier = (earlier,) if earlier.text else ()
        return earlier + value
    first = first_of(earlier) or Word("")
    joined = Word(first.text + value.text, first.why or value.why)
    return joined if isinstance(earlier, Word) else (joined, *earlier[1:])
