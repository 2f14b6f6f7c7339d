"""One pod as local processes: sandbox, address, volumes, containers, status, and its end with a grace period."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import signal
import sys
import traceback
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Iterable
from functools import partial

from standin.node import runtime
from standin.node.container import KILLED, Container
from standin.node.dns import DOMAIN
from standin.node.host import Host
from standin.node.network import GATEWAY, attach
from standin.node.pod_state import PodState
from standin.node.volumes import set_up_volume, tear_down_volumes, translate_files
from standin.state.objects import Object, now, terminating

_LONGEST_HOST_NAME = 63


class PodWorker(PodState):
    """Drives one scheduled pod to its end; the only writer of the pod's container statuses."""

    def __init__(self, host: Host, pod: Object, running: Callable[[], Iterable[PodState]]) -> None:
        super().__init__(host, pod, running)
        self._stored = pod  # as the API server has it
        self._is_heard = True  # by the API server
        self._deadline: float | None = None  # loop time of the SIGKILL
        status = pod.setdefault("status", {"phase": "Pending"})
        inits = self.spec.get("initContainers", [])
        waiting = "PodInitializing" if inits else "ContainerCreating"
        self._inits = [self._container(spec, status, waiting, True) for spec in inits]
        mains = self.spec["containers"]
        self._mains = [self._container(spec, status, waiting, False) for spec in mains]
        self.containers = {container.name: container for container in [*self._inits, *self._mains]}
        self.task = asyncio.create_task(self._run())

    def _container(self, spec: Object, status: Object, waiting: str, init: bool) -> Container:
        """Make a container, with its entry in the pod's status."""
        entry = {
            "name": spec["name"],
            "image": spec["image"],
            "imageID": "",
            "ready": False,
            "started": False,
            "restartCount": 0,
            "state": {"waiting": {"reason": waiting}},
            "lastState": {},
        }
        field = "initContainerStatuses" if init else "containerStatuses"
        status.setdefault(field, []).append(entry)
        return Container(self, spec, entry, init)

    # -- life
    async def _run(self) -> None:
        """Run the pod from its volumes to its end."""
        try:
            await self._set_up()
            self.publish()
            # One after the other; the first that fails keeps the rest from starting.
            initialized = True
            for init in self._inits:
                initialized = initialized and await init.run() == 0 and not self.stopping.is_set()
            if initialized and not self.stopping.is_set():
                await asyncio.gather(*(main.run() for main in self._mains))
        # A bug in here must show in `kubectl get pods`, and its place in the log.
        except Exception as error:
            traceback.print_exc()
            self.pod["status"].update(reason="StandinError", message=repr(error))
            self.store.event(self.pod, "Warning", "StandinError", repr(error))
        finally:
            await self._tear_down()

    async def _set_up(self) -> None:
        self.pod["status"].update(startTime=now(), hostIP=GATEWAY, qosClass="Burstable")
        for name in ("volumes", "logs", "scratch"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        host = self.spec.get("hostname", self.name)[:_LONGEST_HOST_NAME]
        if self.host.settings.loopback:
            self.ip = self.host.loopback.of(self.namespace, host)
        else:
            await self._make_sandbox(host)
        self.pod["status"].update(podIP=self.ip, podIPs=[{"ip": self.ip}])
        for volume in self.spec.get("volumes", []):
            await self.retry(partial(set_up_volume, self, volume), "FailedMount")
        # Of a pod that is stopped before, some volumes may be missing.
        if self.host.settings.loopback and not self.stopping.is_set():
            folders: dict[str, str] = {}
            for container in self.containers.values():
                folders |= container.folders()
            translate_files(self, folders)

    async def _make_sandbox(self, host: str) -> None:
        command = (sys.executable, "-I", "-S", runtime.__file__, "sandbox", host)
        self.sandbox = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=PIPE)
        assert self.sandbox.stdout is not None
        if await self.sandbox.stdout.readline() != b"ok\n":
            raise RuntimeError("the sandbox did not start")
        self.ip = self.host.free_address({pod.ip for pod in self.running()})
        await attach(self.sandbox.pid, self.ip)
        full_name = ""
        subdomain = self.spec.get("subdomain")
        if subdomain:
            full_name = f"{host}.{subdomain}.{self.namespace}.{DOMAIN} "
        search = f"{self.namespace}.{DOMAIN} {DOMAIN} cluster.local"
        self.files = {
            "/etc/hosts": f"127.0.0.1 localhost\n{self.ip} {full_name}{host}\n",
            "/etc/hostname": host + "\n",
            "/etc/resolv.conf": f"nameserver {GATEWAY}\nsearch {search}\noptions ndots:5 timeout:2\n",
        }

    async def _tear_down(self) -> None:
        phase = "Succeeded"
        for main in self._mains:
            # One that never ran counts as killed.
            if main.status["state"].get("terminated", {}).get("exitCode", KILLED):
                phase = "Failed"
            main.status.update(ready=False, started=False)
        self.publish(phase)
        if self.sandbox:
            with contextlib.suppress(ProcessLookupError):
                self.sandbox.kill()
            await self.sandbox.wait()
        tear_down_volumes(self.folder)
        if self._is_heard and terminating(self.pod):
            self.store.delete(self.pod, grace_seconds=0)

    # -- a host that is cut off
    def lose_contact(self) -> None:
        """Go on with a status that nobody hears of, as on a host that is cut off."""
        if not self._is_heard:
            return
        self._is_heard = False
        self._take(copy.deepcopy(self.pod["status"]))

    def regain_contact(self) -> None:
        """Report what has become of the pod meanwhile."""
        if self._is_heard:
            return
        self._is_heard = True
        self._take(self.pod["status"])
        self.store.touch(self.pod)
        if self.task.done() and terminating(self.pod):
            self.store.delete(self.pod, grace_seconds=0)

    def _take(self, status: Object) -> None:
        """Write to this status from now on: the status of the stored pod, or one of our own."""
        pod = self._stored
        if self._is_heard:
            pod["status"] = status
            self.pod = pod
        else:
            self.pod = {**pod, "status": status}
        entries = status.get("initContainerStatuses", []) + status["containerStatuses"]
        for entry in entries:
            self.containers[entry["name"]].status = entry

    # -- end
    def stop(self, grace_seconds: float) -> None:
        """SIGTERM now, SIGKILL after the grace; a later call can only shorten it."""
        deadline = asyncio.get_running_loop().time() + grace_seconds
        if self._deadline is not None and deadline >= self._deadline:
            return
        is_first_call = self._deadline is None
        self._deadline = deadline
        self.stopping.set()
        if is_first_call:
            self._end_task = asyncio.create_task(self._end())

    def kill(self, reason: str) -> bool:
        """SIGKILL every container, as the kernel does when memory runs out; return False when none runs."""
        running = [container for container in self.containers.values() if container.pid is not None]
        for container in running:
            container.end_reason = reason
            container.signal(signal.SIGKILL)
        return bool(running)

    async def _end(self) -> None:
        """Ask all containers to stop, and kill those that still run at the deadline."""
        # A terminating pod leaves its Services.
        self.publish()
        loop = asyncio.get_running_loop()
        # By process: a container may be starting just now.
        asked: dict[int, asyncio.Task[None]] = {}
        while not self.task.done():
            assert self._deadline is not None
            left = self._deadline - loop.time()
            # Once each is asked; at the deadline all are killed.
            for container in self.containers.values():
                if left <= 0:
                    container.signal(signal.SIGKILL)
                elif container.pid is not None and container.pid not in asked:
                    asked[container.pid] = asyncio.create_task(
                        self._ask_to_stop(container, container.pid)
                    )
            # The deadline may move closer while this waits.
            await asyncio.wait({self.task}, timeout=min(max(left, 0.02), 0.05))

    async def _ask_to_stop(self, container: Container, pid: int) -> None:
        """Do what the container wants done before it is asked, then send SIGTERM."""
        await self._run_pre_stop(container)
        self.store.event(self.pod, "Normal", "Killing", f"Stopping container {container.name}")
        if container.pid == pid:
            container.signal(signal.SIGTERM)

    async def _run_pre_stop(self, container: Container) -> None:
        """Run the container's preStop command, for as long as there is time."""
        hook = container.spec.get("lifecycle", {}).get("preStop", {}).get("exec")
        if not hook:
            return
        process = await container.exec(
            hook["command"], stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL
        )
        assert self._deadline is not None
        left = self._deadline - asyncio.get_running_loop().time()
        hook_ends = asyncio.create_task(process.wait())
        await asyncio.wait(
            {hook_ends, self.task}, timeout=max(0.1, left), return_when=asyncio.FIRST_COMPLETED
        )
        if not hook_ends.done():
            process.kill()
