"""A sweep from its first word to its last: the folder, the place, the driver, and what is left at the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from kubetune import errors
from kubetune.base.files import lock
from kubetune.base.humanize import counted
from kubetune.base.signals import Relay
from kubetune.config.load import dotted_values, resolved
from kubetune.config.schema import Config
from kubetune.errors import ConfigError, EnvironmentFault
from kubetune.library.connection import open_cluster
from kubetune.library.plans import plan_here, prepare
from kubetune.library.sweep.budget import Budget
from kubetune.library.sweep.driver import Driver, Place
from kubetune.library.sweep.local import Local, Slot, slots_of
from kubetune.library.sweep.page import write_page
from kubetune.library.sweep.ranges import ENDLESS, Range, settings_in
from kubetune.library.sweep.recipe import Load, Recipe, not_used, rungs_of
from kubetune.library.sweep.record import (
    LOCK,
    SWEEP,
    Record,
    Search,
    read_record,
    read_search,
    summary,
    write_search,
)
from kubetune.library.sweep.study import Study, explained
from kubetune.library.sweep.winner import best_of, told, write_best
from kubetune.rundir.starts import moved_numbers

_AT_ONCE = 4
_MARGIN_SECONDS = 30


@dataclass(frozen=True)
class Wishes:
    """The search that a command line asks for."""

    ranges: tuple[Range, ...]
    metric: str
    greater: bool
    sampler: str
    pruner: str
    repeat: int
    seed: int
    trials: int
    parallel: int | None
    budgets: Sequence[Budget]
    on_cluster: bool = False


def sweep(folder: Path, name: str, load: Load, config: Config, wishes: Wishes, relay: Relay) -> int:
    """Search to the end, or to a stop; returns the exit code. `config` has the first value of each range.

    Raises ConfigError for another sweep in the folder, EnvironmentFault where a driver has it already.
    """
    slots: list[Slot] = []
    if wishes.on_cluster:
        from kubetune.library.sweep import remote

        remote.check(config)
        plan = remote.plan_there(config)
    else:
        config, slots = slots_of(config, wishes.parallel, os.environ)
        base, plan = plan_here(
            config.model_copy(update={"output": str(folder / "base"), "kubernetes": None})
        )
    search = Search(
        resolved(config), wishes.ranges, wishes.metric, wishes.greater, wishes.sampler, wishes.pruner,
        rungs_of(wishes.pruner, plan), wishes.repeat, wishes.seed, name,
        config.kubernetes.namespace if config.kubernetes and wishes.on_cluster else None,
    )  # fmt: skip
    _require_same(folder, search)
    relay.grace_seconds = plan.grace_seconds + _MARGIN_SECONDS  # within which each run has its own
    recipe = Recipe(load, search, folder, name)
    with lock(folder / LOCK, wait=False), explained(folder):
        place = _cluster(recipe, config, wishes) if wishes.on_cluster else Local(
            recipe, slots, config.compute.gpus_per_node
        )  # fmt: skip
        if not (folder / SWEEP).exists():
            write_search(folder, search)
        _head(folder, search, wishes, place, config)
        if not wishes.on_cluster:
            prepare(base)  # once, before several would
        study = Study(
            folder, wishes.ranges, sampler=wishes.sampler, pruner=wishes.pruner, rungs=search.rungs,
            greater=wishes.greater, seed=wishes.seed,
        )  # fmt: skip
        record = read_record(folder)
        crown = partial(_write_best, folder, search, record, recipe, config)
        driver = Driver(
            folder, search, record, study, place, total=wishes.trials, budgets=wishes.budgets,
            asked_to_stop=lambda: relay.stopping, say=lambda text: print(text, flush=True), crown=crown,
        )  # fmt: skip
        try:
            reason = driver.drive()
        except EnvironmentFault as fault:
            left = place.abandon()
            if not left:
                raise
            raise EnvironmentFault(
                f"{fault}\n{left}; the same command goes on with them"
            ) from fault
        finally:
            study.close()
            _conclude(folder, search, record, crown)
    if reason:
        print(f"{'ended':<10} {reason}; the same command goes on")
    return errors.PREEMPTED if relay.stopping else errors.OK


def _cluster(recipe: Recipe, config: Config, wishes: Wishes) -> Place:
    """The cluster of the kubeconfig as a place, with the volumes that all trials share."""
    from kubetune.library.sweep import remote

    assert config.kubernetes is not None
    cluster = open_cluster(config.kubernetes.namespace)
    place = remote.Remote(recipe, cluster, wishes.parallel or min(_AT_ONCE, wishes.trials))
    if shared := place.make_claims(config):
        print(f"{'volumes':<10} {', '.join(shared)}, of all trials")
    return place


def _require_same(folder: Path, search: Search) -> None:
    """Raise ConfigError where the folder holds another sweep."""
    if not (folder / SWEEP).exists():
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(
                f"{folder} holds no sweep, but something else; choose another -o. Nothing was written."
            )
        return
    before, now = asdict(read_search(folder)), asdict(search)
    old, new = (dict(dotted_values(one.pop("config"))) for one in (before, now))
    if before["ranges"] != now["ranges"]:  # which say all of what is searched
        for one in [*before["ranges"], *now["ranges"]]:
            old = {key: value for key, value in old.items() if not one["key"].startswith(key)}
            new = {key: value for key, value in new.items() if not one["key"].startswith(key)}
    changes = [f"{key} was {was}, now is {value}" for key, was, value in moved_numbers(old, new)]
    changes += [
        f"{key} was {_text(before[key])}, now is {_text(now[key])}"
        for key in now
        if before[key] != now[key]
    ]
    if changes:
        last = f"{folder} holds another sweep; undo these changes to go on with it, or choose another -o"
        raise ConfigError([*changes, f"{last}. Nothing was written."])


def _text(value: object) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], dict):
        return " ".join(f"{one['key']}={Range(**one)}" for one in value)
    return str(value)


def _head(folder: Path, search: Search, wishes: Wishes, place: Place, config: Config) -> None:
    most = (
        f"at most {counted(wishes.trials, 'trial')}"
        if wishes.trials < ENDLESS
        else "as long as the budget lasts"
    )
    if wishes.trials == settings_in(search.ranges):
        most += ", for these ranges hold no more settings"
    lines = [
        ("sweep", " ".join(f"{one.key}={one}" for one in search.ranges)),
        ("by", f"{search.metric}, {'highest' if search.greater else 'lowest'} is best"),
        ("search", f"{search.sampler}, pruner {search.pruner}, {most}"),
        ("at once", counted(place.slots, "run")),
        ("budget", ", ".join(map(str, wishes.budgets)) or "none"),
        ("folder", str(folder)),
    ]
    if unused := not_used(config):
        kept = f"each trial has a directory below {folder / 'trials'}"
        lines.append(("not used", f"{', '.join(unused)} of the run file: {kept}"))
    for label, text in lines:
        print(f"{label:<10} {text}", flush=True)


def _write_best(
    folder: Path, search: Search, record: Record, recipe: Recipe, config: Config
) -> Path:
    with suppress(ConfigError):  # the run file may lack what is searched
        config = recipe.load([])
    best = best_of(record, search)
    return write_best(folder, recipe.config(best, best.runs[0]), config, record, search)


def _conclude(folder: Path, search: Search, record: Record, crown: Callable[[], Path]) -> None:
    """Say what came of it, and write the winner's run file and the page."""
    tried = {tuple(trial.values.items()) for trial in record.trials if trial.state != "open"}
    every = (
        "; every setting of these ranges was tried"
        if len(tried) == settings_in(search.ranges)
        else ""
    )
    print(f"\n{'trials':<10} {summary(record)}{every}; {record.device_hours:.3g} device hours")
    if record.ranked(greater=search.greater):
        path = crown()
        for label, text in zip(("best", *[""] * 9), told(record, search), strict=False):
            print(f"{label:<10} {text}")
        print(f"{'run file':<10} {path}")
    print(f"{'page':<10} {write_page(folder)}")
