"""The settings of the smoke test, and the flags that set them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Settings:
    """Settings, by the flags of the same names."""

    epochs: int = 2
    batch: int = 256  # samples of a step, on each rank
    samples: int = 4096
    features: int = 128
    classes: int = 4
    lr: float = 3e-3
    seed: int = 42
    timeout: float = 60.0  # s
    slow_factor: float = 2.0
    volume: tuple[str, ...] = ()
    json: bool = False

    def flags(self) -> list[str]:
        """Return the command line that gives these settings."""
        flags = [f"--volume={path}" for path in self.volume]
        if self.json:
            flags.append("--json")
        for field in fields(self):
            if field.name not in ("volume", "json"):
                flag = field.name.replace("_", "-")
                flags.append(f"--{flag}={getattr(self, field.name)}")
        return flags


# Sockets take no longer timeouts.
_DAY_SECONDS = 86400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `Settings`, and of how many processes to start."""
    training = parser.add_argument_group("training: a small network on linearly separable data")
    _add(training, "--epochs", _count)
    _add(training, "--batch", _count, "per process, ")
    _add(training, "--samples", _count)
    _add(training, "--features", _count)
    _add(training, "--classes", _count)
    _add(training, "--lr", _amount)
    _add(training, "--seed", int)

    checks = parser.add_argument_group("checks")
    checks.add_argument(
        "--volume",
        action="append",
        default=[],
        metavar="DIR",
        help="test write speed and free space here; repeatable",
    )
    slow = "a rank or link that takes this many times as long as the others is named, "
    _add(checks, "--slow-factor", _amount, slow)
    _add(checks, "--timeout", _amount, "seconds to wait for a rank that is missing, ")

    where = parser.add_argument_group("processes", "under torchrun these are torchrun's")
    processes = "on each node; default: one for each GPU, or 1"
    where.add_argument("--processes", type=_count, metavar="N", help=processes)
    where.add_argument("--nodes", type=_count, metavar="N", help="default: PET_NNODES, or 1")
    where.add_argument(
        "--json",
        action="store_true",
        help="print the report as JSON; log lines go to standard error",
    )


def _add(
    group: Any,  # argparse._ArgumentGroup, which is private
    flag: str,
    kind: Callable[[str], float],
    what: str = "",
) -> None:
    """Add a flag with a number, whose default is that of the setting of its name."""
    default = getattr(Settings, flag.removeprefix("--").replace("-", "_"))
    group.add_argument(
        flag, type=kind, default=default, metavar="N", help=f"{what}default %(default)s"
    )


def _count(text: str) -> int:
    """Return a whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; expected a number from 1 on")
    return int(text)


def _amount(text: str) -> float:
    """Return a number above 0, and no more than the seconds of a day."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= _DAY_SECONDS:
        message = f"found {text!r}; expected a number above 0, at most {_DAY_SECONDS}"
        raise argparse.ArgumentTypeError(message)
    return number
