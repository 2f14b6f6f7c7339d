"""The engine of `kubetune import`: tables of another tool's keys, and what they make of its settings.

A key is a name in the tool's file, and its value is what follows it. Each key ends in exactly one note:

    carried       our setting means the same
    approximated  our setting comes near; the note says what differs
    dropped       not done here; the note says why, or what to do
    unneeded      nothing is lost without it

A fifth kind, assumed, is no key of the file: the tool's default, written down where ours is another one.

`convert` takes three steps. First, `Tool.sources` reads the keys of data, whose meaning no row can say. Then each other
key goes to its row of the tool's tables: those in `Tool.first` before the others, which may ask what they set. Where two
keys fill in one setting with different values, the first counts, and the other is dropped by name. `Tool.finish` adds
what follows from the settings. At last `fill_in_defaults` writes down the tool's defaults of what the file leaves out,
and `rules` takes out what does not go together.

A table has four parts, and this is what becomes of a value of theirs:

    same={"data.max_length": "cutoff_len"}                  2048: carried, data.max_length: 2048
    rows=[Row("strategy", "data.overlong", {"right": "cut"}, near("cut", "the end is cut"))]
                                                            left: approximated, data.overlong: cut; the end is cut
    rows=[switch("fp16", "model.dtype", "float16")]         false: unneeded, "off, as here"
    rows=[Row("optim", "training.optim", other=optimizer)]  what the function `optimizer` returns for it
    dropped={"neftune_noise_alpha": ("no noise here", 0)}   5: dropped, "no noise here"; 0: unneeded
    unneeded={"tf32": "it is on where the GPU has it"}      unneeded, whatever its value
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, NoReturn

from kubetune.base.humanize import nearest
from kubetune.base.secrets import is_secret
from kubetune.errors import ConfigError
from kubetune.plugins.importers import not_here
from kubetune.plugins.importers.readings import as_flag, as_list, is_empty
from kubetune.plugins.importers.writing import inline

Kind = Literal["carried", "assumed", "approximated", "dropped", "unneeded"]
Rule = Callable[[Any, "Draft"], "Outcome"]
Step = Callable[["Draft"], None]

# Errors of reading a value where it is of another kind than expected: a text for a number, a list for a name.
WRONG_KINDS = (TypeError, ValueError, AttributeError, LookupError, OverflowError)


@dataclass(frozen=True)
class Note:
    """What became of one key."""

    kind: Kind
    key: str
    value: Any  # theirs
    text: str  # our setting where it was carried over, else the reason


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


OFF = unneeded("off, as here")


@dataclass(frozen=True)
class Row:
    """What becomes of the values of some keys, where they do not simply go over as they are."""

    keys: str  # names, with spaces between
    path: str = ""  # our setting, with dots; empty where we have none
    # Ours for each of theirs, or an Outcome.
    values: Mapping[Any, Any] = field(default_factory=dict)
    # What becomes of any other value. Left out: it goes over as it is.
    other: Outcome | Rule | None = None
    beside: str = ""  # the keys have no effect without this one
    unless: str = ""  # the keys have no effect if this one is set

    def outcome(self, value: Any, draft: Draft) -> Outcome:
        """Return what becomes of a value."""
        if self.beside and not draft.get(self.beside):
            return unneeded(f"has no effect without {self.beside}")
        if self.unless and draft.get(self.unless):
            return unneeded(f"has no effect, since {self.unless} counts")
        for theirs, ours in self.values.items():
            # 1 == True in Python, but a table means the type that it writes; 0 and False are both off.
            same_type = isinstance(value, bool) == isinstance(theirs, bool)
            if value == theirs and (same_type or not value):
                return ours if isinstance(ours, Outcome) else carried(ours)
        if callable(self.other):
            return self.other(value, draft)
        return self.other or carried(value)


def switch(keys: str, path: str, on: Any = True) -> Row:
    """Return a row of a key that sets `on` when it is on, and has no effect when it is off."""
    return Row(keys, path, other=lambda value, _: carried(on) if value else OFF)


@dataclass(frozen=True)
class Table:
    """What becomes of keys, each looked up by its name."""

    same: Mapping[str, str] = field(default_factory=dict)  # by our path: names that mean the same
    rows: Iterable[Row] = ()
    # By names: the reason, or a tuple of it and the values with which the tool does as kubetune does.
    dropped: Mapping[str, Any] = field(default_factory=dict)
    unneeded: Mapping[str, str] = field(default_factory=dict)  # by names: the reason
    section: str = ""  # stands before each of the names, as `trainer.`

    def by_key(self) -> dict[str, Row]:
        """Return the row of each key. Of two rows for one key, the last one counts."""
        rows = [Row(keys, path) for path, keys in self.same.items()]
        rows += self.rows
        rows += [_row_of_dropped(keys, reason) for keys, reason in self.dropped.items()]
        rows += [Row(keys, other=unneeded(reason)) for keys, reason in self.unneeded.items()]
        return {self.section + key: row for row in rows for key in row.keys.split()}


def _row_of_dropped(keys: str, reason: str | tuple[Any, ...]) -> Row:
    """Return the row of keys for what is not done here."""
    if isinstance(reason, str):
        return Row(keys, other=dropped(reason))
    why, *as_here = reason
    outcomes = dict.fromkeys(as_here, unneeded("as here, in any case"))
    outcomes |= {value: OFF for value in as_here if value in (0, None, "none")}
    return Row(keys, values=outcomes, other=dropped(why))


@dataclass(frozen=True)
class Reward:
    """A reward function of ours that a tool knows by a name."""

    name: str  # ours
    # Ours: the key that sets it, and its default, which is the longest answer if it is None.
    settings: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    column: str = ""  # of the right answers
    differs: str = ""  # what ours does otherwise


class ToolCommand(NamedTuple):
    """The command of a tool, as scripts call it."""

    pattern: str  # its group is the subcommand
    example: str  # for messages
    assigns: bool = False  # takes key=value
    names_no_kind: bool = False  # its subcommand is not the kind of learning


@dataclass(frozen=True)
class Tool:
    """Everything that the engine knows of a tool."""

    name: str
    marks: str  # keys that no other tool has, or that are typical; a file is recognised by them
    tables: tuple[Table, ...]  # a key's last row counts
    first: str = ""  # keys whose rows come before the others, in this order
    sources: Step | None = None  # reads the data, before the tables
    finish: Step | None = None  # adds what follows from the settings, after the tables
    defaults: Mapping[str, Any] = field(default_factory=dict)  # by path, where ours are others
    # The same for some runs, by what they do: `lora`, a kind of learning such as `grpo`, a loss such as `simpo`.
    defaults_of: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    kind_of_a_key: Mapping[str, str] = field(default_factory=dict)  # by names, if no key names it
    rewards: Mapping[str, Reward] = field(default_factory=dict)  # by the tool's names
    command: ToolCommand | None = None  # its command in a script
    has_sections: bool = False  # keys of nested sections are joined by dots
    merged: str = ""  # a section whose keys are as well at the top

    def by_key(self, more: Iterable[Table] = ()) -> dict[str, Row]:
        """Return the row of each key. `more`: tables that count before the tool's own."""
        table: dict[str, Row] = {}
        for part in (*self.tables, *more):
            table.update(part.by_key())
        return table


@dataclass
class Draft:
    """A run file in the making. `theirs` is what the tool's file says, `settings` what ours will say."""

    tool: Tool
    theirs: Mapping[str, Any]
    lines: Mapping[str, int] = field(default_factory=dict)
    path: str = ""  # of their file
    command: str | None = None  # of a script, such as `sft` or `pt`
    # Keys whose value only a shell knows: why.
    unknown: Mapping[str, str] = field(default_factory=dict)
    kind: str = ""  # of learning, such as `dpo`; empty for supervised fine-tuning
    kind_key: str = ""  # the key that names it
    place: str = ""  # of a section, such as `datasets[0].`, before each of its keys
    settings: dict[str, Any] = field(default_factory=dict)  # by path, with dots
    comments: dict[str, str] = field(default_factory=dict)  # beside a setting
    origins: dict[str, list[str]] = field(default_factory=dict)  # keys that a setting is from
    notes: list[Note] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)  # keys that need no row any more
    at: str = ""  # the key that was taken last
    # Our paths that wait for the value of such a key.
    undecided: dict[str, str] = field(default_factory=dict)
    # Keys of `unknown` that the present row asked for.
    missed: list[str] = field(default_factory=list)

    def take(self, key: str) -> Any:
        """Return the value of a key that the caller deals with, or None where it is missing or empty."""
        self.taken.add(key)
        self.at = key
        return self.get(key)

    def get(self, key: str) -> Any:
        """Return the value of a key that another rule deals with, or None where it is missing, empty or not known."""
        if key in self.unknown:
            self.missed.append(key)
            return None
        value = self.theirs.get(key)
        return None if is_empty(value) else as_flag(value)

    def has(self, path: str) -> bool:
        """True if our setting is filled in."""
        return path in self.settings

    def ours(self, path: str, default: Any = None) -> Any:
        """Return our setting."""
        return self.settings.get(path, default)

    def origin(self, path: str) -> str | None:
        """Return the key that filled in our setting; None for a default, or where it is not filled in."""
        return self.origins[path][-1] if path in self.origins else None

    def write(self, key: str, outcome: Outcome, path: str = "") -> None:
        """Fill in our setting and the note of a key."""
        path = outcome.path or path
        if outcome.kind in ("dropped", "unneeded"):
            self.note(outcome.kind, key, outcome.text)
            return
        if key in self.unknown:
            self.leave_open(key, path, self.unknown[key])
            return
        written = inline(outcome.value)
        # Two keys for one setting: the tool would take one, and nobody can tell which was meant.
        earlier = self.origin(path)
        if earlier not in (None, key) and inline(self.ours(path)) != written:
            shown = f"{path}: {inline(self.ours(path))}"
            self.drop(key, f"an earlier key, {earlier}, sets the same setting otherwise: {shown}")
            return

        self.settings[path] = outcome.value
        self.origins.setdefault(path, []).append(key)
        # The note shows the setting; a comment beside it says what the file had, where that differs.
        text = f"{path}: {written}"
        if outcome.value is None:
            text = f"a `{path}` section"
        if outcome.kind == "approximated":
            self.comments[path] = f"{key}: {inline(self.theirs.get(key))} in the file"
            text += f"; {outcome.text}"
        elif outcome.text:
            text = outcome.text
        self.note(outcome.kind, key, text + _remark(path, outcome.value))

    def carry(self, key: str, path: str, value: Any, text: str = "") -> None:
        """Write down that our setting means the same."""
        self.write(key, carried(value, text), path)

    def drop(self, key: str, why: str) -> None:
        """Write down that what a key does is not done here."""
        self.note("dropped", key, why)

    def assume(self, path: str, value: Any, why: str = "") -> None:
        """Write down a default of the tool, unless the file fills in the setting, be it with a value not known."""
        if self.has(path) or path in self.undecided:
            return
        self.settings[path] = value
        # None is a section without a setting, such as `lora`.
        shown = {} if value is None else value
        text = (why or f"{self.tool.name}'s default") + _remark(path, value)
        self.notes.append(Note("assumed", path, shown, text))

    def assume_defaults(self, name: str) -> None:
        """Write down the tool's defaults of what some runs do, such as `lora`."""
        for path, value in self.tool.defaults_of.get(name, {}).items():
            self.assume(path, value)

    def refuse(self, key: str, why: str) -> NoReturn:
        """Raise ConfigError at a key's line: no run could mean what it says."""
        place = f"{self.path}:{self.line_of(key)}: {self.place}{key}"
        raise ConfigError(f"{place}: {why}. Nothing was written.")

    def refuse_value(self, key: str) -> NoReturn:
        """Raise ConfigError at a key's line: its value is of another kind than its tool takes."""
        value = inline(self.theirs.get(key))
        self.refuse(key, f"found {value}, which is no value that {self.tool.name} takes")

    def withdraw(self, path: str, why: str, kind: Kind = "dropped") -> None:
        """Take a setting out again, and say why of the keys that it came from."""
        if path not in self.settings:
            return
        del self.settings[path]
        self.comments.pop(path, None)
        # A default of the tool came from no key: its note goes with it.
        self.notes[:] = [note for note in self.notes if (note.kind, note.key) != ("assumed", path)]
        for key in self.origins.pop(path, []):
            self.note(kind, key, why)

    def section(self, place: str, item: Mapping[str, Any]) -> Draft:
        """Return a draft of one section of the file, such as a source of data, with notes of its own."""
        lines = dict.fromkeys(item, self.line_of(place))
        return Draft(self.tool, item, lines, self.path, place=f"{place}.")

    def line_of(self, key: str) -> int:
        """Return the line of a key. Those within a section of a file have the line of the section."""
        section = re.split(r"[.\[]", key)[0]
        return self.lines.get(key) or self.lines.get(section, 1)

    def apply(self, table: Mapping[str, Row], first: str = "") -> None:
        """Send every key that nobody took to its row, those of `first` before the others."""
        for key in (*first.split(), *self.theirs):
            value = self.theirs.get(key)
            # An empty list in a source is a choice, as in `roles_to_train: []`.
            is_silent = is_empty(value) and not (self.place and value == [])
            is_open = key in self.unknown and all(note.key != key for note in self.notes)
            if is_silent or (key in self.taken and not is_open):
                continue
            row = table.get(key) or _row_without_table(key, table, self.place)
            if is_open and (row.path or callable(row.other) or key in self.taken):
                self.leave_open(key, row.path, self.unknown[key])
            else:
                self._apply_row(key, as_flag(value), row)

    def _apply_row(self, key: str, value: Any, row: Row) -> None:
        """Send one key to its row. It is dropped if its row needs a key whose value is not known."""
        self.taken.add(key)
        self.at = key
        self.missed.clear()
        try:
            outcome = row.outcome(value, self)
        except WRONG_KINDS:
            self.refuse_value(key)
        if self.missed:
            why = f"depends on {self.missed[0]}, whose value only a running shell knows"
            self.leave_open(key, outcome.path or row.path, why)
        else:
            self.write(key, outcome, row.path)

    def leave_open(self, key: str, path: str, why: str) -> None:
        """Drop a key, and let no default of the tool stand for our setting, unless another key fills it in."""
        self.undecided[path] = key
        self.drop(key, why)

    def note(self, kind: Kind, key: str, text: str) -> None:
        """Write down what became of a key; a value that looks like a secret is not repeated."""
        self.taken.add(key)
        value = self.theirs.get(key)
        # An option that only some branches of a script give stands for itself: there is no value to show.
        if value == f"${{{key}}}":
            value = None
        # Notes end up in the run file, which people commit.
        if isinstance(value, str) and is_secret((key,), value, known=False):
            value = None
            text += "; its value looks like a secret and is not repeated"
        self.notes.append(Note(kind, self.place + key, value, text))


def convert(draft: Draft, more: Iterable[Table]) -> None:
    """Fill in a draft from its tool's tables, and from tables that count before them."""
    tool = draft.tool
    if tool.sources is not None:
        tool.sources(draft)
    draft.apply(tool.by_key(more), tool.first)
    if tool.finish is not None:
        tool.finish(draft)


def fill_in_defaults(draft: Draft) -> None:
    """Write down the tool's defaults where ours differ, so that the run does what the tool would have done."""
    draft.assume_defaults(draft.kind)
    for path, value in draft.tool.defaults.items():
        draft.assume(path, value)
    if draft.has("lora"):
        draft.assume_defaults("lora")


def _remark(path: str, value: Any) -> str:
    """Return what is to be said of a setting that means the same and that `auto` would not choose everywhere."""
    if path == "model.dtype" and value in ("bfloat16", "float16"):
        return "; without a GPU or instructions for it many times slower than auto"
    return ""


def _row_without_table(key: str, table: Mapping[str, Row], place: str) -> Row:
    """Return what becomes of a key that its tool's tables do not have."""
    if place:
        return Row(key, other=dropped("sources have no such setting"))
    # WANDB_DIR and its like.
    if key.isupper():
        why = "an environment variable; set it where the run is started, or in kubernetes.env"
        return Row(key, other=unneeded(why))
    for patterns, reason in not_here.DROPPED.items():
        if any(fnmatchcase(key, pattern) for pattern in patterns.split()):
            return _row_of_dropped(key, reason)
    names = [name for names in not_here.DROPPED for name in names.split() if "*" not in name]
    close = nearest(key, [*table, *names], 0.8)
    hint = f"; did you mean {close}?" if close else ""
    return Row(key, other=dropped(f"not known to `kubetune import`{hint}"))


def as_names(value: Any, _: Draft) -> Outcome:
    """Carry a list of names."""
    return carried(as_list(value))
