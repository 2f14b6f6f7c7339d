"""Light verbs answer without what training needs: counted, since seconds say more of the machine; those are measured
by benchmarks/startup.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kubetune.cli import main
from kubetune.supervisor import rank_environment
from tests.tiny import pretend_weights, train_tokenizer

CLUSTER_RUN = Path(__file__).parents[1] / "golden" / "full.yaml"
CONFIG = {
    "annotated_types",
    "pydantic",
    "pydantic_core",
    "ruamel",
    "typing_extensions",
    "typing_inspection",
}
TOKENIZER = {"jinja2", "markupsafe", "tokenizers"}

# Runs a verb; its last line on standard error says what that took, in numbers that no machine changes.
PROBE = """
import json, sys
outside, loads = [], 0

def audit(event, _):
    if event.startswith(("subprocess.", "os.fork", "os.posix_spawn", "os.exec", "os.system", "socket.")):
        outside.append(event)

def profile(frame, event, called):
    global loads
    loads += event == "c_call" and called.__name__ in ("from_file", "from_str", "from_buffer")

sys.addaudithook(audit)
sys.setprofile(profile)
from kubetune.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as left:
    code = left.code
sys.setprofile(None)
installed = [name for name, module in sys.modules.items() if "-packages" in (getattr(module, "__file__", None) or "")]
told = {
    "packages": sorted({name.partition(".")[0] for name in installed} - {"_distutils_hack"}),
    "own": sum(name.partition(".")[0] == "kubetune" for name in sys.modules),
    "outside": outside,
    "tokenizers": loads,
}
print(json.dumps(told), file=sys.stderr)
sys.exit(code)
"""


def run_verb(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if key != "COVERAGE_PROCESS_START"}
    return subprocess.run(
        [sys.executable, "-c", PROBE, *argv],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
    )


def require_light(
    done: subprocess.CompletedProcess[str],
    packages: set[str],
    most_of_ours: int,
    tokenizers: int = 0,
) -> None:
    """Require no package but these, few files of kubetune, no process and no connection."""
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stderr.splitlines()[-1])
    others = {
        name
        for name in facts["packages"]
        if name != "kubetune" and not name.startswith("__editable__")
    }
    assert others <= packages
    assert facts["own"] <= most_of_ours
    assert (facts["outside"], facts["tokenizers"]) == ([], tokenizers)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 500)
    (tmp_path / "run.yaml").write_text(
        "model: some/model\ndata: {train: train.jsonl, eval: 0.1}\nlora: {r: 8}\n"
        "compute: {gpus_per_node: 0, memory: 8Gi}\n"
        "kubernetes: {image: registry.example/image:1}\n"  # whose pods fetch the model
    )
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "answer", "packages", "most_of_ours"),
    [
        (["--help"], "write a commented run file", set(), 13),
        (["init"], "learning_rate", set(), 20),
        (["plan", "--help"], "--lora-r", CONFIG, 160),
        (
            ["plan", "run.yaml", "training.global_batch_size=32"],
            "effective batch   32",
            CONFIG,
            200,
        ),
        (["plan", "run.yaml", "--json"], '"rows": 450', CONFIG, 200),
        (["render", str(CLUSTER_RUN), "--kind=jobset"], "kind: JobSet", CONFIG, 140),
    ],
    ids=["help", "init", "plan-help", "plan", "plan-json", "render"],
)
def test_light_verbs_import_and_start_next_to_nothing(
    folder: Path, argv: list[str], answer: str, packages: set[str], most_of_ours: int
) -> None:
    done = run_verb(folder, *argv)
    assert answer in done.stdout
    require_light(done, packages, most_of_ours)


def test_a_plan_with_a_tokenizer_reads_it_once_and_takes_no_more_than_its_library(
    folder: Path,
) -> None:
    model = pretend_weights(train_tokenizer(folder / "model"))
    done = run_verb(folder, "plan", "run.yaml", f"model={model}", "kubernetes=null")
    assert "a row (from 200 rows)" in done.stdout
    # The data are small, so all rows are looked at; numpy draws those that are held out.
    require_light(done, CONFIG | TOKENIZER | {"numpy"}, 232, tokenizers=1)


def test_mistakes_are_explained_with_exit_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = str(folder / "run.yaml")
    assert main(["plan", run_file, "training.sed=1", "lora.r=0"]) == 2
    stderr = capsys.readouterr().err
    assert "override: training.sed: unknown key; did you mean seed?" in stderr
    assert "override: lora.r: found 0" in stderr
    assert "Traceback" not in stderr
    assert main(["plan", run_file, "data.train=none.jsonl"]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_init_writes_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = tmp_path / "new.yaml"
    assert (main(["init", "-o", str(new)]), new.is_file()) == (0, True)
    new.write_text("mine")
    assert (main(["init", "-o", str(new)]), new.read_text()) == (2, "mine")
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["init", "--help"])
def test_a_closed_pipe_is_no_error(folder: Path, words: str) -> None:
    command = f"{sys.executable} -m kubetune {words} | true; exit ${{PIPESTATUS[0]}}"
    # As on most machines, where what is printed waits for the end of the program.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environ, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_unset_variable_changes_nothing_and_a_set_one_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LR", "1e-3")
    monkeypatch.setenv("BATCH", "")
    done = run_verb(folder, "plan", "run.yaml")
    assert "learning rate     0.001" in done.stdout
    assert "LR is set in the environment" in done.stderr
    assert "BATCH" not in done.stderr


# What a rank imports, and then what transformers and PEFT take along wherever it is installed.
RANK_IMPORTS = """
import gc, inspect, sys
from importlib.util import find_spec
getmodule = inspect.getmodule
{before}
from kubetune.training.start.libraries import import_libraries
import_libraries()
import peft
import scipy.optimize, sklearn.metrics
from transformers.loss import loss_for_object_detection

assert loss_for_object_detection.linear_sum_assignment is scipy.optimize.linear_sum_assignment
assert find_spec("bitsandbytes") is None or sys.modules["bitsandbytes"]
assert not [name for name, module in sys.modules.items() if module is None]
assert inspect.getmodule is getmodule
assert gc.isenabled()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "before",
    ["", "import transformers; transformers.utils.is_scipy_available()"],
)
def test_a_rank_imports_libraries_whole_whoever_looked_for_them_before(before: str) -> None:
    script = RANK_IMPORTS.format(before=before)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_rank_forks_the_process_for_its_data_before_it_imports_large_libraries() -> None:
    script = """
import sys, threading
from kubetune.training import worker
from kubetune.training.start import data_preparation

assert threading.active_count() == 1
large = {"numpy", "tokenizers", "torch", "transformers", "peft"}
assert not large & {name.partition(".")[0] for name in sys.modules}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_threads_of_a_rank_sleep_soon_unless_somebody_says_how_they_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    assert rank_environment.environment()["GOMP_SPINCOUNT"] == "10000"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert "GOMP_SPINCOUNT" not in rank_environment.environment()
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert rank_environment.environment()["GOMP_SPINCOUNT"] == "7"
