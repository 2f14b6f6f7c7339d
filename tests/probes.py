"""A file with a reward function that tries to leave its process, in each way that docs/grpo.md has a row for.

    look(completions=[json]) → a number for each answer: 1.0 where the try succeeded, 0.0 where it was refused

An answer is JSON: the try, and what it needs (`target` in tests/trainer_with_secrets.py). The file imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)


def look(completions: list[str], **rest: Any) -> list[float]:
    results = []
    for text in completions:
        tried = json.loads(text)
        try:
            done = TRIES[tried["try"]](tried)
        except (OSError, ValueError):
            done = False
        results.append(float(bool(done)))
    return results


def _is(done: int) -> bool:
    return done != -1


def list_processes(target: Any) -> bool:
    # The trainer, by its command line: its number may be that of another process here.
    commands = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):
                commands.append(_content(f"/proc/{name}/cmdline"))
    return any(target["mark"].encode() in command for command in commands)


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _of_trainer(target: Any, name: str) -> str:
    return f"/proc/{target['pid']}/{name}"


def read_environment(target: Any) -> bool:
    return target["mark"].encode() in _content(_of_trainer(target, "environ"))


def list_open_files(target: Any) -> bool:
    links = [os.readlink(entry) for entry in os.scandir(_of_trainer(target, "fd"))]
    return any(target["file"] in link for link in links)


def read_map(target: Any) -> bool:
    # Its own process may have the same number.
    return target["pid"] != os.getpid() and b"heap" in _content(_of_trainer(target, "maps"))


def read_memory(target: Any) -> bool:
    if target["pid"] == os.getpid():
        return False
    with open(_of_trainer(target, "mem"), "rb") as file:
        file.seek(target["address"])
        return len(file.read(8)) == 8


def write_memory(target: Any) -> bool:
    if target["pid"] == os.getpid():
        return False
    with open(_of_trainer(target, "mem"), "r+b", buffering=0) as file:
        file.seek(target["address"])
        return file.write(b"changed!") == 8


def copy_memory(target: Any) -> bool:
    buffer = ctypes.create_string_buffer(8)
    here = struct.pack("@2Q", ctypes.addressof(buffer), 8)
    there = struct.pack("@2Q", target["address"], 8)
    return LIBC.process_vm_readv(target["pid"], here, 1, there, 1, 0) == 8


def trace(target: Any) -> bool:
    # PTRACE_SEIZE, which does not stop it
    return _is(LIBC.ptrace(0x4206, target["pid"], None, None))


def send_signal(target: Any) -> bool:
    if target["pid"] == os.getpid():
        return False
    os.kill(target["pid"], signal.SIGUSR1)
    return True


def connect_by_path(target: Any) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(target["socket"])
    return True


def connect_pair_by_path(target: Any) -> bool:
    left, right = socket.socketpair(type=socket.SOCK_DGRAM)
    with left, right:
        left.connect(target["datagrams"])
    return True


def connect_by_name(target: Any) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect("\0" + target["abstract"])
    return True


def connect_tcp(target: Any) -> bool:
    with socket.create_connection(("127.0.0.1", target["port"]), 5):
        return True


def send_udp(target: Any) -> bool:
    with socket.socket(type=socket.SOCK_DGRAM) as client:
        return client.sendto(b"x", ("127.0.0.1", target["udp"])) == 1


def change_mode(target: Any) -> bool:
    os.chmod(target["file"], 0o600)
    return True


def change_mode_of_output(target: Any) -> bool:
    os.fchmod(2, 0o600)
    return not stat.S_ISFIFO(os.fstat(2).st_mode)


def open_private_folder(target: Any) -> bool:
    # Its folder lies in one that only its user may enter. This leaves the mode as it is.
    os.chmod("..", stat.S_IMODE(os.stat("..").st_mode))
    return True


def change_owner(target: Any) -> bool:
    os.chown(target["file"], os.getuid(), os.getgid())
    return True


def change_times(target: Any) -> bool:
    os.utime(target["file"], (1, 1))
    return True


def change_attributes(target: Any) -> bool:
    os.setxattr(target["file"], "user.probe", b"x")
    return True


def write_file(target: Any) -> bool:
    with open(target["file"], "a") as file:
        file.write("x")
    return True


def truncate_file(target: Any) -> bool:
    os.truncate(target["file"], 0)
    return True


def rename_file(target: Any) -> bool:
    moved = target["file"] + ".moved"
    os.rename(target["file"], moved)
    os.rename(moved, target["file"])
    return True


def link_file(target: Any) -> bool:
    os.link(target["file"], target["file"] + ".link")
    return True


def make_file(target: Any) -> bool:
    with open(target["file"] + ".new", "w"):
        return True


def lock_file(target: Any) -> bool:
    with open(target["file"]) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return True


def lease_file(target: Any) -> bool:
    with open(target["file"]) as file:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    return True


def write_pipe(target: Any) -> bool:
    os.close(os.open(target["fifo"], os.O_WRONLY | os.O_NONBLOCK))
    return True


def open_terminal(target: Any) -> bool:
    os.close(os.open(target["terminal"], os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK))
    return True


def write_shared_memory(target: Any) -> bool:
    with open(target["shared"], "r+") as file:
        file.write("x")
    return True


def write_setting(target: Any) -> bool:
    with open("/proc/sys/kernel/hostname") as file:
        name = file.read()
    with open("/proc/sys/kernel/hostname", "w") as file:
        file.write(name)
    return True


def set_host_name(target: Any) -> bool:
    socket.sethostname(target["host"])
    return True


def set_clock(target: Any) -> bool:
    time.clock_settime(time.CLOCK_REALTIME, time.clock_gettime(time.CLOCK_REALTIME))
    return True


def mount(target: Any) -> bool:
    return _is(LIBC.mount(b"tmpfs", os.getcwd().encode(), b"tmpfs", ctypes.c_ulong(0), None))


def new_user_namespace(target: Any) -> bool:
    return _is(LIBC.unshare(0x10000000))


def keep_process(target: Any) -> bool:
    # The child of a child, which has no parent that could end it.
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() > 0:
            os._exit(0)
        # It holds the pipe of replies, and ends when the trainer does.
        poll = select.poll()
        poll.register(int(sys.argv[2]), 0)
        poll.poll()
        os._exit(0)
    os.waitpid(child, 0)
    return True


def read_keys(target: Any) -> bool:
    # keyctl(KEYCTL_GET_KEYRING_ID, KEY_SPEC_USER_KEYRING)
    number = {"x86_64": 250, "aarch64": 219}[os.uname().machine]
    return _is(LIBC.syscall(number, 0, -4, 1))


def use_queue(target: Any) -> bool:
    # shmget of a segment that the trainer has made
    return _is(LIBC.shmget(target["key"], 0, 0))


def start_ring(target: Any) -> bool:
    # io_uring_setup, whose requests no filter sees
    return _is(LIBC.syscall(425, 1, ctypes.create_string_buffer(120)))


def set_limit(target: Any) -> bool:
    # To what it is already: the trainer is needed for the other tries.
    if target["pid"] == os.getpid():
        return False
    limit = resource.prlimit(target["pid"], resource.RLIMIT_CORE)
    resource.prlimit(target["pid"], resource.RLIMIT_CORE, limit)
    return True


def set_processors(target: Any) -> bool:
    os.sched_setaffinity(target["pid"], os.sched_getaffinity(target["pid"]))
    return target["pid"] != os.getpid()


def set_priority(target: Any) -> bool:
    if target["pid"] == os.getpid():
        return False
    os.setpriority(os.PRIO_PROCESS, target["pid"], os.getpriority(os.PRIO_PROCESS, target["pid"]))
    return True


def be_spared_without_memory(target: Any) -> bool:
    # The kernel ends those with the highest number first.
    with open("/proc/self/oom_score_adj") as file:
        if int(file.read()) < 1000:
            return True
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("0")
    return True


# Last, since the others need the file.
def remove_file(target: Any) -> bool:
    os.remove(target["file"])
    return True


TRIES = {
    name: value
    for name, value in list(globals().items())
    if callable(value)
    and getattr(value, "__module__", None) == __name__
    and not name.startswith("_")
    and name != "look"
}
