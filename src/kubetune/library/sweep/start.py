"""One sweep, from the check of its folder to the winner's run file and the page."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from kubetune import errors
from kubetune.base.humanize import counted
from kubetune.base.locks import lock
from kubetune.base.signals import Relay
from kubetune.config.resolved import dotted_values, resolved
from kubetune.config.schema import Config, KubernetesConfig
from kubetune.errors import ConfigError, EnvironmentFault
from kubetune.library.cluster_connection import open_cluster
from kubetune.library.plans import plan_here, prepare
from kubetune.library.sweep.budget import Budget
from kubetune.library.sweep.driver import Driver
from kubetune.library.sweep.live_page import write_page
from kubetune.library.sweep.local import LocalRunner, Slot, slots_of
from kubetune.library.sweep.ranges import ENDLESS, Range, settings_in
from kubetune.library.sweep.runner import Runner
from kubetune.library.sweep.study import Study, explained
from kubetune.library.sweep.sweep_record import (
    LOCK,
    SWEEP,
    Record,
    Search,
    read_record,
    read_search,
    summary,
    write_search,
)
from kubetune.library.sweep.trial_configs import Load, Recipe, not_used, rungs_of
from kubetune.library.sweep.winner import best_of, result_lines, write_best
from kubetune.rundir.starts import moved_numbers

_AT_ONCE = 4  # runs on a cluster, without --parallel
_MARGIN_SECONDS = 30  # in which the sweep itself ends, after its runs


@dataclass(frozen=True)
class Wishes:
    """The search that a command line asks for."""

    ranges: tuple[Range, ...]
    metric: str
    greater: bool  # True if more of the metric is better
    sampler: str
    pruner: str
    repeat: int  # runs of a trial, each with a seed of its own
    seed: int  # of the search itself
    trials: int  # at most
    parallel: int | None  # runs at once; None leaves it to the machine
    budgets: Sequence[Budget]
    on_cluster: bool = False

    def search(
        self, config: dict[str, Any], rungs: tuple[int, ...], name: str, namespace: str | None
    ) -> Search:
        """Return the search as sweep.json has it. `config` is the whole config, `name` the sweep's."""
        return Search(
            config=config,
            ranges=self.ranges,
            metric=self.metric,
            greater=self.greater,
            sampler=self.sampler,
            pruner=self.pruner,
            rungs=rungs,
            repeat=self.repeat,
            seed=self.seed,
            name=name,
            namespace=namespace,
        )


def sweep(folder: Path, name: str, load: Load, config: Config, wishes: Wishes, relay: Relay) -> int:
    """Search to the end, or until the sweep is asked to stop. Return the exit code.

    `config` has the first value of each range. Raise ConfigError if the folder holds another sweep,
    EnvironmentFault if another process drives this one already.
    """
    # The plan of a run, which says at which steps it is judged.
    slots: list[Slot] = []
    base = None
    namespace = None
    if wishes.on_cluster:
        from kubetune.library.sweep import remote

        remote.check(config)
        plan = remote.plan_there(config)
        assert config.kubernetes is not None
        namespace = config.kubernetes.namespace
    else:
        compute, slots = slots_of(config.compute, wishes.parallel, os.environ)
        config = config.model_copy(update={"compute": compute})
        here = {"output": str(folder / "base"), "kubernetes": None}
        base, plan = plan_here(config.model_copy(update=here))

    rungs = rungs_of(wishes.pruner, plan)
    search = wishes.search(resolved(config), rungs, name, namespace)
    _require_same(folder, search)

    # Each run has its own grace period within that of the sweep.
    relay.grace_seconds = plan.grace_seconds + _MARGIN_SECONDS
    recipe = Recipe(load, search, folder, name)
    with lock(folder / LOCK, wait=False), explained(folder):
        runner: Runner
        if config.kubernetes is not None and wishes.on_cluster:
            runner = _cluster(recipe, config.kubernetes, wishes)
        else:
            runner = LocalRunner(recipe, slots, config.compute.gpus_per_node)
        if not (folder / SWEEP).exists():
            write_search(folder, search)
        _print_head(folder, search, wishes, runner)
        if base is not None:
            prepare(base)  # once, before several runs would do it at the same time
        study = Study(folder, search)
        record = read_record(folder)
        write_winner = partial(_write_best, folder, search, record, recipe, config)
        try:
            reason = _drive(folder, search, record, study, runner, wishes, relay, write_winner)
        finally:
            _conclude(folder, search, record, write_winner)
    if reason:
        print(f"{'ended':<10} {reason}; repeat the command to continue")
    return errors.PREEMPTED if relay.stopping else errors.OK


def _drive(
    folder: Path,
    search: Search,
    record: Record,
    study: Study,
    runner: Runner,
    wishes: Wishes,
    relay: Relay,
    write_winner: Callable[[], Path],
) -> str:
    """Run trials until the search ends. Return why it ended early, or ""."""
    driver = Driver(
        folder,
        search,
        record,
        study,
        runner,
        total=wishes.trials,
        budgets=wishes.budgets,
        asked_to_stop=lambda: relay.stopping,
        say=lambda text: print(text, flush=True),
        on_new_best=write_winner,
    )
    try:
        return driver.drive()
    except EnvironmentFault as fault:
        # Such as a full disk. Runs on a cluster do not notice.
        still_running = runner.abandon()
        if not still_running:
            raise
        raise EnvironmentFault(
            f"{fault}\n{still_running}; repeat the command to continue them"
        ) from fault
    finally:
        study.close()


def _cluster(recipe: Recipe, kubernetes: KubernetesConfig, wishes: Wishes) -> Runner:
    """Return the cluster of the kubeconfig as a runner, with the volumes that all trials share."""
    from kubetune.library.sweep import remote

    cluster = open_cluster(kubernetes.namespace)
    slots = wishes.parallel or min(_AT_ONCE, wishes.trials)
    runner = remote.ClusterRunner(recipe, cluster, slots)
    shared = remote.make_claims(cluster, recipe, kubernetes.storage)
    if shared:
        print(f"{'volumes':<10} {', '.join(shared)}, shared by all trials")
    return runner


def _require_same(folder: Path, search: Search) -> None:
    """Raise ConfigError if the folder holds another sweep, or something else."""
    if not (folder / SWEEP).exists():
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(
                f"{folder} has files but no sweep; choose another -o. Nothing was written."
            )
        return

    # The config has too many keys for one line, so that its changes are named key by key.
    before = asdict(read_search(folder))
    now = asdict(search)
    values_before = dict(dotted_values(before.pop("config")))
    values_now = dict(dotted_values(now.pop("config")))
    if before["ranges"] != now["ranges"]:
        # The ranges say all about the keys that are searched.
        searched = tuple(a_range["key"] for a_range in (*before["ranges"], *now["ranges"]))
        values_before = _without(values_before, searched)
        values_now = _without(values_now, searched)

    changes = []
    for key, old, new in moved_numbers(values_before, values_now):
        changes.append(f"{key} was {old}, now is {new}")
    for key in now:
        if before[key] != now[key]:
            changes.append(f"{key} was {_text(before[key])}, now is {_text(now[key])}")
    if changes:
        raise ConfigError(
            [
                *changes,
                f"{folder} holds another sweep; undo these changes to continue it, or choose "
                "another -o. Nothing was written.",
            ]
        )


def _without(values: dict[str, Any], searched: tuple[str, ...]) -> dict[str, Any]:
    """Return the values without those of the keys that are searched, and of keys below them."""
    return {key: value for key, value in values.items() if not key.startswith(searched)}


def _text(value: object) -> str:
    """Return a field of a search as the command line has it."""
    if isinstance(value, tuple) and value and isinstance(value[0], dict):
        return " ".join(f"{fields['key']}={Range(**fields)}" for fields in value)
    return str(value)


def _print_head(folder: Path, search: Search, wishes: Wishes, runner: Runner) -> None:
    """Print what is searched, how, and where."""
    limit = "as long as the budget lasts"
    if wishes.trials < ENDLESS:
        limit = f"at most {counted(wishes.trials, 'trial')}"
    if wishes.trials == settings_in(search.ranges):
        limit += ", since these ranges have no more settings"
    ranges = " ".join(f"{a_range.key}={a_range}" for a_range in search.ranges)
    better = "highest" if search.greater else "lowest"
    lines = [
        ("sweep", ranges),
        ("by", f"{search.metric}, {better} is best"),
        ("search", f"{search.sampler}, pruner {search.pruner}, {limit}"),
        ("at once", counted(runner.slots, "run")),
        ("budget", ", ".join(map(str, wishes.budgets)) or "none"),
        ("folder", str(folder)),
    ]
    unused = not_used(search.config)
    if unused:
        reason = f"each trial has a directory below {folder / 'trials'}"
        lines.append(("not used", f"{', '.join(unused)} of the run file: {reason}"))
    for label, text in lines:
        print(f"{label:<10} {text}", flush=True)


def _write_best(
    folder: Path, search: Search, record: Record, recipe: Recipe, config: Config
) -> Path:
    """Write the run file of the best trial, beside the values of the run file that was searched."""
    # Without overrides, for the comments: they say what the search has changed.
    with suppress(ConfigError):  # the run file may lack a key that is searched
        config = recipe.load([])
    best = best_of(record, search)
    return write_best(folder, recipe.config(best, best.runs[0]), config, record, search)


def _conclude(
    folder: Path, search: Search, record: Record, write_winner: Callable[[], Path]
) -> None:
    """Print the result, and write the winner's run file and the page."""
    # A failed trial has tried its setting too.
    tried = {tuple(trial.values.items()) for trial in record.trials if trial.state != "open"}
    result = summary(record)
    if len(tried) == settings_in(search.ranges):
        result += "; every setting of these ranges was tried"
    print(
        f"\n{'trials':<10} {result}; {record.device_hours:.3g} device hours with the start of each trial"
    )
    if record.ranked(greater=search.greater):
        path = write_winner()
        # Only the first line of the result has a label.
        label = "best"
        for text in islice(result_lines(record, search), 10):
            print(f"{label:<10} {text}")
            label = ""
        print(f"{'run file':<10} {path}")
    print(f"{'page':<10} {write_page(folder)}")
