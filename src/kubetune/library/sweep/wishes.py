"""The search that a command line asks for, compared with the one that a folder holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kubetune.base.humanize import counted
from kubetune.config.resolved import dotted_values
from kubetune.errors import ConfigError
from kubetune.library.sweep.budget import Budget
from kubetune.library.sweep.ranges import ENDLESS, Range, settings_in
from kubetune.library.sweep.runner import Runner
from kubetune.library.sweep.sweep_record import SWEEP, Search, read_search
from kubetune.library.sweep.trial_configs import not_used
from kubetune.rundir.starts import moved_numbers


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


def require_same(folder: Path, search: Search) -> None:
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


def print_head(folder: Path, search: Search, wishes: Wishes, runner: Runner) -> None:
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
