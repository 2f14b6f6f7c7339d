"""Runs as the cluster knows them: found by name, looked at as a whole, and asked through their pods.

The ConfigMap of a run holds its config, so a name is enough for every verb, on any machine.
"""

from __future__ import annotations

import io
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from kubetune.config.load import load_resolved
from kubetune.config.schema import Config
from kubetune.config.schema.cluster import DNS_NAME
from kubetune.errors import FINAL, OK, ConfigError, EnvironmentFault, only_followed
from kubetune.k8s.api.api_errors import Refused
from kubetune.k8s.api.client import Cluster, Object
from kubetune.k8s.api.kinds import WORKLOADS
from kubetune.k8s.cluster import kueue, pods, preparation
from kubetune.k8s.cluster.termination import left_progress, logged_progress, noted_progress, trusted
from kubetune.k8s.manifests.kinds.kind import State
from kubetune.k8s.manifests.kinds.registry import kinds_by_object
from kubetune.k8s.manifests.spec import COMPONENT, MANAGED_BY, TRAINER, RunSpec, plan_without_data
from kubetune.rundir.exit_status import ExitStatus

CONFIG_KEY = "run.yaml"

FILES = "files"
"""Component of the pods that read the outputs volume where no other does."""

S = TypeVar("S")
T = TypeVar("T")

_FINAL = (OK, *FINAL)
_STAMP = len("2026-11-20T10:15:00")
# A node that is down answers to nothing, and the API server itself waits for it for half a minute.
ASK_SECONDS = 15.0
ASKED_PODS = 2
_AWAKE_SECONDS = 0.5


@dataclass(frozen=True)
class Target:
    """A container that commands can be run in."""

    pod: str
    container: str
    node: int = 0


@dataclass(frozen=True)
class ObservedRun:
    """A run at one moment. `pods` are the trainer's, by node and age; `progress` is in_pod's answer,
    or as much of it as is known without one.

    `preparing` are the pods that fetch and prepare, while there is no trainer, or where they are why there is none;
    `silence` says why pods that run could not be asked how far they are; `cause` is the pod by which the last start
    ended, its code and the time, as far as Kubernetes knows it.
    """

    spec: RunSpec
    workload: Object | None
    pods: list[Object]
    events: list[Object]
    state: State
    reason: str
    progress: dict[str, Any] | None
    preparing: list[Object] = field(default_factory=list)
    silence: str = ""
    cause: dict[str, Any] | None = None


def workload_kind(spec: RunSpec) -> str:
    """The Kubernetes kind that runs the pods."""
    return WORKLOADS[spec.kubernetes.kind].name


def list_runs(cluster: Cluster) -> list[str]:
    """Names of the runs in the namespace."""
    labels = {MANAGED_BY: "kubetune", COMPONENT: TRAINER}
    found = cluster.list("ConfigMap", labels)
    return sorted(
        pods.name_of(marker) for marker in found if CONFIG_KEY in (marker.get("data") or {})
    )


def find_run(cluster: Cluster, name: str) -> RunSpec:
    """The run of that name. Raises ConfigError naming those there are."""
    found = read_run(cluster, name)
    if found is None:
        cluster.require_namespace()
        there = ", ".join(list_runs(cluster)) or "none"
        raise ConfigError(
            f"there is no run {name or repr(name)} in namespace {cluster.namespace}; runs there: {there}. "
            "-n names another namespace"
        )
    return found


def read_run(cluster: Cluster, name: str) -> RunSpec | None:
    """The run of that name, with the files that travel with it, by their name in the ConfigMap; or None."""
    # Names that no object can have, such as none or two dots, would ask for something else.
    found = cluster.get("ConfigMap", name) if re.fullmatch(DNS_NAME, name) else None
    if found is None:
        return None
    text = (found.get("data") or {}).get(CONFIG_KEY)
    if text is None or pods.labels_of(found).get(MANAGED_BY) != "kubetune":
        raise ConfigError(
            f"ConfigMap {name} in namespace {cluster.namespace} is none of kubetune's; use another name"
        )
    config = _config_of(text, f"ConfigMap {name} in namespace {cluster.namespace}, {CONFIG_KEY}")
    carried = cluster.get("ConfigMap", f"{name}-data")
    spec = RunSpec.of(
        config, plan_without_data(config), (carried or {}).get("data") or {}
    ).in_namespace(cluster.namespace)
    # An overlay of kustomize may have moved it, or put something before its name.
    return spec if spec.name == name else spec.renamed(name)


def _config_of(text: str, where: str) -> Config:
    """The config in a run's ConfigMap. Raises ConfigError where somebody, or a newer kubetune, wrote another one."""
    try:
        tree = YAML(typ="safe", pure=True).load(io.StringIO(text))
    except (YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where}: no YAML ({' '.join(str(error).split())[:200]}); put back what was there"
        ) from None
    return load_resolved(tree, where)


def trainer_pods(cluster: Cluster, spec: RunSpec) -> list[Object]:
    """The pods that train, by node, older ones first."""
    found = cluster.list("Pod", spec.selector(TRAINER))
    return sorted(
        found, key=lambda pod: (pods.node_number(pod), pod["metadata"].get("creationTimestamp", ""))
    )


def running(cluster: Cluster, spec: RunSpec) -> list[Target]:
    """The trainer's running containers, by node."""
    found = [pod for pod in trainer_pods(cluster, spec) if pods.is_running(pod)]
    return [
        Target(pods.name_of(pod), pods.trainer_container(pod), pods.node_number(pod))
        for pod in found
    ]


def _belongs_to(cluster: Cluster, spec: RunSpec) -> Callable[[str], bool]:
    """A test of names: whether an object of that name is one of the run's, of which some begin with its name."""
    others = [name for name in list_runs(cluster) if name.startswith(f"{spec.name}-")]

    def is_ours(name: str) -> bool:
        ours = name == spec.name or name.startswith(f"{spec.name}-")
        return ours and not any(name == other or name.startswith(f"{other}-") for other in others)

    return is_ours


def concerns(cluster: Cluster, spec: RunSpec) -> Callable[[Object], bool]:
    """A test of events: whether one is about anything of the run: objects of its name, or whose name begins with it.

    Those of an earlier run of the name, whose objects had other uids, came before this one's ConfigMap was made.
    """
    is_ours, marker = _belongs_to(cluster, spec), cluster.get("ConfigMap", spec.name)
    began = str(marker["metadata"].get("creationTimestamp", "")) if marker else ""

    def is_of_run(event: Object) -> bool:
        return (
            is_ours(pods.about(event).get("name", ""))
            and _seconds(pods.event_time(event)) >= began[:_STAMP]
        )

    return is_of_run


def events_of(cluster: Cluster, spec: RunSpec) -> list[Object]:
    """Events about anything of the run, oldest first."""
    return sorted(filter(concerns(cluster, spec), cluster.list("Event")), key=pods.event_time)


def _seconds(stamp: str) -> str:
    """A time to whole seconds, which is all that creation times have."""
    return stamp[:_STAMP]


def ask(
    cluster: Cluster, target: Target, *question: str, seconds: float | None = None
) -> list[Any]:
    """Put a question of in_pod.py to a pod; the lines of JSON it answers. EnvironmentFault when it cannot answer."""
    answer, errors = io.BytesIO(), io.BytesIO()
    argv = ["python", "-P", "-m", "kubetune.k8s.cluster.in_pod", *question]
    code = cluster.exec(
        target.pod, target.container, argv, stdout=answer, stderr=errors, seconds=seconds
    )
    if code != 0:
        said = errors.getvalue().decode(errors="replace").strip().rpartition("\n")[2]
        raise EnvironmentFault(
            f"pod {target.pod} could not answer ({question[0]}, exit code {code}): {said}"
        )
    try:
        return [json.loads(line) for line in answer.getvalue().splitlines()]
    except (ValueError, RecursionError):
        said = answer.getvalue()[:200].decode(errors="replace")
        raise EnvironmentFault(
            f"pod {target.pod} answered {question[0]} with {said!r}; expected JSON"
        ) from None


def on_all(question: Callable[[S], T], asked: Sequence[S]) -> list[T]:
    """Put a question to all, such as pods, at once; the answers in their order. Ctrl-C waits for none of them."""
    answers: list[Future[T]] = [Future() for _ in asked]

    def put(answer: Future[T], one: S) -> None:
        try:
            answer.set_result(question(one))
        except BaseException as error:
            answer.set_exception(error)

    for answer, one in zip(answers, asked, strict=True):
        # not a pool's, which the interpreter waits for at its end
        threading.Thread(target=put, args=(answer, one), daemon=True).start()
    while wait(answers, _AWAKE_SECONDS).not_done:
        pass  # the system may hand a signal to another thread, at which this one would sleep on
    return [answer.result() for answer in answers]


def observe(cluster: Cluster, spec: RunSpec) -> ObservedRun:
    """Everything there is to know about a run now."""
    workload = cluster.get(workload_kind(spec), spec.name)
    found = trainer_pods(cluster, spec)
    state, reason = pods.state_of(workload, found)
    preparing: list[Object] = []
    if spec.prepares and not found and state in ("absent", "waiting", "failed"):
        preparing = preparation.find_pods(cluster, spec)
        state, cause = preparation.standing(cluster, spec, state, preparing)
        reason = cause or reason
    if state == "waiting" and not reason and spec.kubernetes.queue:
        reason = kueue.why_waiting(cluster, workload)
    progress, silence = ask_progress(cluster, spec, found)
    events = events_of(cluster, spec)
    if (
        state == "running"
        and (ended := final_status(workload, progress))
        and not is_left_behind(spec, ended)
    ):
        # without its error: a pause is "done", as a Job that pauses is
        state, reason = ExitStatus(ended["code"], ended["reason"]).state, ended["reason"]
    if progress is None and not silence:
        progress = left_progress(found)
    if progress is None:
        progress = (
            noted_progress(cluster, spec) if state == "stopped" else logged_progress(cluster, found)
        )
    last = find_cause(found, events)
    return ObservedRun(
        spec, workload, found, events, state, reason, progress, preparing, silence, last
    )


def find_cause(found: Sequence[Object], events: Sequence[Object]) -> dict[str, Any] | None:
    """The pod by which a start ended last: one that is there still, or, where its Job is deleted with it, of an event.

    `pod`, `code`, `reason` and `time`; None where no more is known than that others followed.
    """
    left = culprit_left(found, events)
    since = ""
    if left is not None:
        ended = pods.last_end(left) or {}
        if not pods.only_followed(left):
            return {
                "pod": pods.name_of(left),
                "code": pods.exit_code(left),
                "reason": pods.why(left),
                "time": ended.get("finishedAt"),
            }
        since = str(ended.get("startedAt") or "")
    for event in reversed(events):
        time = pods.event_time(event)
        match = _failed_pod(str(event.get("message") or ""))
        if match is None:
            continue
        if _seconds(time) < _seconds(since):
            break  # of an earlier start
        code = int(match["code"])
        if not only_followed(code, None):
            return {
                "pod": match["pod"],
                "code": code,
                "reason": pods.ended_with(code),
                "time": time,
            }
        since = max(since, _started(match["pod"], events, time))
    return None


def culprit_left(found: Sequence[Object], events: Sequence[Object]) -> Mapping[str, Any] | None:
    """The pod that brought the last end about, if it is there still; None where a later start was stopped or drained."""
    left = pods.culprit(found)
    ended = str(((left and pods.last_end(left)) or {}).get("finishedAt") or "")
    trainers = tuple({kind.container for kind in kinds_by_object().values()})
    for event in events:
        # Kubelet's word for a pod that is deleted, which names the container last.
        is_of_trainer = event.get("reason") == "Killing" and pods.words_of(event).endswith(trainers)
        if not is_of_trainer:
            continue
        began = _started(str(pods.about(event).get("name")), events, pods.event_time(event))
        if _seconds(began) > _seconds(ended):
            return None
    return left


def _started(pod: str, events: Sequence[Object], before: str) -> str:
    """Return when a pod began last before some time; nothing where no event is left that tells."""
    times = [
        pods.event_time(event)
        for event in events
        if event.get("reason") == "Started" and pods.about(event).get("name") == pod
    ]
    return max((time for time in times if time <= before), default="")


def _failed_pod(message: str) -> re.Match[str] | None:
    """Return what a controller says of a pod that failed, by the words of its kind."""
    for words in dict.fromkeys(kind.failed_pod for kind in kinds_by_object().values()):
        if match := words.search(message):
            return match
    return None


def exit_status_in(progress: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the exit status in a run's progress, or None while it runs."""
    status: dict[str, Any] | None = (progress or {}).get("exit_status")
    return status


def final_status(workload: Object | None, progress: dict[str, Any] | None) -> dict[str, Any] | None:
    """Exit status of a run whose pods go on: those of a StatefulSet, for a moment all, and those of `dev`, which idle.

    None also after an end that another start follows.
    """
    ended = exit_status_in(progress)
    is_over = ended is not None and (
        ended["code"] in _FINAL or (workload is not None and pods.is_idling(workload))
    )
    return ended if is_over else None


def is_left_behind(spec: RunSpec, ended: Mapping[str, Any]) -> bool:
    """The end is a pause of the start before: this one, whose pods have not come to clear it, goes on further."""
    pause = spec.config.training.pause_at_step
    return ended.get("error") == "Paused" and (pause is None or (ended.get("step") or 0) < pause)


def read_progress(
    cluster: Cluster, spec: RunSpec, found: Sequence[Object]
) -> dict[str, Any] | None:
    """Progress by the run directory, through a pod that runs; None when none does, or none can be asked."""
    return ask_progress(cluster, spec, found)[0]


def ask_progress(
    cluster: Cluster, spec: RunSpec, found: Sequence[Object]
) -> tuple[dict[str, Any] | None, str]:
    """Progress by the run directory, and why the pods that run did not tell where they did not."""
    silence = ""
    for pod in [pod for pod in found if pods.is_running(pod)][:ASKED_PODS]:
        target = Target(pods.name_of(pod), pods.trainer_container(pod))
        try:
            (answer,) = ask(cluster, target, "progress", spec.run_dir, seconds=ASK_SECONDS)
            if (told := trusted(answer)) is not None:
                return told, ""
            raise EnvironmentFault(f"pod {target.pod} answered progress with {str(answer)[:200]!r}")
        except (EnvironmentFault, ValueError) as error:
            # It has ended meanwhile, its node is down, or exec is not allowed: what is known without it is shown.
            silence = silence or str(error)
            if isinstance(error, Refused) and error.code == 403:
                break
    return None, silence
