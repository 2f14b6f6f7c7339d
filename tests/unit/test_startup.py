"""Light verbs answer at once, which they can only do without the libraries that training needs."""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "datasets", "peft", "numpy", "pyarrow", "huggingface_hub")
CLUSTER_RUN = Path(__file__).parents[1] / "golden" / "full.yaml"
SHARED = Path(__file__).parents[2].parent / "shared"

PROBE = f"""
import sys
from kubetune.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as left:
    code = left.code
found = [name for name in {HEAVY!r} if name in sys.modules]
print("heavy:", *found, file=sys.stderr)
sys.exit(code)
"""


# What a light verb cannot do without: the yardstick of this machine, as slow and as busy as it is now.
LIBRARIES = """
import argparse, json, ruamel.yaml
from pydantic import BaseModel
class Config(BaseModel):
    number: int
"""
MOST = 2.2
"""What a verb may take, in that: it takes one and a half, and torch alone would add eight."""

LOAD_TOKENIZER = "import sys, tokenizers; tokenizers.Tokenizer.from_file(sys.argv[1])"


def run_verb(folder: Path, *argv: str, program: str = PROBE) -> tuple[subprocess.CompletedProcess[str], float]:
    """The verb's result in a process of its own, and the seconds of CPU time it took: a busy machine adds few."""
    environ = {key: value for key, value in os.environ.items() if key != "COVERAGE_PROCESS_START"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", program, *argv], cwd=folder, env=environ, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def is_light(verb: float, libraries: float, more: float = 0.0) -> bool:
    """Whether the CPU seconds of a verb are few beside those of the libraries it needs, and of what it does `more`."""
    return verb < MOST * libraries + 1.25 * more


def measure(folder: Path, *programs: Sequence[str]) -> tuple[subprocess.CompletedProcess[str], list[float]]:
    """What the first program said, and the least CPU seconds of each over up to five rounds, fewer where it is light.

    In turns, because a busy machine slows any of them; and the first run may have to compile bytecode.
    """
    least = [math.inf] * len(programs)
    for _ in range(5):
        runs = [run_verb(folder, *argv, program=program) for program, *argv in programs]
        least = [min(before, seconds) for before, (_, seconds) in zip(least, runs, strict=True)]
        if is_light(*least):
            break
    return runs[0][0], least


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 500)
    (tmp_path / "run.yaml").write_text("model: some/model\ndata: {train: train.jsonl, eval: 0.1}\nlora: {r: 8}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "answer"),
    [
        (["--help"], "write a commented run file"),
        (["init"], "learning_rate"),
        (["plan", "--help"], "--lora-r"),
        (["plan", "run.yaml", "training.global_batch_size=32"], "effective batch   32"),
        (["plan", "run.yaml", "--json"], '"rows": 450'),
        (["render", str(CLUSTER_RUN), "--kind=jobset"], "kind: JobSet"),
    ],
    ids=["help", "init", "plan-help", "plan", "plan-json", "render"],
)
def test_light_verbs_answer_at_once(folder: Path, argv: list[str], answer: str) -> None:
    done, seconds = measure(folder, [PROBE, *argv], [LIBRARIES])
    assert done.returncode == 0, done.stderr
    assert answer in done.stdout
    assert done.stderr.splitlines()[-1].strip() == "heavy:"
    assert is_light(*seconds), seconds


@pytest.mark.skipif(not (SHARED / "data" / "tokenizers").is_dir(), reason="needs a real tokenizer on this machine")
def test_a_plan_with_a_real_tokenizer_is_nearly_as_fast(folder: Path) -> None:
    model = SHARED / "data" / "tokenizers" / "qwen2.5"
    verb = [PROBE, "plan", "run.yaml", f"model={model}"]
    # Half of it is the library's reading of 150,000 tokens.
    done, seconds = measure(folder, verb, [LIBRARIES], [LOAD_TOKENIZER, str(model / "tokenizer.json")])
    assert "a row (from 200 rows)" in done.stdout
    assert done.stderr.splitlines()[-1].strip() == "heavy:"
    assert is_light(*seconds), seconds


def test_mistakes_are_explained_with_exit_code_2(folder: Path) -> None:
    done, _ = run_verb(folder, "plan", "run.yaml", "training.sed=1", "lora.r=0")
    assert done.returncode == 2
    assert "override: training.sed: unknown key; did you mean seed?" in done.stderr
    assert "override: lora.r: found 0" in done.stderr
    assert "Traceback" not in done.stderr
    missing, _ = run_verb(folder, "plan", "run.yaml", "data.train=none.jsonl")
    assert (missing.returncode, "does not exist" in missing.stderr) == (2, True)


def test_init_writes_once(folder: Path) -> None:
    done, _ = run_verb(folder, "init", "-o", "new.yaml")
    assert (done.returncode, (folder / "new.yaml").is_file()) == (0, True)
    (folder / "new.yaml").write_text("mine")
    again, _ = run_verb(folder, "init", "-o", "new.yaml")
    assert (again.returncode, (folder / "new.yaml").read_text()) == (2, "mine")
    assert "exists already" in again.stderr


def test_a_closed_pipe_is_no_error(folder: Path) -> None:
    command = f"{sys.executable} -m kubetune init | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_unset_variable_changes_nothing_and_a_set_one_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LR", "1e-3")
    monkeypatch.setenv("BATCH", "")
    done, _ = run_verb(folder, "plan", "run.yaml")
    assert "learning rate     0.001" in done.stdout
    assert "LR is set in the environment" in done.stderr
    assert "BATCH" not in done.stderr
