"""Variables of a script, as far as they are known without running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Word:
    """A word of a command, filled in as far as it is known; what is not known stays as `$NAME` or `$(…)`."""

    text: str
    why: str = ""  # why it may not be there at all


@dataclass(frozen=True)
class Choice:
    """A variable that is set to different values in branches, of which the script takes one."""

    texts: tuple[str, ...]
    why: str


# An array has words.
Value = str | tuple[Word, ...] | Choice


@dataclass(frozen=True)
class Command:
    """One command that the script calls."""

    line: int
    words: tuple[Word, ...]  # NAME=value before the command counts as a word
    exported: dict[str, str]  # variables of its environment
    condition: str  # what it depends on and is not known, such as `[ -d data ]`; empty where it is surely called


@dataclass
class Script:
    """What was learnt of a script."""

    commands: list[Command] = field(default_factory=list)
    unclear: dict[str, str] = field(default_factory=dict)  # why a variable's value is not certain
    unread: dict[int, str] = field(
        default_factory=dict
    )  # by line: what the script does and is not followed


@dataclass
class State:
    """The variables at one place of the script."""

    values: dict[str, Value] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)  # where each was set last
    exported: frozenset[str] = frozenset()
    ended_by: str = ""  # exit or return, behind which nothing is called

    def copy(self) -> State:
        """Return a state that a branch may change."""
        return State(dict(self.values), dict(self.lines), self.exported, self.ended_by)


def merged(before: State, ends: Sequence[State]) -> State:
    """Return what is known behind branches. One that ends the script says nothing of what follows."""
    alive = [state for state in ends if not state.ended_by]
    if not alive:
        return ends[0]
    merged = before.copy()
    merged.exported = frozenset().union(*(state.exported for state in alive))
    for name in dict.fromkeys(name for state in alive for name in state.values):
        values = [state.values.get(name) for state in alive]
        if all(value == values[0] for value in values) and values[0] is not None:
            merged.values[name] = values[0]
            continue
        lines = sorted({state.lines[name] for state in alive if name in state.lines})
        where = f"line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines))}"
        merged.values[name] = _choice(values, f"is set in branches ({where})")
        merged.lines[name] = max(lines, default=1)
    return merged


def _choice(values: Sequence[Value | None], why: str) -> Value:
    """Return the value of a variable that branches set differently.

    (--a 1), (--a 1 --b 2)   →   --a 1, and --b 2 which may not be there
    """
    if not any(isinstance(value, tuple) for value in values):
        texts: list[str] = []
        for value in values:
            texts += value.texts if isinstance(value, Choice) else [str(value or "")]
        return Choice(tuple(dict.fromkeys(texts)), why)
    lists = [value if isinstance(value, tuple) else () for value in values]
    same = 0
    while all(len(words) > same and words[same] == lists[0][same] for words in lists):
        same += 1
    rest = {}
    for words in lists:
        rest[words[same:]] = [Word(word.text, word.why or why) for word in words[same:]]
    return (*lists[0][:same], *(word for words in rest.values() for word in words))


def added(earlier: Value, value: Value) -> Value:
    """Return the value of NAME+=value."""
    if isinstance(value, tuple):
        first = (Word(earlier),) if isinstance(earlier, str) and earlier else ()
        return (*(earlier if isinstance(earlier, tuple) else first), *value)
    if isinstance(earlier, Choice):
        return Choice(tuple(f"{text}{value}" for text in earlier.texts), earlier.why)
    if isinstance(earlier, tuple):
        return earlier
    return f"{earlier}{value}"
