"""Read another tool's config: a YAML or JSON file, or the command line in a shell script.

The file of each tool knows what its keys mean and which commands it has; nothing here does.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from kubetune.base.yaml_reader import parse_value, read_entries
from kubetune.errors import ConfigError
from kubetune.plugins.importers.engine import Note, ToolCommand
from kubetune.plugins.importers.shell import (
    Command,
    Script,
    UnreadableError,
    is_known,
    read_script,
)

_SCRIPTS = (".sh", ".bash")
# "$@", $*, "${@:2}": what the script is called with.
_CALLED_WITH = re.compile(r"\$[@*]|\$\{[@*].*\}")
# `swift sft config.yaml`, `trl sft --beta 0.1 --config config.yaml`
_CONFIGS = (".yaml", ".yml", ".json")
# Options of `torchrun` and `accelerate launch`, and the variables that say the same.
_LAUNCHED = {
    "nproc_per_node": "NPROC_PER_NODE",
    "num_processes": "NPROC_PER_NODE",
    "nnodes": "NNODES",
}
# Keys that mark configs which do not describe a training run, with what such a file is.
_OTHER_FILES = {
    "compute_environment": "a config of accelerate, which says how processes are started",
    "distributed_type": "a config of accelerate, which says how processes are started",
    "zero_optimization": "a config of DeepSpeed",
    "model_class": "a config of LLaMA-Factory's second trainer (v1), which is not read; that of its first one is",
}


@dataclass(frozen=True)
class Foreign:
    """The settings of another tool's file."""

    settings: Mapping[str, Any]  # by key
    lines: Mapping[str, int]  # of each key
    peer: str | None = None  # the tool, where the file names it
    command: str | None = None  # subcommand in a script, such as `sft`
    # Why a script's `$NAME` is not known.
    variables: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[Note] = ()  # what stands in a script beside the settings


def read_foreign(path: Path, commands: Mapping[str, ToolCommand]) -> Foreign:
    """Return the settings of a file. Raise ConfigError if it has none. `commands`: of each tool that scripts call."""
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "no such file"
        _refuse(path, f"{problem}; expected a config of another tool")
    if path.suffix in _SCRIPTS:
        return _read_script(path, commands)

    # A file of settings that are no other tool's training run is refused by name, since its keys would all be dropped.
    settings, lines = read_settings(path)
    if not settings:
        _refuse(path, "holds no setting")
    for key, what in _OTHER_FILES.items():
        if key in settings:
            _refuse(path, f"is {what}; expected the config of a training run")
    match settings:
        # Another tool has `data.train` too, beside `model.model_name`.
        case {"data": {"train": _}, "model": {"model_name": _}}:
            pass
        case {"data": {"train": _}}:
            _refuse(path, "is a run file of kubetune already; see `kubetune plan`")
    return Foreign(settings, lines)


def read_settings(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return what a YAML or JSON file says, and the line of each key. Raise ConfigError where it cannot be read."""
    entries, problems = read_entries(path)
    if problems:
        raise ConfigError([str(problem) for problem in problems])
    try:
        settings = parse_value(path.read_text("utf-8-sig"))
    except ValueError as error:
        _refuse(path, str(error))
    lines: dict[str, int] = {}
    for entry in entries:
        lines.setdefault(str(entry.path[0]), entry.origin.line)
    return settings, lines


def flattened(settings: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    """Return settings by their whole keys: `{actor_rollout_ref: {rollout: {n: 8}}}` is `actor_rollout_ref.rollout.n`."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{within}{key}.")
        else:
            flat[within + key] = value
    return flat


def _refuse(path: Path, problem: str) -> NoReturn:
    """Raise ConfigError for a file."""
    raise ConfigError(f"{path}: {problem}. Nothing was written.")


def _read_script(path: Path, commands: Mapping[str, ToolCommand]) -> Foreign:
    """Return the settings of the first training command that the script surely calls."""
    try:
        script = read_script(path.read_text("utf-8"))
    except UnicodeDecodeError:
        _refuse(path, "is no text file")
    except UnreadableError as error:
        _refuse(
            path, f"{error}; take that out, or write the command with its values alone into a file"
        )
    calls = []
    for command in script.commands:
        call = _call(command, commands)
        if call is not None:
            calls.append(call)
    if not calls:
        expected = ", ".join(f"`{command.example}`" for command in commands.values())
        unread = "".join(f"; line {line}: {why}" for line, why in script.unread.items())
        _refuse(
            path,
            f"calls no command that is known; expected one of {expected}, with its arguments{unread}",
        )
    first = _first(path, calls)
    _require_known_words(path, first, script)
    arguments = _arguments(first.after, first.assigns)
    settings: Mapping[str, Any] = {}
    config = _config_of(arguments)
    if config:
        _require_unchanged(path, config, first, script)
        settings = _from_file(path, config)
    further = [call for call in calls if call is not first]
    return _settings_of(first, arguments, settings, script, _notes(script, first, further))


@dataclass(frozen=True)
class _Call:
    """One call of a tool in a script."""

    command: Command
    peer: str  # the tool
    assigns: bool  # it takes key=value
    subcommand: str
    before: tuple[str, ...]  # words of its launcher
    after: tuple[str, ...]  # its arguments

    def text(self) -> str:
        """Return the call as the script has it, without its launcher."""
        return " ".join(self.command.words[len(self.before) :])


def _call(command: Command, commands: Mapping[str, ToolCommand]) -> _Call | None:
    """Return the call of a tool that a command is, or None for any other command."""
    # Spaces within a word are none between words: `--note "swift sft"` calls nothing.
    texts = [re.sub(r"\s", "_", word) for word in command.words]
    for place in range(len(texts)):
        # A tool is a word, which may begin with its folder, or a word with a subcommand.
        named = " ".join(texts[place : place + 2])
        for peer, known in commands.items():
            match = re.match(rf"(?:\S*/)?(?:{known.pattern})", named)
            if match is not None:
                end = place + 1 + match[0].count(" ")
                return _Call(
                    command,
                    peer,
                    assigns=known.assigns,
                    subcommand=next(filter(None, match.groups())),
                    before=command.words[:place],
                    after=command.words[end:],
                )
    return None


def _first(path: Path, calls: Sequence[_Call]) -> _Call:
    """Return the first call that is certain. Raise ConfigError if only a running shell knows which it is."""
    sure = [call for call in calls if not call.command.condition]
    if not sure and len(calls) > 1:
        lines = [f"line {call.command.line} ({call.command.condition})" for call in calls]
        _refuse(
            path,
            f"calls a training in several branches, and only a running shell knows which: {', '.join(lines)}; "
            "leave one of them in the file",
        )
    return (sure or calls)[0]


def _notes(script: Script, first: _Call, further: Sequence[_Call]) -> list[Note]:
    """Name what stands in a script and is not followed: further calls, and lines that only a running shell knows."""
    notes = []
    for call in further:
        why = "a further command of the script; a run file holds one run"
        notes.append(Note("dropped", f"line {call.command.line}", call.text(), why))
    unread = dict(script.unread)
    if first.command.condition:
        unread[first.command.line] = f"{first.command.condition}; taken as if it were called"
    for line, why in unread.items():
        notes.append(Note("approximated", f"line {line}", None, why))
    return notes


def _settings_of(
    call: _Call,
    arguments: _Arguments,
    from_file: Mapping[str, Any],
    script: Script,
    notes: list[Note],
) -> Foreign:
    """Return the settings of one command: of the environment, of its launcher, of a file and of its options."""
    line = call.command.line
    launcher = _arguments(call.before, assigns=True)
    settings = {name: _value(text) for name, text in call.command.exported.items()}
    settings |= launcher.assigned
    settings |= from_file
    settings |= {key: _setting(values) for key, values in arguments.options.items()}
    settings |= arguments.assigned
    # `accelerate launch --num_processes 8 sft.py`: options before the command are its launcher's.
    for key, values in launcher.options.items():
        # Of several values the others are the program's name.
        settings[_LAUNCHED.get(key, f"launcher --{key}")] = _setting(values[:1])
    for word in arguments.strays:
        # The file that the command takes its settings from.
        if not word.endswith(_CONFIGS):
            why = "belongs to no option of the command; what it says is not read"
            notes.append(Note("dropped", f"word {word}", None, why))
    return Foreign(
        settings,
        dict.fromkeys(settings, line),
        call.peer,
        call.subcommand,
        variables=script.reasons,
        notes=notes,
    )


def _require_known_words(path: Path, call: _Call, script: Script) -> None:
    """Raise ConfigError if a call is of a function of the script, or if nobody knows its words."""
    problem = call.command.problem
    # The words before the subcommand are programs, or options of programs.
    for word in call.command.words[: len(call.before) + 1]:
        if word in script.doubts.functions:
            problem = f"`{word}` is a function (line {script.doubts.functions[word]})"
    if problem:
        _refuse(
            path, f"line {call.command.line}: {problem}; write the command there with its values"
        )


def _config_of(arguments: _Arguments) -> str:
    """Return the file that a call takes its settings from, as in `swift sft config.yaml`; empty for none."""
    for name in (*arguments.options.get("config", []), *arguments.strays[:1]):
        if str(name).endswith(_CONFIGS) or "config" in arguments.options:
            return str(name)
    return ""


def _require_unchanged(path: Path, config: str, call: _Call, script: Script) -> None:
    """Raise ConfigError if the script may write the file of a training's settings, or look for it in another folder."""
    last = call.command.line
    lines = []
    for line, word in script.named:
        is_named = posixpath.basename(word.rpartition("=")[2]) == posixpath.basename(config)
        if is_named and line <= last and (line, word) != (last, config):
            lines.append(f"line {line} may write it")
    if 0 < script.moved <= last:
        lines.append(f"line {script.moved} changes the folder")
    if lines:
        _refuse(
            path,
            f"takes its settings from {config}, and {lines[0]}; run the script up to there, then import that file",
        )


def _from_file(path: Path, name: str) -> Mapping[str, Any]:
    """Return the settings from the file that a call names."""
    if not is_known(name):
        _refuse(
            path,
            f"takes its settings from {name}, which only a running shell knows; import that file",
        )
    file = file_above(path, name)
    if file is None:
        _refuse(path, f"takes its settings from {name}, which is not found")
    return read_foreign(file, {}).settings


def file_above(path: Path, name: str) -> Path | None:
    """Return a file beside another one or above it, as tools are called from the root of a repository; None for none."""
    for folder in (*path.absolute().parents, Path.cwd()):
        if (folder / name).is_file():
            return folder / name
    return None


@dataclass
class _Arguments:
    """What the words of a command say."""

    options: dict[str, list[Any]] = field(default_factory=dict)  # --key value …
    strays: list[str] = field(default_factory=list)  # words that belong to no option
    assigned: dict[str, Any] = field(default_factory=dict)  # key=value


def _arguments(words: Sequence[str], assigns: bool) -> _Arguments:
    """Return `--key value`, `--key=value`, `--key a b` and `--flag` of a command, and its assignments, `key=value`.

    --lr 1e-4 --modules q k --bf16   →   lr: [1e-4], modules: [q, k], bf16: []
    """
    arguments = _Arguments()
    key = ""  # of the option before a word
    for word in words:
        name, sign, value = word.partition("=")
        if word.startswith("--"):
            key = _option(name)
            arguments.options[key] = [_value(value)] if sign else []
        elif assigns and sign:
            # `+key=value` and `++key=value` are hydra's words for a key that the defaults do not have.
            arguments.assigned[name.strip().lstrip("+")] = _value(value)
        elif key and not _CALLED_WITH.fullmatch(word):
            arguments.options[key].append(_value(word))
        elif word.strip():
            arguments.strays.append(word)
    return arguments


def _option(name: str) -> str:
    """Return the key of `--some-key`."""
    return name.removeprefix("--").replace("-", "_")


def _setting(values: list[Any]) -> Any:
    """Return what an option says with its values: without one it is a flag, and several are a list."""
    if not values:
        return True
    return values if len(values) > 1 else values[0]


def _value(text: str) -> Any:
    """Return a value as YAML reads it; as a text if YAML cannot."""
    # JSON, which the tools read themselves.
    if text.startswith("{"):
        return text
    if not text:
        return None
    try:
        return parse_value(text)
    except ValueError:
        return text
