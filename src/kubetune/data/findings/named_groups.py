"""Names of files and folders that say a class of the texts in them, or which answers are good. Nothing reads them.

d/chosen.jsonl  d/rejected.jsonl      a verdict on the answers
d/pos/*.txt     d/neg/*.txt           a verdict, or a class
d/sports/*.txt  d/politics/*.txt      a class
d/en/*.txt      d/de/*.txt            nothing: a language, and so years, numbers, splits and shards
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath
from typing import Final, Literal, NamedTuple

from kubetune.config.data_files import ending_of
from kubetune.data.column_names import BAD_WORDS, words_of_name
from kubetune.data.findings.split_files import SPLIT_WORDS, LocatedSource

# Words that call answers bad next to any other name, and those that do so only next to a good one. Words that may be
# the question, such as safe, helpful or toxic, are in neither.
_SURELY_BAD: Final = BAD_WORDS | {
    "dispreferred", "nonpreferred", "unpreferred", "losing", "worst", "undesirable", "disliked", "downvoted",
}  # fmt: skip
_BAD: Final = _SURELY_BAD | {"negative", "neg", "false", "failed", "invalid", "reject"}
_GOOD: Final = frozenset((
    "chosen", "accepted", "accept", "preferred", "winner", "winning", "better", "best", "good", "right", "correct",
    "positive", "po", "desirable", "liked", "upvoted", "true", "passed",
))  # fmt: skip
_TURNING: Final = frozenset(("not", "non", "un"))
# Words of names that say nothing of a file's contents; the words of splits come with them.
_PARTS: Final = frozenset((
    "part", "shard", "chunk", "batch", "file", "data", "dataset", "fold", "section", "page", "chapter", "volume", "vol",
    "sample", "example", "set", "group", "of", "copy", "old", "new", "backup", "final", "raw", "clean", "cleaned", "record",
    "row", "line", "text", "txt", "json", "jsonl", "csv", "parquet", "answer", "response", "completion", "output", "reply",
    "review", "book", "doc", "document", "article", "paper", "note", "log", "dump", "export", "input", "a", "b", "v",
    "small", "large", "full", "mini", "extra", "more", "other", "misc", "rest", "main", "base", "default", "all", "corpu",
    "corpus", "year", "month", "day", "week",
    *(word for words in SPLIT_WORDS.values() for word in words),
))  # fmt: skip
_LANGUAGES: Final = frozenset((
    "arabic", "bengali", "bulgarian", "catalan", "chinese", "croatian", "czech", "danish", "dutch", "english", "estonian",
    "finnish", "french", "german", "greek", "hebrew", "hindi", "hungarian", "icelandic", "indonesian", "irish", "italian",
    "japanese", "korean", "latin", "latvian", "lithuanian", "norwegian", "persian", "polish", "portuguese", "romanian",
    "russian", "serbian", "slovak", "slovenian", "spanish", "swahili", "swedish", "tamil", "telugu", "thai", "turkish",
    "ukrainian", "urdu", "vietnamese",
))  # fmt: skip
_CODE_OF_LANGUAGE: Final = re.compile(r"[a-z]{2,3}([-_]([a-z]{2}|[A-Z]{2}|[A-Z][a-z]{3}))?")
_DIGEST: Final = re.compile(r"[0-9a-f-]+")
# More names are of authors, places or things.
_MOST_CLASSES: Final = 50


class NamedGroups(NamedTuple):
    """Files of a run by what they, or a folder that each is in, are called."""

    bad: tuple[str, ...]  # names that call answers bad; none for classes
    others: tuple[str, ...]
    is_sure: bool  # nothing but answers is called so
    folder: str  # that all of them lie in; empty for a pattern, and for several sources
    depth: int  # of the folder in it that is called so; -1 for the files themselves
    ending: str  # of the files; empty if they have several

    @property
    def names(self) -> tuple[str, ...]:
        """All names."""
        return tuple(sorted((*self.others, *self.bad)))


def named_groups(sources: Sequence[LocatedSource]) -> NamedGroups | None:
    """Return what the names of files say of their contents; None if they say nothing, or all the same."""
    files = [file for source in sources for file in source.located.files]
    if len(files) < 2:
        return None
    parent = Path(os.path.commonpath([file.parent for file in files]))
    paths = [file.relative_to(parent) for file in files]
    endings = {ending_of(file) for file in files}
    folder = ""
    if len(sources) == 1 and Path(os.path.expanduser(sources[0].source.path)).is_dir():
        folder = os.path.relpath(parent) if parent.is_relative_to(Path.cwd()) else str(parent)
    ending = endings.pop() if len(endings) == 1 else ""

    for depth, names in _levels(paths):
        verdicts = {name: _verdict(name) for name in names}
        bad = tuple(name for name in names if verdicts[name] == "bad")
        others = tuple(name for name in names if verdicts[name] != "bad")
        is_sure = any(not _SURELY_BAD.isdisjoint(words_of_name(name)) for name in bad)
        if bad and others and (is_sure or "good" in verdicts.values()):
            return NamedGroups(bad, others, is_sure, folder, depth, ending)
        # Of plain texts in one folder each has a name of its own.
        is_file_each = depth < 0 and ending == ".txt"
        if _are_classes(names) and not is_file_each:
            return NamedGroups((), tuple(names), False, folder, depth, ending)
    return None


def _levels(paths: Sequence[PurePath]) -> Iterable[tuple[int, list[str]]]:
    """Yield the names of folders at each depth at which all files have one, then the names of the files."""
    depth = 0
    while all(len(path.parts) > depth + 1 for path in paths):
        yield depth, sorted({path.parts[depth] for path in paths})
        depth += 1
    yield -1, sorted({_stem(path) for path in paths})


def _stem(path: PurePath) -> str:
    return path.name.split(".")[0] or path.name


def _verdict(name: str) -> Literal["good", "bad"] | None:
    """Return what a name says of answers; None if it says something else: `bad_answers` is bad, `bad_gateway` is not."""
    words = [word for word in words_of_name(re.sub(r"\d", "", name)) if word not in _PARTS]
    if not words or not (_BAD | _GOOD | _TURNING).issuperset(words):
        return None
    is_bad = not _BAD.isdisjoint(words)
    is_turned = not _TURNING.isdisjoint(words)
    return "good" if is_bad == is_turned else "bad"


def _are_classes(names: Sequence[str]) -> bool:
    """True for names of different things; not for languages, years, numbers, splits and shards."""
    if not 2 <= len(names) <= _MOST_CLASSES:
        return False
    if all(_CODE_OF_LANGUAGE.fullmatch(name) or name.lower() in _LANGUAGES for name in names):
        return False
    if all(_DIGEST.fullmatch(name.lower()) for name in names):
        return False
    # Each says something, and no two say the same.
    meanings = {frozenset(words_of_name(re.sub(r"\d", " ", name))) - _PARTS for name in names}
    return frozenset() not in meanings and len(meanings) == len(names)
