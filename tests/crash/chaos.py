"""Kill runs at random moments and see whether what goes on ends bit for bit as a run that was left alone.

    scripts/chaos --kills 50        prints a table; exit code 1 when one run came out different

Real processes, SIGKILL, a checkpoint after every step. Victims are all ranks, one of them, or the launcher with
everything below it; the same seed gives the same victims and delays.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from typing import Any, Literal

from kubetune import checkpoint, processes, train_worker
from kubetune.config.schema import Config
from tests import toy
from tests.ranks import started, wait_all, wait_until

METHODS: dict[str, dict[str, Any]] = {"lora": {"lora": {"r": 4, "dropout": 0.1}}, "full": {"lora": None}}
Victim = Literal["all ranks", "one rank", "launcher"]


@dataclass(frozen=True)
class Kill:
    """What one kill met: the newest good checkpoint and the half-written folders then, and whether all ended equal."""

    method: str
    world_size: int
    victim: Victim
    seconds: float
    safe_step: int
    leftovers: int
    identical: bool

    def row(self) -> str:
        verdict = "identical" if self.identical else "DIFFERENT"
        return (
            f"{self.method:<6} {self.world_size:>5}  {self.victim:<10} {self.seconds:>7.2f} s {self.safe_step:>9} "
            f"{self.leftovers:>9}  {verdict}"
        )


HEADER = f"{'method':<6} {'ranks':>5}  {'killed':<10} {'after':>9} {'safe step':>9} {'leftovers':>9}  at the end"


class Chaos:
    """Runs of a toy model in `folder`, each compared with one of its kind that was never disturbed."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._draw = folder, random.Random(seed)
        self._inputs = toy.make_inputs(folder / "inputs")
        self._whole: dict[tuple[str, int], dict[str, str]] = {}
        self._seconds: dict[tuple[str, int], float] = {}

    def kills(self, number: int) -> Iterator[Kill]:
        """So many kills that met a run still going, over every method, world size and victim in turn."""
        kinds: Iterator[tuple[int, str, Victim]] = cycle(
            product((1, 2), METHODS, ("all ranks", "one rank", "launcher"))
        )
        for index in range(number):
            world_size, method, victim = next(kinds)
            if world_size == 1 and victim == "one rank":
                world_size, method, victim = next(kinds)
            kill = None
            while kill is None:
                kill = self._kill(self._folder / f"run-{index}", method, world_size, victim)
            yield kill

    def _kill(self, run_dir: Path, method: str, world_size: int, victim: Victim) -> Kill | None:
        """One run, killed once and then left alone; None when it had ended before the blow fell."""
        config = toy.make_config(self._inputs, {"save_steps": 1}, **METHODS[method])
        whole = self._undisturbed(config, method, world_size)
        run_dir = toy.make_run(
            run_dir.with_name(f"{run_dir.name}-{self._draw.randrange(2**32):08x}"), config, world_size
        )
        delay = self._draw.uniform(0.0, self._seconds[method, world_size])
        is_hit = (_kill_launcher if victim == "launcher" else self._kill_ranks)(run_dir, world_size, victim, delay)
        if not is_hit:
            return None
        leftovers = len(list(run_dir.glob("checkpoints/.step-*.tmp")))
        safe = checkpoint.find(run_dir)
        safe_step = checkpoint.load_state(safe).step if safe else 0
        codes = toy.train(run_dir, world_size)
        identical = codes == [0] * world_size and toy.digests(run_dir) == whole
        return Kill(method, world_size, victim, delay, safe_step, leftovers, identical)

    def _undisturbed(self, config: Config, method: str, world_size: int) -> dict[str, str]:
        if (method, world_size) not in self._whole:
            began = time.monotonic()
            run_dir = toy.finished(self._folder / f"whole-{method}-{world_size}", config, world_size)
            self._whole[method, world_size] = toy.digests(run_dir)
            self._seconds[method, world_size] = time.monotonic() - began
        return self._whole[method, world_size]

    def _kill_ranks(self, run_dir: Path, world_size: int, victim: Victim, delay: float) -> bool:
        with started(train_worker.main, world_size, [str(run_dir)]) as ranks:
            time.sleep(delay)
            hit = ranks if victim == "all ranks" else [self._draw.choice(ranks)]
            for rank in hit:
                rank.kill()
            # A rank that still waits to meet a dead one is not told; torchrun, which is not here, would end it.
            for rank in ranks:
                rank.join(10)
                rank.kill()
            codes = wait_all(ranks)
        return any(code != 0 for code in codes)


def _kill_launcher(run_dir: Path, world_size: int, victim: Victim, delay: float) -> bool:
    """Counted from the first log line, because a launcher spends most of a toy run importing."""
    command = [sys.executable, "-m", "kubetune.agent", str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as agent:
        wait_until((run_dir / "logs" / "rank-0.log").exists)
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
