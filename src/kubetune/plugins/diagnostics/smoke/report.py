"""What the ranks of a smoke test report, and the verdict on it: is this place fit for a run?

The fields are the keys of `kubetune smoke --json`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kubetune.base.humanize import counted
from kubetune.distributed.nccl_log import Network
from kubetune.plugins.diagnostics.smoke import measure
from kubetune.plugins.diagnostics.smoke.measure import Link, Reduction, Volume
from kubetune.plugins.diagnostics.smoke.settings import Settings


@dataclass(frozen=True)
class RankFacts:
    """Where one rank runs."""

    rank: int
    host: str
    device: str
    gpus_unseen: int  # GPUs that the node has and torch cannot use


@dataclass(frozen=True)
class Training:
    """The small training run."""

    loss_before: float
    epoch_losses: tuple[float, ...]
    loss_after: float
    accuracy: float
    seconds: float
    samples_per_second: float
    ranks_agree: bool  # all ranks ended with the same weights


@dataclass(frozen=True)
class Report:
    """Everything that was measured, the same on every rank."""

    world_size: int
    backend: str
    versions: dict[str, str]
    ranks: list[RankFacts]
    all_reduce: list[Reduction]
    links: list[Link]
    compute_seconds: list[float]  # of each rank, for the same work
    volumes: list[Volume]
    training: Training
    networks: Sequence[Network | None] = ()  # that NCCL uses on each rank, where RDMA was asked for


def judge(report: Report, settings: Settings) -> list[str]:
    """Return the faults of the environment, a line each; none when it is fit for a run."""
    # What is most likely the cause of the rest comes first.
    names = {facts.rank: f"rank {facts.rank} on {facts.host}" for facts in report.ranks}
    return [
        *_judge_gpus(report, names),
        *_judge_sums(report, names),
        *_judge_networks(report, names),
        *_judge_speeds(report, names, settings.slow_factor),
        *_judge_volumes(report, names),
        *_judge_training(report.training, settings),
    ]


def _judge_gpus(report: Report, names: Mapping[int, str]) -> list[str]:
    """Return a problem for each rank on a CPU whose node has GPUs."""
    problems = []
    for facts in report.ranks:
        if facts.gpus_unseen:
            problems.append(
                f"{names[facts.rank]}: the node has {facts.gpus_unseen} GPUs, but torch can use none; "
                f"look at the driver, and whether torch {report.versions['torch']} was built for CUDA"
            )
    return problems


def _judge_sums(report: Report, names: Mapping[int, str]) -> list[str]:
    """Return a problem for each size of message that was added up wrongly."""
    problems = []
    for reduction in report.all_reduce:
        if reduction.wrong_ranks:
            ranks = ", ".join(names[rank] for rank in reduction.wrong_ranks)
            problems.append(f"all-reduce of {reduction.bytes:,} bytes gave wrong sums on {ranks}")
    return problems


def _judge_networks(report: Report, names: Mapping[int, str]) -> list[str]:
    """Return a problem for each rank that was to use RDMA and does not: NCCL falls back without an error."""
    problems = []
    for rank, network in enumerate(report.networks):
        if network is not None and network.name == "Socket":
            reason = f": {network.reason}" if network.reason else ""
            problems.append(
                f"{names[rank]}: RDMA was asked for (NCCL_IB_HCA), but NCCL uses sockets{reason}"
            )
    return problems


def _judge_speeds(report: Report, names: Mapping[int, str], factor: float) -> list[str]:
    """Return a problem for each rank and link that takes `factor` times as long as the others."""
    problems = []
    for rank, ratio in measure.outliers(report.compute_seconds, factor).items():
        problems.append(
            f"{names[rank]} is slow: the same work takes {ratio:.1f} times as long as elsewhere"
        )
    link_seconds = [link.seconds for link in report.links]
    for index, ratio in measure.outliers(link_seconds, factor).items():
        first, second = report.links[index].ranks
        problems.append(
            f"the link from {names[first]} to {names[second]} is {ratio:.1f} times as slow as the others"
        )
    return problems


def _judge_volumes(report: Report, names: Mapping[int, str]) -> list[str]:
    """Return a problem for each volume that could not be written and read back."""
    problems = []
    for volume in report.volumes:
        if volume.problem:
            problems.append(f"volume {volume.path} on {names[volume.rank]}: {volume.problem}")
    return problems


def _judge_training(training: Training, settings: Settings) -> list[str]:
    """Return what is wrong with the training run."""
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
