"""Work of rank 0 alone, of which all ranks need the result, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from kubetune.distributed.process_group import World, broadcast
from kubetune.errors import KubetuneError

Result = TypeVar("Result")


def on_main(function: Callable[[], Result], world: World) -> Result:
    """Picklable result of `function` on rank 0, on every rank; a KubetuneError that it raises is raised on all too."""
    found: Any = None
    if world.is_main:
        try:
            found = function()
        except KubetuneError as error:
            found = error
    found = broadcast(found, world)
    if isinstance(found, KubetuneError):
        raise found
    return cast(Result, found)
