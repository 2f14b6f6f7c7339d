"""A run as a value: where it lies, what it was made from, and what it has to show so far."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from kubetune.base.files import StrPath
from kubetune.config.load import read_config
from kubetune.config.schema import Config
from kubetune.errors import ConfigError
from kubetune.rundir import checkpoints, exit_status, metrics
from kubetune.rundir.exit_status import ExitStatus


@dataclass(frozen=True)
class Run:
    """A run directory. `path` is absolute; `config` is the whole config, with what its first start fixed.

    All else is read anew each time it is asked for, also while the run goes on elsewhere.
    """

    path: Path
    config: Config = field(repr=False, compare=False)

    @classmethod
    def open(cls, path: StrPath) -> Self:
        """The run that lies in a folder, finished or not.

        Raises:
            ConfigError: there is no such folder, or it is no run directory.
        """
        path = Path(path).expanduser().absolute()
        return cls(path, read_config(path))

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl in order: one a training step, with `loss`, one an evaluation, with `eval_loss`.

        Numbers that were not finite are None.
        """
        return metrics.read_metrics(self.path)

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """The steps at which a metric is known, such as `"loss"` or `"eval_loss"`, and its values.

        What was not finite is nan.

        Raises:
            ConfigError: no line has the metric; those there are, are named.
        """
        lines = self.metrics()
        found = [(line["step"], line[key]) for line in lines if key in line]
        if not found:
            known = ", ".join(sorted({name for line in lines for name in line})) or "none yet"
            raise ConfigError(f"{self.path}: no metric {key!r}; there are {known}")
        return [step for step, _ in found], [
            math.nan if value is None else float(value) for _, value in found
        ]

    @property
    def best(self) -> Path:
        """The folder of the best checkpoint; the last where the run evaluates nothing. ConfigError without any."""
        return checkpoints.choose(self.path, "best")

    @property
    def last(self) -> Path:
        """The folder of the newest checkpoint. Raises ConfigError where there is none."""
        return checkpoints.choose(self.path, "last")

    @property
    def exit_status(self) -> ExitStatus | None:
        """End of the run: `code` as of the command line, `reason`, last `step`. None while it goes on."""
        return exit_status.read_exit_status(self.path)


RunLike = Run | StrPath


def folder_of(run: RunLike) -> Path:
    """The run directory that an argument stands for."""
    return run.path if isinstance(run, Run) else Path(run).expanduser()


def folders_of(runs: RunLike | Sequence[RunLike]) -> list[Path]:
    """The run directories of one run, or of several."""
    return [
        folder_of(run) for run in ([runs] if isinstance(runs, (Run, str, os.PathLike)) else runs)
    ]
