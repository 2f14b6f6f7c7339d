"""One rank of the smoke test: meet, measure, train a small network, and judge. `launch.py` starts it.

The training goes the way of every run (flat gradient, one all-reduce a step); only data and model are synthetic.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kubetune import errors
from kubetune.base import logs, processes
from kubetune.base.gpus import visible_gpus
from kubetune.base.humanize import counted
from kubetune.data.prepared.order import mixed_seed
from kubetune.distributed import nccl_log, process_group
from kubetune.distributed.nccl_log import Network
from kubetune.distributed.process_group import World
from kubetune.distributed.rendezvous import Rendezvous, meet
from kubetune.plugins.diagnostics.smoke import measure
from kubetune.plugins.diagnostics.smoke.measure import MIB, Link, Reduction, Volume
from kubetune.plugins.diagnostics.smoke.settings import Settings
from kubetune.training import step_digest
from kubetune.training.optimizer.adamw import AdamSettings, FlatAdamW

_HIDDEN = 64


@dataclass(frozen=True)
class Place:
    """One rank's surroundings."""

    rank: int
    host: str
    device: str
    gpus_unseen: int
    """GPUs that the node has and torch cannot use."""


@dataclass(frozen=True)
class Training:
    """The small run. `rank_seconds`: what each rank computed, without waiting for the others."""

    loss_before: float
    epoch_losses: tuple[float, ...]
    loss_after: float
    accuracy: float
    seconds: float
    samples_per_second: float
    rank_seconds: tuple[float, ...]
    ranks_agree: bool


@dataclass(frozen=True)
class Report:
    """Everything found, the same on every rank."""

    world_size: int
    backend: str
    versions: dict[str, str]
    ranks: list[Place]
    all_reduce: list[Reduction]
    links: list[Link]
    compute_seconds: list[float]
    volumes: list[Volume]
    training: Training
    networks: Sequence[Network | None] = ()
    """The network that NCCL uses on each rank where RDMA was asked for; empty elsewhere."""


def run_rank(settings: Settings) -> int:
    """Be one rank; returns the exit code."""
    named = os.environ.get("RANK", "0")
    rank = int(named) if named.isdecimal() else 0  # `meet` refuses what is none
    with redirect_stdout(sys.stderr) if settings.json else nullcontext():
        logs.configure(settings.log_level, rank=rank)
        found, problems, code = _try(settings)
        # What all ranks have found, one need say; a rank that is alone with its error says it itself.
        for problem in problems if rank == 0 or found is None else ():
            logs.ERROR.error("%s", problem)
        if not problems:
            logs.RESULT.info("good: fit for a run")
    if settings.json and rank == 0:
        facts = asdict(found) if found is not None else {}
        print(
            json.dumps(
                {"verdict": "bad" if problems else "good", "problems": problems, **facts}, indent=2
            )
        )
    return code


def _try(settings: Settings) -> tuple[Report | None, list[str], int]:
    """(what was found, what is wrong, exit code)."""
    try:
        report = examine(settings)
    except errors.KubetuneError as error:
        return None, [str(error)], error.exit_code
    problems = judge(report, settings)
    return report, problems, errors.ENVIRONMENT if problems else errors.OK


def examine(settings: Settings) -> Report:
    """Meet the other ranks and measure everything. Raises EnvironmentFault naming ranks that are missing or lost."""
    logs.STEP.info("init: waiting for %s ranks", os.environ.get("WORLD_SIZE", "1"))
    rendezvous = meet(os.environ, settings.timeout)
    try:
        with ExitStack() as stack:
            log = _nccl_log(stack)
            with process_group.peers():
                world = stack.enter_context(process_group.join(timeout_seconds=settings.timeout))
            _require_memory(settings, world, rendezvous.ranks_per_node)
            return _measure(settings, world, rendezvous, log)
    except errors.LostPeer as error:
        raise errors.EnvironmentFault(f"{rendezvous.find_lost()} ({error})") from error


def _require_memory(settings: Settings, world: World, ranks_per_node: int) -> None:
    """Raise EnvironmentFault for sizes that would have this rank, or another program, killed by the kernel."""
    message = settings.largest_mib * MIB if world.size > 1 else 0
    needed = 4 * max(message, 2 * settings.samples * settings.features)
    on_gpu = world.device.type == "cuda"
    free = (
        torch.cuda.mem_get_info()[0] if on_gpu else processes.free_memory_bytes() // ranks_per_node
    )
    if needed > free:
        raise errors.EnvironmentFault(
            f"{socket.gethostname()}: rank {world.rank} would need {needed / 2**30:,.0f} GiB of memory for these "
            f"sizes, {free / 2**30:,.1f} GiB are free; give a smaller --largest-mib, --samples or --features"
        )


def _nccl_log(stack: ExitStack) -> Path | None:
    """The file that NCCL is told to write where RDMA was asked for; it goes when the rank ends."""
    if not nccl_log.wants_rdma(os.environ):
        return None
    return nccl_log.keep_log(
        os.environ, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kubetune-")))
    )


def _networks(world: World, backend: str, log: Path | None) -> list[Network | None]:
    """Each rank's network, once all ranks have sent something by it."""
    if log is None or backend != "nccl":
        return []
    networks = process_group.gather(nccl_log.read_network(log), world)
    for rank, found in enumerate(networks):
        logs.DDP.info(
            "rank %d: NCCL uses %s",
            rank,
            found.name if found else "a network that its log does not name",
        )
    return networks


def _measure(settings: Settings, world: World, rendezvous: Rendezvous, log: Path | None) -> Report:
    rendezvous.begin("facts")
    places = process_group.gather(_place(world), world)
    versions = _versions()
    backend = dist.get_backend() if world.size > 1 else "none"
    logs.DDP.info(
        "%d ranks, backend %s, %s",
        world.size,
        backend,
        " ".join(f"{k} {v}" for k, v in versions.items()),
    )
    for place in places:
        logs.DDP.info("rank %d on %s: %s", place.rank, place.host, place.device)

    rendezvous.begin("all-reduce")
    logs.STEP.info("all-reduce")
    reductions = measure.measure_all_reduce(world, settings.largest_mib * MIB)
    for one in reductions:
        logs.DDP.info(
            "all-reduce %s bytes: %.3g ms, %.3g GB/s (bus %.3g GB/s), sums %s",
            f"{one.bytes:,}", one.seconds * 1e3, one.gb_per_second, one.bus_gb_per_second,
            "wrong" if one.wrong_ranks else "right",
        )  # fmt: skip

    rendezvous.begin("links")
    links = measure.measure_links(world)
    for link in links:
        logs.DDP.info("rank %d to %d: %.3g GB/s", *link.ranks, link.gb_per_second)

    networks = _networks(world, backend, log)
    rendezvous.begin("compute")
    compute = measure.measure_compute(world)
    shown = " ".join(f"{seconds * 1e3:.3g}" for seconds in compute)
    logs.DDP.info("the same work on each rank, in ms: %s", shown)

    rendezvous.begin("volumes")
    volumes = _volumes(settings, world)
    rendezvous.begin("train")
    training = train(settings, world)
    return Report(
        world.size,
        backend,
        versions,
        places,
        reductions,
        links,
        compute,
        volumes,
        training,
        networks,
    )


def _place(world: World) -> Place:
    if world.device.type == "cuda":
        facts = torch.cuda.get_device_properties(world.device)
        device = f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, capability {facts.major}.{facts.minor}"
        return Place(world.rank, socket.gethostname(), device, 0)
    device = f"CPU ({platform.machine()}), {torch.get_num_threads()} threads"
    return Place(world.rank, socket.gethostname(), device, visible_gpus(os.environ))


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def _volumes(settings: Settings, world: World) -> list[Volume]:
    """The volumes as the first rank of each node sees them."""
    mine = []
    if world.local_rank == 0:
        mine = [
            measure.measure_volume(Path(p), world.rank, settings.volume_mib)
            for p in settings.volume
        ]
    volumes = [volume for found in process_group.gather(mine, world) for volume in found]
    for volume in volumes:
        if volume.write_mib_per_second is not None:
            logs.STEP.info(
                "volume %s on rank %d: writes %.0f MiB/s, %.1f GiB free",
                volume.path, volume.rank, volume.write_mib_per_second, volume.free_bytes / 2**30,
            )  # fmt: skip
    return volumes


def separable(settings: Settings) -> tuple[Tensor, Tensor]:
    """Linearly separable data: fp32 `[samples, features]` and their classes, int64 `[samples]`."""
    draw = torch.Generator().manual_seed(settings.seed)
    features = torch.randn(settings.samples, settings.features, generator=draw)
    planes = torch.randn(settings.features, settings.classes, generator=draw)
    return features, (features @ planes).argmax(dim=1)


def train(settings: Settings, world: World) -> Training:
    """A few epochs of a small network, each step one all-reduce of the flat gradient."""
    logs.STEP.info(
        "seed %d, %d samples, batch %d × %d",
        settings.seed,
        settings.samples,
        settings.batch,
        world.size,
    )
    features, labels = (tensor.to(world.device) for tensor in separable(settings))
    torch.manual_seed(settings.seed)
    model = nn.Sequential(
        nn.Linear(settings.features, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, settings.classes)
    ).to(world.device)
    optimizer = FlatAdamW(model.named_parameters(), AdamSettings())
    logs.STEP.info("model: %d parameters on %s", optimizer.master.numel(), world.device)

    before, _ = _evaluate(model, features, labels, world)
    began, computed, losses = time.perf_counter(), 0.0, []
    for epoch in range(settings.epochs):
        loss, seconds = _train_epoch(settings, epoch, model, optimizer, features, labels, world)
        logs.TRAIN.info("epoch %d/%d loss %.4f", epoch + 1, settings.epochs, loss)
        losses.append(loss)
        computed += seconds
    seconds = time.perf_counter() - began
    after, accuracy = _evaluate(model, features, labels, world)
    speed = settings.epochs * settings.samples / seconds
    logs.RESULT.info(
        "loss %.4f -> %.4f, accuracy %.1f %%, %.2f s, %.0f samples/s",
        before,
        after,
        100 * accuracy,
        seconds,
        speed,
    )
    return Training(
        loss_before=before,
        epoch_losses=tuple(losses),
        loss_after=after,
        accuracy=accuracy,
        seconds=seconds,
        samples_per_second=speed,
        rank_seconds=tuple(process_group.gather(computed, world)),
        ranks_agree=len(set(process_group.gather(step_digest.digest(optimizer.master), world)))
        == 1,
    )


def _train_epoch(
    settings: Settings, epoch: int, model: nn.Module, optimizer: FlatAdamW, features: Tensor, labels: Tensor,
    world: World,
) -> tuple[float, float]:  # fmt: skip
    """(mean loss, seconds this rank computed)."""
    draw = torch.Generator().manual_seed(mixed_seed(settings.seed, epoch))
    batches = torch.randperm(settings.samples, generator=draw).split(settings.batch * world.size)
    total, computed = 0.0, 0.0
    for index, ids in enumerate(batches):
        began = time.perf_counter()
        mine = ids[world.rank :: world.size].to(world.device)
        loss = nn.functional.cross_entropy(
            model(features[mine]), labels[mine], reduction="sum"
        ) / len(ids)
        loss.backward()
        share = float(loss.detach())
        computed += time.perf_counter() - began
        if logs.shows_batch("first-last", index, len(batches)):
            shapes = f"features {list(features[mine].shape)}, labels {list(labels[mine].shape)}"
            mean = share * len(ids) / max(len(mine), 1)
            logs.BATCH.debug(
                "epoch %d batch %d/%d: %s, loss %.4f",
                epoch + 1,
                index + 1,
                len(batches),
                shapes,
                mean,
            )
        process_group.sum_(optimizer.gradient, world)
        optimizer.update(settings.lr)
        total += share * len(ids)
    return process_group.sum_numbers([total], world)[0] / settings.samples, computed


@torch.no_grad()
def _evaluate(
    model: nn.Module, features: Tensor, labels: Tensor, world: World
) -> tuple[float, float]:
    """(mean loss, share of right answers) on all samples, of which each rank sees its part."""
    scores, wanted = model(features[world.rank :: world.size]), labels[world.rank :: world.size]
    loss = float(nn.functional.cross_entropy(scores, wanted, reduction="sum"))
    right = float((scores.argmax(dim=1) == wanted).sum())
    loss, right = process_group.sum_numbers([loss, right], world)
    return loss / len(labels), right / len(labels)


def judge(report: Report, settings: Settings) -> list[str]:
    """Faults of the environment, a line each; nothing when it is fit for a run."""
    named = {place.rank: f"rank {place.rank} on {place.host}" for place in report.ranks}
    factor = settings.slow_factor
    problems = [
        f"{named[place.rank]}: the node has {place.gpus_unseen} GPUs, but torch can use none; "
        f"look at the driver, and whether torch {report.versions['torch']} was built for CUDA"
        for place in report.ranks
        if place.gpus_unseen
    ]
    for one in report.all_reduce:
        wrong = ", ".join(named[rank] for rank in one.wrong_ranks)
        problems += (
            [f"all-reduce of {one.bytes:,} bytes gave wrong sums on {wrong}"] if wrong else []
        )
    for rank, network in enumerate(report.networks):
        if network is not None and network.name == "Socket":
            reason = f": {network.reason}" if network.reason else ""
            problems.append(
                f"{named[rank]}: RDMA was asked for (NCCL_IB_HCA), but NCCL uses sockets{reason}"
            )
    for rank, ratio in measure.outliers(report.compute_seconds, factor).items():
        problems.append(
            f"{named[rank]} is slow: the same work takes {ratio:.1f} times as long as elsewhere"
        )
    for index, ratio in measure.outliers([link.seconds for link in report.links], factor).items():
        first, second = (named[rank] for rank in report.links[index].ranks)
        problems.append(
            f"the link from {first} to {second} is {ratio:.1f} times as slow as the others"
        )
    problems += [
        f"volume {one.path} on {named[one.rank]}: {one.problem}"
        for one in report.volumes
        if one.problem
    ]
    return problems + _judge_training(report.training, settings)


def _judge_training(training: Training, settings: Settings) -> list[str]:
    problems = []
    # Not ">": a loss that is not a number is no improvement either.
    if not training.loss_after < training.loss_before:
        problems.append(
            f"training did not improve: loss {training.loss_before:.4g} before, {training.loss_after:.4g} after "
            f"{counted(settings.epochs, 'epoch')} at --lr {settings.lr:g}"
        )
    if not training.ranks_agree:
        problems.append("the ranks ended with different weights")
    return problems
