"""Data of a run prepared beside the imports of a rank, and what a plan needs to know of them.

Imports no torch: it runs while torch is being imported.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetune import errors
from kubetune.base import fast_import, logs, processes, reminders
from kubetune.config.schema import Config
from kubetune.planning.plan import Plan

if TYPE_CHECKING:
    from kubetune.data.prepared.prepare import Prepared


@contextmanager
def preparing(config: Config, run_dir: Path) -> Iterator[Callable[[], tuple[Prepared, Config]]]:
    """Prepare the data in another process while this one imports torch; the function yielded waits for them.

    With the data comes the config whose model is one commit of the hub.

    Forked, and before torch starts threads of its own: that way it costs nothing and shares no lock.
    """
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, mp_context=context, initializer=processes.work_for_parent) as pool:
        folder = pool.submit(_prepare_folder, config, run_dir)
        try:
            yield lambda: _open_prepared(*_awaited(folder))
        except BrokenProcessPool as error:
            raise errors.EnvironmentFault(
                "the process that prepares the data was killed (out of memory, or somebody's kill -9); allow more "
                "memory or set data.num_proc lower, and run the same command again"
            ) from error
        except BaseException:
            processes.kill_children()  # the pool would wait until work is done that nobody wants any more
            raise


def _awaited(folder: Future[tuple[Path, Config]]) -> tuple[Path, Config]:
    """The prepared folder; waiting may take hours by right, and is told of now and then."""
    with reminders.reminding(lambda taken: logs.DATA.info(reminders.OF_PREPARING, taken), reminders.PATIENT_SECONDS):
        return folder.result()


def _prepare_folder(config: Config, run_dir: Path) -> tuple[Path, Config]:
    from kubetune.data.prepared.identity import pinned
    from kubetune.data.prepared.prepare import prepare

    config = pinned(config, run_dir)
    return prepare(config).path, config


def _open_prepared(folder: Path, config: Config) -> tuple[Prepared, Config]:
    from kubetune.data.prepared.prepare import load_prepared
    from kubetune.data.text.tokenizer import load_tokenizer

    return load_prepared(folder, load_tokenizer(config.model, date=config.data.date), config), config


def import_peft(config: Config, data: Prepared) -> None:
    """Import PEFT without bitsandbytes, which it takes along wherever that is installed, unless the base needs it."""
    from kubetune.data.text.tokenizer_files import read_json

    is_quantised = "quantization_config" in read_json(data.tokenizer.files.get("config.json"))
    needless = () if is_quantised or config.quantization != "none" else ("bitsandbytes",)
    with fast_import.in_haste(), fast_import.without(*needless):
        from peft.import_utils import is_bnb_4bit_available, is_bnb_available

        is_bnb_available(), is_bnb_4bit_available()  # PEFT remembers the answers


def width_of(data: Prepared) -> int | None:
    """Hidden size of the model, from its config.json; None where that names none."""
    from kubetune.data.text.tokenizer_files import read_json
    from kubetune.planning.memory import Shape
    from kubetune.planning.model_shapes import Weights

    shape = Shape.of(Weights({}, read_json(data.tokenizer.files.get("config.json")), stated=False).text_config)
    return shape.hidden if shape is not None and isinstance(shape.hidden, int) else None


def sizes(data: Prepared) -> dict[str, Any]:
    """Sizes of the prepared data that the plan needs."""
    from kubetune.batching.feed import evaluated, rows_per_epoch, tokens_per_epoch

    return {
        "rows": rows_per_epoch(data.train),
        "eval_rows": len(evaluated(data.eval)) if data.eval is not None else 0,
        "tokens": tokens_per_epoch(data.train),
    }


def planned_tokens(plan: Plan, data: Prepared) -> int:
    """Tokens of all steps planned."""
    return round(float(data.train.lengths.mean()) * (plan.rows or 0) * plan.num_epochs)
