"""The settings of the smoke test, and the flags that set them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Settings:
    """Settings by the flags of the same names. `timeout` is in seconds, sizes in MiB."""

    epochs: int = 2
    batch: int = 256
    samples: int = 4096
    features: int = 128
    classes: int = 4
    lr: float = 3e-3
    seed: int = 42
    timeout: float = 60.0
    slow_factor: float = 2.0
    largest_mib: int = 64
    volume_mib: int = 64
    volume: tuple[str, ...] = ()
    log_level: str = "INFO"
    json: bool = False

    def flags(self) -> list[str]:
        """The command line that gives these settings."""
        flags = [f"--volume={path}" for path in self.volume] + ["--json"] * self.json
        rest = (field.name for field in fields(self) if field.name not in ("volume", "json"))
        return flags + [f"--{name.replace('_', '-')}={getattr(self, name)}" for name in rest]


_DEFAULT = Settings()


_DAY_SECONDS = 86400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `Settings`, and of how many processes to start."""
    training = parser.add_argument_group("training: a small network on linearly separable data")
    training.add_argument(
        "--epochs", type=_count, default=_DEFAULT.epochs, metavar="N", help="default %(default)s"
    )
    training.add_argument(
        "--batch",
        type=_count,
        default=_DEFAULT.batch,
        metavar="N",
        help="per process, default %(default)s",
    )
    training.add_argument(
        "--samples", type=_count, default=_DEFAULT.samples, metavar="N", help="default %(default)s"
    )
    training.add_argument(
        "--features",
        type=_count,
        default=_DEFAULT.features,
        metavar="N",
        help="default %(default)s",
    )
    training.add_argument(
        "--classes",
        type=_classes,
        default=_DEFAULT.classes,
        metavar="N",
        help="default %(default)s",
    )
    training.add_argument(
        "--lr", type=_amount, default=_DEFAULT.lr, metavar="X", help="default %(default)s"
    )
    training.add_argument(
        "--seed", type=int, default=_DEFAULT.seed, metavar="N", help="default %(default)s"
    )

    checks = parser.add_argument_group("checks")
    checks.add_argument(
        "--volume",
        action="append",
        default=[],
        metavar="DIR",
        help="test write speed and free space here; repeatable",
    )
    checks.add_argument(
        "--volume-mib", type=_count, default=_DEFAULT.volume_mib, metavar="N",
        help="MiB written and read on each volume, default %(default)s",
    )  # fmt: skip
    checks.add_argument(
        "--largest-mib", type=_count, default=_DEFAULT.largest_mib, metavar="N",
        help="MiB of the largest all-reduce, default %(default)s",
    )  # fmt: skip
    checks.add_argument(
        "--slow-factor",
        type=_amount,
        default=_DEFAULT.slow_factor,
        metavar="X",
        help="a rank or link that takes this many times as long as the others is named, default %(default)s",
    )
    checks.add_argument(
        "--timeout",
        type=_seconds,
        default=_DEFAULT.timeout,
        metavar="S",
        help="seconds to wait for a rank before it counts as missing, default %(default)s",
    )

    where = parser.add_argument_group("processes", "under torchrun these are torchrun's")
    where.add_argument(
        "--processes",
        type=_count,
        metavar="N",
        help="on each node; default: one for each GPU, or 1",
    )
    where.add_argument("--nodes", type=_count, metavar="N", help="default: PET_NNODES, or 1")
    where.add_argument(
        "--log-level", type=str.upper, choices=("DEBUG", "INFO", "WARNING", "ERROR"), default="INFO",
        help="DEBUG shows first and last batches; default %(default)s",
    )  # fmt: skip
    where.add_argument(
        "--json",
        action="store_true",
        help="print the report as JSON; log lines go to standard error",
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; expected a number from 1 on")
    return int(text)


def _classes(text: str) -> int:
    if _count(text) < 2:
        raise argparse.ArgumentTypeError(
            "found 1; expected at least 2 classes, since one is told from itself at once"
        )
    return int(text)


def _seconds(text: str) -> float:
    if _amount(text) > _DAY_SECONDS:
        raise argparse.ArgumentTypeError(
            f"found {text!r}; expected at most a day, {_DAY_SECONDS} seconds"
        )
    return float(text)


def _amount(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"found {text!r}; expected a number above 0")
    return number
