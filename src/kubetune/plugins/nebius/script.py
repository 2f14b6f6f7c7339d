"""The steps of a cluster as a bash script that can be read, kept and run by itself: `cluster create --dry-run`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from kubetune.plugins.nebius.steps import ABSENT, KINDS, TOKEN, Action, Command, Step, Subnet

HEAD = """\
#!/usr/bin/env bash
# Made by kubetune cluster create --dry-run. Needs nebius (with a profile), jq, helm and kubectl.
# Each thing is made only where there is none of its name, so it can be run again after a failure.
set -euo pipefail

look_up() {  # a command that prints a thing: prints its id, nothing where there is none; fails where that is not known
  local errors found code=0
  errors=$(mktemp)
  found=$("$@" 2>"$errors") || code=$?
  if [ "$code" = 0 ]; then
    rm "$errors"
    jq -r .metadata.id <<<"$found"
  elif grep -Eq 'ABSENT' "$errors"; then
    rm "$errors"
  else
    cat "$errors" >&2
    rm "$errors"
    echo "whether it is there is not known; nothing was made on a guess" >&2
    return 1
  fi
}

until_it_runs() {  # a command that prints a thing
  local state
  while true; do
    state=$("$@" | jq -r .status.state)
    case "$state" in
      RUNNING | READY) return ;;
      ERROR | DELETING) echo "$* is $state" >&2; return 1 ;;
    esac
    sleep 10
  done
}
"""
ONLY_SUBNET = (
    'if (.items | length) == 1 then .items[0].metadata.id else error("expected one subnet") end'
)


def script(steps: Sequence[Step]) -> str:
    """Return the text of the script; it reads nothing and keeps no state but what Nebius has."""
    parts = [HEAD.replace("ABSENT", ABSENT)]
    for number, step in enumerate(steps, 1):
        parts.append(f"\n# [{number}/{len(steps)}] {step.title}\n")
        parts += [f"{line}\n" for line in _lines(step)]
    return "".join(parts)


def _lines(step: Step) -> Iterator[str]:
    """Yield the lines of a step; the id of what it makes is a variable for those after it."""
    if isinstance(step, Action):
        line = quote(step.command)
        if step.stdin:
            line += f" <<'EOF'\n{step.stdin}EOF"
        yield line
        return
    if isinstance(step, Subnet):
        yield f"SUBNET_ID=$({quote(step.look)} | jq -er {shlex.quote(ONLY_SUBNET)})"
        return
    # X_ID=$(look_up …); [ -n "$X_ID" ] || X_ID=$(… create …)
    kind = KINDS[step.kind]
    variable = _variable(step.key)
    yield f"{variable}=$(look_up {quote(kind.look(step.name, step.parent))})"
    yield f'[ -n "${variable}" ] ||'
    yield f"  {variable}=$({quote(step.make)} | jq -er .metadata.id)"
    if kind.has_state:
        yield f"until_it_runs {quote(kind.get(f'@{{{step.key}}}'))}"
    yield f'echo "{kind.title}: ${variable}"'


def quote(command: Command) -> str:
    """Return the command for a shell, ids of earlier steps as its variables."""
    return " ".join(_quote_word(word) for word in command)


def _quote_word(word: str) -> str:
    """Return a word for a shell: `id=@{cluster}` is `id="$CLUSTER_ID"`."""
    if not TOKEN.search(word):
        return shlex.quote(word)
    quoted = ""
    # Every second part is a token's key.
    for index, part in enumerate(TOKEN.split(word)):
        if index % 2:
            quoted += f'"${_variable(part)}"'
        elif part:
            quoted += shlex.quote(part)
    return quoted


def _variable(key: str) -> str:
    """Return the variable of an id: `gpu-cluster/a` is GPU_CLUSTER_A_ID."""
    return re.sub(r"[^A-Z0-9]", "_", key.upper()) + "_ID"
