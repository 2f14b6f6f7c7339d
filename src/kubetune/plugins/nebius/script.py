"""The commands of a new cluster as a bash script: `cluster create --dry-run`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from kubetune.plugins.nebius.steps import TOKEN, Action, Command, Step

HEAD = """\
#!/usr/bin/env bash
# What kubetune cluster create runs where nothing is there yet. It also looks first whether each thing is there, waits
# until it runs, and goes on after a failure; this script does not. It needs nebius, jq and helm.
set -euo pipefail
"""


def script(steps: Sequence[Step]) -> str:
    """Return the text of the script."""
    parts = [HEAD]
    for number, step in enumerate(steps, 1):
        parts.append(f"\n# [{number}/{len(steps)}] {step.title}\n{_line(step)}\n")
    return "".join(parts)


def _line(step: Step) -> str:
    """Return the command of a step; the id of what it makes is a variable for those after it."""
    if isinstance(step, Action):
        return _quote(step.command)
    return f"{_variable(step.key)}=$({_quote(step.make)} | jq -er .metadata.id)"


def _quote(command: Command) -> str:
    """Return the command for a shell, ids of earlier steps as its variables: `id=@{cluster}` is `id="$CLUSTER_ID"`."""
    words = []
    for word in command:
        parts = TOKEN.split(word)
        quoted = [shlex.quote(part) if part else "" for part in parts]
        # Every second part is the key of an earlier step.
        quoted[1::2] = [f'"${_variable(part)}"' for part in parts[1::2]]
        words.append("".join(quoted))
    return " ".join(words)


def _variable(key: str) -> str:
    """Return the variable of an id: `gpu-cluster/a` is GPU_CLUSTER_A_ID."""
    return re.sub(r"[^A-Z0-9]", "_", key.upper()) + "_ID"
