"""One rank of the smoke test: meet the others, check everything together, and tell what is wrong. rank_launch.py starts it.

All ranks call each check, and come to the same result.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kubetune import errors
from kubetune.base import logs
from kubetune.base.gpus import visible_gpus
from kubetune.base.humanize import number
from kubetune.distributed import nccl_log, process_group
from kubetune.distributed.process_group import World
from kubetune.distributed.rendezvous import Rendezvous, meet
from kubetune.plugins.diagnostics.smoke import rank_measurements
from kubetune.plugins.diagnostics.smoke.settings import Settings
from kubetune.plugins.diagnostics.smoke.smoke_training import train

# Bytes of all-reduces. Ranks on CPUs only show that they add up.
_SIZES = {
    "cuda": (4096, 65_536, 1_048_576, 16_777_216, 67_108_864),
    "cpu": (4096, 1_048_576),
}


def run_rank(settings: Settings) -> int:
    """Be one rank and return its exit code."""
    rank = os.environ.get("RANK", "0")
    # Standard output is for the report alone.
    with redirect_stdout(sys.stderr) if settings.json else nullcontext():
        # `meet` refuses a rank that is no number.
        logs.configure("INFO", rank=int(rank) if rank.isdecimal() else 0)
        try:
            report = examine(settings)
            code = errors.ENVIRONMENT if report["problems"] else errors.OK
        except errors.KubetuneError as error:
            report = {"problems": [str(error)]}
            code = error.exit_code
            logs.ERROR.error("%s", error)
        if code == errors.OK:
            logs.RESULT.info("good: fit for a run")
    if settings.json and rank == "0":
        print(json.dumps(report, indent=2))
    return code


def examine(settings: Settings) -> dict[str, Any]:
    """Meet the other ranks, check everything, and return what --json prints.

    Raise EnvironmentFault naming ranks that are missing or lost.
    """
    logs.STEP.info("init: waiting for %s ranks", os.environ.get("WORLD_SIZE", "1"))
    # Before any collective, so that missing ranks are named and nothing hangs.
    rendezvous = meet(os.environ, settings.timeout)
    try:
        with tempfile.TemporaryDirectory(prefix="kubetune-") as folder:
            log = None
            # Before NCCL begins, which reads its variables then.
            if nccl_log.wants_rdma(os.environ):
                log = nccl_log.keep_log(os.environ, Path(folder))
            with process_group.join(timeout_seconds=settings.timeout) as world:
                return Checks(world, settings, log).run(rendezvous)
    except errors.LostPeer as error:
        raise errors.EnvironmentFault(f"{rendezvous.find_lost()} ({error})") from error


def _facts(world: World) -> dict[str, Any]:
    """Return where this rank runs, and what is wrong there."""
    device = f"CPU, {torch.get_num_threads()} threads"
    problem = ""
    gpus = visible_gpus(os.environ)
    if world.device.type == "cuda":
        device = torch.cuda.get_device_name(world.device)
    elif gpus:
        problem = (
            f"the node has {gpus} GPUs, but torch can use none; look at the driver, "
            f"and whether torch {torch.__version__} was built for CUDA"
        )
    return {
        "rank": world.rank,
        "host": socket.gethostname(),
        "device": device,
        "problem": problem,
    }


def _shown(what: str, **facts: Any) -> dict[str, Any]:
    """Log what was measured, by its names in the report, and return it."""
    words = [f"{name}={number(value)}" for name, value in facts.items()]
    logs.DDP.info("%s: %s", what, " ".join(words))
    return facts


@dataclass
class Checks:
    """The checks of a world of ranks. Each returns what it measured, and adds what is wrong to `problems`."""

    world: World
    settings: Settings
    log: Path | None = None  # of NCCL, where it was to use RDMA
    names: list[str] = field(default_factory=list)  # of the ranks, for messages
    problems: list[str] = field(default_factory=list)

    def run(self, rendezvous: Rendezvous) -> dict[str, Any]:
        """Check one thing after the other, and return what --json prints."""
        rendezvous.begin("ranks")
        report: dict[str, Any] = {"ranks": self.ranks()}
        parts: dict[str, Callable[[], Any]] = {
            "all_reduce": self.all_reduces,
            "links": self.links,
            "networks": self.networks,
            "compute_seconds": self.compute,
            "volumes": self.volumes,
            "training": partial(train, self.settings, self.world, self.problems),
        }
        for part, check in parts.items():
            # If a rank is lost from here on, its last message names the part.
            rendezvous.begin(part)
            report[part] = check()

        for problem in self.problems:
            # All ranks have the same, so that one prints them.
            if self.world.is_main:
                logs.ERROR.error("%s", problem)
        return report | {"problems": self.problems}

    def ranks(self) -> list[dict[str, Any]]:
        """Show where each rank runs, and name those with something wrong there."""
        ranks = process_group.gather(_facts(self.world), self.world)
        for rank in ranks:
            name = f"rank {rank['rank']} on {rank['host']}"
            self.names.append(name)
            logs.DDP.info("%s: %s", name, rank["device"])
            if rank["problem"]:
                self.problems.append(f"{name}: {rank['problem']}")
        return ranks

    def all_reduces(self) -> list[dict[str, Any]]:
        """Check sums and measure their speed, from small to large; nothing for a lone rank."""
        reductions: list[dict[str, Any]] = []
        ranks = self.world.size
        if ranks == 1:
            return reductions
        for size in _SIZES[self.world.device.type]:
            if rank_measurements.is_sum_wrong(size, self.world):
                self.problems.append(f"all-reduce of {size:,} bytes gave a wrong sum")
            seconds = rank_measurements.all_reduce_seconds(size, self.world)
            # Bytes that really cross each link, as nccl-tests count them.
            bus_bytes = size * 2 * (ranks - 1) / ranks
            speed = bus_bytes / seconds / 1e9
            reduction = _shown("all-reduce", bytes=size, seconds=seconds, bus_gb_per_second=speed)
            reductions.append(reduction)
        return reductions

    def links(self) -> list[dict[str, Any]]:
        """Measure the speed from each rank to the next, one pair at a time while the others are silent."""
        links = []
        names = []
        for first in range(self.world.size - 1):
            second = first + 1
            seconds = rank_measurements.link_seconds(first, second, self.world)
            speed = rank_measurements.LINK_BYTES / seconds / 1e9
            link = _shown("link", ranks=(first, second), seconds=seconds, gb_per_second=speed)
            links.append(link)
            names.append(f"the link from {self.names[first]} to {self.names[second]}")
        self._name_slow(names, [link["seconds"] for link in links])
        return links

    def _name_slow(self, names: Sequence[str], seconds: list[float]) -> None:
        for index, ratio in rank_measurements.outliers(seconds, self.settings.slow_factor).items():
            self.problems.append(f"{names[index]} is slow: {ratio:.1f} times the time of others")

    def networks(self) -> list[str]:
        """Return the network that NCCL uses on each rank that was to use RDMA: NCCL falls back without an error."""
        # Its log names the network once a rank has sent something.
        if self.log is None:
            return []
        networks = process_group.gather(nccl_log.read_network(self.log), self.world)
        names = []
        for rank, network in enumerate(networks):
            network = network or nccl_log.Network("a network that its log does not name")
            names.append(network.name)
            if network.name == "Socket":
                self.problems.append(
                    f"{self.names[rank]}: RDMA was asked for (NCCL_IB_HCA), but NCCL uses sockets: "
                    f"{network.reason or 'its log does not say why'}"
                )
        logs.DDP.info("NCCL uses, by rank: %s", ", ".join(names))
        return names

    def compute(self) -> list[float]:
        """Return the seconds that each rank takes for the same work."""
        compute_seconds = rank_measurements.compute_seconds(self.world)
        for rank, seconds in enumerate(compute_seconds):
            _shown(f"the same work on rank {rank}", seconds=seconds)
        self._name_slow(self.names, compute_seconds)
        return compute_seconds

    def volumes(self) -> list[dict[str, Any]]:
        """Check the volumes as the first rank of each node sees them."""
        # Ranks of one node would measure each other's writes.
        mine = []
        if self.world.local_rank == 0:
            mine = [
                rank_measurements.measure_volume(Path(path), self.world.rank)
                for path in self.settings.volume
            ]
        volumes = process_group.gather_parts(mine, self.world)
        for volume in volumes:
            _shown("volume", **volume)
            if volume["problem"]:
                name = self.names[volume["rank"]]
                self.problems.append(f"volume {volume['path']} on {name}: {volume['problem']}")
        return volumes
