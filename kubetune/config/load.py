"""From a run file, environment variables, flags and overrides to a Config, or to everything that is wrong.

Later sources win: the organisation's defaults < file < environment < flags < `key=value`. Nothing is written, and
nothing but these two files is read.
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
"""Keys whose value may be a local file or folder; the sources below `data` hold theirs as text or under `path`."""


def load_config(
    path: StrPath | FileText | Mapping[str, Any] | None,
    *,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """The config of one run: of a run file, or of a mapping with the keys of one.

    `overrides` are `key=value` texts, `flags` values by dotted path (`{"training.seed": 1}`); `environ` is read only
    when given (see environment.VARIABLES). A relative path in the file means a file beside it if there is one, else
    one in the current directory; existing local paths come back absolute, so that workers started elsewhere find them.
    Raises ConfigError with every problem found; checks between sections come when each key is right by itself.
    """
    tree, problems = read_tree(path, overrides=overrides, flags=flags, environ=environ)
    try:
        config = Config.model_validate_json(json.dumps(tree.data), strict=True)
    except ValidationError as error:
        problems += explain(error.errors(include_url=False), tree)
    if problems:
        raise ConfigError(list(dict.fromkeys(str(problem) for problem in sorted(problems))))
    return config


def read_tree(
    path: StrPath | FileText | Mapping[str, Any] | None,
    *,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[Tree, list[Problem]]:
    """Settings laid over one another with their origins, of which `load_config` makes a config, and what is wrong."""
    problems: list[Problem] = []
    here = Path.cwd()
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
    typed = [
        *_from_environment(environ or {}, problems),
        *_from_flags(flags or {}),
        *_split(overrides, problems),
    ]
    ours = [
        step
        for entry in typed
        if (known := canonical(entry)) is not None
        for step in _steps(entry, known)
    ]
    _put_defaults(tree, {str(entry.path[0]) for entry in (*written, *ours)}, problems)
    tree.put(_safe(_absolute(written, folders), problems))
    _displace_global_batch(tree, {entry.path for entry in ours})
    tree.put(_safe(_absolute(into_lists(ours, tree, problems, whole="path"), [here]), problems))
    _sample_sources(tree, environ or {}, problems)
    _split_output(tree, problems)
    return tree, problems


def _written(file: Path | FileText, problems: list[Problem]) -> list[Entry]:
    """Return the settings of a YAML file by our names, and add what is wrong with it to `problems`."""
    entries, broken = read_entries(file)
    entries, doubled = canonical_file(entries)
    problems += broken + doubled
    return entries


def _put_defaults(tree: Tree, sections: set[str], problems: list[Problem]) -> None:
    """Lay the organisation's defaults under everything, if there are any: those of a machine, whatever `environ` is."""
    place = organisation.defaults_file(os.environ)
    if place is None:
        return
    entries = _written(place, problems)
    tree.put(_safe(organisation.fitting(entries, sections, problems), problems))
    log.info(
        "defaults of %s are laid under the run file (`kubetune plan --origins` shows which)", place
    )


def _sample_sources(tree: Tree, environ: Mapping[str, str], problems: list[Problem]) -> None:
    """`MAX_SAMPLES` adds `#N` to every training source that names no number of its own."""
    try:
        number = max_samples(environ)
    except ValueError as error:
        problems.append(Problem(Origin("environment variable MAX_SAMPLES"), str(error)))
        return
    data = tree.data.get("data")
    if number is None or not isinstance(data, dict):
        return

    def limited(source: Any) -> Any:
        if isinstance(source, list):
            return [limited(each) for each in source]
        if isinstance(source, dict):
            return {**source, "path": limited(source.get("path"))}
        return f"{source}#{number}" if isinstance(source, str) and "#" not in source else source

    data["train"] = limited(data.get("train"))


def _split_output(tree: Tree, problems: list[Problem]) -> None:
    """`output: s3://bucket/run` is short for that mirror and a run directory of the same name on this machine."""
    output = tree.data.get("output")
    if not isinstance(output, str) or "://" not in output:
        return
    bucket, _, place = output.strip().partition("://")[2].partition("/")
    if not bucket or not place.strip("/"):
        said = (
            f"output: found {output}; expected a folder, or SCHEME://BUCKET/PATH of an object store"
        )
        problems.append(Problem(tree.origin(("output",)), said))
        return
    address = output.strip().rstrip("/")
    if tree.data.get("mirror") not in (None, address):
        said = f"output: found {output} beside mirror: {tree.data['mirror']}; leave one out, or make them agree"
        problems.append(Problem(tree.origin(("output",)), said))
    tree.data |= {"output": f"outputs/{address.partition('://')[2]}", "mirror": address}


def _displace_global_batch(tree: Tree, given: set[KeyPath]) -> None:
    """Accumulation that is typed or set in the environment decides over the global batch of the file."""
    training = tree.data.get("training")
    if ("training", "gradient_accumulation_steps") not in given or not isinstance(training, dict):
        return
    for key in ("global_batch_size", "global_batch_tokens"):
        if ("training", key) not in given and training.get(key) not in (None, "packed"):
            log.info(
                "gradient_accumulation_steps decides the global batch; the file's %s is left out",
                key,
            )
            del training[key]


def resolved(config: Config) -> dict[str, Any]:
    """The whole config, defaults included, as JSON-able data; `load_resolved` reads it back equal."""
    return config.model_dump(mode="json", by_alias=True)


def values_by_path(data: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value in `resolved` data with its path, in whose keys there may be dots; lists count as values."""
    if isinstance(data, dict) and data:
        for key, inner in data.items():
            yield from values_by_path(inner, (*path, key))
    else:
        yield path, data


def dotted_values(data: Any) -> Iterator[tuple[str, Any]]:
    """Every value in `resolved` data with its dotted path; lists count as values."""
    return ((dotted(path), value) for path, value in values_by_path(data))


def load_resolved(source: Mapping[str, Any] | Path, where: str = "resolved config") -> Config:
    """A Config from `resolved` data, or from the JSON file that holds it. Raises ConfigError.

    `where` the data came from, in words.
    """
    try:
        text = read_inside(source) if isinstance(source, Path) else json.dumps(source)
        return Config.model_validate_json(text, strict=True)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[:_SHOWN_PROBLEMS]
        reason = "; ".join(
            f"{dotted(one['loc'])}: {one['msg']}".removeprefix(": ") for one in wrong
        )
    except (OSError, ValueError, TypeError, RecursionError) as error:  # among them what is no UTF-8
        reason = str(error)
    name = source if isinstance(source, Path) else where
    raise ConfigError(
        f"{name}: not a config written by this version of kubetune, or a damaged one: {reason}"
    )


def read_config(run_dir: Path) -> Config:
    """The config of a run. Raises ConfigError when the folder is no run directory.

    And EnvironmentFault where a folder in it is a link that leads out, behind which nothing is the run's.
    """
    if not run_dir.is_dir():
        if address := re.fullmatch(
            r"([a-z][a-z0-9]+):(/.*)?", str(run_dir)
        ):  # a path, which has lost a slash
            said = f"{address[1]}:/{address[2] or '/'}: is an address of an object store; expected a run directory"
            raise ConfigError(
                f"{said}: `kubetune sync {address[1]}://BUCKET/RUN FOLDER` fetches one"
            )
        raise ConfigError(
            f"{run_dir}: no such folder; expected a run directory (`kubetune runs` lists them)"
        )
    if not (run_dir / RESOLVED).exists():
        raise ConfigError(
            f"{run_dir} is no run directory: it has no resolved.json (`kubetune runs` lists them)"
        )
    for name in FOLDERS:
        if (run_dir / name).is_symlink():
            require_inside(run_dir / name, run_dir)
    return load_resolved(run_dir / RESOLVED)


def as_yaml(config: Config) -> str:
    """A run file that loads as an equal config and names only what differs from the defaults."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    stream = io.StringIO()
    yaml.dump(config.model_dump(mode="json", by_alias=True, exclude_defaults=True), stream)
    return stream.getvalue()


def _steps(typed: Entry, ours: Entry) -> Iterator[Entry]:
    """`section=null` first takes back what lies in a section that is always there."""
    if typed.value is None and ours.value == {}:
        yield replace(ours, value=None)
    yield ours


def _from_environment(environ: Mapping[str, str], problems: list[Problem]) -> Iterator[Entry]:
    for key, text, origin in read_variables(environ):
        yield from _parsed(key, text, origin, problems)


def _from_mapping(
    values: Mapping[Any, Any], path: KeyPath, problems: list[Problem]
) -> Iterator[Entry]:
    """The settings of a mapping; what no run file could say is a problem."""
    for key, value in values.items():
        here = (*path, key)
        if not isinstance(key, str):
            problems.append(
                Problem(
                    _MAPPING, f"{dotted(path) or 'the top'}: found the key {key!r}; expected a text"
                )
            )
        elif isinstance(value, Mapping):
            yield Entry(here, {}, _MAPPING)
            yield from _from_mapping(value, here, problems)
        else:
            try:
                yield Entry(here, _plain(value), _MAPPING)
            except TypeError as error:
                problems.append(Problem(_MAPPING, f"{dotted(here)}: {error}"))


def _plain(value: Any) -> Any:
    """A value as JSON has it: paths as text, tuples as lists. Raises TypeError for what has no such form."""
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
    """The overrides in their order. One that a later one undoes, as wrappers want it, is told of."""
    seen: list[Entry] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            origin = Origin("command line")
            problems.append(
                Problem(origin, f"found {override!r}; expected key=value, such as training.seed=1")
            )
            continue
        for entry in _parsed(key, text.strip(), Origin("override"), problems):
            ours = canonical(entry) or entry
            parts = [
                ours,
                *(
                    _from_mapping(ours.value, ours.path, [])
                    if isinstance(ours.value, Mapping)
                    else ()
                ),
            ]
            if any(_undoes(parts, earlier) for earlier in seen):
                log.warning("override %s: given twice, with other values; the last one counts", key)
            seen += parts
            yield entry


def _undoes(parts: Sequence[Entry], earlier: Entry) -> bool:
    """An override, whole and in its `parts`, puts another value, or none, in the place of an earlier one."""
    path = parts[0].path
    return earlier.path[: len(path)] == path and all(
        (earlier.path, earlier.value) != (part.path, part.value) for part in parts
    )


def _parsed(key: str, text: str, origin: Origin, problems: list[Problem]) -> Iterator[Entry]:
    entry = Entry(key_path(key), text, origin)
    ours = canonical(entry)
    is_section = entry.path == ("model",) and text.startswith("{")
    if (
        ours is not None
        and json_schema.wants_text(ours.path)
        and text not in ("", "null", "~")
        and not is_section
    ):
        yield entry
        return
    try:
        yield replace(entry, value=parse_value(text))
    except ValueError as error:
        problems.append(Problem(origin, f"{key}: {error}"))


def _safe(entries: Iterable[Entry], problems: list[Problem]) -> Iterator[Entry]:
    """The entries without secrets. Each secret is a problem that does not echo it."""
    for entry in entries:
        suspects = [
            (i, text)
            for i, text in _texts(entry.value)
            if is_secret(entry.path + i, text, known=False)
        ]
        # Asked of suspects only: making the schema takes long for a verb that answers at once.
        known = bool(suspects) and entry.path[-1] in json_schema.keys(
            json_schema.at(entry.path[:-1]) or {}
        )
        secrets = [
            entry.inner.get(inner, entry.origin)
            for inner, text in suspects
            if is_secret(entry.path + inner, text, known=known)
        ]
        problems += [Problem(origin, f"{dotted(entry.path)}: {ADVICE}") for origin in secrets]
        known_values = _environment_secrets(entry) if not secrets else []
        problems += known_values
        if not secrets and not known_values:
            yield entry


def _environment_secrets(entry: Entry) -> list[Problem]:
    """Return a problem for each text of an entry that holds a secret of the environment, which it does not echo."""
    problems = []
    for inner, text in _texts(entry.value):
        name = secret_variable(text)
        if name is not None:
            origin = entry.inner.get(inner, entry.origin)
            what = f"{dotted(entry.path)}: holds the value of the environment variable {name}"
            problems.append(Problem(origin, f"{what}; {ADVICE}"))
    return problems


def _texts(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Every text in a value, with its path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(item, (*path, key))


def _absolute(entries: Iterable[Entry], folders: Sequence[Path]) -> Iterator[Entry]:
    """The entries with local paths that exist below one of `folders`, or are absolute already, made absolute."""
    for entry in entries:
        local = any(entry.path == known or entry.path == (*known, "path") for known in LOCAL_PATHS)
        yield replace(entry, value=_find(entry.value, folders)) if local else entry


def _find(value: Any, folders: Sequence[Path]) -> Any:
    if isinstance(value, list):
        return [_find(item, folders) for item in value]
    if isinstance(value, dict) and "path" in value:
        return {**value, "path": _find(value["path"], folders)}
    if not isinstance(value, str) or "://" in value or "\0" in value:
        return value
    path, mark, count = value.rpartition("#")
    for folder in folders:
        if found := _below(folder, value):
            return found
        if mark and count.isdecimal() and (found := _below(folder, path)):
            return f"{found}#{count}"
    return value


def _below(folder: Path, name: str) -> str | None:
    """The absolute path of a file, a folder or a pattern with matches, or None when there is none."""
    place = folder / Path(name).expanduser()
    exists = place.exists() or (
        any(char in name for char in "*?[") and glob.glob(str(place), recursive=True)
    )
    return os.path.normpath(place) if name and exists else None
