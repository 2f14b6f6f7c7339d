"""Make a Config from a run file, environment variables, flags and overrides, or list everything that is wrong.

Later sources win: the organisation's defaults < file < environment < flags < `key=value`. No file is written, and only
the file of defaults and the run file are read.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kubetune.base.files import StrPath
from kubetune.base.logs import secret_variable
from kubetune.base.provenance import (
    Entry,
    Origin,
    Problem,
    Tree,
    dotted,
    into_lists,
    texts_in,
)
from kubetune.base.secrets import ADVICE, is_secret
from kubetune.base.yaml_reader import FileText, read_entries
from kubetune.config import json_schema, organisation
from kubetune.config.aliases import canonical, canonical_file
from kubetune.config.entries import (
    MAPPING,
    from_environment,
    from_flags,
    from_mapping,
    from_overrides,
)
from kubetune.config.local_paths import with_absolute_paths, with_known_homes
from kubetune.config.problems import explain
from kubetune.config.schema import Config
from kubetune.config.short_forms import (
    displace_global_batch,
    into_sections,
    sample_sources,
    split_output,
)
from kubetune.errors import ConfigError

log = logging.getLogger(__name__)

_STARTING = Origin("what a run without a file starts from")


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
        tree = Tree(MAPPING)
        written, doubled = canonical_file(from_mapping(path, (), problems))
        problems += doubled
    else:
        place = path.path if isinstance(path, FileText) else path
        tree = Tree(Origin(str(place) if place else "command line"))
        if place is not None:
            written = _written(path if isinstance(path, FileText) else Path(place), problems)
            folders = [Path(place).absolute().parent, here]

    # What environment and command line say, in our spelling.
    typed = [
        *from_environment(environ or {}, problems),
        *from_flags(flags or {}),
        *from_overrides(overrides, problems),
    ]
    ours: list[Entry] = []
    for entry in typed:
        known = canonical(entry)
        if known is not None:
            ours += _steps(entry, known)

    # Later layers win: values to start from, defaults, then the file, then what was typed.
    _put_lowest(tree, starting or {}, (*written, *ours), problems)
    tree.put(_safe(with_absolute_paths(with_known_homes(written, problems), folders), problems))

    _put_typed(tree, ours, here, problems)

    # Short forms that need the whole tree.
    sample_sources(tree, environ or {}, problems)
    split_output(tree, problems)
    return tree, problems


def _written(file: Path | FileText, problems: list[Problem]) -> list[Entry]:
    """Return the settings of a YAML file under our names, and add what is wrong with it to `problems`."""
    entries, broken = read_entries(file)
    entries, doubled = canonical_file(entries)
    problems += broken + doubled
    return entries


def _put_typed(tree: Tree, ours: list[Entry], folder: Path, problems: list[Problem]) -> None:
    """Put what was typed into the tree that has the file's settings: its lists and sections are there to be changed."""
    displace_global_batch(tree, {entry.path for entry in ours})
    sections = into_sections(ours, tree, problems)
    whole_lists = into_lists(sections, tree, problems, whole="path")
    known = with_known_homes(whole_lists, problems)
    tree.put(_safe(with_absolute_paths(known, [folder]), problems))


def _put_lowest(
    tree: Tree, starting: Mapping[str, Any], others: Iterable[Entry], problems: list[Problem]
) -> None:
    """Put what all `others` win over into the tree: values to start from, then the organisation's defaults."""
    entries = []
    for entry in from_mapping(starting, (), problems):
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
    fitting = organisation.fitting(entries, sections, problems)
    tree.put(_safe(with_known_homes(fitting, problems), problems))
    log.info(
        "defaults of %s are laid under the run file (`kubetune plan --origins` shows which)", place
    )


def _steps(typed: Entry, ours: Entry) -> Iterator[Entry]:
    """Yield what an override does. `training=null` first removes the keys of that section, then begins it anew."""
    if typed.value is None and ours.value == {}:
        yield replace(ours, value=None)
    yield ours


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
    for inner, text in texts_in(entry.value):
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
    for inner, text in texts_in(entry.value):
        name = secret_variable(text)
        if name is not None:
            origin = entry.inner.get(inner, entry.origin)
            what = f"{dotted(entry.path)}: holds the value of the environment variable {name}"
            problems.append(Problem(origin, f"{what}; {ADVICE}"))
    return problems
