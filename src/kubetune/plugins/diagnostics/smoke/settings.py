"""The settings of the smoke test, and the flags that set them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields

# Sockets take no longer timeouts, in seconds.
_MOST = 1_000_000


def _count(text: str) -> int:
    """Return a whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; expected a number from 1 on")
    return int(text)


def _amount(text: str) -> float:
    """Return a number above 0."""
    with suppress(ValueError):
        number = float(text)
        if 0 < number <= _MOST:
            return number
    raise argparse.ArgumentTypeError(f"found {text!r}; expected a number above 0, at most {_MOST}")


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

    @classmethod
    def of(cls, args: argparse.Namespace) -> Settings:
        """Return what the flags of a command line say."""
        values = {field.name: getattr(args, field.name) for field in fields(cls)}
        values["volume"] = tuple(args.volume)
        return cls(**values)


# The flags that take a number, with their help.
_NUMBERS: dict[str, tuple[Callable[[str], float], str]] = {
    "--epochs": (_count, "over the samples"),
    "--batch": (_count, "samples of a step, per process"),
    "--samples": (_count, "of the training data"),
    "--features": (_count, "of each sample"),
    "--classes": (_count, "of samples"),
    "--lr": (_amount, "learning rate"),
    "--seed": (int, "of samples, weights and order"),
    "--slow-factor": (
        _amount,
        "name a rank or link that takes this many times as long as the others",
    ),
    "--timeout": (_amount, "seconds to wait for a missing rank"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `Settings`, and of how many processes to start."""
    for flag, (kind, text) in _NUMBERS.items():
        name = flag.removeprefix("--").replace("-", "_")
        default = getattr(Settings, name)
        text = f"{text}, default {default}"
        parser.add_argument(flag, type=kind, default=default, metavar="N", help=text)

    volumes = "test write speed and free space here; repeatable"
    parser.add_argument("--volume", action="append", default=[], metavar="DIR", help=volumes)
    processes = "on each node; default: one for each GPU, or 1"
    parser.add_argument("--processes", type=_count, metavar="N", help=processes)
    # Pods of a run know their number as torchrun reads it, such as 4 or 4:4.
    nodes = os.environ.get("PET_NNODES", "1").partition(":")[0]
    text = "default: PET_NNODES, or 1"
    parser.add_argument("--nodes", type=_count, default=nodes, metavar="N", help=text)
    report = "print the report as JSON; log lines go to standard error"
    parser.add_argument("--json", action="store_true", help=report)
