"""One sweep, from the check of its folder to the winner's run file and the page."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path

from kubetune import errors
from kubetune.base.locks import lock
from kubetune.base.signals import Relay
from kubetune.config.resolved import resolved
from kubetune.config.schema import ComputeConfig, Config, KubernetesConfig
from kubetune.errors import ConfigError, EnvironmentFault
from kubetune.library.cluster_connection import open_cluster
from kubetune.library.plans import plan_here, prepare
from kubetune.library.sweep.driver import Driver
from kubetune.library.sweep.live_page import write_page
from kubetune.library.sweep.local import LocalRunner, Slot, slots_of
from kubetune.library.sweep.ranges import settings_in
from kubetune.library.sweep.runner import Runner
from kubetune.library.sweep.study import Study, explained
from kubetune.library.sweep.sweep_record import (
    LOCK,
    SWEEP,
    Record,
    Search,
    read_record,
    summary,
    write_search,
)
from kubetune.library.sweep.trial_configs import Load, Recipe, rungs_of
from kubetune.library.sweep.winner import best_of, result_lines, write_best
from kubetune.library.sweep.wishes import Wishes, print_head, require_same

_AT_ONCE = 4  # runs on a cluster, without --parallel
_MARGIN_SECONDS = 30  # in which the sweep itself ends, after its runs


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
        from kubetune.library.sweep import trials_there

        trials_there.check(config)
        plan = trials_there.plan_there(config)
        assert config.kubernetes is not None
        namespace = config.kubernetes.namespace
    else:
        compute, slots = slots_of(config.compute, wishes.parallel, os.environ)
        config = config.model_copy(update={"compute": compute})
        here = {"output": str(folder / "base"), "kubernetes": None}
        base, plan = plan_here(config.model_copy(update=here))

    rungs = rungs_of(wishes.pruner, plan)
    search = wishes.search(resolved(config), rungs, name, namespace)
    require_same(folder, search)

    # Each run has its own grace period within the grace period of the sweep.
    relay.grace_seconds = plan.grace_seconds + _MARGIN_SECONDS
    recipe = Recipe(load, search, folder, name)
    with lock(folder / LOCK, wait=False), explained(folder):
        runner = _runner(recipe, config.compute, config.kubernetes, slots, wishes)
        if not (folder / SWEEP).exists():
            write_search(folder, search)
        print_head(folder, search, wishes, runner)
        if base is not None:
            prepare(base)  # once, before several runs would do it at the same time
        study = Study(folder, search)
        record = read_record(folder)
        write_winner = partial(_write_best, folder, search, record, recipe, config)
        driver = Driver(
            folder,
            search,
            record,
            study,
            runner,
            total=wishes.trials,
            budgets=wishes.budgets,
            asked_to_stop=lambda: relay.stopping,
            say=partial(print, flush=True),
            on_new_best=write_winner,
        )
        try:
            reason = _drive(driver, study, runner)
        finally:
            _conclude(folder, search, record, write_winner)
    if reason:
        print(f"{'ended':<10} {reason}; repeat the command to continue")
    return errors.PREEMPTED if relay.stopping else errors.OK


def _drive(driver: Driver, study: Study, runner: Runner) -> str:
    """Run trials until the search ends. Return why it ended early, or ""."""
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


def _runner(
    recipe: Recipe,
    compute: ComputeConfig,
    kubernetes: KubernetesConfig | None,
    slots: Sequence[Slot],
    wishes: Wishes,
) -> Runner:
    """Return what runs trials: this machine, or the cluster of the kubeconfig with the volumes that all share."""
    if not wishes.on_cluster:
        return LocalRunner(recipe, slots, compute.gpus_per_node)

    from kubetune.library.sweep import trials_there
    from kubetune.library.sweep.remote import ClusterRunner

    assert kubernetes is not None
    cluster = open_cluster(kubernetes.namespace)
    runner = ClusterRunner(recipe, cluster, wishes.parallel or min(_AT_ONCE, wishes.trials))
    shared = trials_there.make_claims(cluster, recipe, kubernetes.storage)
    if shared:
        print(f"{'volumes':<10} {', '.join(shared)}, shared by all trials")
    return runner


def _write_best(
    folder: Path, search: Search, record: Record, recipe: Recipe, config: Config
) -> Path:
    """Write the run file of the best trial, with the values of the run file that was searched in comments."""
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
