"""Regular expressions of run files and adapters, applied in another process, whose time and memory have limits.

`(a+)+$` takes longer than anybody waits on a name of forty letters, and nothing ends it within a process.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import warnings
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from kubetune.base import processes

# Processor time, of which published expressions take a hundredth, and bytes.
_SECONDS: Final = 1
_MEMORY: Final = 1 << 30


def matches(expression: str, names: Iterable[str]) -> frozenset[str] | None:
    """Return the names that an expression matches whole; None if it is none, or reaches a limit."""
    answers = _answers(expression)
    wanted = frozenset(names)
    new = wanted - answers.keys()
    if new:
        matched = _matches(expression, sorted(new))
        for name in new:
            answers[name] = None if matched is None else name in matched
    if any(answers[name] is None for name in wanted):
        return None
    return frozenset(name for name in wanted if answers[name])


@lru_cache(maxsize=16)
def _answers(expression: str) -> dict[str, bool | None]:
    """Return the names that an expression was asked about, each with its answer; None where a limit was reached.

    A plan asks several times.
    """
    return {}


def _matches(expression: str, names: list[str]) -> set[str] | None:
    done = subprocess.run(
        processes.module(__name__),
        input=json.dumps([expression, names]),
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        return None
    return set(json.loads(done.stdout))


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main() -> None:
    """Answer the question on standard input with a list on standard output."""
    _limit(resource.RLIMIT_CPU, _SECONDS)
    _limit(resource.RLIMIT_CORE, 0)  # reaching the limit of time would leave a core file
    # Other kernels than Linux's refuse a limit of addresses.
    if sys.platform == "linux":
        _limit(resource.RLIMIT_AS, _MEMORY)
    expression, names = json.loads(sys.stdin.read())
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        pattern = re.compile(expression)
    print(json.dumps([name for name in names if pattern.fullmatch(name)]))


if __name__ == "__main__":
    processes.die_with_parent()
    main()
