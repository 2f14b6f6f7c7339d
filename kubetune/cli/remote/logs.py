"""`kubetune logs`: what all pods of a run print, in one stream, or the whole log of one rank."""

from __future__ import annotations

import argparse
import codecs
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kubetune.base.humanize import shown_on, visible
from kubetune.cli.remote.run_on_cluster import add_run, find, local_folder, prefix
from kubetune.errors import OK, ConfigError

if TYPE_CHECKING:
    from kubetune.cluster.log_follow import Look, Source
    from kubetune.cluster.pods import State
    from kubetune.kube_api.client import Cluster, Object
    from kubetune.manifests.spec import RunSpec

_POLL_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 30.0
# Without one answer: how long the log of a rank is asked for, and how long while it is followed.
_PATIENCE_SECONDS, _FOLLOW_PATIENCE_SECONDS = 20.0, 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    add_run(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run ends")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--rank", type=int, metavar="N", help="everything that rank N logged, over all its starts")
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
    from kubetune.cluster.log_follow import LogFollower
    from kubetune.cluster.pods import node_number
    from kubetune.cluster.preparation import find_pods
    from kubetune.cluster.runs import trainer_pods

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
    from kubetune.kube_api.client import say

    gone = f"{spec.name} has no pod now; see kubetune status {spec.typed}, and --rank 0 for what it logged before"
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
    from kubetune.cluster.pods import about, component_of, has_ended, is_running, name_of, why, words_of
    from kubetune.cluster.runs import concerns, event_time
    from kubetune.kube_api.client import say
    from kubetune.manifests.initialisers import PREPROCESS
    from kubetune.manifests.spec import TRAINER

    told = set[str]()
    # Of the warnings at the first look, each with its time then: the clocks of others may differ from the one here.
    first: dict[object, str] | None = None
    is_ours = concerns(cluster, spec)

    def look(pods: Sequence[Object], warnings: Sequence[Object]) -> None:
        nonlocal first
        before = {event["metadata"].get("uid"): event_time(event) for event in warnings} if first is None else first
        first = before
        there = [pod for pod in pods if component_of(pod) in (PREPROCESS, TRAINER)]
        trainers = [pod for pod in there if component_of(pod) == TRAINER]
        reasons = {name_of(pod): reason for pod in there if (reason := why(pod))}
        all_run = sum(map(is_running, trainers)) >= spec.nodes
        settled = {name_of(pod) for pod in there if is_running(pod) or has_ended(pod)}

        def matters(event: Object) -> bool:
            name = about(event).get("name", "")
            is_over = all_run or name in settled
            return is_ours(event) and (not is_over or before.get(event["metadata"].get("uid")) != event_time(event))

        found = sorted(filter(matters, warnings), key=event_time)
        news = [(about(event).get("name", "?"), words_of(event)) for event in found]
        # a pod's own reason repeats what its events say
        news = [(name, text) for name, text in news if text not in reasons.get(name, "")]
        for text in (f"{name}: {text}" for name, text in [*news, *reasons.items()]):
            if text not in told:
                told.add(text)
                say(text)

    return look


def print_rank_log(cluster: Cluster, spec: RunSpec, rank: int, *, follow: bool) -> None:
    """Print `logs/rank-N.log` of the run directory, which all starts of that rank have written to.

    It is read by byte offset, so neither a new pod nor an absence of the API server loses or doubles a line.
    """
    from kubetune.cluster.volume_reader import VolumeReader
    from kubetune.kube_api.api_errors import Unreachable

    path, shown = f"{spec.run_dir}/logs/rank-{rank}.log", _Counter()
    answered, pause = time.monotonic(), _POLL_SECONDS
    with VolumeReader(cluster, spec) as volume:
        while True:
            state = _state(cluster, spec, follow=follow)
            goes_on = follow and state in ("waiting", "running")
            try:
                if state != "waiting" or not follow:
                    target = volume.target()
                    argv = ["sh", "-c", 'test ! -e "$2" || tail -c "+$1" -- "$2"', "sh", str(shown.bytes + 1), path]
                    cluster.exec(target.pod, target.container, argv, stdout=shown)
                answered, pause = time.monotonic(), _POLL_SECONDS
            except Unreachable:
                if time.monotonic() - answered > (_FOLLOW_PATIENCE_SECONDS if follow else _PATIENCE_SECONDS):
                    raise
                goes_on, pause = True, min(2 * pause, _LONGEST_PAUSE_SECONDS)
            if not goes_on:
                if not shown.bytes:
                    _say_nothing_yet(spec, f"no start of rank {rank}")
                return
            time.sleep(pause)


def _state(cluster: Cluster, spec: RunSpec, *, follow: bool) -> State:
    """State of the run; a StatefulSet that is followed, whose pods stay after the end, is done then."""
    from kubetune.cluster.pods import state_of
    from kubetune.cluster.runs import final_status, read_progress, trainer_pods, workload_kind

    found = trainer_pods(cluster, spec)
    workload = cluster.get(workload_kind(spec), spec.name)
    state, _ = state_of(workload, found)
    stays = follow and state == "running" and spec.kubernetes.kind == "statefulset"
    return "done" if stays and final_status(workload, read_progress(cluster, spec, found)) else state


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
