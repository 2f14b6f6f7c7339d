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

from kubetune.config.resolved import load_resolved
from kubetune.config.schema import Config
from kubetune.config.schema.quantities import DNS_NAME
from kubetune.errors import FINAL, OK, ConfigError, EnvironmentFault
from kubetune.k8s.api.api_errors import Refused
from kubetune.k8s.api.client import Cluster, Object
from kubetune.k8s.api.kinds import WORKLOADS
from kubetune.k8s.cluster import kueue, pods, preparation
from kubetune.k8s.cluster.causes import find_cause
from kubetune.k8s.cluster.hosts import LostHost, lost_hosts
from kubetune.k8s.cluster.termination import left_progress, logged_progress, noted_progress, trusted
from kubetune.k8s.manifests.extras import server_components
from kubetune.k8s.manifests.kinds.kind import State
from kubetune.k8s.manifests.samplers import SAMPLER
from kubetune.k8s.manifests.spec import COMPONENT, MANAGED_BY, TRAINER, RunSpec, plan_without_data
from kubetune.rundir.exit_status import ExitStatus

CONFIG_KEY = "run.yaml"

# Component of the pods that read the outputs volume where no other does.
FILES = "files"

Question = TypeVar("Question")
Answer = TypeVar("Answer")

# Exit codes after which no other start follows.
_FINAL = (OK, *FINAL)
# A node that is down answers to nothing, and the API server itself waits for it for half a minute.
ASK_SECONDS = 15.0
# So many pods are asked before we give up: with two, one dead node does not hide a run.
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
    """A run at one moment."""

    spec: RunSpec
    workload: Object | None
    pods: list[Object]  # of the trainer, by node and age
    events: list[Object]  # oldest first
    state: State
    reason: str
    progress: dict[str, Any] | None  # in_pod's answer, or as much of it as is known without one
    # the pods that fetch and prepare: while there is no trainer, or where they are why there is none
    preparing: list[Object] = field(default_factory=list)
    silence: str = ""  # why pods that run could not be asked for progress
    cause: dict[str, Any] | None = None  # the pod by which the last start ended, see find_cause
    samplers: list[Object] = field(default_factory=list)  # pods that draw answers, by index and age
    lost_hosts: list[LostHost] = field(default_factory=list)  # that hold pods of the run
    servers: list[Object] = field(
        default_factory=list
    )  # TensorBoard's, the page's and JupyterLab's


def workload_kind(spec: RunSpec) -> str:
    """Return the Kubernetes kind that runs the pods."""
    return WORKLOADS[spec.kubernetes.kind].name


def list_runs(cluster: Cluster) -> list[str]:
    """Return the names of the runs in the namespace."""
    names = []
    for config_map in cluster.list("ConfigMap", {MANAGED_BY: "kubetune", COMPONENT: TRAINER}):
        # The ConfigMap of a run's data has the same labels, and no config.
        if CONFIG_KEY in (config_map.get("data") or {}):
            names.append(pods.name_of(config_map))
    return sorted(names)


def find_run(cluster: Cluster, name: str) -> RunSpec:
    """Return the run of that name. Raise ConfigError, with the names that exist, where there is none."""
    spec = read_run(cluster, name)
    if spec is None:
        cluster.require_namespace()
        names = ", ".join(list_runs(cluster)) or "none"
        raise ConfigError(
            f"there is no run {name or repr(name)} in namespace {cluster.namespace}; runs there: {names}. "
            "-n names another namespace"
        )
    return spec


def read_run(cluster: Cluster, name: str) -> RunSpec | None:
    """Return the run of that name with the files that travel with it, by their name in the ConfigMap; or None."""
    # Names that no object can have, such as none or two dots, would ask for something else.
    if not re.fullmatch(DNS_NAME, name):
        return None
    config_map = cluster.get("ConfigMap", name)
    if config_map is None:
        return None
    text = (config_map.get("data") or {}).get(CONFIG_KEY)
    if text is None or pods.labels_of(config_map).get(MANAGED_BY) != "kubetune":
        raise ConfigError(
            f"ConfigMap {name} in namespace {cluster.namespace} is none of kubetune's; use another name"
        )

    # The ConfigMap holds everything that the run's manifests are made from.
    config = _config_of(text, f"ConfigMap {name} in namespace {cluster.namespace}, {CONFIG_KEY}")
    carried = cluster.get("ConfigMap", f"{name}-data") or {}
    spec = RunSpec.of(config, plan_without_data(config), carried.get("data") or {})
    spec = spec.in_namespace(cluster.namespace)
    # An overlay of kustomize may have moved it, or put something before its name.
    if spec.name != name:
        spec = spec.renamed(name)
    return spec


def _config_of(text: str, where: str) -> Config:
    """Return the config in a run's ConfigMap. Raise ConfigError where somebody, or a newer kubetune, changed it."""
    try:
        tree = YAML(typ="safe", pure=True).load(io.StringIO(text))
    except (YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where}: no YAML ({' '.join(str(error).split())[:200]}); put back what was there"
        ) from None
    return load_resolved(tree, where)


def trainer_pods(cluster: Cluster, spec: RunSpec) -> list[Object]:
    """Return the pods that train, by node, older ones first."""
    return _numbered_pods(cluster, spec, TRAINER)


def sampler_pods(cluster: Cluster, spec: RunSpec) -> list[Object]:
    """Return the pods that draw answers, by index, older ones first."""
    if spec.kubernetes.samplers is None:
        return []
    return _numbered_pods(cluster, spec, SAMPLER)


def server_pods(cluster: Cluster, spec: RunSpec) -> list[Object]:
    """Return the pods of the servers beside the run: TensorBoard, the page, JupyterLab."""
    found = []
    for component in server_components(spec):
        found.extend(cluster.list("Pod", spec.selector(component)))
    return found


def _numbered_pods(cluster: Cluster, spec: RunSpec, component: str) -> list[Object]:
    def order(pod: Object) -> tuple[int, str]:
        return pods.node_number(pod), pod["metadata"].get("creationTimestamp", "")

    return sorted(cluster.list("Pod", spec.selector(component)), key=order)


def running(cluster: Cluster, spec: RunSpec) -> list[Target]:
    """Return the trainer's running containers, by node."""
    targets = []
    for pod in trainer_pods(cluster, spec):
        if pods.is_running(pod):
            container = pods.trainer_container(pod)
            targets.append(Target(pods.name_of(pod), container, pods.node_number(pod)))
    return targets


def concerns(cluster: Cluster, spec: RunSpec) -> Callable[[Object], bool]:
    """Return a test of events: whether one is about an object of the run, by its name or how its name begins.

    An earlier run of the same name is told apart by time: its events came before this run's ConfigMap was made.
    """
    is_ours = _belongs_to(cluster, spec)
    config_map = cluster.get("ConfigMap", spec.name) or {"metadata": {}}
    began = pods.to_seconds(str(config_map["metadata"].get("creationTimestamp", "")))

    def is_of_run(event: Object) -> bool:
        name = pods.about(event).get("name", "")
        return is_ours(name) and pods.to_seconds(pods.event_time(event)) >= began

    return is_of_run


def _belongs_to(cluster: Cluster, spec: RunSpec) -> Callable[[str], bool]:
    """Return a test of names: whether the object of that name is one of the run's.

    With runs `fit` and `fit-large`, the pod `fit-0-abc` is of `fit`, and `fit-large-0-xyz` is not.
    """
    longer_names = [name for name in list_runs(cluster) if name.startswith(f"{spec.name}-")]

    def is_of(run: str, name: str) -> bool:
        return name == run or name.startswith(f"{run}-")

    def is_ours(name: str) -> bool:
        return is_of(spec.name, name) and not any(is_of(longer, name) for longer in longer_names)

    return is_ours


def events_of(cluster: Cluster, spec: RunSpec) -> list[Object]:
    """Return the events about anything of the run, oldest first."""
    is_of_run = concerns(cluster, spec)
    events = [event for event in cluster.list("Event") if is_of_run(event)]
    return sorted(events, key=pods.event_time)


def ask(
    cluster: Cluster, target: Target, *question: str, seconds: float | None = None
) -> list[Any]:
    """Put a question of in_pod.py to a pod and return the values that it answers, one for each line of JSON.

    Raise EnvironmentFault when it cannot answer.
    """
    answer = io.BytesIO()
    errors = io.BytesIO()
    argv = ["python", "-P", "-m", "kubetune.k8s.cluster.in_pod", *question]
    code = cluster.exec(
        target.pod,
        target.container,
        argv,
        stdout=answer,
        stderr=errors,
        seconds=seconds,
    )
    if code != 0:
        last_line = errors.getvalue().decode(errors="replace").strip().rpartition("\n")[2]
        raise EnvironmentFault(
            f"pod {target.pod} could not answer ({question[0]}, exit code {code}): {last_line}"
        )
    try:
        return [json.loads(line) for line in answer.getvalue().splitlines()]
    except (ValueError, RecursionError):
        beginning = answer.getvalue()[:200].decode(errors="replace")
        raise EnvironmentFault(
            f"pod {target.pod} answered {question[0]} with {beginning!r}; expected JSON"
        ) from None


def on_all(ask_one: Callable[[Question], Answer], questions: Sequence[Question]) -> list[Answer]:
    """Call a function on all of these, such as pods, at once, and return its answers in their order.

    Ctrl-C waits for none of them.
    """
    futures: list[Future[Answer]] = [Future() for _ in questions]

    def put(future: Future[Answer], question: Question) -> None:
        try:
            future.set_result(ask_one(question))
        except BaseException as error:
            future.set_exception(error)

    for future, question in zip(futures, questions, strict=True):
        # Threads of a pool would hold up the interpreter at its end.
        threading.Thread(target=put, args=(future, question), daemon=True).start()
    # The system may hand a signal to another thread, at which a wait without end would sleep on.
    while wait(futures, _AWAKE_SECONDS).not_done:
        pass
    return [future.result() for future in futures]


def observe(cluster: Cluster, spec: RunSpec) -> ObservedRun:
    """Return everything there is to know about a run now."""
    workload = cluster.get(workload_kind(spec), spec.name)
    trainers = trainer_pods(cluster, spec)
    state, reason = pods.state_of(workload, trainers)

    # While there is no trainer, the pods that prepare say what the run is doing.
    preparing: list[Object] = []
    if spec.prepares and not trainers and state in ("absent", "waiting", "failed"):
        preparing = preparation.find_pods(cluster, spec)
        state, cause = preparation.state_before_training(cluster, spec, state, preparing)
        reason = cause or reason
    if state == "waiting" and not reason and spec.kubernetes.queue:
        reason = kueue.why_waiting(cluster, workload)

    samplers = sampler_pods(cluster, spec)
    progress, silence = ask_progress(cluster, spec, trainers)

    # Listed after the question, which takes a while: the newest events say why nobody answered.
    events = events_of(cluster, spec)
    status = final_status(workload, progress)
    if state == "running" and status and not is_left_behind(spec, status):
        # Without its error: a pause is "done", as a Job that pauses is.
        state = ExitStatus(status["code"], status["reason"]).state
        reason = status["reason"]

    # No pod can be asked: take a note, the last message of ended pods, or the log. A stopped Job keeps pods of earlier
    # starts, so what `stop` noted comes before what they left.
    if progress is None and state == "stopped":
        progress = noted_progress(cluster, spec)
    if progress is None and not silence:
        progress = left_progress(trainers)
    if progress is None and state != "stopped":
        progress = logged_progress(cluster, trainers)
    return ObservedRun(
        spec,
        workload,
        trainers,
        events,
        state,
        reason,
        progress,
        preparing,
        silence,
        find_cause(trainers, events),
        samplers,
        lost_hosts(cluster, [*preparing, *trainers, *samplers]),
        server_pods(cluster, spec),
    )


def exit_status_in(progress: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the exit status in a run's progress, or None while it runs."""
    status: dict[str, Any] | None = (progress or {}).get("exit_status")
    return status


def final_status(workload: Object | None, progress: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the exit status of a run that has ended while its pods go on; None where another start follows.

    Pods go on in a StatefulSet, in `dev`, where they idle, and in all other kinds for a moment.
    """
    status = exit_status_in(progress)
    if status is None:
        return None
    is_over = status["code"] in _FINAL or (workload is not None and pods.is_idling(workload))
    if not is_over:
        return None
    return status


def is_left_behind(spec: RunSpec, status: Mapping[str, Any]) -> bool:
    """True if an exit status is the pause of the start before, which this start has not cleared yet.

    With `pause_at_step` raised from 10 to 20, a pause at step 10 is such a one.
    """
    if status.get("error") != "Paused":
        return False
    pause = spec.config.training.pause_at_step
    return pause is None or (status.get("step") or 0) < pause


def read_progress(
    cluster: Cluster, spec: RunSpec, trainers: Sequence[Object]
) -> dict[str, Any] | None:
    """Return the progress in the run directory, read by a pod that runs; None where none can be asked."""
    progress, _ = ask_progress(cluster, spec, trainers)
    return progress


def ask_progress(
    cluster: Cluster, spec: RunSpec, trainers: Sequence[Object]
) -> tuple[dict[str, Any] | None, str]:
    """Return the progress in the run directory, or None and why the pods that run did not answer."""
    silence = ""
    candidates = [pod for pod in trainers if pods.is_running(pod)]
    for pod in candidates[:ASKED_PODS]:
        target = Target(pods.name_of(pod), pods.trainer_container(pod))
        try:
            (answer,) = ask(cluster, target, "progress", spec.run_dir, seconds=ASK_SECONDS)
            progress = trusted(answer)
            if progress is None:
                raise EnvironmentFault(
                    f"pod {target.pod} answered progress with {str(answer)[:200]!r}"
                )
            return progress, ""
        except (EnvironmentFault, ValueError) as error:
            # It has ended meanwhile, its node is down, or exec is not allowed: what is known without it is shown.
            silence = silence or str(error)
            if isinstance(error, Refused) and error.code == 403:
                break
    return None, silence
