"""What a library builds at its first use is built before there are threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Forked copies of a process that has only imported: each is a first use by eight threads at once.
_FIRST_USES = """
import os, sys, threading
from lightkube.core.websocket import ExecAccumulator
{imports}

END = b'{{"status":"Failure","reason":"NonZeroExitCode","details":{{"causes":[{{"reason":"ExitCode","message":"7"}}]}}}}'
THREADS = 8

def use(barrier, codes):
    accumulator = ExecAccumulator(stdout=False, stderr=False, raise_on_error=False, decode=None)
    barrier.wait()
    codes.append(accumulator.feed(3, END).exit_code)

def first_use():
    sys.setswitchinterval(1e-6)
    barrier = threading.Barrier(THREADS)
    codes = []
    threads = [threading.Thread(target=use, args=(barrier, codes)) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return codes == [7] * THREADS

signals = 0
for _ in range({processes}):
    child = os.fork()
    if child == 0:
        os._exit(0 if first_use() else 1)
    _, status = os.waitpid(child, 0)
    signals += status != 0
print(signals)
"""


def crashes(imports: str, processes: int) -> int:
    """Return how many of so many processes did not end well."""
    script = _FIRST_USES.format(imports=imports, processes=processes)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    return int(done.stdout)


def test_commands_that_end_at_once_in_many_pods_are_decoded_by_threads() -> None:
    pytest.importorskip("lightkube")
    assert crashes("import kubetune.k8s.api.client", 100) == 0
