"""The folder that a script's commands run in, and whether they may write a file.

cd sub; trl sft --config c.yaml       the file is sub/c.yaml
grep lr c.yaml                        c.yaml is read
sed -i s/1e-3/5e-6/ c.yaml            c.yaml may be written: nobody knows what a program does with a name
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence

# What scripts write for the folder that they lie in:
#     $(dirname "$0")
#     $(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
_OF_THE_SCRIPT = re.compile(
    r"\$\((?:cd )?\"?\$?\(?dirname (?:-- )?\"?\$\{?(?:0|BASH_SOURCE(?:\[0\])?)\}?\"?\)?\"?(?: &&? ?pwd)?\)"
)
# A folder that only a running shell knows.
UNKNOWN = "$PWD"
# Programs that read the files that they name.
_READERS = frozenset(
    "[ basename cat cmp diff dirname du file grep head jq less ls md5sum mkdir more readlink realpath sha256sum".split()
    + "stat tail test touch wc".split()
)


def moved(folder: str, target: str) -> str:
    """Return the folder after `cd target`; relative to where the script began. Folders that are not known have a $."""
    target = _OF_THE_SCRIPT.sub(".", target)
    if "$" in target or "`" in target or target == "-":
        return UNKNOWN
    return posixpath.normpath(posixpath.join(folder, target))


def may_write(words: Sequence[str], file: str) -> bool:
    """True if a command may write a file: it names it, and does more than read."""
    is_reader = posixpath.basename(words[0]) in _READERS
    names = [word.rpartition("=")[2] for word in words]
    return not is_reader and any(is_named(name, file) for name in names)


def is_named(path: str, file: str) -> bool:
    """True if a path may be that of a file. Only names are compared, since folders may be links."""
    return posixpath.basename(path) == posixpath.basename(file)
