"""Apply a function in several processes at once, with the results in order and only few of them waiting."""

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
    function: Callable[[Item], Result],
    items: Iterable[Item],
    processes: int,
    *,
    if_killed: str,
) -> Generator[Result]:
    """Yield the results of `function` for all items, in their order.

    Raise EnvironmentFault with the text `if_killed` if a process was killed. Closing the generator ends the processes.
    """
    # Forked processes share the memory of what the function holds, such as a tokenizer.
    fork = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(
        processes,
        mp_context=fork,
        initializer=_start,
        initargs=(function, os.getpid()),
    )

    # Items stay in memory until their results are taken, so only so many wait.
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(_call, item))
            # Results come in order, so the oldest is waited for; a few more items keep the other processes busy.
            if len(waiting) > 4 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise EnvironmentFault(if_killed) from error
    finally:
        pool.shutdown(cancel_futures=True)  # also when the caller stops early


# The function of a forked process. It gets there by the fork: pickling it with each item would copy the tokenizer.
_function: Callable[[Any], Any] | None = None


def _start(function: Callable[[Any], Any], parent: int) -> None:
    global _function
    _function = function
    work_for_parent()
    if os.getppid() != parent:
        os._exit(1)  # the parent died before it could be watched
    # The processes are the parallelism: one thread in each.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _call(item: Any) -> Any:
    assert _function is not None
    return _function(item)
