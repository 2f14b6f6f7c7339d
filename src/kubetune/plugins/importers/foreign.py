"""Reads another tool's config: a YAML or JSON file, or the command line in a shell script.

Not for what the keys mean, nor for which commands there are: each tool's file says that of itself.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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
_VARIABLE = re.compile(r"(\w+)=(.*)")
_ASSIGNMENT = re.compile(r"(export\s+)?(\w+)=([^\s$`]*)")
_SHELL_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)")
_ENDS_OF_A_COMMAND = (";", "&&", "||", "|", "&")
# Keys by which configs are known that say nothing of a training run.
_OTHER_FILES = {
    "compute_environment": "a config of accelerate, which says how processes are started",
    "distributed_type": "a config of accelerate, which says how processes are started",
    "zero_optimization": "a config of DeepSpeed",
    "model_class": "a config of LLaMA-Factory's second trainer (v1), which is not read; that of its first one is",
}


@dataclass(frozen=True)
class Foreign:
    """What another tool's file says."""

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
        problem = "no such file"
        if path.is_dir():
            problem = "is a folder"
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
    if _is_ours(settings):
        _refuse(path, "is a run file of kubetune already; see `kubetune plan`")
    return Foreign(settings, lines)


def read_settings(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return what a YAML or JSON file says, and the line of each key. Raises ConfigError where it cannot be read."""
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


def _refuse(path: Path, problem: str) -> NoReturn:
    """Raise ConfigError for a file."""
    raise ConfigError(f"{path}: {problem}. Nothing was written.")


def _is_ours(settings: Mapping[str, Any]) -> bool:
    """True for a run file of kubetune."""
    data = settings.get("data")
    model = settings.get("model")
    # Another tool has `data.train` too, beside `model.model_name`.
    is_another = isinstance(model, dict) and "model_name" in model
    return isinstance(data, dict) and "train" in data and not is_another


def _read_script(path: Path, commands: Mapping[str, str]) -> Foreign:
    """Return the settings of the first training command, with the variables set before it."""
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError:
        _refuse(path, "is no text file")
    # MODEL=…, and export NPROC_PER_NODE=…, which the tool reads itself.
    variables: dict[str, str] = {}
    exported: dict[str, Any] = {}

    first: Foreign | None = None
    for line, written in _commands(text):
        command = _without_comment(_filled_in(written, variables))
        assignment = _ASSIGNMENT.fullmatch(command.strip())
        if assignment:
            value = assignment[3].strip("'\"")
            variables[assignment[2]] = value
            if assignment[1]:
                exported[assignment[2]] = _value(value)

        for peer, pattern in commands.items():
            match = re.search(pattern, command)
            if match and first is None:
                first = _read_command(path, line, peer, match, exported)
                # One line may hold two: swift sft … && swift rlhf …
                rest = command[match.end() :]
                again = re.search(pattern, rest)
                if again:
                    first.more[line] = rest[again.start() :].strip()
            elif match and first is not None:
                first.more[line] = command.strip()
    if first is None:
        expected = "`swift sft` or `rlhf`, `trl sft`, `dpo` or `grpo`, `llamafactory-cli train` or verl's `main_ppo`"
        _refuse(path, f"holds no command that is known; expected {expected}, with its arguments")
    return first


def _read_command(
    path: Path, line: int, peer: str, match: re.Match[str], exported: Mapping[str, Any]
) -> Foreign:
    """Return the settings of one command: of the environment, of its launcher, of a file and of its options."""
    before = match.string[: match.start()]
    after = match.string[match.end() :]
    settings = dict(exported)
    settings |= _variables(before)
    settings |= _from_file(after, path)
    settings |= _options(after, path, line)
    if peer == "verl":
        settings |= _assignments(after)

    # `accelerate launch --num_processes 8 sft.py`: options before the command are its launcher's.
    for key, value in _options(before, path, line).items():
        # Of several values the others are the program's name.
        if isinstance(value, list):
            value = value[0]
        settings[_LAUNCHED.get(key, f"launcher --{key}")] = value
    subcommand = next(filter(None, match.groups()))
    return Foreign(settings, dict.fromkeys(settings, line), peer, subcommand)


def _filled_in(command: str, variables: Mapping[str, str]) -> str:
    """Return a command with the values of its variables: ${SIZE:-8} is what was set above it, or 8."""

    def value_of(match: re.Match[str]) -> str:
        # Without a default a variable that nothing sets stays as it is written.
        default = match[0]
        if match[2] is not None:
            default = match[2]
        return variables.get(match[1] or match[3], default)

    return _SHELL_VARIABLE.sub(value_of, command)


def _commands(text: str) -> Iterator[tuple[int, str]]:
    """Yield each command with the line it begins in; lines that end in a backslash belong together."""
    start = 1
    parts: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not parts:
            start = number
        if line.lstrip().startswith("#"):
            continue
        stripped = line.rstrip()
        parts.append(stripped.removesuffix("\\"))
        if not stripped.endswith("\\"):
            yield start, " ".join(parts)
            parts = []
    if parts:
        yield start, " ".join(parts)


def _without_comment(command: str) -> str:
    """Cut at a `#` that begins a word; within a word, as in `chats#500`, or in quotes it is no comment."""
    # What stands in quotes, or a letter that does not begin a comment.
    match = re.match(r"""(?:'[^']*'?|"[^"]*"?|(?<=\S)#|[^'"#])*""", command)
    if match is None:
        return command
    return match[0]


def _variables(text: str) -> dict[str, Any]:
    """Return variables before a command, as `NPROC_PER_NODE=4`."""
    try:
        words = shlex.split(text)
    except ValueError:
        return {}
    variables = {}
    for word in words:
        if match := _VARIABLE.match(word):
            variables[match[1]] = _value(match[2])
    return variables


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


def _options(text: str, path: Path, line: int) -> dict[str, Any]:
    """Return `--key value`, `--key=value`, `--key a b` and `--flag` of a command."""
    # $(expr 64 / 4) is one word, whatever stands in it.
    text = re.sub(r"\$\([^)]*\)", lambda match: shlex.quote(match[0]), text)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{path}:{line}: is no shell command that can be read: {error}") from None

    # --lr 1e-4 --modules q k --bf16   →   lr: [1e-4], modules: [q, k], bf16: []
    values: dict[str, list[Any]] = {}
    key = ""
    for word in words:
        if word in _ENDS_OF_A_COMMAND or word.startswith((">", "2>")):
            break
        if word.startswith("--"):
            name, sign, value = word.removeprefix("--").partition("=")
            key = name.replace("-", "_")
            values[key] = []
            if sign:
                values[key].append(_value(value))
        elif key:
            values[key].append(_value(word))
    return {key: _option(several) for key, several in values.items()}


def _assignments(text: str) -> dict[str, Any]:
    """Return what hydra reads from a command line, `key.of.section=value`."""
    values = {}
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    for word in words:
        if word in _ENDS_OF_A_COMMAND or word.startswith((">", "2>")):
            break
        key, sign, value = word.partition("=")
        if sign and not key.startswith("-"):
            values[key] = _value(value)
    return values


def _option(values: list[Any]) -> Any:
    """Return True for an option without a value, its value, or a list of several."""
    if not values:
        return True
    if len(values) == 1:
        return values[0]
    return values


def _value(text: str) -> Any:
    """Return a value as YAML reads it, where it can."""
    if not text:
        return None
    # JSON, which the tools read themselves.
    if text.startswith("{"):
        return text
    try:
        return parse_value(text)
    except ValueError:
        return text
