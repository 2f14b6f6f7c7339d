"""Kill runs at random moments and see whether what goes on ends bit for bit as a run that was left alone.

    scripts/chaos --kills 50        prints a table; exit code 1 when one run came out different

Real processes, SIGKILL, a checkpoint after every step, written between steps or beside them. Victims are all ranks, one
of them, or the launcher with everything below it. The same seed gives the same order of kinds, victims and delays.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
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

from kubetune import checkpoint, processes, train_worker
from kubetune.config.schema import Config
from tests import toy
from tests.ranks import started, wait_all, wait_until

METHODS: dict[str, dict[str, Any]] = {"lora": {"lora": {"r": 4, "dropout": 0.1}}, "full": {"lora": None}}
Victim = Literal["all ranks", "one rank", "launcher"]


class Kind(NamedTuple):
    """What is trained how, and who is killed."""

    parallelism: str
    world_size: int
    method: str
    async_save: bool
    victim: Victim


VICTIMS: tuple[Victim, ...] = ("all ranks", "one rank", "launcher")
KINDS = [
    Kind(parallelism, world_size, method, async_save, victim)
    for (parallelism, world_size), method, async_save, victim in product(
        (("ddp", 1), ("ddp", 2), ("fsdp", 2)), METHODS, (False, True), VICTIMS
    )
    if (world_size, victim) != (1, "one rank")
]


@dataclass(frozen=True)
class Kill:
    """What one kill met: the newest good checkpoint and the half-written folders then, and whether all ended equal."""

    kind: Kind
    seconds: float
    safe_step: int
    leftovers: int
    identical: bool

    def row(self) -> str:
        kind, verdict = self.kind, "identical" if self.identical else "DIFFERENT"
        return (
            f"{kind.parallelism:<4} {kind.world_size:>5}  {kind.method:<6} {'async' if kind.async_save else '-':<5}  "
            f"{kind.victim:<9} {self.seconds:>7.2f} s {self.safe_step:>9} {self.leftovers:>9}  {verdict}"
        )


HEADER = (
    f"{'kind':<4} {'ranks':>5}  {'method':<6} {'saves':<5}  {'killed':<9} {'after':>9} {'safe step':>9} "
    f"{'leftovers':>9}  at the end"
)


class Chaos:
    """Runs of a toy model in `folder`, each compared with one of its kind that was never disturbed."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._draw = folder, random.Random(seed)
        self._inputs = toy.make_inputs(folder / "inputs")
        self._whole: dict[tuple[str, int, str], dict[str, str]] = {}
        self._seconds: dict[tuple[str, int, str], float] = {}

    def kills(self, number: int, kinds: Sequence[Kind] = KINDS) -> Iterator[Kill]:
        """So many kills that met a run still going, over these kinds in an order that the seed gives."""
        order = cycle(self._draw.sample(kinds, len(kinds)))
        for index, kind in zip(range(number), order, strict=False):
            kill = None
            while kill is None:
                kill = self._kill(self._folder / f"run-{index}", kind)
            yield kill

    def _kill(self, run_dir: Path, kind: Kind) -> Kill | None:
        """One run, killed once and then left alone; None when it had ended before the blow fell."""
        whole, seconds = self._undisturbed(kind)
        run_dir = run_dir.with_name(f"{run_dir.name}-{self._draw.randrange(2**32):08x}")
        toy.make_run(run_dir, self._config(kind), kind.world_size)
        delay = self._draw.uniform(0.0, seconds)
        blow = _kill_launcher if kind.victim == "launcher" else self._kill_ranks
        if not blow(run_dir, kind, delay):
            return None
        leftovers = len(list(run_dir.glob("checkpoints/.step-*.tmp")))
        safe = checkpoint.find(run_dir)
        safe_step = checkpoint.load_state(safe).step if safe else 0
        codes = toy.train(run_dir, kind.world_size)
        identical = codes == [0] * kind.world_size and toy.digests(run_dir) == whole
        if identical:
            shutil.rmtree(run_dir)
        return Kill(kind, delay, safe_step, leftovers, identical)

    def _config(self, kind: Kind) -> Config:
        training = {"save_steps": 1, "parallelism": kind.parallelism, "async_save": kind.async_save}
        return toy.make_config(self._inputs, training, **METHODS[kind.method])

    def _undisturbed(self, kind: Kind) -> tuple[dict[str, str], float]:
        """What a run that waits for its checkpoints leaves, and how long it took."""
        key = kind[:3]
        if key not in self._whole:
            config = self._config(kind._replace(async_save=False))
            if not self._whole:  # the first one waits for the server that ranks are forked from, and for the data
                toy.finished(self._folder / "warm-up", config, kind.world_size)
            began = time.monotonic()
            run_dir = toy.finished(self._folder / "-".join(["whole", *map(str, key)]), config, kind.world_size)
            self._whole[key] = toy.digests(run_dir)
            self._seconds[key] = time.monotonic() - began
        return self._whole[key], self._seconds[key]

    def _kill_ranks(self, run_dir: Path, kind: Kind, delay: float) -> bool:
        with started(train_worker.main, kind.world_size, [str(run_dir)]) as ranks:
            if wait([rank.sentinel for rank in ranks], delay):
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


def _kill_launcher(run_dir: Path, kind: Kind, delay: float) -> bool:
    """Counted from when the ranks have met, because a launcher's toy run is nearly all importing before that."""
    command = [sys.executable, "-m", "kubetune.agent", str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as agent:
        log = run_dir / "logs" / "rank-0.log"
        wait_until(lambda: log.exists() and "loading model" in log.read_text())
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(delay)
            return False
        below = descendants(agent.pid)
        agent.kill()
    wait_until(lambda: not any(processes.is_alive(pid) for pid in below), seconds=5)
    return True


def descendants(pid: int) -> list[int]:
    """All processes below one."""
    found = processes.children(pid)
    return found + [grandchild for child in found for grandchild in descendants(child)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=10, help="kills that must meet a run still going")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    began, done = time.monotonic(), list[Kill]()
    os.environ.update({"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
    table = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the runs themselves print
    print(f"{'':>4} {HEADER}", file=table)
    with tempfile.TemporaryDirectory() as folder:
        for kill in Chaos(Path(folder), args.seed).kills(args.kills):
            done.append(kill)
            print(f"{len(done):>4} {kill.row()}", file=table)
    missed = sum(not kill.identical for kill in done)
    torn = sum(kill.leftovers > 0 for kill in done)
    seconds = time.monotonic() - began
    print(f"{len(done)} kills, {torn} in the middle of a checkpoint, {missed} misses, {seconds:.0f} s", file=table)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
