"""A run file in the making: what was taken from another tool's config, and a note on every key of it.

Peers' tables (axolotl.py and the like) map a key to a rule, a function that fills in the draft. Nothing is lost in
silence: a key that no rule takes is noted as dropped, by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, Literal, NoReturn, ParamSpec

from kubetune.base.humanize import nearest
from kubetune.base.secrets import is_secret
from kubetune.errors import ConfigError
from kubetune.plugins.importers.not_here import purpose_of
from kubetune.plugins.importers.writing import inline

_VARIABLE = re.compile(r"\$\{?[A-Za-z_]\w*\}?|\$\(")
_NOT_ONE = "kubetune has no such one"
WRONG_KINDS = (TypeError, ValueError, AttributeError, LookupError, OverflowError)
"""Errors of reading a value where it is of another kind than expected: a text for a number, a list for a name."""
Kind = Literal["carried", "assumed", "approximated", "dropped", "unneeded"]


@dataclass(frozen=True)
class Note:
    """Fate of one key: `text` is our setting where it was carried over, else why it was not."""

    kind: Kind
    key: str
    value: Any
    text: str
    line: int = 0


@dataclass
class Draft:
    """`given`: their settings; `path`, `lines`: their places. `settings`: ours, by path; `origins`: of which key."""

    peer: str
    given: Mapping[str, Any]
    lines: Mapping[str, int] = field(default_factory=dict)
    path: str = ""
    settings: dict[tuple[str, ...], Any] = field(default_factory=dict)
    comments: dict[tuple[str, ...], str] = field(default_factory=dict)
    origins: dict[tuple[str, ...], str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    at: str = ""
    """The key that was taken last."""
    command: str | None = None
    """The command of a script, such as `sft` or `pt`."""

    def take(self, key: str) -> Any:
        """The value of a key that the caller deals with; None where it is missing or empty."""
        self.seen.add(key)
        self.at = key
        value = self.given.get(key)
        return None if is_empty(value) else value

    def has(self, path: str) -> bool:
        """Our setting at a dotted path is filled in."""
        return _parts(path) in self.settings

    def carry(self, key: str, path: str, value: Any, text: str = "") -> None:
        """Our setting means what theirs does. `text` tells of it where the value alone does not."""
        if found := _VARIABLE.search(inline(value)):
            self.drop(
                key,
                f"{inline(value)} holds {found[0]}, which the file does not set; put its value there",
            )
            return
        self._put(path, value, key)
        self._note(
            "carried",
            key,
            text or (f"{path}: {inline(value)}" if value is not None else f"a `{path}` section"),
        )

    def approximate(self, key: str, path: str, value: Any, why: str) -> None:
        """Our setting comes near theirs; `why` says what differs."""
        self._put(path, value, key)
        self.comments[_parts(path)] = f"{key}: {inline(self.given.get(key))} there"
        shown = f"{path}: {inline(value)}" if value is not None else f"a `{path}` section"
        self._note("approximated", key, f"{shown}; {why}")

    def assume(self, path: str, value: Any, why: str = "") -> None:
        """The file leaves this out and their default is not ours, so theirs is written down."""
        if not self.has(path):
            self._put(path, value)
            self.notes.append(
                Note(
                    "assumed", path, {} if value is None else value, why or f"{self.peer}'s default"
                )
            )

    def drop(self, key: str, why: str) -> None:
        """Note that what the key does is not done here."""
        self._note("dropped", key, why)

    def drop_rest(
        self,
        place: str,
        section: Mapping[str, Any],
        known: Collection[str],
        why: Mapping[str, str] | None = None,
    ) -> None:
        """Note all other keys of a section, such as a source of data."""
        for name, value in section.items():
            if name not in known and value not in (None, "", {}):
                self.drop(f"{place}.{name}", (why or {}).get(name, "sources have no such setting"))

    def unneeded(self, key: str, why: str) -> None:
        """Nothing is lost without the key."""
        self._note("unneeded", key, why)

    def refuse(self, key: str, why: str) -> NoReturn:
        """No run could mean what the key says. Raises ConfigError at its line."""
        raise ConfigError(
            f"{self.path}:{self.lines.get(key, 1)}: {key}: {why}. Nothing was written."
        )

    def refuse_value(self, key: str) -> NoReturn:
        """Raise ConfigError at a key's line: its value is of another kind than its tool takes there."""
        self.refuse(
            key,
            f"found {inline(self.given.get(key))}, which is no value that {self.peer} takes there",
        )

    def withdraw(self, path: str, why: str) -> None:
        """Take a setting out again: the key that it came from is dropped after all."""
        parts = _parts(path)
        if parts in self.settings:
            del self.settings[parts]
            self.comments.pop(parts, None)
            if key := self.origins.pop(parts, None):
                self.drop(key, why)
            else:
                self.notes[:] = [
                    note for note in self.notes if (note.kind, note.key) != ("assumed", path)
                ]

    def _put(self, path: str, value: Any, key: str | None = None) -> None:
        self.settings[_parts(path)] = value
        if key is not None:
            self.origins[_parts(path)] = key

    def _note(self, kind: Kind, key: str, text: str) -> None:
        self.seen.add(key)
        value = self.given.get(key)
        if isinstance(value, str) and is_secret((key,), value, known=False):
            value, text = None, f"{text}; its value looks like a secret and is not repeated here"
        self.notes.append(Note(kind, key, value, text, self.lines.get(key, 0)))

    def apply(self, rules: Mapping[str, Rule]) -> None:
        """Every key that nobody took yet goes to its rule; one without a rule is dropped by name."""
        for key, value in self.given.items():
            if key in self.seen or is_empty(value):
                continue
            if rule := rules.get(key):
                try:
                    rule(self, key, value)
                except WRONG_KINDS:
                    self.refuse_value(key)
            elif key.isupper():
                self.unneeded(
                    key,
                    "an environment variable; set it where the run is started, or in kubernetes.env",
                )
            elif row := purpose_of(key):
                dropped(row.reason, *row.off)(self, key, value)
            else:
                close = nearest(key, rules, 0.8)
                hint = f"; did you mean {close}?" if close else ""
                self.drop(key, f"not known to `kubetune import`{hint}")


Rule = Callable[[Draft, str, Any], None]
P = ParamSpec("P")


def rule_with(function: Callable[Concatenate[Draft, str, Any, P], None]) -> Callable[P, Rule]:
    """From a rule with more parameters than draft, key and value, a function of these that makes the rule."""
    return lambda *args, **kwargs: (
        lambda draft, key, value: function(draft, key, value, *args, **kwargs)
    )


def is_empty(value: Any) -> bool:
    """`key:` with nothing behind it."""
    return value is None or value in ("", [], {})


def as_flag(value: Any) -> Any:
    """YAML 1.1, which peers read, has more words for true and false."""
    if isinstance(value, str) and value.lower() in ("yes", "on", "true"):
        return True
    return False if isinstance(value, str) and value.lower() in ("no", "off", "false") else value


def as_list(value: Any) -> list[Any]:
    """A list; texts are split at commas, as on peers' command lines."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return list(value) if isinstance(value, (list, tuple)) else [value]


@rule_with
def same(draft: Draft, key: str, value: Any, path: str) -> None:
    """Means the same under our name."""
    draft.carry(key, path, as_flag(value))


@rule_with
def choice(
    draft: Draft,
    key: str,
    value: Any,
    path: str,
    values: Mapping[Any, Any],
    otherwise: Any = None,
    why: str = _NOT_ONE,
) -> None:
    """One of a few values. Another one is approximated by `otherwise`, or dropped."""
    value = as_flag(value)
    found = next(
        (
            ours
            for theirs, ours in values.items()
            if theirs == value and type(theirs) is type(value)
        ),
        None,
    )
    if found is not None:
        draft.carry(key, path, found)
    elif otherwise is not None:
        draft.approximate(key, path, otherwise, why)
    else:
        draft.drop(key, why)


@rule_with
def flag(draft: Draft, key: str, value: Any, path: str, on: Any) -> None:
    """A switch that sets something when on, and says nothing when off."""
    if as_flag(value):
        draft.carry(key, path, on)
    else:
        draft.unneeded(key, "off, as here")


@rule_with
def always(draft: Draft, key: str, value: Any, why: str, otherwise: str | None = None) -> None:
    """Rule for what is always done here: nothing is lost by asking for it, and it cannot be switched off."""
    if as_flag(value) is False:
        draft.drop(key, otherwise or why)
    else:
        draft.unneeded(key, why)


@rule_with
def only(
    draft: Draft, key: str, value: Any, values: Collection[Any], why: str, otherwise: str
) -> None:
    """Nothing is lost without the key where it has one of these values; any other is not done here."""
    if value in values:
        draft.unneeded(key, why)
    else:
        draft.drop(key, otherwise)


def unneeded(why: str) -> Rule:
    """Nothing is lost without it."""
    return lambda draft, key, _: draft.unneeded(key, why)


@rule_with
def dropped(draft: Draft, key: str, value: Any, why: str, *off: Any) -> None:
    """Drop what is not done here. `off`: the values with which the tool does not do it either."""
    if as_flag(value) in off:
        draft.unneeded(key, "off, as here")
    else:
        draft.drop(key, why)


def each(keys: str | Iterable[str], rule: Rule) -> dict[str, Rule]:
    """The same rule for several keys."""
    return dict.fromkeys(keys.split() if isinstance(keys, str) else keys, rule)


def _parts(path: str) -> tuple[str, ...]:
    return tuple(path.split("."))
