"""The engine of `kubetune import`: rows of a table, and what they make of another tool's settings.

A key is a name in the tool's file, and its value is what stands behind it. Each key ends in exactly one note:

    carried       our setting means the same
    approximated  our setting comes near; the note says what differs
    dropped       not done here; the note says why, or what to do
    unneeded      nothing is lost without it

A fifth kind, assumed, is no key of the file: the tool's default, written down where ours is another one.

`convert` takes three steps. First, the functions in `Tool.together` read the keys that act on each other, such as
`warmup_steps` and `warmup_ratio`, and write down what the tool makes of them together. Then every key that none of them
took goes to its row of the tool's table; where two fill in one setting with different values, the first key counts, and
the other is dropped by name. At last `Tool.finish` and the tool's defaults fill in what the file leaves out. A value
that no run can have is refused: ConfigError, at the line of its key.

Some rows, and what becomes of a value of theirs:

    Row("cutoff_len", "data.max_length")                      2048: carried, data.max_length: 2048
    Row("strategy", "data.overlong", values={"right": "cut"}, near="cut", reason="the end is cut")
                                                              left: approximated, data.overlong: cut; the end is cut
    switch("fp16", "model.dtype", "float16")                  false: unneeded, "off, as here"
    drop("neftune_noise_alpha", "noise is not there", 0)      5: dropped, "noise is not there"; 0: unneeded
    ignore("tf32", "it is on where the GPU has it")           unneeded, whatever its value
    Row("optim", "training.optim", optimizer)                 what the function `optimizer` returns for it
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from kubetune.base.humanize import nearest
from kubetune.base.secrets import is_secret
from kubetune.config.aliases import ALIASES
from kubetune.errors import ConfigError
from kubetune.plugins.importers.not_here import TABLE as NOT_HERE
from kubetune.plugins.importers.writing import inline

Kind = Literal["carried", "assumed", "approximated", "dropped", "unneeded"]
Rule = Callable[[Any, "Draft"], "Outcome"]
Step = Callable[["Draft"], None]

# Errors of reading a value where it is of another kind than expected: a text for a number, a list for a name.
WRONG_KINDS = (TypeError, ValueError, AttributeError, LookupError, OverflowError)
OFF = "off, as here"
# $NAME, ${NAME} or $(command): only a shell knows the value.
_VARIABLE = re.compile(r"\$\{?[A-Za-z_]\w*\}?|\$\(")


@dataclass(frozen=True)
class Note:
    """What became of one key."""

    kind: Kind
    key: str
    value: Any  # theirs
    text: str  # our setting where it was carried over, else the reason
    line: int = 0  # of the key


@dataclass(frozen=True)
class Outcome:
    """What becomes of one value: made by `carried`, `near`, `dropped` and `unneeded`."""

    kind: Kind
    text: str = ""  # the reason, or what to say in place of the setting
    value: Any = None  # ours
    path: str = ""  # of our setting, where it is not the row's


def carried(value: Any, text: str = "", path: str = "") -> Outcome:
    """Return that our setting means the same. `text` describes it where path and value do not."""
    return Outcome("carried", text, value, path)


def near(value: Any, why: str, path: str = "") -> Outcome:
    """Return that our setting comes near; `why` says what differs."""
    return Outcome("approximated", why, value, path)


def dropped(why: str) -> Outcome:
    """Return that what the key does is not done here."""
    return Outcome("dropped", why)


def unneeded(why: str) -> Outcome:
    """Return that nothing is lost without the key."""
    return Outcome("unneeded", why)


@dataclass(frozen=True)
class Row:
    """One row of a tool's table: what becomes of each of some keys.

    The first of these that applies decides: `unless`, `rule`, `same`, `values`, `near`, `path` alone, `reason`.
    """

    keys: str  # names, with spaces between
    path: str = ""  # our setting, with dots; empty where we have none
    rule: Rule | None = None  # a function of value and draft, where data do not say enough
    values: Mapping[Any, Any] | None = None  # ours for each of theirs
    near: Any = None  # ours for a value that is not among `values`
    same: Mapping[Any, str] | None = None  # values for which nothing needs to be set, and why
    reason: str = "kubetune has no such value"  # why any other value is dropped, or only near
    # returns why the key says nothing beside other keys; "" where it does
    unless: Callable[[Draft], str] | None = None

    def outcome(self, value: Any, draft: Draft) -> Outcome:
        """Return what becomes of a value."""
        if self.unless is not None:
            why_idle = self.unless(draft)
            if why_idle:
                return unneeded(why_idle)
        if self.rule is not None:
            return self.rule(value, draft)

        # A value for which nothing needs to be set.
        for theirs, why in (self.same or {}).items():
            if value == theirs:
                return unneeded(why)

        # Without a list of values, any value goes over as it is, if we have such a setting.
        if self.values is None and self.path:
            return carried(value)
        if self.values is None:
            return dropped(self.reason)

        for theirs, ours in self.values.items():
            # 1 == True in Python, but a table means the type that it writes.
            if value == theirs and type(value) is type(theirs):
                return carried(ours)
        if self.near is None:
            return dropped(self.reason)
        return near(self.near, self.reason)


def drop(keys: str, reason: str, *off: Any) -> Row:
    """Return a row of what is not done here. `off`: values with which the tool does not do it either."""
    return Row(keys, same=dict.fromkeys(off, OFF), reason=reason)


def ignore(keys: str, reason: str) -> Row:
    """Return a row of what is not needed, whatever its value."""
    return Row(keys, rule=lambda *_: unneeded(reason))


def switch(keys: str, path: str, on: Any = True) -> Row:
    """Return a row of what sets `on` when it is on, and says nothing when it is off."""
    return Row(keys, path, lambda value, _: carried(on) if value else unneeded(OFF))


def names(keys: str, path: str) -> Row:
    """Return a row of lists of names."""
    return Row(keys, path, lambda value, _: carried(as_list(value)))


def aliased(keys: str) -> list[Row]:
    """Return rows of names that a run file takes too (config/aliases.py)."""
    return [Row(key, ALIASES[key].path) for key in keys.split()]


@dataclass(frozen=True)
class Tool:
    """Everything that the engine knows of a tool."""

    name: str
    marks: str  # keys that no other tool has, or that are typical; a file is recognised by them
    rows: Iterable[Row]  # a key's last row counts
    together: tuple[Step, ...] = ()  # read keys that act on each other, before the rows
    finish: Step | None = None  # adds what follows from the settings, after the rows
    defaults: Mapping[str, Any] = field(default_factory=dict)  # by path, where ours are others
    lora_defaults: Mapping[str, Any] = field(default_factory=dict)  # the same, for runs with LoRA
    command: str = ""  # pattern of its command in a script, whose group is the subcommand
    has_sections: bool = False  # keys of nested sections are joined by dots


@dataclass
class Draft:
    """A run file in the making. `theirs` is what the tool's file says, `settings` what ours will say."""

    tool: Tool
    theirs: Mapping[str, Any]
    lines: Mapping[str, int] = field(default_factory=dict)
    path: str = ""  # of their file
    command: str | None = None  # of a script, such as `sft` or `pt`
    place: str = ""  # of a section, such as `datasets[0].`, before each of its keys
    settings: dict[str, Any] = field(default_factory=dict)  # by path, with dots
    comments: dict[str, str] = field(default_factory=dict)  # beside a setting
    origins: dict[str, str] = field(default_factory=dict)  # key that a setting is from
    earlier_origins: dict[str, list[str]] = field(default_factory=dict)  # keys that wrote it before
    notes: list[Note] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)  # keys that need no row any more
    at: str = ""  # the key that was taken last

    def take(self, key: str) -> Any:
        """Return the value of a key that the caller deals with, or None where it is missing or empty."""
        self.taken.add(key)
        self.at = key
        return self.get(key)

    def get(self, key: str) -> Any:
        """Return the value of a key that another rule deals with, or None where it is missing or empty."""
        value = self.theirs.get(key)
        if is_empty(value):
            return None
        return as_flag(value)

    def has(self, path: str) -> bool:
        """Return True if our setting is filled in."""
        return path in self.settings

    def ours(self, path: str, default: Any = None) -> Any:
        """Return our setting."""
        return self.settings.get(path, default)

    def write(self, key: str, outcome: Outcome, path: str = "") -> None:
        """Fill in our setting and the note of a key."""
        path = outcome.path or path
        written = inline(outcome.value)
        variable = _VARIABLE.search(written)
        if outcome.kind in ("dropped", "unneeded"):
            self.note(outcome.kind, key, outcome.text)
            return

        # A source is written as a whole, so a variable within it is seen at its place.
        if variable and outcome.kind == "carried" and not self.place:
            why = f"{written} holds {variable[0]}, which the file does not set; put its value there"
            self.note("dropped", key, why)
            return

        # Two keys that agree; should the setting be taken out again, both are dropped.
        if self.origins.get(path, key) != key:
            self.earlier_origins.setdefault(path, []).append(self.origins[path])
        self.settings[path] = outcome.value
        self.origins[path] = key

        # The note shows the setting; a comment beside it says what the file had, where that differs.
        text = f"{path}: {written}"
        if outcome.value is None:
            text = f"a `{path}` section"
        if outcome.kind == "approximated":
            self.comments[path] = f"{key}: {inline(self.theirs.get(key))} there"
            text += f"; {outcome.text}"
        elif outcome.text:
            text = outcome.text
        self.note(outcome.kind, key, text)

    def carry(self, key: str, path: str, value: Any, text: str = "") -> None:
        """Write down that our setting means the same."""
        self.write(key, carried(value, text), path)

    def drop(self, key: str, why: str) -> None:
        """Write down that what a key does is not done here."""
        self.note("dropped", key, why)

    def ignore(self, key: str, why: str) -> None:
        """Write down that nothing is lost without a key, where the file has it."""
        if not is_empty(self.theirs.get(key)):
            self.note("unneeded", key, why)

    def assume(self, path: str, value: Any, why: str = "") -> None:
        """Write down a default of the tool, unless the setting is filled in."""
        if self.has(path):
            return
        self.settings[path] = value
        # None is a section without a setting, such as `lora`.
        shown = value
        if value is None:
            shown = {}
        reason = why or f"{self.tool.name}'s default"
        self.notes.append(Note("assumed", path, shown, reason))

    def refuse(self, key: str, why: str) -> NoReturn:
        """Raise ConfigError at a key's line: no run could mean what it says."""
        line = self.lines.get(key, 1)
        raise ConfigError(f"{self.path}:{line}: {key}: {why}. Nothing was written.")

    def refuse_value(self, key: str) -> NoReturn:
        """Raise ConfigError at a key's line: its value is of another kind than its tool takes."""
        value = inline(self.theirs.get(key))
        self.refuse(key, f"found {value}, which is no value that {self.tool.name} takes there")

    def withdraw(self, path: str, why: str) -> None:
        """Take a setting out again: the keys that it came from are dropped after all."""
        if path not in self.settings:
            return
        del self.settings[path]
        self.comments.pop(path, None)
        for earlier in self.earlier_origins.pop(path, []):
            self.drop(earlier, why)

        # A default of the tool came from no key: its note goes with it.
        key = self.origins.pop(path, None)
        if key is not None:
            self.drop(key, why)
        else:
            assumed = ("assumed", path)
            self.notes[:] = [note for note in self.notes if (note.kind, note.key) != assumed]

    def section(self, place: str, item: Mapping[str, Any]) -> Draft:
        """Return a draft of one section of the file, such as a source of data, with notes of its own."""
        return Draft(self.tool, item, place=f"{place}.")

    def apply(self, rows: Iterable[Row], unknown: str = "") -> None:
        """Send every key that nobody took to its row. `unknown`: why one without a row is dropped."""
        table: dict[str, Row] = {}
        for row in rows:
            table.update(dict.fromkeys(row.keys.split(), row))
        for key in self.theirs:
            # An empty list in a source is a choice, as in `roles_to_train: []`.
            is_silent = is_empty(self.theirs[key]) and not (self.place and self.theirs[key] == [])
            if key in self.taken or is_silent:
                continue

            row = table.get(key) or _row_without_table(key, unknown, table)
            value = self.take(key)
            try:
                outcome = row.outcome(value, self)
            except WRONG_KINDS:
                self.refuse_value(key)

            # The tool would take one of the two, and nobody can tell which was meant.
            earlier = self._set_otherwise(key, outcome, row.path)
            if earlier:
                path = outcome.path or row.path
                why = f"an earlier key, {earlier}, sets the same setting otherwise: {path}: {inline(self.ours(path))}"
                outcome = dropped(why)
            self.write(key, outcome, row.path)

    def _set_otherwise(self, key: str, outcome: Outcome, path: str) -> str:
        """Return the key that filled in our setting with another value before this one; empty where none has.

        Example: `max_length: 512` stands before `max_seq_length: 1024`, and both are our data.max_length.
        """
        path = outcome.path or path
        earlier = self.origins.get(path, key)
        is_written = outcome.kind in ("carried", "approximated") and path in self.settings
        if not is_written or earlier == key or _are_equal(self.settings[path], outcome.value):
            return ""
        return earlier

    def note(self, kind: Kind, key: str, text: str) -> None:
        """Write down what became of a key; a value that looks like a secret is not repeated."""
        self.taken.add(key)
        value = self.theirs.get(key)
        # Notes end up in the run file, which people commit.
        if isinstance(value, str) and is_secret((key,), value, known=False):
            value = None
            text = f"{text}; its value looks like a secret and is not repeated here"
        self.notes.append(Note(kind, self.place + key, value, text, self.lines.get(key, 0)))


def convert(draft: Draft, more: Iterable[Row] = ()) -> None:
    """Fill in a draft from its tool's table, and from rows that count before it."""
    tool = draft.tool
    # What one key means may depend on others, so these are read first.
    for step in tool.together:
        step(draft)
    draft.apply([*tool.rows, *more])
    if tool.finish is not None:
        tool.finish(draft)

    # The run must do what the tool would have done, so its defaults are written down where ours differ.
    for path, value in tool.defaults.items():
        draft.assume(path, value)
    if draft.has("lora"):
        for path, value in tool.lora_defaults.items():
            draft.assume(path, value)


def _are_equal(value: Any, other: Any) -> bool:
    """Return True for equal values, also where one is a text: YAML 1.1 reads `1e-4` so."""
    if isinstance(value, str) != isinstance(other, str):
        try:
            return float(value) == float(other)
        except (TypeError, ValueError):
            return False
    return bool(value == other)


def _row_without_table(key: str, unknown: str, table: Mapping[str, Row]) -> Row:
    """Return what becomes of a key that its tool's table does not have."""
    if unknown:
        return drop(key, unknown)
    # WANDB_DIR and its like.
    if key.isupper():
        why = "an environment variable; set it where the run is started, or in kubernetes.env"
        return ignore(key, why)
    for row in NOT_HERE:
        if row.holds(key):
            return drop(key, row.reason, *row.off)
    hint = ""
    close = nearest(key, table, 0.8)
    if close:
        hint = f"; did you mean {close}?"
    return drop(key, f"not known to `kubetune import`{hint}")


def is_empty(value: Any) -> bool:
    """Return True for `key:` with nothing behind it."""
    return value is None or value in ("", [], {})


def as_flag(value: Any) -> Any:
    """Return True or False for the words that YAML 1.1, which the tools read, has for them."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("yes", "on", "true"):
        return True
    if value.lower() in ("no", "off", "false"):
        return False
    return value


def as_list(value: Any) -> list[Any]:
    """Return a list; texts are split at commas, as on the tools' command lines."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, (list, tuple)):
        return list(value)
    return [value]
