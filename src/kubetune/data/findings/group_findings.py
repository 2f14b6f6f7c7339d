"""Findings about names of files and folders that say a class, or which answers are good, if nothing reads them."""

from __future__ import annotations

import json
import os.path
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Final

from kubetune.base.humanize import shell_word
from kubetune.config.schema import SourceConfig
from kubetune.data.findings.finding import Finding, Severity
from kubetune.data.findings.named_groups import NamedGroups, named_groups
from kubetune.data.findings.split_files import LocatedSource
from kubetune.data.reading.examples import Example, Text
from kubetune.data.reading.formats import convert
from kubetune.data.reading.record_problems import Problems
from kubetune.data.reading.sources import read_source
from kubetune.errors import DataError

NAMED_GROUPS: Final = "named_groups"  # the id of these findings
# Tasks that learn all texts and answers alike.
LEARNS_ALIKE: Final = ("causal_lm", "vision_language", "distill")
_MOST_NAMED: Final = 4
# Columns that say themselves what the names of files may say.
_OF_CLASSES: Final = frozenset(("label", "labels", "class", "category"))


def of_names(sources: Sequence[LocatedSource]) -> Iterator[Finding]:
    """Yield what the names of files say of records that are learned one like the other, and what to write.

    An error for answers that are called bad, unless the run file names each file: then it is meant.
    """
    groups = named_groups(sources)
    if groups is None:
        return
    try:
        example = _first(sources[0].source)
    except DataError:
        return  # whoever reads it says what is wrong
    if example is None:
        return
    is_meant = len(sources) > 1
    names = _titles(groups.names)
    if groups.bad and not isinstance(example, Text):
        is_error = groups.is_sure and not is_meant
        severity: Severity = "error" if is_error else "warning"
        called = "calls its" if len(groups.bad) == 1 else "call their"
        sentence = (
            f"train: {_titles(groups.bad)} {called} answers bad, and they would be learned like those of "
            f"{_titles(groups.others)}"
        )
        yield Finding(NAMED_GROUPS, severity, "train", sentence, advice=_on_verdict(groups))
    elif isinstance(example, Text) and not (is_meant and not groups.bad):
        severity = "warning" if groups.bad else "note"
        sentence = (
            f"train: the texts of {names} are learned alike; nothing reads what they are called"
        )
        yield Finding(NAMED_GROUPS, severity, "train", sentence, advice=_on_class(groups))


def _first(source: SourceConfig) -> Example | None:
    """Return the first record of a source as it is understood; None if it is none to learn texts from, or says a class."""
    for record in read_source(source, Problems(0)):
        if not _OF_CLASSES.isdisjoint(record.value):
            break
        try:
            return convert(record.value, source.format, source.columns)
        except ValueError:
            break
    return None


def _on_verdict(groups: NamedGroups) -> str:
    """Return how to learn only the good answers, or from both."""
    alone = "Name the good ones alone"
    if len(groups.others) == 1 and groups.folder and groups.ending:
        end = groups.ending if groups.depth < 0 else ""
        if groups.depth <= 0:
            path = os.path.join(groups.folder, f"{groups.others[0]}{end}")
            alone = f"Give `data.train: {path}` to learn the good ones alone"
    both = "`task: preference` with `preference.loss: kto` learns from both, if each record has a `label` of true or false"
    made = _program(groups, "judged", f"{{}} not in {json.dumps(groups.bad)}")
    return f"{alone}. {both}{made}. Files that are each a source of their own are all learned"


def _on_class(groups: NamedGroups) -> str:
    """Return how to learn the class of texts, or only some of them."""
    made = _program(groups, "labelled", "{}")
    advice = f"If that is a class, a classifier learns it as the `label` of each record{made}"
    if groups.bad:
        advice += f". If {_titles(groups.bad)} are no texts to learn, name the others alone"
    return advice


def _program(groups: NamedGroups, word: str, label: str) -> str:
    """Return a program that writes the name that a record's file has, as its `label`; empty for other kinds of files.

    `label`: in Python, of the name.
    """
    if not groups.folder or groups.ending not in (".jsonl", ".txt"):
        return ""
    folder = json.dumps(groups.folder)
    name = 'f.name.split(".")[0]'
    if groups.depth >= 0:
        name = f"f.relative_to({folder}).parts[{groups.depth}]"
    new = f'"label": {label.format(name)}'
    files = f'for f in sorted(pathlib.Path({folder}).rglob("*{groups.ending}"))'
    code = f'import json, pathlib; [print(json.dumps({{"text": f.read_text(), {new}}})) {files}]'
    if groups.ending == ".jsonl":
        record = f"json.dumps({{**json.loads(line), {new}}})"
        code = (
            f"import json, pathlib; [print({record}) {files} for line in f.open() if line.strip()]"
        )
    # Not in a folder of data, which would be another one then.
    parts = [part for part in PurePath(groups.folder).parts[-2:] if re.match(r"\w", part)]
    made = f"{'-'.join([*parts, word])}.jsonl"
    return f"; give {made} after `python3 -c {shlex.quote(code)} > {shell_word(made)}`"


def _titles(names: Sequence[str]) -> str:
    """Return the first names in words."""
    listed = ", ".join(f"`{name}`" for name in names[:_MOST_NAMED])
    return f"{listed} …" if len(names) > _MOST_NAMED else listed
