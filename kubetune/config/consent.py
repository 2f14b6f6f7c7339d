"""Consent to code: the settings that have code run, and what this user has allowed on this machine.

A run file that is named on the command line is the user's own act, and so is starting it. What is opened, such as a run
directory, may be somebody else's: what it says is data. Code that it names runs only where the user has allowed that
very code here. Three things count: this machine's defaults file says the same; a digest of it was written down when the
user started a run with it; or the user types that digest (`--trust-code`), which is then written down too.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kubetune.base import files
from kubetune.config.load import load_config, resolved
from kubetune.config.naming import STARTED
from kubetune.config.schema import Config, DataConfig, EvaluationConfig, ModelConfig
from kubetune.config.schema.tracking import HooksConfig
from kubetune.errors import ConfigError, EnvironmentFault, KubetuneError

REMOTE_CODE: Final = "model.trust_remote_code"
METRICS: Final = "evaluation.metrics"
TASKS: Final = "evaluation.benchmarks.tasks_folder"
CODE: Final = ("hooks", METRICS, TASKS, REMOTE_CODE)
"""Keys of a run file, or sections of it, that have code run."""

_OF_CHECKPOINTS = ("manifest.json", "state.json")
_MOST_TASK_FILES = 10_000
_DIGEST_CHARACTERS = 40


@dataclass(frozen=True)
class Code:
    """Code that a config names."""

    key: str  # dotted key of the run file
    what: str  # the code in words, for messages
    digest: str  # SHA-256 of the key, of what it says, and of the files that it names


def code_of(config: Config, keys: Collection[str] = CODE) -> list[Code]:
    """Return the code that a config names by any of `keys`."""
    named = _named(config.hooks, config.evaluation, config.model)
    return [named[key] for key in keys if key in named]


def of_folder(folder: Path) -> Code:
    """Return the code that a model's folder brings, such as a checkpoint's, which no commit of the hub pins."""
    return _remote_code(folder_digest(folder), str(folder))


def cache_of(data: DataConfig) -> Code | None:
    """Return the folder of prepared data that a run file names, which is allowed as code is; None where it names none.

    Files are written there: a run directory of somebody else may not say where.
    """
    if data.cache is None:
        return None
    folder = _absolute(data.cache)
    return _code("data.cache", f"the folder {folder}", folder)


def folder_digest(folder: Path) -> str:
    """Return the digest of what can make code run: the Python and JSON files below a folder.

    Of a checkpoint without those two that differ in each, and that name no code.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix not in (".py", ".json") or name in _OF_CHECKPOINTS or not path.is_file():
            continue
        with files.open_inside(path, folder) as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{name}\0{content}\n".encode())
    return digest.hexdigest()[:_DIGEST_CHARACTERS]


def require(code: Sequence[Code], whose: Path, given: str | None = None) -> None:
    """Raise ConfigError for code of a run directory, `whose`, that the user has not allowed here.

    `given`: the digest that the user typed; where it is that of the code, it is allowed from now on.
    """
    if is_started(whose):
        return
    refused = [one for one in code if not is_allowed(one)]
    if not refused:
        return
    digest = _together(refused)
    if given is not None and given == digest:
        allow(refused)
        return
    problems = [
        f"{whose}: {one.key} has code run that nobody allowed here: {one.what}" for one in refused
    ]
    wrong = (
        "" if given is None else f"--trust-code is {given}, which is not the digest of this code; "
    )
    problems.append(
        f"{wrong}read the code; if you want it to run on this machine, add --trust-code {digest} to the command in a "
        "terminal. Nothing was run."
    )
    raise ConfigError(problems)


def is_started(run_dir: Path) -> bool:
    """True in a process that the supervisor of this run has begun after its last step."""
    return os.environ.get(STARTED) == os.path.realpath(run_dir)


def is_allowed(code: Code) -> bool:
    """True if this user has allowed this code on this machine."""
    if code.digest in {one.digest for one in _of_defaults()}:
        return True
    folder = _folder(os.environ)
    return folder is not None and (folder / f"{code.digest}.json").is_file()


def allow(code: Sequence[Code]) -> None:
    """Write down that the user has allowed this code. Where that cannot be written, it will be asked for again."""
    folder = _folder(os.environ)
    if folder is None:
        return
    for item in code:
        file = folder / f"{item.digest}.json"
        if not file.is_file():
            with suppress(EnvironmentFault):
                files.write_atomic(file, json.dumps({"key": item.key, "what": item.what}) + "\n")


def allow_start(config: Config) -> None:
    """Write down that the user starts a run here: its code, and the folder that it caches in, are allowed."""
    code = code_of(config)
    cache = cache_of(config.data)
    if cache is not None:
        code.append(cache)
    allow(code)


def _folder(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of what was allowed; None for a user without a home."""
    try:
        state = Path(environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    except RuntimeError:
        return None
    return state / "kubetune" / "allowed-code"


def _of_defaults() -> list[Code]:
    """Return the code that this machine's defaults file names."""
    try:
        return code_of(load_config({"model": {"path": "any"}, "data": {"train": "any.jsonl"}}))
    except KubetuneError:
        return []  # whoever loads a run file hears what is wrong with it


def _together(code: Sequence[Code]) -> str:
    digest = hashlib.sha256("".join(sorted(item.digest for item in code)).encode())
    return digest.hexdigest()[:_DIGEST_CHARACTERS]


def _named(hooks: HooksConfig, evaluation: EvaluationConfig, model: ModelConfig) -> dict[str, Code]:
    """Return the code that a run file names, by the key that names it."""
    named: dict[str, Code] = {}
    command = hooks.on_event
    if command is not None:
        named["hooks"] = _code("hooks", f"the command {command}", command)
    metrics = evaluation.metrics
    if metrics is not None:
        file = _absolute(metrics.file)
        named[METRICS] = _code(METRICS, f"the file {file}", [file, *_contents([Path(file)])])
    benchmarks = evaluation.benchmarks
    if benchmarks is not None and benchmarks.tasks_folder is not None:
        folder = _absolute(benchmarks.tasks_folder)
        content = [folder, *_contents(_task_files(Path(folder)))]
        named[TASKS] = _code(TASKS, f"task files of {folder}, which may import Python", content)
    if model.trust_remote_code:
        named[REMOTE_CODE] = _remote_code(str(model.revision), model.path)
    return named


def _remote_code(pin: str, where: str) -> Code:
    """Return the code of a model by its pin, wherever it lies: a commit, or the digest of a folder."""
    return _code(REMOTE_CODE, f"Python code of the model {where}, pinned by {pin}", pin)


def _code(key: str, what: str, content: Any) -> Code:
    text = json.dumps([key, content], sort_keys=True)
    return Code(key, what, hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest())


def _absolute(path: str) -> str:
    return os.path.abspath(Path(path).expanduser())


def _task_files(folder: Path) -> Iterator[Path]:
    """Return the files of a folder of tasks, as many as are compared."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    yield from paths[:_MOST_TASK_FILES]


def _contents(paths: Iterator[Path] | Sequence[Path]) -> Iterator[str]:
    """Return name and SHA-256 of each file, or that it cannot be read."""
    for path in paths:
        try:
            yield f"{path} {files.sha256_file(path)}"
        except (OSError, KubetuneError):
            yield f"{path} cannot be read"


def changed(config: Config, base: Config) -> list[str]:
    """Return the keys of CODE that two configs have otherwise."""
    mine, other = resolved(config), resolved(base)
    return [key for key in CODE if _at(mine, key) != _at(other, key)]


def _at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = (values or {}).get(part)
    return values
