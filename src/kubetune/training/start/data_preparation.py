"""Prepare the data of a run while the rank imports its libraries.

Imports no torch, because it runs while torch is being imported.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from kubetune import errors
from kubetune.base import logs, processes, reminders
from kubetune.config.schema import Config

if TYPE_CHECKING:
    from kubetune.data.prepared.prepare import Prepared

Result = TypeVar("Result")


class Preparation:
    """Prepares the data of a run in another process. Use it as a context manager, and import torch within.

    The other process is forked before this one imports any large library, so that it costs little and no lock is held.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        end: Callable[[BaseException], None] | None = None,
    ) -> None:
        """`end`: ends this process at once for data that cannot be used, while it still imports its libraries."""
        self._config = config
        self._run_dir = run_dir
        self._end = end
        # Held by who is the first to have the result: the rank that waits for it, or the thread that ends it.
        self._first = threading.Lock()
        # A pool of one, because its future carries the result or the error back.
        self._pool = ProcessPoolExecutor(
            1, mp_context=multiprocessing.get_context("fork"), initializer=processes.work_for_parent
        )

    def __enter__(self) -> Self:
        # A stop may be asked for while the process is forked. Nobody would leave the block then, and Python would wait
        # at its end until all is prepared.
        try:
            self._folder = self._pool.submit(_prepare_folder, self._config, self._run_dir)
            if self._end is not None:
                self._folder.add_done_callback(self._end_early)
        except BaseException:
            processes.kill_children()
            raise

        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            processes.kill_children()  # or the pool would wait for work that nobody wants any more
        self._pool.shutdown()

    def _end_early(self, folder: Future[tuple[Path, Config]]) -> None:
        """End the process where the data are refused before anybody waits for them. This is a thread of the pool."""
        if folder.cancelled():
            return
        error = folder.exception()
        # What broke in another way may be the pool's own end.
        if isinstance(error, errors.KubetuneError) and self._first.acquire(blocking=False):
            assert self._end is not None
            self._end(error)

    def result(self) -> tuple[Prepared, Config]:
        """Return the data, and the config with a commit of the hub as its model. Preparing may rightly take hours."""
        # Whoever is ended waits here until it is.
        self._first.acquire()
        with reminders.reminding(
            lambda taken: logs.DATA.info(reminders.OF_PREPARING, taken), reminders.PATIENT_SECONDS
        ):
            folder, config = _unless_killed(self._folder)

            from kubetune.data.prepared.prepare import load_prepared
            from kubetune.data.spec import DataSpec
            from kubetune.data.text.tokenizer import load_tokenizer

            tokenizer = load_tokenizer(config.model, date=config.data.date)
            return load_prepared(folder, tokenizer, DataSpec.of(config)), config


def _unless_killed(future: Future[Result]) -> Result:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise errors.EnvironmentFault(
            "the process that prepares the data was killed (out of memory, or somebody's kill -9); allow more "
            "memory or set data.num_proc lower, and run the same command again"
        ) from error


def _prepare_folder(config: Config, run_dir: Path) -> tuple[Path, Config]:
    """Prepare the data in the other process. Return their folder, and the config that they were prepared for."""
    from kubetune.data.findings.checked import prepare_start
    from kubetune.data.prepared.identity import pinned

    # With several ranks the agent has them prepared before it starts any.
    if os.environ.get("WORLD_SIZE", "1") == "1":
        logs.STEP.info("preparing data, importing torch and transformers")
    else:
        logs.STEP.info("opening the prepared data")

    # Pinned first: tokenizer and weights must be of the same commit.
    config = config.model_copy(update={"model": pinned(config.model, run_dir)})
    return prepare_start(config, run_dir).path, config
