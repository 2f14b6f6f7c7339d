"""Work of one rank whose result or error all ranks need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from kubetune.distributed.process_group import World, broadcast
from kubetune.errors import KubetuneError

Result = TypeVar("Result")


def on_main(function: Callable[[], Result], world: World) -> Result:
    """Call `function` on rank 0, and return its picklable result on every rank. A KubetuneError is raised on all too."""
    outcome: Any = None
    if world.is_main:
        try:
            outcome = function()
        except KubetuneError as error:
            # The others wait in `broadcast`, so the error is sent to them first and raised afterwards.
            outcome = error
    outcome = broadcast(outcome, world)
    if isinstance(outcome, KubetuneError):
        raise outcome
    return cast(Result, outcome)


def raise_first(failures: Sequence[KubetuneError | None]) -> None:
    """Raise the first failure of the ranks, if there is one. All ranks call it with what they gathered."""
    for failure in failures:
        if failure is not None:
            raise failure
