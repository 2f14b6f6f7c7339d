"""Find a container that can read the outputs volume: one of the run or, if none answers, that of a pod made for it.

Such a pod is made once and used as long as it answers.
"""

from __future__ import annotations

import io
import secrets
import time
from collections.abc import Sequence
from typing import Self

from kubetune.errors import EnvironmentFault
from kubetune.k8s.api.api_errors import ApiError, Refused
from kubetune.k8s.api.client import Cluster, Object, say
from kubetune.k8s.api.informer import Informer
from kubetune.k8s.api.kinds import KINDS
from kubetune.k8s.api.passing import passing_refusal
from kubetune.k8s.cluster import pods
from kubetune.k8s.cluster.asking_pods import ASK_SECONDS, ASKED_PODS, PodContainer
from kubetune.k8s.cluster.cluster_runs import FILES, running
from kubetune.k8s.cluster.run_events import events_of
from kubetune.k8s.manifests.pod import container, pod_basics
from kubetune.k8s.manifests.run_spec import RunSpec
from kubetune.k8s.manifests.storage import outputs_volume
from kubetune.k8s.run_names import OUTPUTS

_POD_SECONDS = 300
# The pod ends by itself, in case the command that made it loses the connection.
_LIFE_SECONDS = 6 * 3600
_MOST_PODS = 3
# Before our pod is asked again.
_PAUSE_SECONDS = 0.2


class VolumeReader:
    """The outputs volume of a run, as a context manager. At its end, a pod that was made for it is deleted."""

    def __init__(self, cluster: Cluster, spec: RunSpec) -> None:
        self._cluster = cluster
        self._spec = spec
        self._reader: Object | None = None  # the pod that was made
        self._made = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._delete_reader()

    def target(self) -> PodContainer:
        """Return a container that answers now. Raise EnvironmentFault if none does, not even in pods made for it."""
        if self._reader is not None:
            reader = PodContainer(pods.name_of(self._reader), FILES)
            if self._answers_in_a_moment(reader):
                return reader
        # A run that has begun again in the meantime has the volume too.
        trainers = running(self._cluster, self._spec)
        target = self._answering(trainers)
        if target is not None:
            return target
        if self._reader is None or self._is_unusable(self._reader):
            self._delete_reader()
            reason = f"no pod of {self._spec.name} runs"
            if trainers:
                reason = "no pod that runs answers"
            self._make(reason)
        assert self._reader is not None
        name = pods.name_of(self._reader)
        self._wait_until_running(name)
        return PodContainer(name, FILES)

    def _answering(self, targets: Sequence[PodContainer]) -> PodContainer | None:
        """Return the first of these that runs a command, or None. Raise Refused where exec is not permitted."""
        for target in targets[:ASKED_PODS]:
            error = self._problem(target)
            if error is None:
                return target
            say(str(error))
        return None

    def _answers_in_a_moment(self, target: PodContainer) -> bool:
        """True if our pod runs a command. A refusal that may pass is waited out: another pod would cost more."""
        began = time.monotonic()
        breaks_left = 1  # a connection may be cut, or the pod may have just begun
        text_before = ""
        while (error := self._problem(target)) is not None:
            if str(error) != text_before:
                text_before = str(error)
                say(text_before)
            if not isinstance(error, Refused):
                breaks_left -= 1
                if breaks_left < 0:
                    return False
                continue
            row = passing_refusal(error.code, error.words, KINDS["Pod"], "exec")
            if row is None or time.monotonic() - began > row.seconds:
                return False
            time.sleep(_PAUSE_SECONDS)
        return True

    def _problem(self, target: PodContainer) -> ApiError | None:
        """Return why a container runs no command now; None if it does. Raise Refused where exec is not permitted."""
        try:
            # The API server refuses a command that reads and writes nothing.
            self._cluster.exec(
                target.pod, target.container, ["true"], stdout=io.BytesIO(), seconds=ASK_SECONDS
            )
        except ApiError as error:
            if isinstance(error, Refused) and error.code == 403:
                raise
            return error
        return None

    def _is_unusable(self, reader: Object) -> bool:
        """True if our pod, which does not answer, never will: it runs already, has ended, or is gone."""
        pod = self._cluster.get("Pod", pods.name_of(reader))
        return pod is None or pods.is_running(pod) or pods.has_ended(pod)

    def _make(self, reason: str) -> None:
        """Make a pod that reads the volume. Raise EnvironmentFault if earlier ones did not answer either."""
        if self._made == _MOST_PODS:
            raise EnvironmentFault(
                f"{reason}, and none of the {self._made} that were made to read its volume answers; "
                "see kubectl get nodes, and whether something between here and them cuts connections"
            )
        self._made += 1
        self._reader = reader_pod(self._spec)
        say(f"{reason}; {pods.name_of(self._reader)} reads its volume meanwhile")
        self._cluster.apply(self._reader)

    def _delete_reader(self) -> None:
        if self._reader is None:
            return
        name = pods.name_of(self._reader)
        self._reader = None
        try:
            self._cluster.delete("Pod", name, grace_seconds=1)
        except ApiError as error:
            say(f"{name} stays, and ends by itself within {_LIFE_SECONDS // 3600} hours: {error}")

    def _wait_until_running(self, name: str) -> None:
        """Wait for our pod. Raise EnvironmentFault with what it waits for when time is up."""
        # The pod's last state, or an event, says what it waits for.
        last: Object = {}
        deadline = time.monotonic() + _POD_SECONDS
        with Informer(self._cluster, "Pod", fields={"metadata.name": name}) as informer:
            while time.monotonic() < deadline:
                last = informer.get(name) or {}
                if last and pods.is_running(last):
                    return
                # It was deleted, or has ended.
                if not last or pods.has_ended(last):
                    break
                informer.changed.wait(deadline - time.monotonic())
                informer.changed.clear()
        events = []
        for event in events_of(self._cluster, self._spec):
            if event["involvedObject"].get("name") == name:
                events.append(event)
        reason = pods.why(last, events) if last else ""
        raise EnvironmentFault(
            f"pod {name}, which reads the outputs volume, does not run: {reason or 'no reason is known'}"
        )


def reader_pod(spec: RunSpec) -> Object:
    """Return a small pod that mounts the outputs volume."""
    server = container(
        spec,
        FILES,
        ["python", "-P", "-m", "kubetune.k8s.cluster.in_pod", "idle"],
        resources={"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}},
        volumeMounts=[{"name": "outputs", "mountPath": OUTPUTS, "readOnly": True}],
    )
    body = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": _LIFE_SECONDS,
        **pod_basics(spec),
        # The run's own account may be gone already.
        "serviceAccountName": spec.kubernetes.service_account or "default",
        "containers": [server],
        "volumes": [outputs_volume(spec)],
    }
    name = f"{spec.name}-{FILES}-{secrets.token_hex(2)}"
    return spec.manifest("v1", "Pod", name, FILES, spec=body)
