"""One container of a pod over all its restarts: start, log, restart policy, signals, exec."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from standin.node import runtime
from standin.node.environment import Waiting, environment, expand
from standin.node.loopback import translate
from standin.node.pod_state import PodState
from standin.node.readiness import wait_until_ready
from standin.state.objects import Object, now

KILLED = 128 + signal.SIGKILL
_READ_ONLY_VOLUMES = {"configMap", "secret"}
_LONGEST_BACKOFF_FACTOR = 30
_CHUNK_BYTES = 16_384
_MESSAGE_PATH = "/dev/termination-log"
_MESSAGE_BYTES = 4096


class Container:
    """Runs one container; `status` is its entry in the pod's containerStatuses, edited in place."""

    def __init__(self, owner: PodState, spec: Object, status: Object, init: bool) -> None:
        self.owner = owner
        self.spec = spec
        self.status = status
        self.init = init  # an init container
        self.name: str = spec["name"]
        self.pid: int | None = None  # of the command, in this machine's numbering, while it runs
        # What the next ending is called, if not Completed or Error.
        self.end_reason: str | None = None
        self._probing: asyncio.Task[None] | None = None  # until the readiness probe is answered
        self._env: dict[str, str] = {}
        # The container's own settings come before the pod's.
        context = {
            **(owner.spec.get("securityContext") or {}),
            **(spec.get("securityContext") or {}),
        }
        self._context = context
        self._uid = context.get("runAsUser", 0)
        self._gid = context.get("runAsGroup", 0)
        self._groups: list[int] = []
        if context.get("fsGroup") is not None:
            self._groups.append(context["fsGroup"])

    def log_file(self, attempt: int) -> Path:
        """Return the file with the log of a start, counted from 0."""
        return self.owner.folder / "logs" / f"{self.name}.{attempt}.log"

    async def run(self) -> int:
        """Run it as often as the pod's restart policy says; return the last exit code."""
        policy = self.owner.spec.get("restartPolicy", "Always")
        failures = 0
        while not self.owner.stopping.is_set():
            spec = await self.owner.retry(self._prepare, "Failed", self.status)
            if spec is None:
                break
            code = await self._run_once(spec)
            self.status["ready"] = self.init and code == 0
            self.owner.publish()
            has_succeeded = code == 0 and (self.init or policy == "OnFailure")
            if policy == "Never" or has_succeeded or self.owner.stopping.is_set():
                return code
            # Before the next start, which takes the restart count one higher.
            failures += 1
            await self._back_off(failures)
        return KILLED

    async def exec(self, argv: list[str], **streams: Any) -> Process:
        """Start a command inside the running container, as the container's user."""
        if self.owner.sandbox_pid is None:
            places = {**self.folders(), "/proc/1": f"/proc/{self.pid}"}
            command = [translate(word, places) for word in argv]
        else:
            command = [*self._into_namespaces(), *argv]
        return await asyncio.create_subprocess_exec(
            *command, env=self._env, start_new_session=True, **streams
        )

    def _into_namespaces(self) -> list[str]:
        """Return the command before another one that has it run inside, as the container's user."""
        words = ["nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-n", "-p", "-r", "-w", "--"]
        if not runtime.single_user():
            groups = "--clear-groups"
            if self._groups:
                groups = f"--groups={','.join(map(str, self._groups))}"
            words += ["setpriv", f"--reuid={self._uid}", f"--regid={self._gid}", groups, "--"]
        return words

    def has_program(self, program: str) -> bool:
        """True if the running container has a program of this name."""
        root = f"/proc/{self.pid}/root"
        if self.owner.sandbox_pid is None:
            root = ""
            program = translate(program, self.folders())
        if "/" in program:
            return os.access(f"{root}{program}", os.X_OK)
        folders = self._env.get("PATH", os.defpath).split(":")
        return any(os.access(f"{root}{folder}/{program}", os.X_OK) for folder in folders)

    def signal(self, number: int) -> None:
        """Send a signal to the command, if it runs."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    # -- starting
    def _prepare(self) -> Object:
        """Return what runtime.py needs to start the container; Waiting when something is missing."""
        owner = self.owner
        context = self._context
        image = owner.host.pull(self.spec["image"], self.spec.get("imagePullPolicy"))
        if self._uid == 0 and context.get("runAsNonRoot"):
            raise Waiting(
                "CreateContainerConfigError",
                "container has runAsNonRoot and image will run as root",
            )
        # As a runtime sets it for a user without an entry in /etc/passwd.
        home = "/" if self._uid else "/root"
        self._env = environment(owner.store, owner.pod, self.spec, image, home)
        argv = [*self.spec.get("command", image.command), *self.spec.get("args", [])]
        if owner.sandbox_pid is None:
            return self._prepare_loopback(argv)
        mounts: list[list[Any]] = []
        for source, target in image.mounts.items():
            mounts.append([source, target, True])
        mounts += self._mounts()
        mounts.append([str(self._message_file()), _MESSAGE_PATH, False])
        return {
            "sandbox": owner.sandbox_pid,
            "scratch": str(owner.folder / "scratch"),
            "files": owner.files,
            "mounts": mounts,
            "read_only": context.get("readOnlyRootFilesystem", False),
            "no_new_privileges": context.get("allowPrivilegeEscalation") is False,
            "uid": self._uid,
            "gid": self._gid,
            "groups": self._groups,
            "folder": self.spec.get("workingDir", "/"),
            "argv": [expand(word, self._env) for word in argv],
            "env": self._env,
        }

    def _message_file(self) -> Path:
        """Return the file for the container's last message, empty at each start."""
        path = self.owner.folder / f"{self.name}.message"
        path.write_text("")
        path.chmod(0o666)
        return path

    def folders(self) -> dict[str, str]:
        """Return the folders of volumes, by the path that each would be mounted at."""
        return {os.path.normpath(target): source for source, target, _ in self._mounts()}

    def _prepare_loopback(self, argv: list[str]) -> Object:
        """Return what runtime.py needs if there are no namespaces."""
        folders = self.folders()
        env = dict(self._env)
        # The variables that the manifest names; the image's mean this machine.
        for entry in self.spec.get("env", []):
            if entry["name"] in env:
                env[entry["name"]] = translate(env[entry["name"]], folders)
        self._env = self.owner.host.loopback.resolved(self.owner.namespace, env)
        words = [translate(expand(word, self._env), folders) for word in argv]
        folder = translate(self.spec.get("workingDir", "/"), folders)
        return {"sandbox": None, "folder": folder, "argv": words, "env": self._env}

    def _mounts(self) -> list[list[Any]]:
        """Return the mounts of volumes: folder, path in the container, and whether it is read-only."""
        volumes = {volume["name"]: volume for volume in self.owner.spec.get("volumes", [])}
        mounts: list[list[Any]] = []
        for entry in self.spec.get("volumeMounts", []):
            volume_folder = (self.owner.folder / "volumes" / entry["name"]).resolve()
            source = volume_folder / entry.get("subPath", "")
            if not source.exists():
                source.mkdir(parents=True)
            is_projected = not _READ_ONLY_VOLUMES.isdisjoint(volumes[entry["name"]])
            read_only = entry.get("readOnly", False) or is_projected
            mounts.append([str(source), entry["mountPath"], read_only])
        return mounts

    async def _run_once(self, spec: Object) -> int:
        """Start the container, copy its log, and return its exit code."""
        started = now()
        self.end_reason = None
        process, pid, error = await self._start(spec)
        if pid and not error:
            self._say_started(int(pid), started)
        assert process.stdout is not None
        await _copy_log(process.stdout, self.log_file(self.status["restartCount"]))
        code = await process.wait()
        if self._probing is not None:
            self._probing.cancel()
        self.pid = None
        terminated = {
            "exitCode": code,
            "reason": self._reason(code, error),
            "startedAt": started,
            "finishedAt": now(),
            "containerID": f"standin://{pid}",
        }
        message = error or self._message()
        if message:
            terminated["message"] = message
        self.status.update(ready=False, started=False, state={"terminated": terminated})
        return code

    def _reason(self, code: int, error: str) -> str:
        """Return what an ending is called."""
        if error:
            return "StartError"
        return self.end_reason or ("Error" if code else "Completed")

    async def _start(self, spec: Object) -> tuple[Process, str, str]:
        """Start runtime.py; return it, the command's process id, and why that could not be started."""
        spec_file = self.owner.folder / f"{self.name}.json"
        spec_file.touch(mode=0o600)
        spec_file.write_text(json.dumps(spec))
        read_end, write_end = os.pipe()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", runtime.__file__, "run", str(spec_file), str(write_end)),
            pass_fds=[write_end],
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
        )
        os.close(write_end)
        # `pid N` and `error TEXT`, in any order: two processes write them
        report = {}
        for line in (await _read_all(read_end)).splitlines():
            key, _, text = line.partition(" ")
            report[key] = text
        # It may hold secrets.
        spec_file.unlink()
        return process, report.get("pid", ""), report.get("error", "")

    def _message(self) -> str:
        """Return what the container has left as its last message."""
        path = self.owner.folder / f"{self.name}.message"
        if not path.exists():
            return ""
        return path.read_bytes()[:_MESSAGE_BYTES].decode(errors="replace")

    def _say_started(self, pid: int, started: str) -> None:
        """Publish that the container runs; without a readiness probe it is ready."""
        self.pid = pid
        self.status.update(
            state={"running": {"startedAt": started}}, started=True, containerID=f"standin://{pid}"
        )
        self.status["ready"] = not self.init and "readinessProbe" not in self.spec
        if not self.init and not self.status["ready"]:
            self._probing = asyncio.create_task(self._probe())
        self.owner.store.event(
            self.owner.pod, "Normal", "Started", f"Started container {self.name}"
        )
        self.owner.publish(None if self.init else "Running")

    async def _probe(self) -> None:
        """Make the container ready once its readiness probe is answered."""
        address = self.owner.pod["status"]["podIP"]
        await wait_until_ready(self.spec, address, self.owner.sandbox_pid)
        self.status["ready"] = True
        self.owner.publish()

    async def _back_off(self, failures: int) -> None:
        """Wait before the next restart: hardly at all at first, then twice as long each time."""
        self.status["lastState"] = self.status["state"]
        factor = 0.1
        if failures > 1:
            factor = min(2 ** (failures - 2), _LONGEST_BACKOFF_FACTOR)
            message = "back-off restarting failed container"
            self.status["state"] = {"waiting": {"reason": "CrashLoopBackOff", "message": message}}
            text = f"Back-off restarting failed container {self.name} in pod {self.owner.name}"
            self.owner.store.event(self.owner.pod, "Warning", "BackOff", text)
        self.owner.publish()
        await self.owner.stopped_within(self.owner.host.settings.crash_backoff_seconds * factor)
        self.status["restartCount"] += 1


async def _read_all(descriptor: int) -> str:
    """Return all that comes by a pipe until its other end is closed."""
    reader = asyncio.StreamReader()
    pipe = os.fdopen(descriptor, "rb")
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    text = (await reader.read()).decode()
    transport.close()
    return text


async def _copy_log(stream: asyncio.StreamReader, path: Path) -> None:
    """Append output in the CRI format `time stdout F|P text`; P marks a line that goes on in the next entry."""
    with path.open("ab", buffering=0) as log:
        while chunk := await stream.read(_CHUNK_BYTES):
            stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z").encode()
            *lines, rest = chunk.split(b"\n")
            entries = [b"%s stdout F %s\n" % (stamp, line) for line in lines]
            if rest:
                entries.append(b"%s stdout P %s\n" % (stamp, rest))
            # In one write, so that a reader never sees half an entry.
            log.write(b"".join(entries))
