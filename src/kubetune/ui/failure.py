"""Why a run failed, for its page: the cause in a sentence, the line of the file that it is about, and what would mend it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from kubetune.base.yaml_reader import read_entries
from kubetune.config.schema import DataConfig, RewardConfig
from kubetune.errors import ConfigError, KubetuneError
from kubetune.reporting.reading import RunRecord
from kubetune.rundir import metrics
from kubetune.rundir.starts import train_again
from kubetune.ui.form.fixes import Values, for_failure
from kubetune.ui.form.new_run import texts_of
from kubetune.ui.site import Site

_AROUND = 2  # lines before and after the one that is meant
_MOST_LINES = 100_000  # of a file that are looked through
_MOST_CHARACTERS = 300  # of a line that are shown
_NOWHERE: Final[Mapping[str, Any]] = MappingProxyType({"file": "", "lines": [], "at": None})


def failure_of(run: RunRecord, reason: str) -> dict[str, Any]:
    """Return the cause of a failure, and the lines of the file that it is about, if it names any of the run."""
    # The first sentence is the cause; what follows says what came of it, or what to do.
    first, _, others = reason.partition("\n")
    title, *more = re.split(r"(?<=[.?]) +|: +(?=File \")", first, maxsplit=1)
    # rank 0 was killed by SIGKILL (out of memory, or somebody's kill -9)
    in_brackets = re.fullmatch(r"(.{12,}?) \(([^()]{30,})\)\.?", title)
    if in_brackets is not None:
        title = in_brackets[1]
        more = [in_brackets[2][0].upper() + in_brackets[2][1:], *more]
    texts = [text for text in (*more, others) if text]
    return {"title": title.rstrip("."), "more": "\n".join(texts), **_place(run, reason)}


def _place(run: RunRecord, reason: str) -> Mapping[str, Any]:
    """Return a file, a few lines of it and the number of the one that is meant; no lines if there is none."""
    config = run.config
    # data/train.jsonl:12: no column answer
    in_data = re.match(r"(.+?):(\d+): ", reason)
    if in_data is not None and in_data[1] in _files_of_data(config.data):
        return _lines(Path(in_data[1]), int(in_data[2]))

    # File "rewards.py", line 6, in graded
    in_code = re.search(r'File "(.+?)", line (\d+)', reason)
    if in_code is not None and in_code[1] in _files_of_rewards(config.rewards):
        return _lines(Path(in_code[1]), int(in_code[2]))

    # data.max_length: expected at least 1
    key = re.match(r"([a-z_]+(?:\.[a-z_0-9]+)*): ", reason)
    if key is not None:
        return _of_key(run.path, key[1])
    return _NOWHERE


# A reason may come with a run of somebody else, and name any file: only files of the run are shown.


def _files_of_data(data: DataConfig) -> set[str]:
    sources = list(data.train)
    # Rows that are held out may be a share of the others.
    if isinstance(data.eval, (list, tuple)):
        sources.extend(data.eval)
    return {source.path.partition("#")[0] for source in sources}


def _files_of_rewards(rewards: Sequence[RewardConfig]) -> set[str]:
    return {str(reward.file) for reward in rewards if reward.file is not None}


def _of_key(run_dir: Path, key: str) -> Mapping[str, Any]:
    """Return where the value of a key was given: on the command line of the first start, or in the run file."""
    try:
        words = train_again(run_dir)
    except KubetuneError:
        words = []
    for word in words:
        if word.startswith((f"{key}=", f"{key}.")):
            line = ("", shlex.quote(word))
            return {"file": "given on the command line", "lines": [line], "at": ""}

    file = run_dir / metrics.CONFIG
    at = _line_of(file, key)
    if at is not None:
        return _lines(file, at)
    return _NOWHERE


def _lines(file: Path, at: int) -> dict[str, Any]:
    """Return a line of a file with those around it. What cannot be read has no lines."""
    shown = []
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            first = max(1, at - _AROUND)
            last = min(at + _AROUND, _MOST_LINES)
            for number, line in islice(enumerate(opened, 1), last):
                if number >= first:
                    shown.append((number, _cut(line.rstrip("\n"))))
    except OSError:
        shown = []
    return {"file": f"{file}:{at}", "lines": shown, "at": at}


def _cut(text: str) -> str:
    """Return a line with at most so many characters as are shown."""
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[:_MOST_CHARACTERS]}…"


def _line_of(file: Path, key: str) -> int | None:
    """Return the number of the line of a run file in which a key is set, None if it does not set it."""
    try:
        entries, _ = read_entries(file)
    except ConfigError:
        return None
    path = tuple(key.split("."))
    return next((entry.origin.line for entry in entries if entry.path == path), None)


def mend_of(site: Site, run: RunRecord, reason: str) -> dict[str, Any] | None:
    """Return what would mend a failed run: a label, and the texts of the form with it. None if nothing is known to."""
    texts = texts_of(site, run.config)
    fix: tuple[str, Values] | None = for_failure(reason, texts)
    if fix is None:
        return None
    label, values = fix
    mended = {**texts, **values}
    return {
        "label": label,
        "values": {key: text for key, text in mended.items() if text},
        "words": _words_again(run.path, mended["name"], values),
    }


def _words_again(run_dir: Path, name: str, values: Values) -> str:
    """Return the command line that starts a run again with these values, "" if its file cannot be read."""
    try:
        verb, file, _, *overrides = train_again(run_dir)
    except KubetuneError:
        return ""
    kept = [word for word in overrides if word.partition("=")[0] not in values]
    mended = [f"{key}={text}" for key, text in values.items()]
    output = f"output={run_dir.parent / name}"
    return shlex.join(["kubetune", verb, file, f"name={name}", output, *kept, *mended])
