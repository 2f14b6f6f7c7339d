"""A stand-in cluster as tests talk to it: objects, waiting, kubectl, logs, and faults."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlencode, urlsplit

from standin.control_plane import ControlPlane
from standin.state.objects import (
    COMPLETION_INDEX,
    Object,
    condition,
    labels_of,
    name_of,
    now,
    phase,
    terminating,
)
from standin.state.resources import BY_KIND

_RECONNECT_SECONDS = 0.05
_NOT_SHARED = ("Namespace", "SelfSubjectAccessReview")

Finished = subprocess.CompletedProcess[str]


class Cluster:
    """A stand-in cluster as one test sees it: a namespace of its own, with a kubeconfig that points there."""

    def __init__(self, control_plane: ControlPlane, namespace: str, folder: Path) -> None:
        self.control_plane, self.namespace = control_plane, namespace
        self.kubeconfig = folder / "kubeconfig"
        text = (control_plane.state / "kubeconfig").read_text()
        self.kubeconfig.touch(mode=0o600)
        self.kubeconfig.write_text(text.replace("namespace: default", f"namespace: {namespace}"))
        self._folder = folder
        self._address = urlsplit(control_plane.url).netloc

    # -- objects
    def request(
        self, method: str, path: str, body: object = None, content_type: str = "application/json"
    ) -> Object:
        """Send one request and return the decoded answer. Raise AssertionError when the server refuses."""
        with closing(http.client.HTTPConnection(self._address, timeout=30)) as connection:
            connection.request(method, path, json.dumps(body), {"Content-Type": content_type})
            response = connection.getresponse()
            text = response.read()
        assert response.status < 400, f"{method} {path}: {response.status} {text.decode()}"
        answer: Object = json.loads(text)
        return answer

    def apply(self, *objects: Object) -> None:
        """Apply objects on the server, in order; those without a namespace go into this cluster's own."""
        for obj in objects:
            path = f"{self._path(obj['kind'], name_of(obj))}?fieldManager=test&force=true"
            self.request("PATCH", path, obj, "application/apply-patch+yaml")

    def get(self, kind: str, name: str) -> Object:
        return self.request("GET", self._path(kind, name))

    def find(self, kind: str, labels: str = "") -> list[Object]:
        query = urlencode({"labelSelector": labels})
        items: list[Object] = self.request("GET", f"{self._path(kind)}?{query}")["items"]
        return items

    def delete(self, kind: str, name: str) -> None:
        self.request("DELETE", self._path(kind, name))

    def wait(
        self, kind: str, name: str, test: Callable[[Object], object], seconds: float = 60
    ) -> Object:
        """Watch one object until `test` is true of it; AssertionError with all that is known when time is up."""
        return self._wait(kind, f"metadata.name={name}", test, seconds)

    def wait_event(self, text: str, seconds: float = 60) -> Object:
        """Wait for an event in this namespace whose message contains `text`."""
        return self._wait("Event", "", lambda event: text in event["message"], seconds)

    def wait_gone(self, kind: str, name: str, seconds: float = 60) -> None:
        """Watch until there is no object of that name."""
        for obj in self._watch(kind, f"metadata.name={name}", seconds):
            if obj is None:
                return
        raise AssertionError(f"{kind} {name} is still there after {seconds} s\n{self._why()}")

    def wait_phase(self, pod: str, *phases: str, seconds: float = 60) -> Object:
        """Return the pod once it is in one of these phases."""
        return self.wait("Pod", pod, lambda obj: phase(obj) in phases, seconds)

    def wait_condition(self, kind: str, name: str, type_: str, seconds: float = 60) -> Object:
        """Return the object once its condition of that type is true."""
        return self.wait(kind, name, lambda obj: condition(obj, type_), seconds)

    def wait_pods(self, labels: str, count: int, seconds: float = 60) -> list[Object]:
        """Return the pods with these labels, once there are so many."""
        self._wait(
            "Pod", "", lambda _: len(self.find("Pod", labels)) == count, seconds, when_gone=True
        )
        return self.find("Pod", labels)

    def wait_ready(self, job: str, pods: int = 1, seconds: float = 60) -> list[Object]:
        """Return the pods of a Job, once so many of them are ready."""
        self.wait(
            "Job", job, lambda current: current.get("status", {}).get("ready") == pods, seconds
        )
        return self.find("Pod", f"job-name={job}")

    def wait_replacement(self, pod: Object, seconds: float = 60) -> Object:
        """Return the running pod that took the place of another one in the same Job."""

        def place(replacement: Object) -> list[str | None]:
            return [labels_of(replacement).get(label) for label in ("job-name", COMPLETION_INDEX)]

        def test(other: Object) -> bool:
            runs = phase(other) == "Running" and not terminating(other)
            return runs and place(other) == place(pod) and name_of(other) != name_of(pod)

        return self._wait("Pod", "", test, seconds)

    def log(self, pod: str, container: str = "") -> str:
        """Return all of a container's log so far."""
        return "".join(self._log_lines(pod, timeout_seconds=30, container=container))

    def wait_log(self, pod: str, text: str, seconds: float = 60) -> None:
        """Follow the log of a started pod until a line contains `text`."""
        seen = []
        for line in self._log_lines(pod, timeout_seconds=seconds, follow="true"):
            seen.append(line)
            if text in line:
                return
        raise AssertionError(f"the log of {pod} ended without {text!r}: {seen}")

    def claim_folder(self, claim: str) -> Path:
        """Return the folder on this machine that a claim of this namespace stands for."""
        return self.control_plane.state / "claims" / self.namespace / claim

    def image_folder(self, reference: str) -> Path:
        """Return the folder of an image that pods mount as a volume, as this machine sees it."""
        return self.control_plane.state / "images" / reference

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> Finished:
        """Run the real kubectl in this namespace; with `check`, AssertionError when it fails."""
        done = subprocess.run(
            ["kubectl", *arguments],
            input=stdin,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert not check or done.returncode == 0, (
            f"kubectl {' '.join(arguments)}: {done.stdout}{done.stderr}"
        )
        return done

    def environment(self) -> dict[str, str]:
        """Return variables with which any client finds this cluster, and keeps its caches to itself."""
        return {
            **os.environ,
            "KUBECONFIG": str(self.kubeconfig),
            "KUBECACHEDIR": str(self._folder / "cache"),
        }

    def add_event(
        self,
        kind: str,
        name: str,
        reason: str,
        message: str,
        *,
        uid: str = "none",
        time: str | None = None,
    ) -> None:
        """Add a warning about an object, which need not exist, at a time (now where none is given)."""
        stamp = time or now()
        about = {
            "apiVersion": "v1",
            "kind": kind,
            "name": name,
            "namespace": self.namespace,
            "uid": uid,
        }
        facts = {"type": "Warning", "reason": reason, "message": message, "count": 1}
        times = {"firstTimestamp": stamp, "lastTimestamp": stamp}
        metadata = {"name": f"{name}.{reason.lower()}"}
        self.apply(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": metadata,
                "involvedObject": about,
                **facts,
                **times,
            }
        )

    # -- pods without processes
    def add_fake_node(self, name: str) -> None:
        """Add a node whose pods only seem to run: those that select `type: kwok`."""
        size = {"cpu": "100000", "memory": "1000Ti"}
        metadata = {"name": name, "labels": {"kubernetes.io/hostname": name, "type": "kwok"}}
        status = {
            "capacity": size,
            "allocatable": size,
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        node = {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {}}
        self.apply(node)
        self.request(
            "PATCH",
            f"{self._path('Node', name)}/status",
            {"status": status},
            "application/merge-patch+json",
        )

    def end_fake_pods(self, code: int = 0) -> None:
        """Let all of them end."""
        self._fault("end-fakes", namespace=self.namespace, code=code)

    # -- faults
    def kill_pod(self, pod: str, reason: str = "Error") -> None:
        """Kill all its processes with SIGKILL, as a crash or (reason OOMKilled) the kernel does."""
        self._fault("kill-pod", namespace=self.namespace, pod=pod, reason=reason)

    def drain(self, node: str) -> None:
        """Cordon a node and evict its pods, with their grace periods."""
        self._fault("drain", node=node)

    def never_schedule(self, pod: str) -> None:
        """Let no node fit pods of this namespace whose name matches the regular expression."""
        self._fault("never-schedule", pod=f"^{self.namespace}/{pod}")

    def leave_unbound(self, claim: str) -> None:
        """Let nothing provide a volume for claims of this namespace whose name matches the regular expression."""
        self._fault("leave-unbound", claim=f"^{self.namespace}/{claim}")

    def leave_kubelet(self, node: str) -> None:
        """Let the kubelet of a node not answer until faults are cleared."""
        self._fault("leave-kubelet", node=node)

    def cut_host(self, node: str, *, evicts: bool = True) -> None:
        """Let nothing of a node be heard any more, until faults are cleared or it is said to be out of service."""
        self._fault("cut-host", node=node, evicts=evicts)

    def restart_kubelet(self, node: str) -> None:
        """Let the kubelet of a node start anew: its streams are cut, and its next answers are 404."""
        self._fault("restart-kubelet", node=node)

    def lag_behind(self, times: int) -> None:
        """Refuse so many lists and watches of users, as a server that has not read the newest revision yet."""
        self._fault("lag-behind", times=times)

    def break_image(self, image: str) -> None:
        """Let no image be pulled whose name matches the regular expression."""
        self._fault("break-image", image=image)

    def uninstall(self, kind: str) -> None:
        """Take a custom kind away, as where its operator was never installed."""
        self._fault("uninstall", kind=kind)

    def refuse(self, kind: str, message: str) -> None:
        """Refuse to create objects of a kind, as a quota does: `exceeded quota: gpus, requested: …`."""
        self._fault("refuse", kind=kind, message=message)

    def trouble(self, request: str, **facts: object) -> None:
        """Let users' requests that match, such as `get pods/exec`, fail: see standin.faults.Trouble."""
        self._fault("trouble", request=request, **facts)

    def asked(self) -> list[str]:
        """Return what users have asked the API server for since the last `clear_faults`: `list pods`, `get pods/exec` …"""
        requests: list[str] = self.request("GET", "/standin/asked")["asked"]
        return requests

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Drop all connections to the API server and refuse new ones; pods go on."""
        process = self.control_plane.process
        process.send_signal(signal.SIGUSR1)
        self._wait_for_connections(accepted=False)
        try:
            yield
        finally:
            process.send_signal(signal.SIGUSR2)
            self._wait_for_connections(accepted=True)

    def clear_faults(self) -> None:
        self._fault("clear")

    def _fault(self, name: str, **body: object) -> None:
        self.request("POST", f"/standin/faults/{name}", body)

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Give the control plane back as it was, without this namespace, faults and nodes of the block's own.

        AssertionError where the block changed more than that, which other tests would meet.
        """
        before = self._shared()
        try:
            yield
        finally:
            try:
                self.remove()
            finally:
                self.clear_faults()
                for kind, name in self._shared().keys() - before.keys():
                    self.delete(kind, name)
        assert self._shared() == before, "this test changes what all namespaces share"

    def _shared(self) -> dict[tuple[str, str], Object]:
        """Return labels and specification of what belongs to no namespace, by kind and name."""
        kinds = [
            kind
            for kind, details in BY_KIND.items()
            if not details.namespaced and kind not in _NOT_SHARED
        ]
        return {
            (kind, name_of(obj)): {"labels": labels_of(obj), "spec": obj.get("spec")}
            for kind in kinds
            for obj in self.find(kind)
        }

    def remove(self) -> None:
        """Delete the namespace and all in it at once, whatever grace its pods were given."""
        self.delete("Namespace", self.namespace)
        self.request("DELETE", self._path("Pod"), {"gracePeriodSeconds": 0})
        self.wait_gone("Namespace", self.namespace)

    # -- inside
    def _wait_for_connections(self, accepted: bool) -> None:
        host, port = self._address.split(":")
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if (probe.connect_ex((host, int(port))) == 0) == accepted:
                    return
            time.sleep(_RECONNECT_SECONDS)
        raise AssertionError(f"the server {'refuses' if accepted else 'accepts'} connections still")

    def _path(self, kind: str, name: str = "") -> str:
        resource = BY_KIND[kind]
        root = f"/apis/{resource.api_version}" if resource.group else f"/api/{resource.version}"
        namespace = f"/namespaces/{self.namespace}" if resource.namespaced else ""
        return f"{root}{namespace}/{resource.plural}" + (f"/{name}" if name else "")

    def _wait(
        self,
        kind: str,
        fields: str,
        test: Callable[[Object], object],
        seconds: float,
        *,
        when_gone: bool = False,
    ) -> Object:
        """Wait until `test` is true of the object; with `when_gone` it is also asked when the object is gone."""
        deadline = time.monotonic() + seconds
        last = None
        while (left := deadline - time.monotonic()) > 0:
            try:
                for obj in self._watch(kind, fields, left):
                    last = obj
                    if (when_gone or obj is not None) and test(obj):
                        return obj
            except (OSError, http.client.HTTPException):  # an outage, or time is up
                time.sleep(_RECONNECT_SECONDS)
        last_seen = json.dumps(last, indent=1)
        raise AssertionError(
            f"{kind} {fields} did not get there in {seconds} s: {last_seen}\n{self._why()}"
        )

    def _watch(self, kind: str, fields: str, seconds: float) -> Iterator[Object | None]:
        """Yield the selected objects now and after every change; None when there is none, or one is deleted."""
        selected = {"fieldSelector": fields}
        now = self.request("GET", f"{self._path(kind)}?{urlencode(selected)}")
        yield from now["items"] or [None]
        since = {
            "watch": "true",
            "resourceVersion": now["metadata"]["resourceVersion"],
            "timeoutSeconds": seconds,
        }
        with closing(http.client.HTTPConnection(self._address, timeout=seconds)) as connection:
            connection.request("GET", f"{self._path(kind)}?{urlencode(selected | since)}")
            response = connection.getresponse()
            while line := response.readline():
                event = json.loads(line)
                yield None if event["type"] == "DELETED" else event["object"]

    def _log_lines(self, pod: str, timeout_seconds: float, **query: str) -> Iterator[str]:
        with closing(
            http.client.HTTPConnection(self._address, timeout=timeout_seconds)
        ) as connection:
            connection.request("GET", f"{self._path('Pod', pod)}/log?{urlencode(query)}")
            response = connection.getresponse()
            assert response.status == 200, response.read().decode()
            while line := response.readline():
                yield line.decode()

    def _why(self) -> str:
        """Return what a person would look at first."""
        events = [f"{event['reason']}: {event['message']}" for event in self.find("Event")]
        return "\n".join(["events:", *events, "server:", self.control_plane.server_log.read_text()])
