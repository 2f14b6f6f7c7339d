"""Other tools' configs, turned into run files: axolotl, LLaMA-Factory, TRL, ms-swift, verl, and a job's resources.

A tool is one file with one table, and one line in `TOOLS`. Read `engine` first, then a tool's table. What means the
same is carried over, what only comes near is approximated, what is not there is dropped; each key of the file is
named in one of the lists. Where a file leaves a key out and its tool's default is not ours, theirs is written down.
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
from kubetune.plugins.importers import kinds
from kubetune.plugins.importers.engine import (
    WRONG_KINDS,
    Draft,
    Note,
    Tool,
    convert,
    is_empty,
)
from kubetune.plugins.importers.foreign import Foreign, flattened, read_foreign
from kubetune.plugins.importers.settle import settle
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
    commands = {}
    for name, tool in _tools().items():
        if tool.command:
            commands[name] = tool.command
    foreign = read_foreign(path, commands)

    # The user's word goes first, then the tool that a script calls, then typical keys.
    peer = peer or foreign.peer or _recognise(path, foreign)
    draft = understand(path, foreign, peer)
    _require_model_and_data(draft)
    text = _text(path, draft)
    _require_valid(text, draft)
    return Imported(draft.tool.name, text, draft.notes)


def understand(path: Path, foreign: Foreign, peer: str) -> Draft:
    """Return what becomes of each key. Raise ConfigError for a kind of learning that kubetune does not do."""
    tool = _tools()[peer]
    if tool.has_sections:
        foreign = flattened(foreign)
    draft = Draft(tool, foreign.settings, foreign.lines, str(path), foreign.command)
    # verl's command has the name of another method; the file says that it is GRPO.
    kinds.require_known_kind(draft, is_named=foreign.peer == "verl")
    try:
        convert(draft, *kinds.learn(draft))
        kinds.finish(draft)
        settle(draft)
    except WRONG_KINDS:
        draft.refuse_value(draft.at)
    _complete(draft)
    why = "a further command of the script; a run file holds one run"
    for line, command in foreign.more.items():
        draft.notes.append(Note("dropped", f"line {line}", command, why, line))
    return draft


def _tools() -> dict[str, Tool]:
    """Return all tools by name; their modules are imported now, since most commands need none of them."""
    return {name: import_module(module).TOOL for name, module in TOOLS.items()}


def _recognise(path: Path, foreign: Foreign) -> str:
    """Return the tool that has most of the keys. Raise ConfigError where none has any, or two have as many."""
    # Most keys are Hugging Face's, and so of all tools: those that are typical of one decide.
    points: dict[str, int] = {}
    for name, tool in _tools().items():
        marks = set(tool.marks.split())
        points[name] = len(foreign.settings.keys() & marks)

    # Two tools that are equally likely are for the user to choose from.
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
    missing = []
    if not draft.has("model.path"):
        missing.append("model")
    if not draft.has("data.train"):
        missing.append("data to train on")
    if not missing:
        return

    # `model: $MODEL` in a script that does not set it names one, but not to us.
    unset = [note for note in draft.notes if note.kind == "dropped" and " holds $" in note.text]
    if unset:
        problems = []
        for note in unset:
            if note.line:
                problems.append(f"{draft.path}:{note.line}: {note.key}: {note.text}.")
        raise ConfigError(problems)

    keys = ", ".join(list(draft.theirs)[:8])
    raise ConfigError(
        f"{draft.path}: names no {' and no '.join(missing)}; found as a config of {draft.tool.name}: {keys}. Nothing "
        "was written."
    )


def _complete(draft: Draft) -> None:
    """Leave one note for each key: the last, since a key whose setting was taken out again counts as dropped."""
    # No key may go without a word: the user would take it for carried over.
    keys = {note.key for note in draft.notes}
    for key, value in draft.theirs.items():
        if key not in keys and is_empty(value):
            draft.note("unneeded", key, "left empty")
        elif key not in keys:
            draft.drop(key, "read, but nothing here follows from it")

    # A default that is written down has a note of its own beside that of its key.
    last: dict[tuple[str, bool], Note] = {}
    for note in draft.notes:
        last[note.key, note.kind == "assumed"] = note
    draft.notes[:] = [note for note in draft.notes if note in last.values()]


def _text(path: Path, draft: Draft) -> str:
    """Return the run file, with a heading, and at its end what to look at."""
    name = shell_word(path.name)
    heading = [
        f"Made by `kubetune import {name}` from a config of {draft.tool.name}.",
        "`kubetune plan` shows what it comes to, `kubetune data check` what would be trained.",
    ]
    body = run_file(_short(draft.settings), draft.comments)
    parts = [comment(heading), body]

    titles = {"dropped": "Not carried over:", "approximated": "Only near to the original:"}
    for kind, title in titles.items():
        lines = [_line(note) for note in draft.notes if note.kind == kind]
        if lines:
            parts.append(comment([title, *lines]))
    return "\n".join(parts)


def _line(note: Note) -> str:
    """Return a note in one line, with a value that is short."""
    key = note.key
    if note.value is not None:
        shown = inline(note.value)
        if 0 < len(shown) <= 40:
            key = f"{note.key} ({shown})"
    return f"  {key}: {note.text}"


def _short(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings as people write them: a model that is only a name, a source that is only a path."""
    short = dict(settings)
    if short.get("task") == "causal_lm":
        del short["task"]

    # model: {path: org/name}   →   model: org/name
    model_keys = [path for path in short if path.startswith("model.")]
    if model_keys == ["model.path"]:
        short["model"] = short.pop("model.path")

    # data.train: [{path: a.jsonl}]   →   data.train: a.jsonl
    for path in ("data.train", "data.eval"):
        if isinstance(short.get(path), list):
            sources = [_short_source(source) for source in short[path]]
            short[path] = sources
            if len(sources) == 1 and isinstance(sources[0], str):
                short[path] = sources[0]
    return short


def _short_source(source: Any) -> Any:
    """Return a source, as its path where it says nothing else."""
    if isinstance(source, dict) and list(source) == ["path"]:
        return source["path"]
    return source


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
    our_key = re.split(r"[:\[]", text, maxsplit=1)[0]
    key = _origin(our_key, draft)
    if key is None:
        return f"{draft.path}: as a run file: {text}"
    line = draft.lines.get(key, 1)
    return f"{draft.path}:{line}: {key}: becomes {text}"


def _origin(path: str, draft: Draft) -> str | None:
    """Return the key that our setting came from, or the section around it, or the only key within it."""
    # `lora.r` came from lora_r; `data.train[0].path` came from the key that made data.train.
    around = path
    while around:
        if around in draft.origins:
            return draft.origin(around)
        around = around.rpartition(".")[0]

    # A problem of a section has a line only if one key of theirs made it.
    within = [ours for ours in draft.origins if ours.startswith(f"{path}.")]
    return draft.origin(within[0]) if len(within) == 1 else None
