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
    from kubetune.k8s.manifests.run_spec import RunSpec

_POLL_SECONDS = 1.0
# Between two attempts while nothing answers; it doubles up to this.
_LONGEST_PAUSE_SECONDS = 30.0
# What the scheduler says of claims that are being made, and for how long that is no news.
_WAITS_FOR_VOLUMES = ("waiting for ephemeral volume", "unbound immediate PersistentVolumeClaims")
_VOLUME_SECONDS = 10.0
# How long the log of a rank is asked for without any answer.
_PATIENCE_SECONDS = 20.0
# The same while it is followed.
_FOLLOW_PATIENCE_SECONDS = 600.0


# Prints a file from a byte on, and nothing while the file does not exist.
READ_FROM = 'test ! -e "$2" || tail -c "+$1" -- "$2"'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    add_run(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="continue until the run ends")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--rank", type=int, metavar="N", help="everything that rank N logged, over all its starts"
    )
    chosen.add_argument("--node", type=int, metavar="N", help="only what the pod of node N prints")
    chosen.add_argument(
        "--sampler",
        metavar="N",
        help="print the output of the Nth server that draws answers, or of `all`, instead of the trainer's pods",
    )


def run(args: argparse.Namespace) -> int:
    """Print logs. Raise ConfigError for a run, node or rank that does not exist."""
    cluster, spec = find(args)
    _require_below("--rank", args.rank, spec.nodes * spec.processes)
    _require_below("--node", args.node, spec.nodes)
    sampler = _sampler_number(spec, args.sampler)
    if args.rank is not None:
        print_rank_log(cluster, spec, args.rank, follow=args.follow)
        return OK
    from kubetune.k8s.cluster.log_follow import LogFollower
    from kubetune.k8s.cluster.pods import node_number
    from kubetune.k8s.manifests.initialisers import PREPROCESS
    from kubetune.k8s.manifests.run_spec import TRAINER
    from kubetune.k8s.manifests.samplers import SAMPLER

    show = printer(spec)
    tell = teller(cluster, spec)
    is_silent = True

    def emit(source: Source, text: str) -> None:
        nonlocal is_silent
        is_silent = False
        show(source, text)

    number = args.node
    components = [PREPROCESS, TRAINER]
    if args.sampler is not None:
        number = sampler
        components = [SAMPLER]

    def wanted(pod: Object) -> bool:
        return number is None or node_number(pod) == number

    keep = None
    if args.follow:
        # The logs of pods vanish with them.
        keep = local_folder(spec) / "logs" / "pods"
    follower = LogFollower(
        cluster, spec, emit, wanted=wanted, keep=keep, look=tell, components=components
    )
    if args.follow:
        follower.follow()
    else:
        follower.read()

    if is_silent:
        pods = _pods_of(cluster, spec, components)
        who = ""
        if pods:
            who = "no pod"
        _say_nothing_yet(spec, who)
        # Following has printed warnings as they came.
        if not args.follow:
            warnings, _ = cluster.list_with_revision("Event", fields={"type": "Warning"})
            tell(pods, warnings)
    return OK


def _pods_of(cluster: Cluster, spec: RunSpec, components: Sequence[str]) -> list[Object]:
    """Return the pods of these components."""
    from kubetune.k8s.cluster.pods import component_of

    pods = cluster.list("Pod", spec.every_pod())
    return [pod for pod in pods if component_of(pod) in components]


def _require_below(option: str, number: int | None, count: int) -> None:
    """Raise ConfigError for a number of a rank or node that the run does not have."""
    if number is not None and not 0 <= number < count:
        raise ConfigError(f"{option}: found {number}; expected 0 to {count - 1}")


def _sampler_number(spec: RunSpec, text: str | None) -> int | None:
    """Return the number of a server; None for `all` of them. Raise ConfigError for one that the run does not have."""
    if text is None:
        return None
    samplers = spec.kubernetes.samplers
    if samplers is None:
        raise ConfigError(
            f"--sampler: {spec.name} has no pods that draw answers (kubernetes.samplers)"
        )
    if text == "all":
        return None
    if not text.isdecimal() or int(text) >= samplers.replicas:
        raise ConfigError(f"--sampler: found {text}; expected 0 to {samplers.replicas - 1}, or all")
    return int(text)


def _say_nothing_yet(spec: RunSpec, who: str) -> None:
    """Say that nothing was printed. `who`: "no pod" or "no start"; empty where none exists."""
    from kubetune.k8s.api.client import say

    if who:
        say(f"{who} of {spec.name} has printed anything so far")
        return
    status = f"kubetune status {spec.typed}"
    say(f"{spec.name} has no pod now; see {status}, and --rank 0 for its earlier log")


def printer(spec: RunSpec) -> Callable[[Source, str], None]:
    """Return a function that prints the lines of all pods, each marked with its node."""
    from kubetune.k8s.manifests.samplers import SAMPLER

    def show(source: Source, text: str) -> None:
        # The main container goes without its name: nearly all lines are its.
        container = ""
        if not source.is_main:
            container = source.container
        if source.component == SAMPLER:
            servers = spec.pods - spec.nodes
            mark = prefix(source.node, servers, container, group=SAMPLER)
        else:
            mark = prefix(source.node, spec.nodes, container)
        sys.stdout.write(f"{mark}{shown_on(sys.stdout, text)}\n")
        sys.stdout.flush()

    return show


def teller(cluster: Cluster, spec: RunSpec) -> Look:
    """Return a function that says, once, why pods do not run and what the cluster warns of; not what is over."""
    from kubetune.k8s.api.client import say
    from kubetune.k8s.cluster.pods import component_of, event_time, is_running, without_names
    from kubetune.k8s.cluster.run_events import concerns
    from kubetune.k8s.manifests.run_spec import TRAINER

    # Messages already printed, without names of pods: of many pods that wait for the same, only the first is shown.
    said_before = set[str]()
    # Time of each warning at the last look: clocks of the cluster may differ from the one here.
    times: dict[object, str] | None = None
    # The same at the last look at which all pods ran: what they warned of is over, also where a pod goes later.
    times_of_what_is_over: dict[object, str] = {}
    is_ours = concerns(cluster, spec)

    def look(pods: Sequence[Object], warnings: Sequence[Object]) -> None:
        nonlocal times, times_of_what_is_over
        times_before = _times(warnings) if times is None else times

        by_name = _by_name(pods)
        trainers = [pod for pod in by_name.values() if component_of(pod) == TRAINER]

        # Why pods do not run or, where Kueue holds back the workload, why there are none.
        reasons = _lasting_reasons(list(by_name.values()))
        if not trainers:
            reasons |= _reasons_of_queue(cluster, spec)

        # What held back a pod that runs now is over, unless the warning is new.
        running_pods = [pod for pod in trainers if is_running(pod)]
        all_run = len(running_pods) >= spec.nodes

        def matters(event: Object) -> bool:
            if not is_ours(event):
                return False
            pod = _subject(event, by_name)
            if pod is not None and _is_no_news(event, pod):
                return False
            uid = event["metadata"].get("uid")
            if times_of_what_is_over.get(uid) == event_time(event):
                return False
            # It came, or came again, since the last look.
            is_new = times_before.get(uid) != event_time(event)
            return is_new or not (all_run or _is_over(event, pod))

        news = [event for event in warnings if matters(event)]
        news.sort(key=event_time)
        times = _times(warnings)
        if all_run:
            times_of_what_is_over = times
        for text in _lines(news, reasons):
            kind_of_text = without_names(text)
            if kind_of_text not in said_before:
                said_before.add(kind_of_text)
                say(text)

    return look


def _reasons_of_queue(cluster: Cluster, spec: RunSpec) -> dict[str, str]:
    """Return why Kueue holds back the workload; nothing where it does not."""
    from kubetune.k8s.cluster import kueue, pods
    from kubetune.k8s.cluster.run_lookup import workload_kind

    workload = cluster.get(workload_kind(spec), spec.name)
    reason = kueue.why_waiting(cluster, workload)
    if workload is None or not reason:
        return {}
    return {f"queue {pods.queue_of(workload)}": reason}


def _by_name(pods: Sequence[Object]) -> dict[str, Object]:
    """Return the pods that prepare, draw or train, by name. Others, such as TensorBoard's, are no news of the run."""
    from kubetune.k8s.cluster.pods import component_of, name_of
    from kubetune.k8s.manifests.initialisers import PREPROCESS
    from kubetune.k8s.manifests.run_spec import TRAINER
    from kubetune.k8s.manifests.samplers import SAMPLER

    by_name = {}
    for pod in pods:
        if component_of(pod) in (PREPROCESS, SAMPLER, TRAINER):
            by_name[name_of(pod)] = pod
    return by_name


def _subject(event: Object, by_name: Mapping[str, Object]) -> Object | None:
    """Return the pod that an event is about; None where it is gone, though another one may have its name."""
    from kubetune.k8s.cluster.pods import about

    subject = about(event)
    pod = by_name.get(subject.get("name", ""))
    if pod is None or subject.get("uid", pod["metadata"]["uid"]) != pod["metadata"]["uid"]:
        return None
    return pod


def _is_over(event: Object, pod: Object | None) -> bool:
    """True if a warning held back a pod that runs now, has ended, or is gone."""
    from kubetune.k8s.cluster.pods import about, has_ended, is_running

    if pod is None:
        return about(event).get("kind") == "Pod"
    return is_running(pod) or has_ended(pod)


def _times(events: Sequence[Object]) -> dict[object, str]:
    """Return when each event was seen last, by its uid."""
    from kubetune.k8s.cluster.pods import event_time

    times = {}
    for event in events:
        times[event["metadata"].get("uid")] = event_time(event)
    return times


def _lines(warnings: Sequence[Object], reasons: Mapping[str, str]) -> list[str]:
    """Return what to tell of these warnings, and of the pods that do not run for these reasons."""
    from kubetune.k8s.cluster.pods import about, words_of

    lines = []
    for event in warnings:
        name = about(event).get("name", "?")
        text = words_of(event)
        # A pod's own reason repeats what its events say.
        if text not in reasons.get(name, ""):
            lines.append(f"{name}: {text}")
    for name, reason in reasons.items():
        lines.append(f"{name}: {reason}")
    return lines


def _lasting_reasons(pods: Sequence[Object]) -> dict[str, str]:
    """Return why pods do not run, by their names, without what passes in some seconds.

    The pod by which a start ended comes before those that only lost it.
    """
    from kubetune.k8s.cluster.pods import name_of, only_followed, why

    reasons = {}
    for pod in sorted(pods, key=only_followed):
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

    path = f"{spec.run_dir}/logs/rank-{rank}.log"
    patience = _PATIENCE_SECONDS
    if follow:
        patience = _FOLLOW_PATIENCE_SECONDS
    shown = _Counter()
    answered = time.monotonic()
    pause = _POLL_SECONDS
    with VolumeReader(cluster, spec) as volume:
        while True:
            try:
                state = _state(cluster, spec, follow=follow)
                goes_on = follow and state in ("waiting", "running")
                # While a run waits, no pod has the volume mounted. Without --follow, one is made to read it.
                if state != "waiting" or not follow:
                    target = volume.target()
                    command = ["sh", "-c", READ_FROM, "sh", str(shown.bytes + 1), path]
                    cluster.exec(target.pod, target.container, command, stdout=shown)
                answered = time.monotonic()
                pause = _POLL_SECONDS
            except ApiError as error:
                if not may_pass(error) or time.monotonic() - answered > patience:
                    raise
                goes_on = True
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            if not goes_on:
                if not shown.bytes:
                    _say_nothing_yet(spec, f"no start of rank {rank}")
                return
            time.sleep(pause)


def _state(cluster: Cluster, spec: RunSpec, *, follow: bool) -> State:
    """Return the state of the run. Some kinds keep their pods running after its end: followed, it is done then."""
    from kubetune.k8s.cluster.asking_pods import read_progress
    from kubetune.k8s.cluster.cluster_runs import final_status, trainer_pods
    from kubetune.k8s.cluster.pods import state_of
    from kubetune.k8s.cluster.run_lookup import workload_kind
    from kubetune.k8s.manifests.kinds.registry import kind_of

    pods = trainer_pods(cluster, spec)
    workload = cluster.get(workload_kind(spec), spec.name)
    state, _ = state_of(workload, pods)
    if not follow or state != "running":
        return state
    if not kind_of(spec.kubernetes.kind).never_ends:
        return state

    # The run's own status says what Kubernetes does not.
    if final_status(workload, read_progress(cluster, spec, pods)):
        return "done"
    return state


class _Counter:
    """Standard output that counts its bytes. A terminal gets them escaped, a file or a pipe as they are."""

    def __init__(self) -> None:
        self.bytes = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, data: bytes) -> None:
        self.bytes += len(data)
        # What a run prints may hold codes that a terminal obeys. A piece may end within a character.
        if sys.stdout.isatty():
            sys.stdout.write(visible(self._decoder.decode(data)))
        else:
            sys.stdout.buffer.write(data)
        sys.stdout.flush()
