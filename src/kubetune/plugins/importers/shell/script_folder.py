"""The folder that a script's commands run in, and the files that they may write.

cd sub; trl sft --config c.yaml       the file is sub/c.yaml
cat > c.yaml <<EOF                    c.yaml is written
sed -i s/1e-3/5e-6/ c.yaml            c.yaml is changed
python make.py --out c.yaml           c.yaml may be written: nobody knows what a program does with a name
grep lr c.yaml                        c.yaml is read
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
# Programs that change the files that they name with this option, and else read them.
_CHANGING_WITH = {"sed": "-i", "perl": "-i", "yq": "-i"}
_COPYING = ("cp", "install", "ln", "mv", "rsync", "scp")


def moved(folder: str, target: str) -> str:
    """Return the folder after `cd target`; relative to where the script began. Folders that are not known have a $."""
    target = _OF_THE_SCRIPT.sub(".", target)
    if "$" in target or "`" in target or target == "-":
        return UNKNOWN
    return posixpath.normpath(posixpath.join(folder, target))


def may_write(words: Sequence[str], file: str, folder: str) -> bool:
    """True if a command in `folder` may write `file`, by its words."""
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    if not words:
        return False
    program = posixpath.basename(words[0])
    arguments = words[1:]
    option = _CHANGING_WITH.get(program)
    changes = option is not None and any(word.startswith(option) for word in arguments)
    if program in _READERS or (option is not None and not changes):
        return False
    names = [word.rpartition("=")[2] for word in arguments]
    if program in _COPYING:
        names = _copied(arguments, file, folder)
    return any(may_be_same(posixpath.join(folder, name), file) for name in names)


def _copied(arguments: Sequence[str], file: str, folder: str) -> list[str]:
    """Return what `cp` and its like may write. A copy of the file itself is another one."""
    names = [word for word in arguments if not word.startswith("-")]
    written = names[-1:]
    for source in names[:-1]:
        if posixpath.normpath(posixpath.join(folder, source)) != posixpath.normpath(file):
            # The target may be a folder.
            written.append(posixpath.join(names[-1], posixpath.basename(source)))
    return written


def may_be_same(one: str, other: str) -> bool:
    """True if two paths of a script may be one file. Those with a $ or a / at the start are compared by their last part."""
    if any("$" in path or path.startswith("/") for path in (one, other)):
        return posixpath.basename(one) == posixpath.basename(other)
    return posixpath.normpath(one) == posixpath.normpath(other)
