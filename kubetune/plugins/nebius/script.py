"""The steps of a cluster as a bash script that can be read, kept and run by itself: `cluster create --dry-run`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from kubetune.plugins.nebius.steps import ABSENT, KINDS, TOKEN, Command, Step, fill

HEAD = """\
#!/usr/bin/env bash
# Made by kubetune cluster create --dry-run. Needs nebius (with a profile), jq, helm and kubectl.
# Each thing is made only where there is none of its name, so it can be run again after a failure.
set -euo pipefail

look_up() {  # a name, jq's query, a command: prints the id, nothing where there is none; fails where that is not known
  local name=$1 query=$2 errors found code=0
  shift 2
  errors=$(mktemp)
  found=$("$@" 2>"$errors") || code=$?
  if [ "$code" = 0 ]; then
    rm "$errors"
    jq -r --arg name "$name" "$query" <<<"$found"
  elif grep -Eq 'ABSENT' "$errors"; then
    rm "$errors"
  else
    cat "$errors" >&2
    rm "$errors"
    echo "whether there is a $name is not known; nothing was made on a guess" >&2
    return 1
  fi
}

until_it_runs() {  # a command that prints the thing as JSON
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


def script(steps: Sequence[Step], context: str) -> str:
    """The text of the script; it reads nothing and keeps no state but what Nebius has."""
    parts = [HEAD.replace("ABSENT", ABSENT)]
    for number, step in enumerate(steps, 1):
        title = KINDS[step.kind].title if step.kind else step.key
        name = "" if TOKEN.search(step.name) else step.name
        heading = f"\n# [{number}/{len(steps)}] {title} {name}".rstrip()
        parts.append("\n".join([heading, *_lines(step, context), ""]))
    return "".join(parts)


def _lines(step: Step, context: str) -> Iterator[str]:
    if not step.kind or step.repeats:
        yield quote(step.make) + (f" <<'EOF'\n{step.stdin}EOF" if step.stdin else "")
        return
    kind, variable = KINDS[step.kind], _variable(step.key)
    words = {"name": step.name, "parent": step.parent, "context": context}
    look = quote(fill(kind.look, words))
    yield f"{variable}=$(look_up {quote((step.name,))} {shlex.quote(kind.jq)} {look})"
    if not step.make:
        return
    yield f'[ -n "${variable}" ] ||'
    yield f"  {variable}=$({quote(step.make)} | jq -er .metadata.id)"
    if kind.has_state:
        yield f"until_it_runs {quote(fill(kind.get, {'id': f'@{{{step.key}}}'}))}"
    yield f'echo "{kind.title}: ${variable}"'


def quote(command: Command) -> str:
    """The command for a shell, ids of earlier steps as its variables."""
    return " ".join(_quote_word(word) for word in command)


def _quote_word(word: str) -> str:
    if not TOKEN.search(word):
        return shlex.quote(word)
    # Every second part is a token's key.
    parts = TOKEN.split(word)
    return "".join(
        f'"${_variable(part)}"' if i % 2 else part and shlex.quote(part)
        for i, part in enumerate(parts)
    )


def _variable(key: str) -> str:
    return re.sub(r"[^A-Z0-9]", "_", key.upper()) + "_ID"
