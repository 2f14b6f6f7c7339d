"""One rank of the smoke test: meet the others, measure, train a small network, and judge. `launch.py` starts it."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import tempfile
from contextlib import ExitStack, nullcontext, redirect_stdout
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from kubetune import errors
from kubetune.base import logs
from kubetune.base.gpus import visible_gpus
from kubetune.distributed import nccl_log, process_group
from kubetune.distributed.nccl_log import Network
from kubetune.distributed.process_group import World
from kubetune.distributed.rendezvous import Rendezvous, meet
from kubetune.plugins.diagnostics.smoke import measure
from kubetune.plugins.diagnostics.smoke.measure import Link, Reduction, Volume
from kubetune.plugins.diagnostics.smoke.report import RankFacts, Report, judge
from kubetune.plugins.diagnostics.smoke.settings import Settings
from kubetune.plugins.diagnostics.smoke.training import train


def run_rank(settings: Settings) -> int:
    """Be one rank and return its exit code."""
    rank_text = os.environ.get("RANK", "0")
    # `meet` refuses a rank that is no number.
    rank = int(rank_text) if rank_text.isdecimal() else 0
    # Standard output is for the report alone.
    lines_to = redirect_stdout(sys.stderr) if settings.json else nullcontext()
    with lines_to:
        logs.configure("INFO", rank=rank)
        report, problems, code = _try(settings)
        # All ranks have the same report, so that one prints its problems; a rank that failed prints its own.
        if rank == 0 or report is None:
            for problem in problems:
                logs.ERROR.error("%s", problem)
        if not problems:
            logs.RESULT.info("good: fit for a run")
    if settings.json and rank == 0:
        facts = asdict(report) if report is not None else {}
        verdict = "bad" if problems else "good"
        print(json.dumps({"verdict": verdict, "problems": problems, **facts}, indent=2))
    return code


def _try(settings: Settings) -> tuple[Report | None, list[str], int]:
    """Return the report, what is wrong, and the exit code."""
    try:
        report = examine(settings)
    except errors.KubetuneError as error:
        return None, [str(error)], error.exit_code
    problems = judge(report, settings)
    return report, problems, errors.ENVIRONMENT if problems else errors.OK


def examine(settings: Settings) -> Report:
    """Meet the other ranks and measure everything. Raise EnvironmentFault naming ranks that are missing or lost."""
    logs.STEP.info("init: waiting for %s ranks", os.environ.get("WORLD_SIZE", "1"))
    # Before any collective, so that missing ranks are named and nothing hangs.
    rendezvous = meet(os.environ, settings.timeout)
    try:
        with ExitStack() as stack:
            # Before NCCL begins, which reads its variables then.
            log = _nccl_log(stack)
            with process_group.peers():
                world = stack.enter_context(process_group.join(timeout_seconds=settings.timeout))
            return _measure(settings, world, rendezvous, log)
    except errors.LostPeer as error:
        raise errors.EnvironmentFault(f"{rendezvous.find_lost()} ({error})") from error


def _nccl_log(stack: ExitStack) -> Path | None:
    """Return the file that NCCL writes its log to, where RDMA was asked for; it goes when the rank ends."""
    if not nccl_log.wants_rdma(os.environ):
        return None
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kubetune-"))
    return nccl_log.keep_log(os.environ, Path(folder))


def _measure(settings: Settings, world: World, rendezvous: Rendezvous, log: Path | None) -> Report:
    """Measure everything, one thing after the other. `begin` tells the other ranks how far this one came."""
    rendezvous.begin("facts")
    ranks = process_group.gather(_facts(world), world)
    versions = _versions()
    backend = "none"
    if world.size > 1:
        backend = dist.get_backend()
    shown = " ".join(f"{name} {version}" for name, version in versions.items())
    logs.DDP.info("%d ranks, backend %s, %s", world.size, backend, shown)
    for facts in ranks:
        logs.DDP.info("rank %d on %s: %s", facts.rank, facts.host, facts.device)

    # Should a rank be lost from here on, its last word says in which part.
    rendezvous.begin("all-reduce")
    reductions = _reductions(world)
    rendezvous.begin("links")
    links = _links(world)
    networks = _networks(world, backend, log)

    rendezvous.begin("compute")
    compute_seconds = _compute_seconds(world)
    rendezvous.begin("volumes")
    volumes = _volumes(settings, world)
    rendezvous.begin("train")
    training = train(settings, world)
    return Report(
        world_size=world.size,
        backend=backend,
        versions=versions,
        ranks=ranks,
        all_reduce=reductions,
        links=links,
        compute_seconds=compute_seconds,
        volumes=volumes,
        training=training,
        networks=networks,
    )


def _facts(world: World) -> RankFacts:
    """Return where this rank runs."""
    host = socket.gethostname()
    # A rank on a CPU of a node with GPUs is a fault, which `judge` names.
    if world.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(world.device)
        gib = gpu.total_memory / 2**30
        device = f"{gpu.name}, {gib:.0f} GiB, capability {gpu.major}.{gpu.minor}"
        return RankFacts(world.rank, host, device, gpus_unseen=0)
    device = f"CPU ({platform.machine()}), {torch.get_num_threads()} threads"
    return RankFacts(world.rank, host, device, gpus_unseen=visible_gpus(os.environ))


def _versions() -> dict[str, str]:
    """Return the versions of what decides whether ranks understand each other."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def _reductions(world: World) -> list[Reduction]:
    """Measure all-reduces, and print a line for each size."""
    logs.STEP.info("all-reduce")
    reductions = measure.measure_all_reduce(world)
    for reduction in reductions:
        sums = "right"
        if reduction.wrong_ranks:
            sums = "wrong"
        logs.DDP.info(
            "all-reduce %s bytes: %.3g ms, %.3g GB/s (bus %.3g GB/s), sums %s",
            f"{reduction.bytes:,}",
            reduction.seconds * 1e3,
            reduction.gb_per_second,
            reduction.bus_gb_per_second,
            sums,
        )
    return reductions


def _links(world: World) -> list[Link]:
    """Measure links, and print a line for each."""
    links = measure.measure_links(world)
    for link in links:
        logs.DDP.info("rank %d to %d: %.3g GB/s", *link.ranks, link.gb_per_second)
    return links


def _networks(world: World, backend: str, log: Path | None) -> list[Network | None]:
    """Return each rank's network, and print a line for each. NCCL's log names it once a rank has sent something."""
    if log is None or backend != "nccl":
        return []
    networks = process_group.gather(nccl_log.read_network(log), world)
    for rank, network in enumerate(networks):
        name = "a network that its log does not name"
        if network is not None:
            name = network.name
        logs.DDP.info("rank %d: NCCL uses %s", rank, name)
    return networks


def _compute_seconds(world: World) -> list[float]:
    """Measure the seconds that each rank takes for the same work, and print them."""
    compute_seconds = measure.measure_compute(world)
    shown = " ".join(f"{seconds * 1e3:.3g}" for seconds in compute_seconds)
    logs.DDP.info("the same work on each rank, in ms: %s", shown)
    return compute_seconds


def _volumes(settings: Settings, world: World) -> list[Volume]:
    """Measure the volumes as the first rank of each node sees them, and print a line for each."""
    # Ranks of one node would measure each other's writes.
    mine = []
    if world.local_rank == 0:
        for path in settings.volume:
            mine.append(measure.measure_volume(Path(path), world.rank))

    volumes = []
    for of_rank in process_group.gather(mine, world):
        volumes += of_rank
    for volume in volumes:
        # One that cannot be written has a reason instead, which the report shows.
        if volume.write_mib_per_second is not None:
            logs.STEP.info(
                "volume %s on rank %d: writes %.0f MiB/s, %.1f GiB free",
                volume.path,
                volume.rank,
                volume.write_mib_per_second,
                volume.free_bytes / 2**30,
            )
    return volumes
