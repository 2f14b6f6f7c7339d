"""Other tools' configs, turned into run files: axolotl, LLaMA-Factory, TRL, ms-swift, verl, and a job's resources.

A tool is one file with one table, and one line in `TOOLS`. Read `engine` first, then a tool's table. What means the
same is carried over, what only comes near is approximated, what is not there is dropped; each key of the file is
named in one of the lists. Where a file leaves a key out and its tool's default is not ours, theirs is written down.
A file that its own tool refuses, such as one with two keys that exclude each other, is nobody's: it may be imported.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from kubetune.base.humanize import shell_word
from kubetune.config.load import load_config
from kubetune.errors import ConfigError
from kubetune.plugins.importers import learning_kinds
from kubetune.plugins.importers.engine import (
    WRONG_KINDS,
    Draft,
    Note,
    Tool,
    convert,
    fill_in_defaults,
)
from kubetune.plugins.importers.foreign import Foreign, flattened, read_foreign
from kubetune.plugins.importers.readings import is_empty, unknown_values
from kubetune.plugins.importers.rules import apply_rules
from kubetune.plugins.importers.writing import comment, inline, run_file

# The module of each tool, which holds its `TOOL`; `--from` takes the module's name, with dashes.
TOOLS: dict[str, str] = {
    "axolotl": "kubetune.plugins.importers.axolotl",
    "LLaMA-Factory": "kubetune.plugins.importers.llama_factory",
    "TRL": "kubetune.plugins.importers.trl",
    "ms-swift": "kubetune.plugins.importers.ms_swift",
    "verl": "kubetune.plugins.importers.verl",
    "job resources": "kubetune.plugins.importers.resources",
}


@dataclass(frozen=True)
class Imported:
    """A run file, made of another tool's config."""

    peer: str  # the tool
    text: str
    notes: Sequence[Note]  # what became of each key

    def of(self, kind: str) -> list[Note]:
        """Return the notes of one kind."""
        return [note for note in self.notes if note.kind == kind]


def words_of_tools() -> dict[str, str]:
    """Return the name of each tool by its word on the command line."""
    names = {}
    for name, module in TOOLS.items():
        word = module.rpartition(".")[2].replace("_", "-")
        names[word] = name
    return names


def import_config(path: Path, peer: str | None = None) -> Imported:
    """Return a run file equal to another tool's config. `peer`: a key of TOOLS; without it, seen from the keys.

    Raise ConfigError for a file that is none of these, or a kind of learning that kubetune does not do.
    """
    commands = {name: tool.command for name, tool in _tools().items() if tool.command}
    foreign = read_foreign(path, commands)
    # The user's word goes first, then the tool that a script calls, then typical keys.
    peer = peer or foreign.peer or _recognise(path, foreign)
    draft = understand(path, foreign, peer)
    _require_model_and_data(draft)
    text = _text(path, draft)
    _require_valid(text, draft)
    return Imported(peer, text, draft.notes)


def understand(path: Path, foreign: Foreign, peer: str) -> Draft:
    """Return what becomes of each key. Raise ConfigError for a kind of learning that kubetune does not do."""
    tool = _tools()[peer]
    theirs = foreign.settings
    if tool.has_sections:
        theirs = flattened(theirs)
    if isinstance(theirs.get(tool.merged), dict):
        theirs = {**theirs[tool.merged], **theirs}
    unknown = unknown_values(theirs, foreign.variables)
    draft = Draft(tool, theirs, foreign.lines, str(path), foreign.command, unknown)
    learning_kinds.require_known_kind(draft)
    try:
        convert(draft, learning_kinds.learn(draft))
        learning_kinds.finish(draft)
        fill_in_defaults(draft)
        apply_rules(draft)
    except WRONG_KINDS:
        draft.refuse_value(draft.at)
    _complete(draft)
    draft.notes += foreign.notes
    return draft


def _tools() -> dict[str, Tool]:
    """Return all tools by name; their modules are imported now, since most commands need none of them."""
    return {name: import_module(module).TOOL for name, module in TOOLS.items()}


def _recognise(path: Path, foreign: Foreign) -> str:
    """Return the tool that has most of the keys. Raise ConfigError where none has any, or two have as many."""
    # Most keys are Hugging Face's, and so of all tools: those that are typical of one decide.
    points = {}
    for name, tool in _tools().items():
        points[name] = len(foreign.settings.keys() & set(tool.marks.split()))
    first, second = sorted(points, key=lambda name: -points[name])[:2]
    if points[first] > points[second]:
        return first
    keys = ", ".join(list(foreign.settings)[:8])
    raise ConfigError(
        f"{path}: not recognised as a config of {', '.join(points)}; found keys {keys}. Say whose it is with --from. "
        "Nothing was written."
    )


def _require_model_and_data(draft: Draft) -> None:
    """Raise ConfigError without a model and data; where their key was dropped, its line says why."""
    wanted = {"model.path": "model", "data.train": "data to train on"}
    missing = {path: what for path, what in wanted.items() if not draft.has(path)}
    if not missing:
        return
    # `model: $MODEL` in a script that does not set it names one, but not to us.
    waiting = [draft.undecided[path] for path in missing if path in draft.undecided]
    problems = [
        f"{draft.path}:{draft.line_of(key)}: {key}: {draft.unknown[key]}." for key in waiting
    ]
    keys = ", ".join(list(draft.theirs)[:8])
    raise ConfigError(
        problems
        or f"{draft.path}: names no {' and no '.join(missing.values())}; found as a config of {draft.tool.name}: {keys}. "
        "Nothing was written."
    )


def _complete(draft: Draft) -> None:
    """Leave one note for each key: the last, since a key whose setting was taken out again counts as dropped."""
    # No key may go without a word: the user would take it for carried over.
    noted = {note.key for note in draft.notes}
    for key, value in draft.theirs.items():
        if key not in noted and is_empty(value):
            draft.note("unneeded", key, "left empty")
        elif key not in noted:
            draft.drop(key, "read, but no setting follows from it")
    # A default that is written down has a note of its own beside that of its key.
    last = {(note.key, note.kind == "assumed"): note for note in draft.notes}
    draft.notes[:] = [note for note in draft.notes if note in last.values()]


def _text(path: Path, draft: Draft) -> str:
    """Return the run file, with a heading, and at its end what to look at."""
    parts = [
        comment(
            [
                f"Made by `kubetune import {shell_word(path.name)}` from a config of {draft.tool.name}.",
                "`kubetune plan` shows what it will take, `kubetune data check` what would be trained.",
            ]
        ),
        run_file(_short(draft.settings), draft.comments),
    ]
    titles = {"dropped": "Not carried over:", "approximated": "Only near to the original:"}
    for kind, title in titles.items():
        lines = [_line(note) for note in draft.notes if note.kind == kind]
        if lines:
            parts.append(comment([title, *lines]))
    return "\n".join(parts)


def _line(note: Note) -> str:
    """Return a note in one line, with a value that is short."""
    shown = "" if note.value is None else inline(note.value)
    if 0 < len(shown) <= 40:
        return f"  {note.key} ({shown}): {note.text}"
    return f"  {note.key}: {note.text}"


def _short(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings as people write them: a model that is only a name, a source that is only a path."""
    short = dict(settings)
    if short.get("task") == "causal_lm":
        del short["task"]
    # model: {path: org/name}   →   model: org/name
    if [path for path in short if path.startswith("model.")] == ["model.path"]:
        short["model"] = short.pop("model.path")
    # data.train: [{path: a.jsonl}]   →   data.train: a.jsonl
    for path in ("data.train", "data.eval"):
        match short.get(path):
            case [{"path": only, **rest}] if not rest:
                short[path] = only
    return short


def _require_valid(text: str, draft: Draft) -> None:
    """Raise ConfigError where the run file cannot be loaded, in the words of the file that it is made from."""
    # Loaded as `train` loads it, so that nothing is written that would not run.
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(text, "utf-8")
        try:
            load_config(file)
        except ConfigError as error:
            problems = [_in_their_words(problem, file, draft) for problem in error.problems]
            first = f"{draft.path}: what it says is no valid run:"
            raise ConfigError([first, *problems, "Mend the file. Nothing was written."]) from None


def _in_their_words(problem: str, file: Path, draft: Draft) -> str:
    """Return a problem of the run file, at the line and the key that the setting came from."""
    # /tmp/x/run.yaml:7: lora.r: expected …   →   theirs.yaml:12: lora_r: becomes lora.r: expected …
    text = re.sub(rf"^{re.escape(str(file))}(:\d+)?: ", "", problem)
    # `lora.r` came from lora_r; `data.train[0].path` came from the key that made data.train.
    path = re.split(r"[:\[]", text, maxsplit=1)[0]
    around = [ours for ours in draft.origins if f"{path}.".startswith(f"{ours}.")]
    # A problem of a section has a line only if one key of theirs made it.
    within = [ours for ours in draft.origins if ours.startswith(f"{path}.")]
    if not around and len(within) != 1:
        return f"{draft.path}: as a run file: {text}"
    key = draft.origins[max(around or within, key=len)][-1]
    return f"{draft.path}:{draft.line_of(key)}: {key}: becomes {text}"
