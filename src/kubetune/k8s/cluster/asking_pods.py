"""Questions to pods that run: put to one of them or to all at once, and what a run has come to, as they answer."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from kubetune.errors import EnvironmentFault
from kubetune.k8s.api.api_errors import Refused
from kubetune.k8s.api.client import Cluster, Object
from kubetune.k8s.cluster import pods
from kubetune.k8s.cluster.termination import trusted
from kubetune.k8s.manifests.run_spec import RunSpec

Item = TypeVar("Item")
Result = TypeVar("Result")
# A node that is down answers to nothing, and the API server itself waits for it for half a minute.
ASK_SECONDS = 15.0
# So many pods are asked before we give up: with two, one dead node does not hide a run.
ASKED_PODS = 2
_AWAKE_SECONDS = 0.5


@dataclass(frozen=True)
class PodContainer:
    """A container that commands can be run in."""

    pod: str
    container: str
    node: int = 0


class NoAnswer(EnvironmentFault):
    """A pod ended while it was asked, or answered something else."""


def ask(
    cluster: Cluster, target: PodContainer, *question: str, seconds: float | None = None
) -> list[Any]:
    """Put a question of in_pod to a pod and return the values that it answers, one for each line of JSON.

    Raise NoAnswer, or ApiError when it cannot be asked.
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
        raise NoAnswer(
            f"pod {target.pod} could not answer ({question[0]}, exit code {code}): {last_line}"
        )
    try:
        return [json.loads(line) for line in answer.getvalue().splitlines()]
    except (ValueError, RecursionError):
        beginning = answer.getvalue()[:200].decode(errors="replace")
        raise NoAnswer(
            f"pod {target.pod} answered {question[0]} with {beginning!r}; expected JSON"
        ) from None


def on_all(ask_one: Callable[[Item], Result], questions: Sequence[Item]) -> list[Result]:
    """Call a function on all of these, such as pods, at once, and return its answers in their order.

    Ctrl-C waits for none of them.
    """
    futures: list[Future[Result]] = [Future() for _ in questions]

    def put(future: Future[Result], question: Item) -> None:
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
        target = PodContainer(pods.name_of(pod), pods.trainer_container(pod))
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
