"""Consent: the settings by which a run acts outside of its directory, and what this user has allowed on this machine.

A user who names a run file on the command line, or starts it, agrees to what it does. A run directory that the user
only opens may come from somebody else, so its settings are data: they may not run code, write files elsewhere or send
data unless the user has allowed exactly that on this machine. There are three ways to allow it:

- this machine's defaults file has the same setting;
- the user has started a run with it here, and its digest was saved then;
- the user types the digest (`--trust-code`), which saves it too.
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
from kubetune.config.load import load_config
from kubetune.config.resolved import resolved
from kubetune.config.schema import Config, DataConfig, EvaluationConfig, ModelConfig, RewardConfig
from kubetune.config.schema.distill import DistillConfig
from kubetune.config.schema.grpo import ServersConfig
from kubetune.config.schema.tracking import HooksConfig, PushConfig, TrackingConfig
from kubetune.errors import ConfigError, EnvironmentFault, KubetuneError

# Environment variable with the run directory that the user has started. The supervisor sets it for benchmarks and the
# other processes after the last step, so that they need not ask for consent again.
STARTED = "KUBETUNE_STARTED"

REMOTE_CODE: Final = "model.trust_remote_code"
METRICS: Final = "evaluation.metrics"
TASKS: Final = "evaluation.benchmarks.tasks_folder"
REWARDS: Final = "rewards"
# Keys of a run file, or sections of it, that have code run.
CODE: Final = ("hooks", METRICS, TASKS, REWARDS, REMOTE_CODE)

CACHE: Final = "data.cache"
# Keys that have files written outside of the run directory.
WRITTEN: Final = (CACHE, "logging.report_json")
# Keys that have numbers or weights sent elsewhere.
SENT: Final = (
    "mirror", "push", "tracking.mlflow", "tracking.wandb", "tracking.trackio", "grpo.servers",
    "distill.teacher",
)  # fmt: skip
EFFECTS: Final = (*CODE, *WRITTEN, *SENT)

_OF_CHECKPOINTS = ("manifest.json", "state.json")
_MOST_TASK_FILES = 10_000
_DIGEST_CHARACTERS = 40


@dataclass(frozen=True)
class Effect:
    """One thing that a config does outside of its run directory: it runs code, writes files or sends data."""

    key: str  # dotted key of the run file
    does: str  # "has code run", "has files written" or "has data sent", for messages
    what: str  # the code, the place or the address in words, for messages
    digest: str  # SHA-256 of the key, of its value, and of the code that it names


def effects_of(config: Config, keys: Collection[str] = EFFECTS) -> list[Effect]:
    """Return what a config does outside of its run directory, of these keys."""
    named = {
        **_code_in(config.hooks, config.evaluation, config.model),
        **_code_of_rewards(config.rewards),
        **_written(config.data.cache, config.logging.report_json),
        **_sent(config.mirror, config.push, config.tracking, config.grpo.servers, config.distill),
    }
    return [named[key] for key in keys if key in named]


def of_folder(folder: Path) -> Effect:
    """Return the effect of loading a model's folder with code in it, such as a checkpoint. No commit pins that code."""
    return _remote_code(folder_digest(folder), str(folder))


def of_model(model: ModelConfig) -> list[Effect]:
    """Return the code that a model brings, if its section lets it run."""
    # Code on the hub is pinned by its commit; without one, the newest runs.
    if not model.trust_remote_code:
        return []
    return [_remote_code(str(model.revision), model.path)]


def of_cache(data: DataConfig) -> list[Effect]:
    """Return the folder of prepared data that a run file names, if any."""
    return list(_written(data.cache, None).values())


def of_sent_file(path: str) -> Effect:
    """Return the effect of sending a file of this machine to a cluster."""
    return _effect("data", "has data sent", f"the file {path}, to a cluster", path)


def folder_digest(folder: Path) -> str:
    """Return the digest of what can make code run: the Python and JSON files below a folder.

    A checkpoint's manifest.json and state.json are left out: they differ in every checkpoint and name no code.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        # JSON counts too: config.json names the Python classes that are loaded.
        if path.suffix not in (".py", ".json") or name in _OF_CHECKPOINTS or not path.is_file():
            continue
        with files.open_inside(path, folder) as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{name}\0{content}\n".encode())
    return digest.hexdigest()[:_DIGEST_CHARACTERS]


def require(
    effects: Sequence[Effect],
    whose: Path,  # the run directory or file that has these effects
    typed_digest: str | None = None,  # --trust-code; the right one allows these effects for good
    instead: str | None = None,  # advice for where nobody can type a digest
) -> None:
    """Raise ConfigError if the user has not allowed all of these effects on this machine."""
    if is_started(whose):
        return
    refused = [effect for effect in effects if not is_allowed(effect)]
    if not refused:
        return
    digest = _together(refused)
    if typed_digest == digest:
        allow(refused)
        return

    # The message names the digest, so that the user who has looked at the code can allow it.
    problems = []
    for effect in refused:
        problems.append(
            f"{whose}: {effect.key} {effect.does} that nobody allowed here: {effect.what}"
        )
    wrong = ""
    if typed_digest is not None:
        wrong = f"--trust-code is {typed_digest}, which is not the digest of this code; "
    by_digest = f"add --trust-code {digest} to the command in a terminal"
    problems.append(
        f"{wrong}look at it; if you want that on this machine, {instead or by_digest}. Nothing was run."
    )
    raise ConfigError(problems)


def is_started(run_dir: Path) -> bool:
    """True in a process that the supervisor of this run starts after the last step, such as benchmarks."""
    return os.environ.get(STARTED) == os.path.realpath(run_dir)


def is_allowed(effect: Effect) -> bool:
    """True if this user has allowed exactly this effect on this machine."""
    digests_of_defaults = {known.digest for known in _of_defaults()}
    if effect.digest in digests_of_defaults:
        return True
    folder = _folder(os.environ)
    return folder is not None and (folder / f"{effect.digest}.json").is_file()


def allow(effects: Sequence[Effect]) -> None:
    """Save that the user has allowed these effects. If it cannot be saved, the user is asked again next time."""
    folder = _folder(os.environ)
    if folder is None:
        return
    for effect in effects:
        place = folder / f"{effect.digest}.json"
        if not place.is_file():
            text = json.dumps({"key": effect.key, "what": effect.what}) + "\n"
            with suppress(EnvironmentFault):
                files.write_atomic(place, text)


def _folder(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of what was allowed. None if the user has no home directory."""
    try:
        state = Path(environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    except RuntimeError:
        return None
    return state / "kubetune" / "allowed-code"


def _of_defaults() -> list[Effect]:
    """Return the effects that this machine's defaults file has."""
    try:
        return effects_of(load_config({"model": {"path": "any"}, "data": {"train": "any.jsonl"}}))
    except KubetuneError:
        # A broken defaults file allows nothing. Loading a run file reports what is wrong with it.
        return []


def _together(effects: Sequence[Effect]) -> str:
    # Sorted, so that the same effects have the same digest in any order.
    digests = sorted(effect.digest for effect in effects)
    digest = hashlib.sha256("".join(digests).encode())
    return digest.hexdigest()[:_DIGEST_CHARACTERS]


def _code_in(
    hooks: HooksConfig, evaluation: EvaluationConfig, model: ModelConfig
) -> dict[str, Effect]:
    """Return the code that a run file names, by key."""
    named: dict[str, Effect] = {}
    # Each digest covers what runs: the command, or the content of the files.
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

    for code in of_model(model):
        named[REMOTE_CODE] = code
    return named


def _code_of_rewards(rewards: Sequence[RewardConfig]) -> dict[str, Effect]:
    """Return the files of functions that reward answers, as one effect; none where all rewards are built in."""
    # The file of a JSON schema is data.
    paths = sorted({_absolute(reward.file) for reward in rewards if reward.file and reward.is_code})
    if not paths:
        return {}
    content = [*paths, *_contents([Path(path) for path in paths])]
    what = f"the file {paths[0]}" if len(paths) == 1 else f"the files {', '.join(paths)}"
    return {REWARDS: _code(REWARDS, what, content)}


def _written(cache: str | None, report: str | None) -> dict[str, Effect]:
    """Return the places outside of the run directory where files are written, by key."""
    named = {}
    for key, path in zip(WRITTEN, (cache, report), strict=True):
        if path is not None:
            place = _absolute(path)
            named[key] = _effect(key, "has files written", place, place)
    return named


def _sent(
    mirror: str | None,
    push: PushConfig | None,
    tracking: TrackingConfig,
    servers: ServersConfig | None,
    distill: DistillConfig,
) -> dict[str, Effect]:
    """Return the addresses that numbers, weights or rows are sent to, by key."""
    addresses: dict[str, str] = {}
    if mirror is not None:
        addresses["mirror"] = mirror
    if push is not None:
        addresses["push"] = f"the hub's {push.repo}, {_who_sees(push.private)}"
    if tracking.mlflow is not None:
        addresses["tracking.mlflow"] = tracking.mlflow.uri
    wandb = tracking.wandb
    if wandb is not None:
        addresses["tracking.wandb"] = f"{wandb.entity or 'yourself'}/{wandb.project}"
    trackio = tracking.trackio
    if trackio is not None:
        place = trackio.server_url or trackio.dir or "your own Trackio"
        if trackio.space_id is not None:
            place = f"the hub's {trackio.space_id}, {_who_sees(trackio.private)}"
        addresses["tracking.trackio"] = place
    if servers is not None and servers.urls:
        addresses["grpo.servers"] = ", ".join(servers.urls)
    if distill.urls:
        addresses["distill.teacher"] = ", ".join(distill.urls)

    effects = {}
    for key, address in addresses.items():
        effects[key] = _effect(key, "has data sent", f"to {address}", address)
    return effects


def _who_sees(private: bool) -> str:
    # It is part of what the user allows.
    return "private" if private else "public"


def _remote_code(pin: str, where: str) -> Effect:
    """Return the effect of a model's code. `pin` is a commit or the digest of a folder; the place does not count."""
    return _code(REMOTE_CODE, f"Python code of the model {where}, pinned by {pin}", pin)


def _code(key: str, what: str, content: Any) -> Effect:
    return _effect(key, "has code run", what, content)


def _effect(key: str, does: str, what: str, content: Any) -> Effect:
    text = json.dumps([key, content], sort_keys=True)
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return Effect(key, does, what, digest)


def _absolute(path: str) -> str:
    return os.path.abspath(Path(path).expanduser())


def _task_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder of tasks, up to a limit."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    yield from paths[:_MOST_TASK_FILES]


def _contents(paths: Iterator[Path] | Sequence[Path]) -> Iterator[str]:
    """Yield the name and SHA-256 of each file, or that it cannot be read."""
    for path in paths:
        try:
            yield f"{path} {files.sha256_file(path)}"
        except (OSError, KubetuneError):
            yield f"{path} cannot be read"


def changed(config: Config, base: Config) -> list[str]:
    """Return the keys of EFFECTS whose values differ between two configs."""
    values = resolved(config)
    base_values = resolved(base)
    return [key for key in EFFECTS if _at(values, key) != _at(base_values, key)]


def _at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = (values or {}).get(part)
    return values
