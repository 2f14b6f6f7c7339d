"""A run as a value: its directory, its config, and what it has measured and saved so far."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Self

from kubetune.base.files import StrPath
from kubetune.config.resolved import read_config
from kubetune.config.schema import Config
from kubetune.errors import ConfigError
from kubetune.rundir import checkpoints, exit_status, metrics
from kubetune.rundir.exit_status import ExitStatus


def _use_open() -> Config:
    raise ConfigError(
        "Run takes a path and a config; to open the run in a folder, use Run.open(path)"
    )


@dataclass(frozen=True)
class Run:
    """A run directory.

    Metrics, checkpoints and the exit status are read from disk at every call, so they are up to date
    while the run continues in another process.
    """

    path: Path  # absolute
    # Whole, with what the first start fixed.
    config: Config = field(repr=False, compare=False, default_factory=_use_open)

    @classmethod
    def open(cls, path: StrPath) -> Self:
        """Return the run in a folder, finished or not.

        Raises:
            ConfigError: there is no such folder, or it is no run directory.
        """
        path = Path(path).expanduser().absolute()
        return cls(path, read_config(path))

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl: one a training step, one an evaluation (`eval_loss`).

        Numbers that were not finite are None.
        """
        return metrics.read_metrics(self.path)

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Return the steps of a metric, such as `"loss"` or `"eval_loss"`, and its values there.

        A value that was not finite is nan.

        Raises:
            ConfigError: no line has the metric; the message names all metrics.
        """
        steps: list[int] = []
        values: list[float] = []
        metric_names: set[str] = set()
        for line in self.metrics():
            metric_names.update(line)
            if key in line:
                steps.append(line["step"])
                value = line[key]
                values.append(math.nan if value is None else value)
        if not steps:
            # A misspelt name is the likely reason, so say what there is.
            known = ", ".join(sorted(metric_names)) or "none yet"
            raise ConfigError(f"{self.path}: no metric {key!r}; there are {known}")
        return steps, values

    @property
    def best(self) -> Path:
        """The folder of the best checkpoint; of the last one if the run evaluates nothing.

        Raise ConfigError if there is no checkpoint.
        """
        return checkpoints.choose(self.path, "best")

    @property
    def last(self) -> Path:
        """The folder of the newest checkpoint. Raise ConfigError if there is none."""
        return checkpoints.choose(self.path, "last")

    @property
    def exit_status(self) -> ExitStatus | None:
        """How the run ended: exit `code`, `reason`, last `step`. None while it runs."""
        return exit_status.read_exit_status(self.path)

    def _repr_html_(self) -> str:
        """Return what a notebook shows of the run: a table of its state, steps, losses and place."""
        from kubetune.library.listing import facts

        known = facts(self.path)
        rows = {"state": known["state"], "why": known["why"], "model": known["model"]}
        if known["step"] is not None:
            rows["step"] = f"{known['step']:,} of {known['steps'] or '?'}"
        if known["loss"] is not None:
            rows["loss"] = f"{known['loss']:.4f}"
        for name, value in (known["evaluation"] or {}).items():
            if isinstance(value, float):
                rows[name] = f"{value:.4g}"
        rows["folder"] = str(self.path)
        lines = []
        for name, value in rows.items():
            if value:
                lines.append(f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>")
        title = escape(known["name"] or self.path.name)
        return f"<table><caption>{title}</caption>{''.join(lines)}</table>"


RunLike = Run | StrPath


def folder_of(run: RunLike) -> Path:
    """Return the run directory that an argument stands for."""
    # A path is not looked at here: whoever reads it says what is wrong with it.
    if isinstance(run, Run):
        return run.path
    return Path(run).expanduser()


def folders_of(runs: RunLike | Sequence[RunLike]) -> list[Path]:
    """Return the run directories of one run, or of several."""
    # A text is a sequence of texts too, so it is asked for first.
    if isinstance(runs, (Run, str, os.PathLike)):
        return [folder_of(runs)]
    return [folder_of(run) for run in runs]
