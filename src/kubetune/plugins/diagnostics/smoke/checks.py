"""One rank of the smoke test: meet the others, check everything together, and tell what is wrong. launch.py starts it.

All ranks call each check, and come to the same result.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kubetune import errors
from kubetune.base import logs
from kubetune.base.gpus import visible_gpus
from kubetune.distributed import nccl_log, process_group
from kubetune.distributed.process_group import World
from kubetune.distributed.rendezvous import Rendezvous, meet
from kubetune.plugins.diagnostics.smoke import measure
from kubetune.plugins.diagnostics.smoke.settings import Settings
from kubetune.plugins.diagnostics.smoke.training import train

# All-reduces grow by factors of 16. Ranks on CPUs only show that they add up.
_SMALLEST_BYTES = 4096
_LARGEST_BYTES = {"cuda": 64 * measure.MIB, "cpu": measure.MIB}


def run_rank(settings: Settings) -> int:
    """Be one rank and return its exit code."""
    rank_text = os.environ.get("RANK", "0")
    # `meet` refuses a rank that is no number.
    rank = int(rank_text) if rank_text.isdecimal() else 0
    # Standard output is for the report alone.
    with redirect_stdout(sys.stderr) if settings.json else nullcontext():
        logs.configure("INFO", rank=rank)
        code = errors.OK
        try:
            report = examine(settings)
            # All ranks have the same report, so that one prints its problems.
            printed = report["problems"] if rank == 0 else ()
        except errors.KubetuneError as error:
            report = {"problems": [str(error)]}
            printed = report["problems"]
            code = error.exit_code
        for problem in printed:
            logs.ERROR.error("%s", problem)
        if report["problems"]:
            code = code or errors.ENVIRONMENT
        else:
            logs.RESULT.info("good: fit for a run")
    if settings.json and rank == 0:
        verdict = "bad" if report["problems"] else "good"
        print(json.dumps({"verdict": verdict, **report}, indent=2))
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
                return _check(settings, world, rendezvous, log)
    except errors.LostPeer as error:
        raise errors.EnvironmentFault(f"{rendezvous.find_lost()} ({error})") from error


def _check(
    settings: Settings,
    world: World,
    rendezvous: Rendezvous,
    log: Path | None,
) -> dict[str, Any]:
    """Check one thing after the other. `begin` tells the other ranks how far this one came."""
    rendezvous.begin("facts")
    ranks = process_group.gather(_facts(world), world)
    backend = "none"
    if world.size > 1:
        backend = dist.get_backend()
    logs.DDP.info("%d ranks, backend %s, torch %s", world.size, backend, torch.__version__)
    for rank in ranks:
        logs.DDP.info("rank %d on %s: %s", rank["rank"], rank["host"], rank["device"])

    checks = Checks(world, [f"rank {rank['rank']} on {rank['host']}" for rank in ranks])
    checks.require_gpus(ranks)
    report: dict[str, Any] = {
        "world_size": world.size,
        "backend": backend,
        "ranks": ranks,
    }

    # If a rank is lost from here on, its last message names the part.
    rendezvous.begin("all-reduce")
    report["all_reduce"] = checks.all_reduces()
    rendezvous.begin("links")
    report["links"] = checks.links()
    # NCCL's log names its network once a rank has sent something.
    if log is not None and backend == "nccl":
        report["networks"] = checks.networks(log)

    rendezvous.begin("compute")
    report["compute_seconds"] = checks.compute()
    rendezvous.begin("volumes")
    report["volumes"] = checks.volumes(settings.volume)
    rendezvous.begin("train")
    report["training"] = train(settings, world, checks.problems)
    checks.name_slow(report, settings.slow_factor)
    return report | {"problems": checks.problems}


def _facts(world: World) -> dict[str, Any]:
    """Return where this rank runs."""
    # A rank on a CPU of a node with GPUs is a fault.
    gpus_unseen = 0
    if world.device.type == "cuda":
        device = torch.cuda.get_device_name(world.device)
    else:
        device = f"CPU ({platform.machine()}), {torch.get_num_threads()} threads"
        gpus_unseen = visible_gpus(os.environ)
    host = socket.gethostname()
    return {
        "rank": world.rank,
        "host": host,
        "device": device,
        "gpus_unseen": gpus_unseen,
    }


class Checks:
    """The checks of a world of ranks. Each returns what it measured, and adds what is wrong to `problems`."""

    def __init__(self, world: World, names: Sequence[str]) -> None:
        self.world = world
        self.names = names  # of the ranks, for messages
        self.problems: list[str] = []

    def require_gpus(self, ranks: Sequence[dict[str, Any]]) -> None:
        """Name each rank on a CPU whose node has GPUs."""
        for rank in ranks:
            if rank["gpus_unseen"]:
                self.problems.append(
                    f"{self.names[rank['rank']]}: the node has {rank['gpus_unseen']} GPUs, but torch can use none; "
                    f"look at the driver, and whether torch {torch.__version__} was built for CUDA"
                )

    def all_reduces(self) -> list[dict[str, Any]]:
        """Check sums and measure their speed, from small to large; nothing for a lone rank."""
        logs.STEP.info("all-reduce")
        reductions = []
        size = _SMALLEST_BYTES
        while self.world.size > 1 and size <= _LARGEST_BYTES[self.world.device.type]:
            wrong_ranks = measure.find_wrong_sums(size, self.world)
            if wrong_ranks:
                names = ", ".join(self.names[rank] for rank in wrong_ranks)
                self.problems.append(f"all-reduce of {size:,} bytes gave wrong sums on {names}")

            seconds = measure.all_reduce_seconds(size, self.world)
            # Bytes that really cross each link, as nccl-tests count them.
            bus_bytes = size * 2 * (self.world.size - 1) / self.world.size
            speed = bus_bytes / seconds / 1e9
            logs.DDP.info(
                "all-reduce %s bytes: %.3g ms, bus %.3g GB/s",
                f"{size:,}",
                seconds * 1e3,
                speed,
            )
            reductions.append(
                {
                    "bytes": size,
                    "seconds": seconds,
                    "bus_gb_per_second": speed,
                }
            )
            size *= 16
        return reductions

    def links(self) -> list[dict[str, Any]]:
        """Measure the speed from each rank to the next, one pair at a time while the others are silent."""
        pairs = [(rank, (rank + 1) % self.world.size) for rank in range(self.world.size)]
        # A lone rank has no link, and of two ranks both pairs are the same.
        if self.world.size <= 2:
            pairs = pairs[: self.world.size - 1]
        links = []
        for pair in pairs:
            seconds = measure.link_seconds(pair, self.world)
            speed = measure.LINK_BYTES / seconds / 1e9
            logs.DDP.info("rank %d to %d: %.3g GB/s", *pair, speed)
            links.append(
                {
                    "ranks": pair,
                    "seconds": seconds,
                    "gb_per_second": speed,
                }
            )
        return links

    def networks(self, log: Path) -> list[str]:
        """Return the network that NCCL uses on each rank that was to use RDMA: NCCL falls back without an error."""
        networks = process_group.gather(nccl_log.read_network(log), self.world)
        names = []
        for rank, network in enumerate(networks):
            name = "a network that its log does not name"
            if network is not None:
                name = network.name
            names.append(name)
            logs.DDP.info("rank %d: NCCL uses %s", rank, name)
            if network is not None and name == "Socket":
                reason = f": {network.reason}" if network.reason else ""
                self.problems.append(
                    f"{self.names[rank]}: RDMA was asked for (NCCL_IB_HCA), but NCCL uses sockets{reason}"
                )
        return names

    def compute(self) -> list[float]:
        """Return the seconds that each rank takes for the same work."""
        compute_seconds = measure.measure_compute(self.world)
        shown = " ".join(f"{seconds * 1e3:.3g}" for seconds in compute_seconds)
        logs.DDP.info("the same work on each rank, in ms: %s", shown)
        return compute_seconds

    def volumes(self, paths: Sequence[str]) -> list[dict[str, Any]]:
        """Check the volumes as the first rank of each node sees them."""
        # Ranks of one node would measure each other's writes.
        mine = []
        if self.world.local_rank == 0:
            mine = [measure.measure_volume(Path(path), self.world.rank) for path in paths]
        volumes = process_group.gather_parts(mine, self.world)
        for volume in volumes:
            path = volume["path"]
            rank = volume["rank"]
            if volume["problem"]:
                self.problems.append(f"volume {path} on {self.names[rank]}: {volume['problem']}")
            else:
                logs.STEP.info(
                    "volume %s on rank %d: writes %.0f MiB/s, %.1f GiB free",
                    path,
                    rank,
                    volume["write_mib_per_second"],
                    volume["free_bytes"] / 2**30,
                )
        return volumes

    def name_slow(self, report: dict[str, Any], factor: float) -> None:
        """Name each rank and link that takes `factor` times as long as the others."""
        for rank, ratio in measure.outliers(report["compute_seconds"], factor).items():
            self.problems.append(
                f"{self.names[rank]} is slow: the same work takes {ratio:.1f} times as long as elsewhere"
            )
        link_seconds = [link["seconds"] for link in report["links"]]
        for index, ratio in measure.outliers(link_seconds, factor).items():
            first, second = report["links"][index]["ranks"]
            self.problems.append(
                f"the link from {self.names[first]} to {self.names[second]} is {ratio:.1f} times as slow as the others"
            )
