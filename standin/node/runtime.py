"""The container runtime: namespaces, a root file system, exec. Standard library only, for it starts every container.

`python -I -S runtime.py sandbox NAME` holds a pod's network, host name and IPC namespaces (the pause container).
`python -I -S runtime.py run SPEC.json FD` joins them, adds mount and process namespaces and an overlay of the
machine's root, then execs the command as process 1, and exits with its code. To FD it writes two lines at most, in any
order: `pid N`, the command's, and `error TEXT` if it could not be started; closed without an error means: started.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

# Of linux/sched.h, linux/mount.h and linux/prctl.h.
NEWNS = 0x20000
NEWUTS = 0x4000000
NEWIPC = 0x8000000
NEWUSER = 0x10000000
NEWPID = 0x20000000
NEWNET = 0x40000000
RDONLY = 1
REMOUNT = 32
BIND = 4096
REC = 16384
PRIVATE = 1 << 18
_DETACH = 2
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
# Read-only, nosuid, nodev, noexec: a user namespace may not drop them.
_LOCKED_FLAGS = 0x2F
_NOT_BOUND = ("dev", "proc", "sys", "tmp", "run", "etc", "lost+found")
_COPIED_FROM_ETC = ("passwd", "group", "nsswitch.conf", "ld.so.cache", "alternatives", "ssl")

_libc = ctypes.CDLL(None, use_errno=True)

_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "fd/0",
    "stdout": "fd/1",
    "stderr": "fd/2",
    "ptmx": "pts/ptmx",
}


def _check(result: int, what: str) -> None:
    """Raise OSError where a call of libc has failed."""
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def mount(
    source: str | None,
    target: str,
    kind: str | None = None,
    flags: int = 0,
    data: str | None = None,
) -> None:
    raw = [text.encode() if text else None for text in (source, target, kind, data)]
    _check(_libc.mount(raw[0], raw[1], raw[2], ctypes.c_ulong(flags), raw[3]), f"mount {target}")


def unmount(target: str) -> None:
    _check(_libc.umount2(target.encode(), _DETACH), f"unmount {target}")


def die_with_parent() -> None:
    """SIGKILL this process when its parent ends, however that ends: nothing is ever left behind."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def single_user() -> bool:
    """True if this user namespace maps one id only, so that nothing can run as another user."""
    with open("/proc/self/uid_map") as file:
        return sum(int(line.split()[2]) for line in file) == 1


def join(namespace_file: str) -> None:
    """Move this process into the namespace of a `/proc/PID/ns/…` file."""
    with open(namespace_file) as file:
        _check(_libc.setns(file.fileno(), 0), "setns")


@contextlib.contextmanager
def network_of(pid: int) -> Iterator[None]:
    """Be in another process' network namespace for a moment; not to be held over an await."""
    with open("/proc/self/ns/net") as this_network:
        join(f"/proc/{pid}/ns/net")
        try:
            yield
        finally:
            _check(_libc.setns(this_network.fileno(), 0), "setns")


def hold_sandbox(name: str) -> None:
    """Hold the namespaces of a pod until SIGTERM."""
    die_with_parent()
    unshare(NEWNET | NEWUTS | NEWIPC)
    socket.sethostname(name)
    print("ok", flush=True)
    signal.sigwait({signal.SIGTERM})


def run(spec: dict[str, Any], report: int) -> None:
    """Start the container that `spec` describes (see container.py) and stay as its parent."""
    die_with_parent()
    if spec["sandbox"] is None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    else:
        for namespace in ("net", "uts", "ipc"):
            join(f"/proc/{spec['sandbox']}/ns/{namespace}")
        unshare(NEWNS | NEWPID)
    pid = os.fork()
    if pid:
        os.write(report, b"pid %d\n" % pid)
        os.close(report)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        _kill_children()
        os._exit(code if code >= 0 else 128 - code)
    try:
        os.set_inheritable(report, False)
        if spec["sandbox"] is None:
            os.setsid()
            os.chdir(spec["folder"])
            die_with_parent()
        else:
            _become(spec)
        os.execvpe(spec["argv"][0], spec["argv"], spec["env"])
    except Exception as error:
        os.write(report, f"error {type(error).__name__}: {error}\n".encode())
        os._exit(128)


def _kill_children() -> None:
    """SIGKILL what the command left behind, which a process namespace of its own does by itself."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = file.read().split()
        if not children:
            return
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _become(spec: dict[str, Any]) -> None:
    """Turn this process into the container's first one: root, user, rights."""
    os.setsid()
    _make_root(spec)
    if not single_user():
        os.setgroups(spec["groups"])
        os.setgid(spec["gid"])
        os.setuid(spec["uid"])
    if spec["no_new_privileges"]:
        _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.umask(0o022)
    # Again, for setuid clears it.
    die_with_parent()


def _make_root(spec: dict[str, Any]) -> None:
    """Make the container's root of this machine's, with what the container writes on top, and move into it."""
    base = spec["scratch"]
    mount(None, "/", None, REC | PRIVATE)
    mount("tmpfs", base, "tmpfs", 0, "mode=755")
    upper = f"{base}/upper"
    work = f"{base}/work"
    root = f"{base}/root"
    for folder in (upper, work, root):
        os.mkdir(folder)
    try:
        mount("overlay", root, "overlay", 0, f"lowerdir=/,upperdir={upper},workdir={work}")
        # Interpreters may live there.
        os.chmod(root + "/root", 0o711)
    # In a user namespace "/" has locked submounts, which overlayfs cannot clone.
    except OSError:
        _bind_root(root)
    _make_devices(root + "/dev")
    # Every runtime's default size, and a known trap.
    mount("shm", root + "/dev/shm", "tmpfs", 0, "mode=1777,size=64m")
    mount("proc", root + "/proc", "proc")
    mount("sysfs", root + "/sys", "sysfs", RDONLY)
    for path, text in spec["files"].items():
        with contextlib.suppress(FileNotFoundError):
            os.unlink(root + path)
        with open(root + path, "w") as file:
            file.write(text)
    for source, target, read_only in sorted(spec["mounts"], key=lambda entry: str(entry[1])):
        _bind(source, root + os.path.normpath(target), read_only)
    os.makedirs(root + spec["folder"], exist_ok=True)
    if spec["read_only"]:
        mount(None, root, None, REMOUNT | BIND | RDONLY)
    os.chroot(root)
    os.chdir(spec["folder"])


def _make_devices(folder: str) -> None:
    """Make a /dev of its own, as runtimes do: nothing that a container leaves there reaches the machine's."""
    mount("tmpfs", folder, "tmpfs", 0, "mode=755")
    for name in _DEVICES:
        open(f"{folder}/{name}", "w").close()
        mount(f"/dev/{name}", f"{folder}/{name}", None, BIND)
    for name, target in _DEVICE_LINKS.items():
        os.symlink(target, f"{folder}/{name}")
    for name in ("shm", "pts"):
        os.mkdir(f"{folder}/{name}")
    mount("/dev/pts", folder + "/pts", None, BIND)


def _bind(source: str, target: str, read_only: bool) -> None:
    """Show a file or folder at another path too."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        open(target, "w").close()
    mount(source, target, None, BIND | REC)
    if read_only:
        locked = os.statvfs(target).f_flag & _LOCKED_FLAGS
        mount(None, target, None, REMOUNT | BIND | RDONLY | locked)


def _bind_root(root: str) -> None:
    """Make a root without overlayfs: a tmpfs with read-only binds of the top-level folders, and some files of /etc."""
    for name in os.listdir("/"):
        source = f"/{name}"
        target = f"{root}/{name}"
        if os.path.islink(source):
            os.symlink(os.readlink(source), target)
        elif os.path.isdir(source) and name in _NOT_BOUND:
            os.makedirs(target, exist_ok=True)
        elif os.path.isdir(source):
            _bind(source, target, read_only=True)
    os.chmod(root + "/tmp", 0o1777)
    for name in _COPIED_FROM_ETC:
        source = f"/etc/{name}"
        target = f"{root}/etc/{name}"
        if os.path.isdir(source):
            _bind(source, target, read_only=False)
        elif os.path.isfile(source):
            with open(source, "rb") as old, open(target, "wb") as new:
                new.write(old.read())


if __name__ == "__main__":
    if sys.argv[1] == "sandbox":
        hold_sandbox(sys.argv[2])
    else:
        with open(sys.argv[2]) as spec_file:
            loaded = json.load(spec_file)
        run(loaded, int(sys.argv[3]))
