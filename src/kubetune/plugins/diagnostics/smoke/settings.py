"""The settings of the smoke test, and the flags that set them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields


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
    shown = "default %(default)s"
    for flag in ("--epochs", "--batch", "--samples", "--features", "--classes"):
        default = getattr(Settings, flag.removeprefix("--"))
        per_process = "per process, " if flag == "--batch" else ""
        training.add_argument(
            flag, type=_count, default=default, metavar="N", help=f"{per_process}{shown}"
        )
    training.add_argument("--lr", type=_amount, default=Settings.lr, metavar="N", help=shown)
    training.add_argument("--seed", type=int, default=Settings.seed, metavar="N", help=shown)

    checks = parser.add_argument_group("checks")
    checks.add_argument(
        "--volume",
        action="append",
        default=[],
        metavar="DIR",
        help="test write speed and free space here; repeatable",
    )
    checks.add_argument(
        "--slow-factor",
        type=_amount,
        default=Settings.slow_factor,
        metavar="N",
        help=f"name a rank or link that takes this many times as long as the others, {shown}",
    )
    checks.add_argument(
        "--timeout",
        type=_amount,
        default=Settings.timeout,
        metavar="N",
        help=f"seconds to wait for a missing rank, {shown}",
    )

    where = parser.add_argument_group("processes", "under torchrun these are torchrun's")
    processes = "on each node; default: one for each GPU, or 1"
    where.add_argument("--processes", type=_count, metavar="N", help=processes)
    where.add_argument("--nodes", type=_count, metavar="N", help="default: PET_NNODES, or 1")
    where.add_argument(
        "--json",
        action="store_true",
        help="print the report as JSON; log lines go to standard error",
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
