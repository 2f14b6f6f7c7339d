"""Reads another tool's config: a YAML or JSON file, or the command line in a shell script.

Knows the tools' commands and how they are told apart, not what their keys mean.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kubetune.base.yaml_reader import parse_value, read_entries
from kubetune.errors import ConfigError

_SCRIPTS = (".sh", ".bash")
_COMMANDS = {
    "ms-swift": re.compile(
        r"\b(?:swift|megatron|swift/cli/main\.py)\s+(\w+)|\bswift/cli/(sft|pt)\.py"
    ),
    "TRL": re.compile(
        r"\btrl(?:\s+|/scripts/)(\w+)|\bscripts/(sft|dpo|kto|orpo|cpo|reward)(?:_vlm|_modeling)?\.py"
    ),
    "LLaMA-Factory": re.compile(r"\bllamafactory-cli\s+(\w+)"),
}
_CONFIG = re.compile(r"(?:\s+|.*\s--config[\s=]+)['\"]?([^\s'\"-][^\s'\"]*\.(?:ya?ml|json))\b")
_LAUNCHED = {
    "nproc_per_node": "NPROC_PER_NODE",
    "num_processes": "NPROC_PER_NODE",
    "nnodes": "NNODES",
}
_VARIABLE = re.compile(r"^(\w+)=(.*)$")
_ASSIGNMENT = re.compile(r"(?:export\s+)?(\w+)=([^\s$`]*)")
_SHELL_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)")
_OTHER_FILES = {
    "compute_environment": "a config of accelerate, which says how processes are started",
    "distributed_type": "a config of accelerate, which says how processes are started",
    "zero_optimization": "a config of DeepSpeed",
    "model_class": "a config of LLaMA-Factory's second trainer (v1), which is not read; that of its first one is",
}


@dataclass(frozen=True)
class Foreign:
    """Settings by key, the line of each, and the tool and its command where the file names them."""

    settings: Mapping[str, Any]
    lines: Mapping[str, int]
    peer: str | None = None
    command: str | None = None
    more: dict[int, str] = field(default_factory=dict)
    """Further training commands of a script, by their lines."""


def read_foreign(path: Path) -> Foreign:
    """The settings of a file. Raises ConfigError where there are none."""
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "no such file"
        raise ConfigError(
            f"{path}: {found}; expected a config of another tool. Nothing was written."
        )
    if path.suffix in _SCRIPTS:
        return _read_script(path)
    entries, problems = read_entries(path)
    if problems:
        raise ConfigError([str(problem) for problem in problems])
    try:
        settings = parse_value(path.read_text("utf-8-sig"))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}. Nothing was written.") from None
    if not settings:
        raise ConfigError(f"{path}: holds no setting. Nothing was written.")
    for key, what in _OTHER_FILES.items():
        if key in settings:
            raise ConfigError(
                f"{path}: is {what}; expected the config of a training run. Nothing was written."
            )
    data, model = settings.get("data"), settings.get("model")
    if (
        isinstance(data, dict)
        and "train" in data
        and not (isinstance(model, dict) and "model_name" in model)
    ):
        raise ConfigError(
            f"{path}: is a run file of kubetune already; see `kubetune plan`. Nothing was written."
        )
    lines: dict[str, int] = {}
    for entry in entries:
        lines.setdefault(str(entry.path[0]), entry.origin.line)
    return Foreign(settings, lines)


def _read_script(path: Path) -> Foreign:
    """Settings of the first training command of a shell script, with the variables set before it."""
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is no text file. Nothing was written.") from None
    known, exported, first = dict[str, str](), dict[str, Any](), None
    for number, written in _commands(text):
        command = _without_comment(_SHELL_VARIABLE.sub(lambda found: _known(found, known), written))
        if found := _ASSIGNMENT.fullmatch(command.strip()):
            known[found[1]] = found[2].strip("'\"")
            if command.lstrip().startswith("export "):
                exported[found[1]] = _value(known[found[1]])
        for peer, pattern in _COMMANDS.items():
            if found := pattern.search(command):
                if first is not None:
                    first.more[number] = command.strip()
                    break
                verb = next(filter(None, found.groups()))
                before, after = command[: found.start()], command[found.end() :]
                settings = (
                    exported
                    | _variables(before)
                    | _from_file(after, path)
                    | _arguments(after, path, number)
                )
                for key, value in _arguments(before, path, number).items():
                    value = (
                        value[0] if isinstance(value, list) else value
                    )  # the others are the program's name
                    settings[_LAUNCHED.get(key, f"launcher --{key}")] = value
                more = (
                    {number: after[again.start() :].strip()}
                    if (again := pattern.search(after))
                    else {}
                )
                first = Foreign(settings, dict.fromkeys(settings, number), peer, verb, more)
    if first is not None:
        return first
    raise ConfigError(
        f"{path}: holds no command that is known; expected `swift sft` or `rlhf`, `trl sft` or `dpo`, or "
        "`llamafactory-cli train`, with its arguments. Nothing was written."
    )


def _known(found: re.Match[str], known: Mapping[str, str]) -> str:
    """Value of a variable: the one set above, or its own default, or itself."""
    return known.get(found[1] or found[3], found[0] if found[2] is None else found[2])


def _commands(text: str) -> Iterator[tuple[int, str]]:
    """Each command with the line it begins in; lines that end in a backslash belong together."""
    start, parts = 1, list[str]()
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
    """A `#` that begins a word begins a comment; within a word, as in `chats#500`, or in quotes it is none."""
    quote = ""
    for place, letter in enumerate(command):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter == "#" and (place == 0 or command[place - 1].isspace()):
            return command[:place]
    return command


def _variables(text: str) -> dict[str, Any]:
    """`NPROC_PER_NODE=4` before the command; other variables are settings of other programs."""
    try:
        words = shlex.split(text)
    except ValueError:
        return {}
    return {found[1]: _value(found[2]) for word in words if (found := _VARIABLE.match(word))}


def _from_file(text: str, path: Path) -> dict[str, Any]:
    """Settings that a command is given in a file, as in `swift sft config.yaml` and `trl sft --config config.yaml`."""
    found = _CONFIG.match(text)
    if found is None:
        return {}
    # Such commands are called from the root of a repository, which is above the script.
    places = [folder / found[1] for folder in (*path.absolute().parents, Path.cwd())]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise ConfigError(
            f"{path}: takes its settings from {found[1]}, which is not found. Nothing was written."
        )
    return dict(read_foreign(file).settings)


def _arguments(text: str, path: Path, number: int) -> dict[str, Any]:
    """`--key value`, `--key=value`, `--key a b` and `--flag`."""
    text = re.sub(r"\$\([^)]*\)", lambda found: shlex.quote(found[0]), text)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            f"{path}:{number}: is no shell command that can be read: {error}"
        ) from None
    settings: dict[str, Any] = {}
    key: str | None = None
    for word in words:
        if word in (";", "&&", "||", "|", "&") or word.startswith((">", "2>")):
            break
        if word.startswith("--"):
            name, sign, value = word.removeprefix("--").partition("=")
            key = name.replace("-", "_")
            settings[key] = _value(value) if sign else True
        elif key is not None:
            before = settings[key]
            more = _value(word)
            settings[key] = (
                more
                if before is True
                else [*(before if isinstance(before, list) else [before]), more]
            )
    return settings


def _value(text: str) -> Any:
    if text.startswith("{"):
        return text
    try:
        return parse_value(text) if text else None
    except ValueError:
        return text
