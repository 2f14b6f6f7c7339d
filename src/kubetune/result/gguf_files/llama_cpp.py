"""llama.cpp, asked in a process of its own: logits of rows, greedy answers, ids of texts, prompts of conversations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetune import errors
from kubetune.base import processes

if TYPE_CHECKING:
    from torch import Tensor

PACKAGE = "llama-cpp-python"


@dataclass(frozen=True)
class AskedRow:
    """Tokens, and at which of them logits are asked for."""

    ids: list[int]
    positions: list[int]


@dataclass(frozen=True)
class LlamaRequest:
    """What llama.cpp is asked about one file."""

    model: str
    rows: list[AskedRow]
    adapter: str | None = None
    prompts: list[list[int]] = field(default_factory=list)  # which are continued greedily
    length: int = 0  # tokens of each continuation
    texts: list[str] = field(default_factory=list)  # which are tokenized
    template: str = ""  # the chat template
    # Pairs of role and text, the user's last.
    chats: list[list[tuple[str, str]]] = field(default_factory=list)
    vocabulary: int = 0  # size
    threads: int = 1


@dataclass(frozen=True)
class LlamaAnswer:
    """What llama.cpp answered."""

    version: str  # of the Python package
    logits: list[Tensor]  # of each row, `[positions, vocabulary]`
    continuations: list[list[int]]
    tokens: list[list[int]]  # of each text
    start: list[int]  # tokens that are put before each text
    ends: list[int]  # tokens at which it ends an answer
    chats: list[str | None]  # prompts; None if it does not know the template


def missing() -> str | None:
    """Return why llama.cpp cannot be asked here; None if it can."""
    package = find_spec("llama_cpp")
    if package is None:
        return f"{PACKAGE} is not installed (pip install {PACKAGE}; it compiles llama.cpp)"
    return _why_broken(str(package.origin))


# The page asks again and again, and each answer takes a process.
@cache
def _why_broken(origin: str) -> str | None:
    """Return why the package at this place does not load; None if it does."""
    # One that was built for another machine, or lacks a package, is no fault of the file that it is asked about.
    done = run_to_end([sys.executable, "-P", "-c", "import llama_cpp"])
    if done.returncode:
        reason = " ".join(done.stderr.split("\n")[-2:]).strip()
        return f"{PACKAGE} is installed, and does not load ({reason or f'exit code {done.returncode}'})"
    return None


def ask(request: LlamaRequest) -> LlamaAnswer:
    """Return what llama.cpp answers. Raise ModelError if it does not load the file, or ends by itself."""
    import numpy as np
    import torch

    with tempfile.TemporaryDirectory(prefix="kubetune-gguf-") as folder:
        question = Path(folder) / "request.json"
        answer = Path(folder) / "answer.npz"
        question.write_text(json.dumps(asdict(request)))
        done = run_to_end(
            processes.module("kubetune.result.gguf_files.llama_worker", question, answer),
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        if done.returncode or not answer.is_file():
            raise errors.ModelError(
                f"llama.cpp does not load or run {Path(request.model).name} "
                f"(exit code {done.returncode}: {last_lines(done)})"
            )
        logits = []
        with np.load(answer) as arrays:
            facts: dict[str, Any] = json.loads(arrays["answers"].tobytes())
            for number in range(len(request.rows)):
                logits.append(torch.from_numpy(arrays[f"logits_{number}"]))
    return LlamaAnswer(logits=logits, **facts)


def run_to_end(
    command: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program until it ends, with nothing to read, and return what it printed and its exit code."""
    return subprocess.run(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )


def last_lines(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last three lines that a program printed, as one."""
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return " | ".join(lines[-3:])
