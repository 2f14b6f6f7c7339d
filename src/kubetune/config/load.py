"""Make a Config from a run file, environment variables, flags and overrides, or list everything that is wrong.

Later sources win: the organisation's defaults < file < environment < flags < `key=value`. No file is written, and only
the file of defaults and the run file are read.
"""

from __future__ import annotations

import glob
import io
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML

from kubetune.base.files import StrPath, read_inside, require_inside
from kubetune.base.logs import secret_variable
from kubetune.base.provenance import (
    Entry,
    KeyPath,
    Origin,
    Problem,
    Tree,
    dotted,
    into_lists,
    key_path,
)
from kubetune.base.secrets import ADVICE, is_secret
from kubetune.base.yaml_reader import TOO_LARGE, FileText, is_too_large, parse_value, read_entries
from kubetune.config import json_schema, organisation
from kubetune.config.aliases import canonical, canonical_file
from kubetune.config.environment import max_samples, read_variables
from kubetune.config.naming import FOLDERS, RESOLVED
from kubetune.config.problems import explain
from kubetune.config.schema import Config
from kubetune.errors import ConfigError

log = logging.getLogger(__name__)

_SHOWN_PROBLEMS = 3
_MAPPING = Origin("config")
_STARTING = Origin("what a run without a file starts from")

# Keys whose value may be a local file or folder, as text or under `path` of a source.
LOCAL_PATHS: tuple[KeyPath, ...] = (
    ("model", "path"),
    ("model", "tokenizer"),
    ("model", "chat_template"),
    ("data", "train"),
    ("data", "eval"),
    ("evaluation", "metrics", "file"),
    ("evaluation", "forget", "data"),
    ("evaluation", "forget"),
)

# Sections that may be written as a text, and the key that the text stands for.
_SHORT_FORMS: dict[KeyPath, str] = {
    ("data", "train"): "path",
    ("data", "eval"): "path",
    ("push",): "repo",
}


def load_config(
    path: StrPath | FileText | Mapping[str, Any] | None,
    *,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    starting: Mapping[str, Any] | None = None,
) -> Config:
    """Return the config of one run, from a run file or from a mapping with the same keys.

    `overrides` are `key=value` texts, `flags` are values by dotted key (`{"training.seed": 1}`), and `environ` holds
    variables such as `LR` (see environment.VARIABLES); no variable counts if it is left out. `starting`: values that all
    others win over, of a run that has no file (see starting_values).

    A relative path in the file means a file beside it if there is one, else one in the current directory. Paths that
    exist come back absolute, so that workers that start elsewhere find them.

    Raise ConfigError with every problem. Checks between sections run only when each key is right by itself.
    """
    # Read and merge everything first, then check: so that all mistakes are shown at once, each with its line.
    tree, problems = read_tree(
        path, overrides=overrides, flags=flags, environ=environ, starting=starting
    )
    try:
        config = Config.model_validate_json(json.dumps(tree.data), strict=True)
    except ValidationError as error:
        problems += explain(error.errors(include_url=False), tree)
    if problems:
        # By file and line. Two checks may say the same of one key.
        texts = [str(problem) for problem in sorted(problems)]
        raise ConfigError(list(dict.fromkeys(texts)))
    return config


def read_tree(
    path: StrPath | FileText | Mapping[str, Any] | None,
    *,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    starting: Mapping[str, Any] | None = None,
) -> tuple[Tree, list[Problem]]:
    """Merge the settings of all sources, each with its origin. Return the tree and what is wrong so far."""
    problems: list[Problem] = []
    here = Path.cwd()

    # What the run file says.
    written: list[Entry] = []
    folders = [here]
    if isinstance(path, Mapping):
        tree = Tree(_MAPPING)
        written, doubled = canonical_file(_from_mapping(path, (), problems))
        problems += doubled
    else:
        place = path.path if isinstance(path, FileText) else path
        tree = Tree(Origin(str(place) if place else "command line"))
        if place is not None:
            written = _written(path if isinstance(path, FileText) else Path(place), problems)
            folders = [Path(place).absolute().parent, here]

    # What environment and command line say, in our spelling.
    typed = [
        *_from_environment(environ or {}, problems),
        *_from_flags(flags or {}),
        *_split(overrides, problems),
    ]
    ours: list[Entry] = []
    for entry in typed:
        known = canonical(entry)
        if known is not None:
            ours += _steps(entry, known)

    # Later layers win: values to start from, defaults, then the file, then what was typed.
    _put_lowest(tree, starting or {}, (*written, *ours), problems)
    tree.put(_safe(_absolute(written, folders), problems))

    _put_typed(tree, ours, here, problems)

    # Short forms that need the whole tree.
    _sample_sources(tree, environ or {}, problems)
    _split_output(tree, problems)
    return tree, problems


def _written(file: Path | FileText, problems: list[Problem]) -> list[Entry]:
    """Return the settings of a YAML file under our names, and add what is wrong with it to `problems`."""
    entries, broken = read_entries(file)
    entries, doubled = canonical_file(entries)
    problems += broken + doubled
    return entries


def _put_typed(tree: Tree, ours: list[Entry], folder: Path, problems: list[Problem]) -> None:
    """Put what was typed into the tree that has the file's settings: its lists and sections are there to be changed."""
    _displace_global_batch(tree, {entry.path for entry in ours})
    sections = _into_sections(ours, tree, problems)
    whole_lists = into_lists(sections, tree, problems, whole="path")
    tree.put(_safe(_absolute(whole_lists, [folder]), problems))


def _into_sections(
    entries: Iterable[Entry], tree: Tree, problems: list[Problem]
) -> Iterator[Entry]:
    """Yield the entries. What was written as a text becomes a section before a key of it is set.

    `--data faq.csv data.train.columns.prompt=q` means `data.train: {path: faq.csv, columns: {prompt: q}}`. A key of a
    list of several has no item that it belongs to, and is a problem.
    """
    for entry in entries:
        section = _short_form_above(entry.path)
        if section is None:
            yield entry
            continue
        written = tree.find(section)
        # `--data` may be repeated, so it makes a list.
        if isinstance(written, list) and len(written) == 1:
            written = written[0]
            yield Entry(section, written, tree.origin(section))
        if isinstance(written, list):
            example = dotted((*section, 0, *entry.path[len(section) :]))
            what = f"{dotted(section)} is a list; expected a key of one of its items, such as {example}"
            problems.append(Problem(entry.origin, f"{dotted(entry.path)}: {what}"))
            continue
        if isinstance(written, str):
            yield Entry(section, {_SHORT_FORMS[section]: written}, tree.origin(section))
        yield entry


def _short_form_above(path: KeyPath) -> KeyPath | None:
    """Return the section with a short form that `path` is a key of; None where there is none, or `path` is an item."""
    for section in _SHORT_FORMS:
        is_below = path[: len(section)] == section and len(path) > len(section)
        if is_below and not isinstance(path[len(section)], int):
            return section
    return None


def _put_lowest(
    tree: Tree, starting: Mapping[str, Any], others: Iterable[Entry], problems: list[Problem]
) -> None:
    """Put what all `others` win over into the tree: values to start from, then the organisation's defaults."""
    entries = []
    for entry in _from_mapping(starting, (), problems):
        entries.append(replace(entry, origin=_STARTING))
    tree.put(entries)
    sections = {str(entry.path[0]) for entry in (*entries, *others)}
    _put_defaults(tree, sections, problems)


def _put_defaults(tree: Tree, sections: set[str], problems: list[Problem]) -> None:
    """Put the organisation's defaults into the tree first, so that every other source wins over them.

    They belong to the machine, so this process's environment names them, even if `environ` is another one.
    """
    place = organisation.defaults_file(os.environ)
    if place is None:
        return
    entries = _written(place, problems)
    tree.put(_safe(organisation.fitting(entries, sections, problems), problems))
    log.info(
        "defaults of %s are laid under the run file (`kubetune plan --origins` shows which)", place
    )


def _sample_sources(tree: Tree, environ: Mapping[str, str], problems: list[Problem]) -> None:
    """Add `#N` of MAX_SAMPLES to every training source that has no number yet."""
    try:
        # MAX_SAMPLES is no key of the file, so it is read here and not with the other variables.
        number = max_samples(environ)
    except ValueError as error:
        problems.append(Problem(Origin("environment variable MAX_SAMPLES"), str(error)))
        return

    data = tree.data.get("data")
    if number is None or not isinstance(data, dict):
        return

    def limited(source: Any) -> Any:
        if isinstance(source, list):
            return [limited(item) for item in source]
        if isinstance(source, dict):
            return {**source, "path": limited(source.get("path"))}
        if isinstance(source, str) and "#" not in source:
            return f"{source}#{number}"
        return source

    data["train"] = limited(data.get("train"))


def _split_output(tree: Tree, problems: list[Problem]) -> None:
    """Unfold the short form of a mirror.

    output: s3://bucket/run  →  output: outputs/bucket/run
                                mirror: s3://bucket/run
    """
    output = tree.data.get("output")
    if not isinstance(output, str) or "://" not in output:
        return

    # s3://bucket/run has a bucket and a folder in it; a whole bucket cannot be one run's.
    origin = tree.origin(("output",))
    address = output.strip().rstrip("/")
    _, _, place = address.partition("://")
    bucket, _, folder = place.partition("/")
    if not bucket or not folder.strip("/"):
        message = (
            f"output: found {output}; expected a folder, or SCHEME://BUCKET/PATH of an object store"
        )
        problems.append(Problem(origin, message))
        return

    # A `mirror` of its own may name the same address, but no other.
    mirror = tree.data.get("mirror")
    if mirror not in (None, address):
        message = (
            f"output: found {output} beside mirror: {mirror}; leave one out, or make them agree"
        )
        problems.append(Problem(origin, message))
    tree.data |= {"output": f"outputs/{place}", "mirror": address}


def _displace_global_batch(tree: Tree, typed: set[KeyPath]) -> None:
    """Let accumulation that the user types, or sets in the environment, decide over the file's global batch.

    The two contradict each other, and the later source wins. `packed` is a multiple of the accumulation, so it stays.
    """
    training = tree.data.get("training")
    if ("training", "gradient_accumulation_steps") not in typed or not isinstance(training, dict):
        return
    for key in ("global_batch_size", "global_batch_tokens"):
        if ("training", key) not in typed and training.get(key) not in (None, "packed"):
            log.info(
                "gradient_accumulation_steps decides the global batch; the file's %s is left out",
                key,
            )
            del training[key]


def resolved(config: Config) -> dict[str, Any]:
    """Return the whole config, defaults included, as data for JSON. `load_resolved` reads it back equal."""
    return config.model_dump(mode="json", by_alias=True)


def values_by_path(data: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every value in `resolved` data with its path. Lists count as values, and keys may have dots in them."""
    if isinstance(data, dict) and data:
        for key, inner in data.items():
            yield from values_by_path(inner, (*path, key))
    else:
        yield path, data


def dotted_values(data: Any) -> Iterator[tuple[str, Any]]:
    """Yield every value in `resolved` data with its dotted path. Lists count as values."""
    return ((dotted(path), value) for path, value in values_by_path(data))


def load_resolved(source: Mapping[str, Any] | Path, where: str = "resolved config") -> Config:
    """Return the Config of `resolved` data, or of the JSON file that holds it. Raise ConfigError.

    `where` names the source of data for messages.
    """
    try:
        text: str | bytes
        if isinstance(source, Path):
            text = read_inside(source)
        else:
            text = json.dumps(source)
        return Config.model_validate_json(text, strict=True)
    except ValidationError as error:
        reasons = []
        for detail in error.errors(include_url=False)[:_SHOWN_PROBLEMS]:
            # A check of the whole config has no place in it.
            where_and_what = f"{dotted(detail['loc'])}: {detail['msg']}"
            reasons.append(where_and_what.removeprefix(": "))
        reason = "; ".join(reasons)
    except (OSError, ValueError, TypeError, RecursionError) as error:  # also what is no UTF-8
        reason = str(error)
    name = source if isinstance(source, Path) else where
    raise ConfigError(
        f"{name}: not a config written by this version of kubetune, or a damaged one: {reason}"
    )


def read_config(run_dir: Path) -> Config:
    """Return the config of a run. Raise ConfigError if the folder is no run directory.

    Raise EnvironmentFault if a folder in it is a link that leads out of the run directory.
    """
    if not run_dir.is_dir():
        # pathlib has made s3:/bucket of s3://bucket.
        if address := re.fullmatch(r"([a-z][a-z0-9]+):(/.*)?", str(run_dir)):
            scheme = address[1]
            raise ConfigError(
                f"{scheme}:/{address[2] or '/'}: is an address of an object store; expected a run directory: "
                f"`kubetune sync {scheme}://BUCKET/RUN FOLDER` fetches one"
            )
        raise ConfigError(
            f"{run_dir}: no such folder; expected a run directory (`kubetune runs` lists them)"
        )
    if not (run_dir / RESOLVED).exists():
        raise ConfigError(
            f"{run_dir} is no run directory: it has no resolved.json (`kubetune runs` lists them)"
        )
    # A received run directory may have `checkpoints` as a link to somewhere else.
    for name in FOLDERS:
        if (run_dir / name).is_symlink():
            require_inside(run_dir / name, run_dir)
    return load_resolved(run_dir / RESOLVED)


def as_yaml(config: Config) -> str:
    """Return the text of a run file that loads as an equal config. It names only what differs from the defaults."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    # In the order of the schema.
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    stream = io.StringIO()
    yaml.dump(config.model_dump(mode="json", by_alias=True, exclude_defaults=True), stream)
    return stream.getvalue()


def _steps(typed: Entry, ours: Entry) -> Iterator[Entry]:
    """Yield what an override does. `training=null` first removes the keys of that section, then begins it anew."""
    if typed.value is None and ours.value == {}:
        yield replace(ours, value=None)
    yield ours


def _from_environment(environ: Mapping[str, str], problems: list[Problem]) -> Iterator[Entry]:
    for key, text, origin in read_variables(environ):
        yield from _parsed(key, text, origin, problems)


def _from_mapping(
    values: Mapping[Any, Any], path: KeyPath, problems: list[Problem]
) -> Iterator[Entry]:
    """Yield the settings of a mapping. Keys and values that no run file could hold are problems."""
    for key, value in values.items():
        here = (*path, key)
        if not isinstance(key, str):
            where = dotted(path) or "the top"
            problems.append(Problem(_MAPPING, f"{where}: found the key {key!r}; expected a text"))
        elif isinstance(value, Mapping):
            yield Entry(here, {}, _MAPPING)
            yield from _from_mapping(value, here, problems)
        else:
            try:
                yield Entry(here, _plain(value), _MAPPING)
            except TypeError as error:
                problems.append(Problem(_MAPPING, f"{dotted(here)}: {error}"))


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: paths as text, tuples as lists. Raise TypeError for anything else."""
    # Python users pass paths and tuples, which a file does not have.
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if is_too_large(value):
        raise TypeError(TOO_LARGE)
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise TypeError(
        f"found a value of type {type(value).__name__}; expected text, a number, a list or a mapping"
    )


def _from_flags(flags: Mapping[str, Any]) -> Iterator[Entry]:
    for key, value in flags.items():
        yield Entry(tuple(key.split(".")), value, Origin("command line"))


def _split(overrides: Sequence[str], problems: list[Problem]) -> Iterator[Entry]:
    """Yield the settings of `key=value` overrides in their order.

    A later override may change an earlier one, as wrappers around kubetune do; a warning says so.
    """
    seen: list[Entry] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        # `seed`, `=1` and `training.=1` are no overrides.
        if not equals or not all(key.split(".")):
            origin = Origin("command line")
            problems.append(
                Problem(origin, f"found {override!r}; expected key=value, such as training.seed=1")
            )
            continue
        for entry in _parsed(key, text.strip(), Origin("override"), problems):
            # Compared in our spelling: `lr=1` and `training.learning_rate=2` are one key.
            ours = canonical(entry) or entry
            parts = [ours]
            if isinstance(ours.value, Mapping):
                parts += _from_mapping(ours.value, ours.path, [])
            # Wrappers append overrides to those of their users, so a second one is allowed.
            if any(_undoes(parts, earlier) for earlier in seen):
                log.warning("override %s: given twice, with other values; the last one counts", key)
            seen += parts
            yield entry


def _undoes(parts: Sequence[Entry], earlier: Entry) -> bool:
    """True if an override changes or removes what an earlier one set.

    `parts`: the override itself, then each key of it if it is a mapping. `lora={r: 8}` undoes `lora.r=16` and
    `lora.alpha=32`, but not `lora.r=8`.
    """
    path = parts[0].path
    if earlier.path[: len(path)] != path:
        return False
    return all((earlier.path, earlier.value) != (part.path, part.value) for part in parts)


def _parsed(key: str, text: str, origin: Origin, problems: list[Problem]) -> Iterator[Entry]:
    """Yield the entry of `key=text`, with the text read as YAML. What can only be text is not read: `name=123`."""
    entry = Entry(key_path(key), text, origin)
    ours = canonical(entry)
    is_section = entry.path == ("model",) and text.startswith("{")
    is_null = text in ("", "null", "~")
    is_text = ours is not None and json_schema.wants_text(ours.path)
    if is_text and not is_null and not is_section:
        yield entry
        return
    try:
        yield replace(entry, value=parse_value(text))
    except ValueError as error:
        problems.append(Problem(origin, f"{key}: {error}"))


def _safe(entries: Iterable[Entry], problems: list[Problem]) -> Iterator[Entry]:
    """Yield the entries without secrets. Each secret is a problem, whose message does not repeat it."""
    for entry in entries:
        secrets = _secrets_in(entry) or _environment_secrets(entry)
        problems += secrets
        if not secrets:
            yield entry


def _secrets_in(entry: Entry) -> list[Problem]:
    """Return a problem for each text of an entry that looks like a secret, or whose key says that it is one."""
    suspects = []
    for inner, text in _texts(entry.value):
        if is_secret(entry.path + inner, text, known=False):
            suspects.append((inner, text))
    if not suspects:
        return []

    # Only now, since making the schema takes long for a verb that answers at once.
    known = entry.path[-1] in json_schema.keys(json_schema.at(entry.path[:-1]) or {})
    problems = []
    for inner, text in suspects:
        if is_secret(entry.path + inner, text, known=known):
            origin = entry.inner.get(inner, entry.origin)
            problems.append(Problem(origin, f"{dotted(entry.path)}: {ADVICE}"))
    return problems


def _environment_secrets(entry: Entry) -> list[Problem]:
    """Return a problem for each text of an entry that holds the value of a secret environment variable."""
    problems = []
    for inner, text in _texts(entry.value):
        name = secret_variable(text)
        if name is not None:
            origin = entry.inner.get(inner, entry.origin)
            what = f"{dotted(entry.path)}: holds the value of the environment variable {name}"
            problems.append(Problem(origin, f"{what}; {ADVICE}"))
    return problems


def _texts(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield every text in a value, with its path inside the value."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, (*path, index))


def _absolute(entries: Iterable[Entry], folders: Sequence[Path]) -> Iterator[Entry]:
    """Yield the entries. Local paths that exist, alone or below one of `folders`, are made absolute."""
    for entry in entries:
        is_local = any(entry.path in (known, (*known, "path")) for known in LOCAL_PATHS)
        if is_local:
            yield replace(entry, value=_find(entry.value, folders))
        elif entry.path == ("rewards",):
            yield replace(entry, value=_with_absolute_files(entry.value, folders))
        else:
            yield entry


def _with_absolute_files(rewards: Any, folders: Sequence[Path]) -> Any:
    """Return rewards whose files and models have their absolute paths if they exist; other names stay."""
    if isinstance(rewards, list):
        return [_with_absolute_files(reward, folders) for reward in rewards]
    if not isinstance(rewards, dict):
        return rewards
    changed = dict(rewards)
    for key in ("file", "reward_model", "teacher"):
        if isinstance(rewards.get(key), str):
            changed[key] = _find(rewards[key], folders)
    return changed


def _find(value: Any, folders: Sequence[Path]) -> Any:
    """Return a path, or a source or list of sources with its paths, made absolute if the file exists."""
    if isinstance(value, list):
        return [_find(item, folders) for item in value]
    if isinstance(value, dict) and "path" in value:
        return {**value, "path": _find(value["path"], folders)}
    if not isinstance(value, str) or "://" in value or "\0" in value:
        return value
    # `train.jsonl#500`: a file of the whole name goes first, since # is valid in a name.
    path, mark, count = value.rpartition("#")
    for folder in folders:
        whole = _below(folder, value)
        if whole is not None:
            return whole
        if mark and count.isdecimal():
            file = _below(folder, path)
            if file is not None:
                return f"{file}#{count}"
    return value


def _below(folder: Path, name: str) -> str | None:
    """Return the absolute path of a file, a folder or a pattern with matches. None if there is none."""
    if not name:
        return None
    place = folder / Path(name).expanduser()
    is_pattern = any(char in name for char in "*?[")
    if place.exists() or (is_pattern and glob.glob(str(place), recursive=True)):
        return os.path.normpath(place)
    return None
