"""Shell scripts, read without running them: `statements` splits them, `doubts` and `calls` say what is certain."""

from __future__ import annotations

from kubetune.plugins.importers.shell.calls import Command, Script, read_script
from kubetune.plugins.importers.shell.filler import is_known
from kubetune.plugins.importers.shell.statements import UnreadableError

__all__ = ["Command", "Script", "UnreadableError", "is_known", "read_script"]
