"""Kill runs at random moments and see whether what goes on ends bit for bit as a run that was left alone.

    scripts/chaos --kills 50        prints a table; exit code 1 when one run came out different, which is then kept

Real processes, SIGKILL, a checkpoint after every step, written between steps or beside them. Victims are all ranks, one
of them, or the launcher with everything below it. Most blows fall while steps are trained and saved, one in five from
the start of the processes on. The same seed gives the same order of kinds, victims and moments.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kubetune.base import processes
from kubetune.config.schema import Config
from kubetune.rundir import checkpoints, metrics
from kubetune.training import worker
from tests import toy
from tests.ranks import started, wait_all, wait_until

METHODS: dict[str, dict[str, Any]] = {
    "lora": {"lora": {"r": 4, "dropout": 0.1}},
    "full": {"lora": None},
}
Victim = Literal["all ranks", "one rank", "launcher"]


class Kind(NamedTuple):
    """What is trained how, and who is killed."""

    parallelism: str
    world_size: int
    method: str
    async_save: bool
    victim: Victim


# What the time until a blow is counted from: the start of the processes, or the model being loaded.
Moment = Literal["start", "model"]

EARLY_SHARE = 0.2

# So many that a step takes about half a second, longer than the write of a checkpoint beside it, however narrow they are.
LAYERS = 24

VICTIMS: tuple[Victim, ...] = ("all ranks", "one rank", "launcher")
KINDS = [
    Kind(parallelism, world_size, method, async_save, victim)
    for (parallelism, world_size), method, async_save, victim in product(
        (("ddp", 1), ("ddp", 2), ("fsdp", 2)), METHODS, (False, True), VICTIMS
    )
    if (world_size, victim) != (1, "one rank")
]


class Undisturbed(NamedTuple):
    """What a run that nobody disturbs leaves, and the seconds until its model is loaded, and from there to its end."""

    digests: dict[str, str]
    loading: float
    training: float


class Blow(NamedTuple):
    """When a victim is killed: so many seconds after a moment of its run."""

    moment: Moment
    seconds: float


@dataclass(frozen=True)
class Kill:
    """What one kill met: the newest good checkpoint and the half-written folders then, and whether all ended equal."""

    kind: Kind
    blow: Blow
    safe_step: int
    leftovers: int
    identical: bool

    def row(self) -> str:
        kind = self.kind
        verdict = "identical" if self.identical else "DIFFERENT"
        return (
            f"{kind.parallelism:<4} {kind.world_size:>5}  {kind.method:<6} {'async' if kind.async_save else '-':<5}  "
            f"{kind.victim:<9}  {self.blow.moment} +{self.blow.seconds:>5.2f} s {self.safe_step:>9} {self.leftovers:>9}"
            f"  {verdict}"
        )


HEADER = (
    f"{'kind':<4} {'ranks':>5}  {'method':<6} {'saves':<5}  {'killed':<9}  {'after':<14} {'safe step':>9} "
    f"{'leftovers':>9}  at the end"
)


class Chaos:
    """Runs of a toy model in `folder`, each compared with one of its kind that was never disturbed."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._draw = folder, random.Random(seed)
        self._inputs = toy.make_inputs(folder / "inputs", num_hidden_layers=LAYERS)
        self._whole: dict[tuple[str, int, str], Undisturbed] = {}

    def kills(self, number: int, kinds: Sequence[Kind] = KINDS) -> Iterator[Kill]:
        """Yield so many kills that met a run still going, over these kinds in an order that the seed gives."""
        order = cycle(self._draw.sample(kinds, len(kinds)))
        for index, kind in zip(range(number), order, strict=False):
            kill = None
            while kill is None:
                kill = self._kill(self._folder / f"run-{index + 1}", kind)
            yield kill

    def _kill(self, run_dir: Path, kind: Kind) -> Kill | None:
        """Return one run, killed once and then left alone; None when it had ended before the blow fell."""
        whole = self._undisturbed(kind)
        toy.make_run(run_dir, self._config(kind), kind.world_size)
        is_early = self._draw.random() < EARLY_SHARE
        span = whole.loading if is_early else whole.training
        blow = Blow("start" if is_early else "model", self._draw.uniform(0.0, span))
        strike = _kill_launcher if kind.victim == "launcher" else self._kill_ranks
        if not strike(run_dir, kind, blow):
            shutil.rmtree(run_dir)
            return None
        leftovers = len(list(run_dir.glob("checkpoints/.step-*.tmp")))
        safe = checkpoints.find(run_dir)
        safe_step = checkpoints.load_state(safe).step if safe else 0
        codes = toy.train(run_dir, kind.world_size)
        identical = codes == [0] * kind.world_size and toy.digests(run_dir) == whole.digests
        if identical:
            shutil.rmtree(run_dir)
        return Kill(kind, blow, safe_step, leftovers, identical)

    def _config(self, kind: Kind) -> Config:
        training = {
            "num_train_epochs": 1,
            "save_steps": 1,
            "per_device_train_batch_size": 1,
            "parallelism": kind.parallelism,
            "async_save": kind.async_save,
        }
        return toy.make_config(self._inputs, training, **METHODS[kind.method])

    def _undisturbed(self, kind: Kind) -> Undisturbed:
        """Return a run of this kind that waits for its checkpoints, made once."""
        key = kind[:3]
        if key not in self._whole:
            config = self._config(kind._replace(async_save=False))
            if (
                not self._whole
            ):  # the first one waits for the server that ranks are forked from, and for the data
                toy.finished(self._folder / "warm-up", config, kind.world_size)
            run_dir = toy.make_run(
                self._folder / "-".join(["whole", *map(str, key)]), config, kind.world_size
            )
            began = time.monotonic()
            with started(worker.main, kind.world_size, [str(run_dir)]) as ranks:
                wait_until(lambda: has_loaded(run_dir))
                loaded = time.monotonic()
                codes = wait_all(ranks)
            assert codes == [0] * kind.world_size, toy.log_of(run_dir)
            self._whole[key] = Undisturbed(
                toy.digests(run_dir), loaded - began, time.monotonic() - loaded
            )
        return self._whole[key]

    def _kill_ranks(self, run_dir: Path, kind: Kind, blow: Blow) -> bool:
        with started(worker.main, kind.world_size, [str(run_dir)]) as ranks:
            ends = [rank.sentinel for rank in ranks]
            if blow.moment == "model":
                wait_until(lambda: has_loaded(run_dir) or wait(ends, 0))
            if wait(ends, blow.seconds):
                return False
            hit = ranks if kind.victim == "all ranks" else [self._draw.choice(ranks)]
            for rank in hit:
                rank.kill()
            # A rank that still waits to meet a dead one is not told; torchrun, which is not here, would end it.
            for rank in ranks:
                rank.join(10)
                rank.kill()
            codes = wait_all(ranks)
        return any(code != 0 for code in codes)


def has_loaded(run_dir: Path) -> bool:
    """True if a run has its model, and trains from here on."""
    return any(event["event"] == "start" for event in metrics.read_events(run_dir))


def _kill_launcher(run_dir: Path, kind: Kind, blow: Blow) -> bool:
    """Return the time of its rank's first line: before that there is nothing but imports."""
    command = [sys.executable, "-m", "kubetune.agent", str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as agent:
        log = run_dir / "logs" / "rank-0.log"
        has_begun = log.exists if blow.moment == "start" else lambda: has_loaded(run_dir)
        wait_until(lambda: has_begun() or agent.poll() is not None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(blow.seconds)
            return False
        below = toy.descendants(agent.pid)
        agent.kill()
    wait_until(lambda: not any(processes.is_alive(pid) for pid in below))
    return True


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; expected a number from 1 on")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 when a run came out different, 130 after Ctrl-C."""
    description = __doc__.splitlines()[0] if __doc__ else None
    parser = argparse.ArgumentParser(
        prog="scripts/chaos", description=description, allow_abbrev=False
    )
    parser.add_argument(
        "--kills",
        type=_count,
        default=10,
        metavar="N",
        help="that meet a run still going, default 10",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="another order and moments, default 0"
    )
    args = parser.parse_args(argv)
    began = time.monotonic()
    done = list[Kill]()
    interrupted = False
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # so that a stop from outside tidies up too
    folder = Path(tempfile.mkdtemp(prefix="kubetune-chaos-"))
    # Speeds of toys say nothing of the user's runs.
    os.environ.update(
        {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    )
    # What the runs themselves print is of use only beside one that came out different.
    table = os.fdopen(os.dup(1), "w", buffering=1)
    mistakes = os.dup(2)
    printed = os.open(folder / "printed.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(printed, number)
    print(f"{'':>4} {HEADER}", file=table)
    try:
        for kill in Chaos(folder, args.seed).kills(args.kills):
            done.append(kill)
            print(f"{len(done):>4} {kill.row()}", file=table)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        os.dup2(mistakes, 2)
    missed = [number for number, kill in enumerate(done, 1) if not kill.identical]
    torn = sum(kill.leftovers > 0 for kill in done)
    late = sum(kill.safe_step > 0 for kill in done)
    print(
        f"{len(done)} kills (seed {args.seed}), {late} after the first checkpoint, {torn} in the middle of one, "
        f"{len(missed)} misses, {time.monotonic() - began:.0f} s",
        file=table,
    )
    if missed:
        kept = ", ".join(str(folder / f"run-{number}") for number in missed)
        print(
            f"kept: {kept}; beside them undisturbed runs of each kind, and what all printed",
            file=table,
        )
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return 130 if interrupted else 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
