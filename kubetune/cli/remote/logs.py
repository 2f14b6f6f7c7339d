"""`kubetune logs`: what all pods of a run print, in one stream, or the whole log of one rank."""

from __future__ import annotations

import argparse
import codecs
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kubetune.base.humanize import shown_on, visible
from kubetune.cli.remote.run_on_cluster import add_run, find, local_folder, prefix
from kubetune.errors import OK, ConfigError

if TYPE_CHECKING:
    from kubetune.k8s.api.client import Cluster, Object
    from kubetune.k8s.cluster.log_follow import Look, Source
    from kubetune.k8s.manifests.kinds.kind import State
    from kubetune.k8s.manifests.spec import RunSpec

_POLL_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 30.0
# What the scheduler says of claims that are being made, and for how long that is no news.
_WAITS_FOR_VOLUMES = ("waiting for ephemeral volume", "unbound immediate PersistentVolumeClaims")
_VOLUME_SECONDS = 10.0
# Without one answer: how long the log of a rank is asked for, and how long while it is followed.
_PATIENCE_SECONDS, _FOLLOW_PATIENCE_SECONDS = 20.0, 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    add_run(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run ends")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--rank", type=int, metavar="N", help="everything that rank N logged, over all its starts"
    )
    chosen.add_argument("--node", type=int, metavar="N", help="only what the pod of node N prints")


def run(args: argparse.Namespace) -> int:
    """Print logs. Raises ConfigError for a run, node or rank there is not."""
    cluster, spec = find(args)
    ranks = spec.nodes * spec.processes
    for name, value, count in (("--rank", args.rank, ranks), ("--node", args.node, spec.nodes)):
        if value is not None and not 0 <= value < count:
            raise ConfigError(f"{name}: found {value}; expected 0 to {count - 1}")
    if args.rank is not None:
        print_rank_log(cluster, spec, args.rank, follow=args.follow)
        return OK
    from kubetune.k8s.cluster.log_follow import LogFollower
    from kubetune.k8s.cluster.pods import node_number
    from kubetune.k8s.cluster.preparation import find_pods
    from kubetune.k8s.cluster.runs import trainer_pods

    show, tell, is_silent = printer(spec), teller(cluster, spec), True

    def emit(source: Source, text: str) -> None:
        nonlocal is_silent
        is_silent = False
        show(source, text)

    follower = LogFollower(
        cluster,
        spec,
        emit,
        wanted=lambda pod: args.node is None or node_number(pod) == args.node,
        keep=local_folder(spec) / "logs" / "pods" if args.follow else None,
        look=tell,
    )
    if args.follow:
        follower.follow()
    else:
        follower.read()
    if is_silent:
        there = [*find_pods(cluster, spec), *trainer_pods(cluster, spec)]
        _say_nothing_yet(spec, "no pod" if there else "")
        if not args.follow:
            warnings, _ = cluster.list_with_revision("Event", fields={"type": "Warning"})
            tell(there, warnings)
    return OK


def _say_nothing_yet(spec: RunSpec, who: str) -> None:
    """Say that nobody has printed; `who`: the pods or starts that might have, empty where there is none."""
    from kubetune.k8s.api.client import say

    look = f"kubetune status {spec.typed}"
    gone = f"{spec.name} has no pod now; see {look}, and --rank 0 for what it logged before"
    say(f"{who} of {spec.name} has printed anything so far" if who else gone)


def printer(spec: RunSpec) -> Callable[[Source, str], None]:
    """Prints the lines of all pods, each marked with its node."""

    def show(source: Source, text: str) -> None:
        more = "" if source.is_trainer else source.container
        sys.stdout.write(f"{prefix(source.node, spec.nodes, more)}{shown_on(sys.stdout, text)}\n")
        sys.stdout.flush()

    return show


def teller(cluster: Cluster, spec: RunSpec) -> Look:
    """Tells, once each, why pods do not come and what the cluster warns of; not what is over."""
    from kubetune.k8s.api.client import say
    from kubetune.k8s.cluster import kueue
    from kubetune.k8s.cluster.pods import (
        about,
        component_of,
        event_time,
        has_ended,
        is_running,
        name_of,
        without_names,
    )
    from kubetune.k8s.cluster.runs import concerns, workload_kind
    from kubetune.k8s.manifests.initialisers import PREPROCESS
    from kubetune.k8s.manifests.spec import TRAINER

    told = set[str]()
    # Of the warnings at the first look, each with its time then: the clocks of others may differ from the one here.
    first: dict[object, str] | None = None
    is_ours = concerns(cluster, spec)

    def look(pods: Sequence[Object], warnings: Sequence[Object]) -> None:
        nonlocal first
        before = (
            {event["metadata"].get("uid"): event_time(event) for event in warnings}
            if first is None
            else first
        )
        first = before
        there = [pod for pod in pods if component_of(pod) in (PREPROCESS, TRAINER)]
        trainers = [pod for pod in there if component_of(pod) == TRAINER]
        reasons = _lasting_reasons(there)
        if spec.kubernetes.queue and not trainers:
            held = kueue.why_waiting(cluster, cluster.get(workload_kind(spec), spec.name))
            reasons |= {f"queue {spec.kubernetes.queue}": held} if held else {}
        all_run = sum(map(is_running, trainers)) >= spec.nodes
        settled = {name_of(pod) for pod in there if is_running(pod) or has_ended(pod)}
        by_name = {name_of(pod): pod for pod in there}

        def matters(event: Object) -> bool:
            name = about(event).get("name", "")
            if name in by_name and _is_no_news(event, by_name[name]):
                return False
            is_over = all_run or name in settled
            return is_ours(event) and (
                not is_over or before.get(event["metadata"].get("uid")) != event_time(event)
            )

        for text in _lines(sorted(filter(matters, warnings), key=event_time), reasons):
            if without_names(text) not in told:
                told.add(without_names(text))
                say(text)

    return look


def _lines(warnings: Sequence[Object], reasons: Mapping[str, str]) -> list[str]:
    """Return what to tell of these warnings, and of the pods that do not run for these reasons."""
    from kubetune.k8s.cluster.pods import about, words_of

    lines = []
    for event in warnings:
        name, text = about(event).get("name", "?"), words_of(event)
        # A pod's own reason repeats what its events say.
        if text not in reasons.get(name, ""):
            lines.append(f"{name}: {text}")
    return [*lines, *(f"{name}: {reason}" for name, reason in reasons.items())]


def _lasting_reasons(there: Sequence[Object]) -> dict[str, str]:
    """Return why pods do not run, by their names, without what passes in some seconds."""
    from kubetune.k8s.cluster.pods import name_of, why

    reasons = {}
    for pod in there:
        reason = why(pod)
        if reason and not _may_pass_soon(pod, reason):
            reasons[name_of(pod)] = reason
    return reasons


def _is_no_news(event: Object, pod: Object) -> bool:
    """True if a warning about a pod is over, or will soon be."""
    from kubetune.k8s.cluster.pods import is_of_scheduling, words_of

    return is_of_scheduling(event, pod) or _may_pass_soon(pod, words_of(event))


def _may_pass_soon(pod: Object, reason: str) -> bool:
    """True if a new pod only waits for its volumes to be made, which takes some seconds."""
    from kubetune.k8s.cluster.pods import age_seconds

    age = age_seconds(pod["metadata"].get("creationTimestamp"))
    is_young = age is not None and age < _VOLUME_SECONDS
    return is_young and any(text in reason for text in _WAITS_FOR_VOLUMES)


def print_rank_log(cluster: Cluster, spec: RunSpec, rank: int, *, follow: bool) -> None:
    """Print `logs/rank-N.log` of the run directory, which all starts of that rank have written to.

    It is read by byte offset, so neither a new pod nor an absence of the API server loses or doubles a line.
    """
    from kubetune.k8s.api.api_errors import ApiError, may_pass
    from kubetune.k8s.cluster.volume_reader import VolumeReader

    path, shown = f"{spec.run_dir}/logs/rank-{rank}.log", _Counter()
    answered, pause = time.monotonic(), _POLL_SECONDS
    with VolumeReader(cluster, spec) as volume:
        while True:
            try:
                state = _state(cluster, spec, follow=follow)
                goes_on = follow and state in ("waiting", "running")
                if state != "waiting" or not follow:
                    target = volume.target()
                    argv = [
                        "sh",
                        "-c",
                        'test ! -e "$2" || tail -c "+$1" -- "$2"',
                        "sh",
                        str(shown.bytes + 1),
                        path,
                    ]
                    cluster.exec(target.pod, target.container, argv, stdout=shown)
                answered, pause = time.monotonic(), _POLL_SECONDS
            except ApiError as error:
                patience = _FOLLOW_PATIENCE_SECONDS if follow else _PATIENCE_SECONDS
                if not may_pass(error) or time.monotonic() - answered > patience:
                    raise
                goes_on, pause = True, min(2 * pause, _LONGEST_PAUSE_SECONDS)
            if not goes_on:
                if not shown.bytes:
                    _say_nothing_yet(spec, f"no start of rank {rank}")
                return
            time.sleep(pause)


def _state(cluster: Cluster, spec: RunSpec, *, follow: bool) -> State:
    """State of the run; a StatefulSet that is followed, whose pods stay after the end, is done then."""
    from kubetune.k8s.cluster.pods import state_of
    from kubetune.k8s.cluster.runs import final_status, read_progress, trainer_pods, workload_kind
    from kubetune.k8s.manifests.kinds.registry import kind_of

    found = trainer_pods(cluster, spec)
    workload = cluster.get(workload_kind(spec), spec.name)
    state, _ = state_of(workload, found)
    stays = follow and state == "running" and kind_of(spec.kubernetes.kind).never_ends
    return (
        "done" if stays and final_status(workload, read_progress(cluster, spec, found)) else state
    )


class _Counter:
    """Writes to the terminal, which obeys none of it, or byte by byte to where it is kept; and counts."""

    def __init__(self) -> None:
        self.bytes = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, data: bytes) -> None:
        self.bytes += len(data)
        if sys.stdout.isatty():
            sys.stdout.write(visible(self._decoder.decode(data)))
        else:
            sys.stdout.buffer.write(data)
        sys.stdout.flush()
