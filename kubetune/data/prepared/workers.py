"""A function applied by several processes at once, its results in order and only a few of them waiting at a time."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from kubetune.base.processes import work_for_parent
from kubetune.errors import EnvironmentFault

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_processes(
    function: Callable[[Item], Result], items: Iterable[Item], processes: int, *, if_killed: str
) -> Generator[Result]:
    """The results of `function` for all items, in their order, from forked processes, which share what it holds.

    Raises EnvironmentFault with `if_killed` when a process was killed. To close the generator ends the processes.
    """
    fork = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(
        processes, mp_context=fork, initializer=_start, initargs=(function, os.getpid())
    )
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(_call, item))
            if len(waiting) > 4 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise EnvironmentFault(if_killed) from error
    finally:
        pool.shutdown(cancel_futures=True)


_function: Callable[[Any], Any] | None = None


def _start(function: Callable[[Any], Any], parent: int) -> None:
    global _function
    _function = function
    work_for_parent()
    if os.getppid() != parent:
        os._exit(1)  # it died before it could be watched
    os.environ["TOKENIZERS_PARALLELISM"] = (
        "false"  # one thread each: the processes are the parallelism
    )


def _call(item: Any) -> Any:
    assert _function is not None
    return _function(item)
