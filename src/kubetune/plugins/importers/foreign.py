"""Read another tool's config: a YAML or JSON file, or the command line in a shell script.

The file of each tool knows what its keys mean and which commands it has; nothing here does.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from kubetune.base.yaml_reader import parse_value, read_entries
from kubetune.errors import ConfigError

_SCRIPTS = (".sh", ".bash")
_CONFIG = re.compile(r"(?:\s+|.*\s--config[\s=]+)['\"]?([^\s'\"-][^\s'\"]*\.(?:ya?ml|json))\b")
# Options of `torchrun` and `accelerate launch`, and the variables that say the same.
_LAUNCHED = {
    "nproc_per_node": "NPROC_PER_NODE",
    "num_processes": "NPROC_PER_NODE",
    "nnodes": "NNODES",
}
# NAME=value, and arrays: ARGS=( … ) and ARGS+=( … ).
_ASSIGNMENT = re.compile(r"(export\s+)?(?:declare\s+-a\s+)?(\w+)(\+?)=(?:\((.*)\)|([^\s$`]*))")
_ARRAY_BEGINS = re.compile(r"\s*(?:export\s+|declare\s+-a\s+)?\w+\+?=\(")
_SHELL_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)")
# "${ARGS[@]}" stands for all words of an array.
_ALL_WORDS = re.compile(r""""?\$\{(\w+)\[[@*]\]\}"?""")
_ENDS_OF_A_COMMAND = (";", "&&", "||", "|", "&")
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
    more: dict[int, str] = field(default_factory=dict)  # further training commands, by line


def read_foreign(path: Path, commands: Mapping[str, str]) -> Foreign:
    """Return the settings of a file. Raise ConfigError where there are none.

    `commands`: for each tool, the pattern of its command in a script, whose group is the subcommand.
    """
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


def flattened(foreign: Foreign) -> Foreign:
    """Return settings by their whole keys: `{actor_rollout_ref: {rollout: {n: 8}}}` is `actor_rollout_ref.rollout.n`."""
    settings: dict[str, Any] = {}
    lines: dict[str, int] = {}

    # Lines are known of the keys at the top only, so what is within has the line of its section.
    def add(key: str, value: Any, line: int) -> None:
        if isinstance(value, Mapping) and value:
            for name, item in value.items():
                add(f"{key}.{name}", item, line)
            return
        settings[key] = value
        lines[key] = line

    for key, value in foreign.settings.items():
        # `+key=value` and `++key=value` are hydra's words for a key that the defaults do not have.
        add(key.lstrip("+"), value, foreign.lines.get(key, 1))
    return replace(foreign, settings=settings, lines=lines)


def _refuse(path: Path, problem: str) -> NoReturn:
    """Raise ConfigError for a file."""
    raise ConfigError(f"{path}: {problem}. Nothing was written.")


def _read_script(path: Path, commands: Mapping[str, str]) -> Foreign:
    """Return the settings of the first training command, with the variables set before it."""
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError:
        _refuse(path, "is no text file")
    # MODEL=…, ARGS=(…), and export NPROC_PER_NODE=…, which the tool reads itself.
    variables: dict[str, str] = {}
    exported: dict[str, Any] = {}
    calls: list[_Call] = []
    for line, written in _commands(text):
        command = _without_comment(_filled_in(written, variables))
        if match := _ASSIGNMENT.fullmatch(command.strip()):
            is_exported, name, adds, words, text_of_value = match.groups()
            # An array has words, any other variable a value.
            value = words
            if words is None:
                value = text_of_value.strip("'\"")
            # NAME+=( … ) adds words to those before.
            if adds:
                value = f"{variables.get(name, '')} {value}".strip()
            variables[name] = value
            if is_exported:
                exported[name] = _value(value)
            continue
        for peer, pattern in commands.items():
            for match in re.finditer(pattern, command):
                calls.append(_Call(line, peer, match, dict(exported)))
    if not calls:
        expected = "`swift sft` or `rlhf`, `trl sft`, `dpo` or `grpo`, `llamafactory-cli train` or verl's `main_ppo`"
        _refuse(path, f"holds no command that is known; expected {expected}, with its arguments")
    # One line may hold two: swift sft … && swift rlhf …
    first, *others = calls
    more = {}
    for call in others:
        start = call.match.start() if call.line == first.line else 0
        more[call.line] = call.match.string[start:].strip()
    return replace(_read_command(path, first), more=more)


@dataclass(frozen=True)
class _Call:
    """One call of a tool in a script."""

    line: int
    peer: str  # the tool
    match: re.Match[str]  # of its command, in the whole command line
    exported: Mapping[str, Any]  # variables of the environment


def _read_command(path: Path, call: _Call) -> Foreign:
    """Return the settings of one command: of the environment, of its launcher, of a file and of its options."""
    command = call.match.string
    after = command[call.match.end() :]
    launcher, variables = _arguments(command[: call.match.start()], path, call.line, assigns=True)
    options, assigned = _arguments(after, path, call.line, assigns=call.peer == "verl")
    settings = {**call.exported, **variables, **_from_file(after, path), **options, **assigned}
    # `accelerate launch --num_processes 8 sft.py`: options before the command are its launcher's.
    for key, value in launcher.items():
        # Of several values the others are the program's name.
        first = value
        if isinstance(value, list):
            first = value[0]
        settings[_LAUNCHED.get(key, f"launcher --{key}")] = first
    subcommand = next(filter(None, call.match.groups()))
    return Foreign(settings, dict.fromkeys(settings, call.line), call.peer, subcommand)


def _filled_in(command: str, variables: Mapping[str, str]) -> str:
    """Return a command with the values of its variables: ${SIZE:-8} is what was set above it, or 8."""

    def value_of(match: re.Match[str]) -> str:
        # Without a default a variable that nothing sets stays as it is written.
        default = match[0] if match[2] is None else match[2]
        return variables.get(match[1] or match[3], default)

    command = _ALL_WORDS.sub(lambda match: variables.get(match[1], match[0]), command)
    return _SHELL_VARIABLE.sub(value_of, command)


def _commands(text: str) -> Iterator[tuple[int, str]]:
    """Yield each command with the line it begins in: lines joined by a backslash, or within ARGS=( … )."""
    start = 1
    parts: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not parts:
            start = number
        if line.lstrip().startswith("#"):
            continue
        is_array = _ARRAY_BEGINS.match(parts[0] if parts else line) is not None
        stripped = _without_comment(line).rstrip() if is_array else line.rstrip()
        parts.append(stripped.removesuffix("\\"))
        if not stripped.endswith("\\") and (not is_array or stripped.endswith(")")):
            yield start, " ".join(parts)
            parts = []
    if parts:
        yield start, " ".join(parts)


def _without_comment(command: str) -> str:
    """Cut at a `#` that begins a word; within a word, as in `chats#500`, or in quotes it is no comment."""
    # What is in quotes, or a letter that does not begin a comment.
    match = re.match(r"""(?:'[^']*'?|"[^"]*"?|(?<=\S)#|[^'"#])*""", command)
    return match[0] if match else command


def _from_file(text: str, path: Path) -> Mapping[str, Any]:
    """Return settings from a file, as in `swift sft config.yaml` and `trl sft --config config.yaml`."""
    match = _CONFIG.match(text)
    if match is None:
        return {}
    # Such commands are called from the root of a repository, which is above the script.
    for folder in (*path.absolute().parents, Path.cwd()):
        if (folder / match[1]).is_file():
            return read_foreign(folder / match[1], {}).settings
    _refuse(path, f"takes its settings from {match[1]}, which is not found")


def _arguments(
    text: str, path: Path, line: int, assigns: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `--key value`, `--key=value`, `--key a b` and `--flag` of a command, and its assignments, `key=value`.

    --lr 1e-4 --modules q k --bf16   →   lr: 1e-4, modules: [q, k], bf16: True
    """
    # $(expr 64 / 4) is one word, whatever it holds.
    text = re.sub(r"\$\([^)]*\)", lambda match: shlex.quote(match[0]), text)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{path}:{line}: is no shell command that can be read: {error}") from None

    values: dict[str, list[Any]] = {}
    assigned: dict[str, Any] = {}
    key = ""
    for word in words:
        name, sign, value = word.partition("=")
        if word in _ENDS_OF_A_COMMAND or word.startswith((">", "2>")):
            break
        if word.startswith("--"):
            key = name.removeprefix("--").replace("-", "_")
            values[key] = [_value(value)] if sign else []
        elif assigns and sign:
            assigned[name] = _value(value)
        elif key:
            values[key].append(_value(word))
    # An option without a value is a flag, and of several values a list.
    options: dict[str, Any] = {}
    for key, several in values.items():
        if len(several) > 1:
            options[key] = several
        elif several:
            options[key] = several[0]
        else:
            options[key] = True
    return options, assigned


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
