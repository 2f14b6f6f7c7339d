"""The Python interface as its pages show it: the block of the README and the examples of docs/python.md, run."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import kubetune
from kubetune import errors
from kubetune.supervisor.place import hold
from tests.ranks import wait_until

ROOT = Path(__file__).parents[2]
BLOCKS = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
DEMO = ROOT / "src" / "kubetune" / "cli" / "local" / "embedded"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """Return the folder in which the README's block has run, the names it leaves behind, and what it printed."""
    folder = tmp_path_factory.mktemp("python")
    names = dict[str, Any]()
    [block] = BLOCKS.findall((ROOT / "README.md").read_text())
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(block, "README.md", "exec"), names)
    return folder, names, printed.getvalue()


def config(folder: Path, **training: Any) -> dict[str, Any]:
    """Return a run of the demo's model, as a mapping."""
    return {
        "model": DEMO / "model",
        "data": {"train": DEMO / "data" / "train.jsonl", "max_length": 128},
        "lora": {"r": 4},
        "training": {"global_batch_size": 8, **training},
        "compute": {"processes": 1},
        "output": folder / "run",
    }


def test_the_block_of_the_readme_does_what_it_says(shown: tuple[Path, dict[str, Any], str]) -> None:
    folder, names, printed = shown
    run = names["run"]
    assert run.path == folder / "outputs" / "python"
    assert names["steps"] == [1, 2, 3, 4]
    for cell in ("<caption>python", "<th>state</th><td>done", "<td>4 of 4", "<th>eval_loss</th>"):
        assert cell in run._repr_html_()
    assert "[TRAIN] step 4/4" in printed
    assert "'eval_loss':" in printed
    assert "'eval_is_short':" in printed
    assert (Path(printed.splitlines()[-1]) / "model.safetensors").is_file()
    assert (run.exit_status.code, run.exit_status.reason, run.exit_status.step) == (0, "done", 4)


@pytest.mark.slow
def test_every_example_of_the_page_runs(shown: tuple[Path, dict[str, Any], str]) -> None:
    folder, names, _ = shown
    page = (ROOT / "docs" / "python.md").read_text()
    names = dict(names)
    functions = [name for name in kubetune.__all__ if name not in ("errors", "__version__")]
    assert [name for name in functions if not re.search(rf"^## .*\b{name}\b", page, re.M)] == []
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        for block in BLOCKS.findall(page):
            exec(compile(block, f"docs/python.md: {block.splitlines()[0]}", "exec"), names)
    assert (folder / "comparison.html").is_file()
    assert (folder / "adapter" / "adapter_config.json").is_file()


def test_a_run_is_what_its_folder_says(shown: tuple[Path, dict[str, Any], str]) -> None:
    folder, names, _ = shown
    run = kubetune.Run.open(str(folder / "outputs" / "python"))
    assert run == names["run"]
    assert len({run, names["run"]}) == 1
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4, 4]
    assert run.series("eval_loss")[0] == [4]
    assert run.best == run.last == run.path / "checkpoints" / "step-000004"
    with pytest.raises(
        errors.ConfigError, match=r"no metric 'eval_f1'; there are .*eval_loss, .*loss"
    ):
        run.series("eval_f1")


def test_a_name_of_the_run_is_enough(shown: tuple[Path, dict[str, Any], str]) -> None:
    _, names, _ = shown
    path = str(names["run"].path)
    assert len(kubetune.generate(path, ["Hello."], max_new_tokens=1)) == 1
    with pytest.raises(errors.ConfigError, match="expected a list of them"):
        kubetune.generate(path, "Hello.")
    with pytest.raises(errors.ConfigError, match="top_p is 2"):
        kubetune.generate(path, ["Hello."], top_p=2)
    with pytest.raises(errors.DataError, match="prompt:2"):
        kubetune.generate(path, ["Hello.", [{"role": "nobody", "content": "?"}]])


def test_what_is_wrong_before_a_run_begins_is_raised_from_its_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a thread, too, in which Python can have no signal handlers."""
    with hold(tmp_path / "run", node=0), ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            with pytest.raises(errors.EnvironmentFault, match=rf"node-0\.lock.*{os.getpid()}"):
                pool.submit(kubetune.train, config(tmp_path)).result()
    assert capsys.readouterr() == ("", "")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.slow
def test_a_run_that_is_done_is_found_so(shown: tuple[Path, dict[str, Any], str]) -> None:
    folder, names, _ = shown
    with contextlib.chdir(folder):  # where its `output` is meant from
        assert kubetune.train(names["run"].config, quiet=True) == names["run"]
    assert len(names["run"].metrics()) == 5


@pytest.mark.slow
def test_what_ends_a_run_in_its_own_process_is_raised_here_as_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = config(tmp_path)
    (tmp_path / "bad.jsonl").write_text(
        '{"prompt": "a", "completion": "b"}\n' * 3 + '{"messages": 1}\n'
    )
    wrong["data"] = {"train": str(tmp_path / "bad.jsonl")}
    with pytest.raises(errors.DataError, match=r"bad\.jsonl:4.*config and logs\. Logs are in "):
        kubetune.train(wrong, quiet=True)
    assert capsys.readouterr() == ("", ""), "all there is to say is raised"
    status = kubetune.Run.open(tmp_path / "run").exit_status
    assert status is not None
    assert (status.code, status.error) == (errors.USER, "DataError")


def test_a_run_directory_of_another_run_is_refused_before_anything_starts(
    shown: tuple[Path, dict[str, Any], str],
) -> None:
    _, names, _ = shown
    other = names["run"].config.model_copy(
        update={"output": str(names["run"].path), "quantization": "8bit"}
    )
    with pytest.raises(errors.ConfigError, match='quantization was "none", now is "8bit"'):
        kubetune.train(other)


@pytest.mark.slow
def test_where_what_follows_a_run_raises_it_is_stopped_with_a_checkpoint(tmp_path: Path) -> None:
    def stop(line: dict[str, Any]) -> None:
        if line.get("loss", 10) < 9 and line["step"] >= 2:
            raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        kubetune.train(
            config(tmp_path, max_steps=100_000, compile=False), quiet=True, on_event=stop
        )
    run = kubetune.Run.open(tmp_path / "run")
    assert run.exit_status is not None
    assert run.exit_status.code == errors.PREEMPTED
    assert run.last.name == f"step-{run.exit_status.step:06d}"


STOPPED = """
import json, os, signal, sys, threading
from pathlib import Path
import kubetune

config = json.loads(sys.argv[1])
metrics = Path(config["output"], "metrics.jsonl")

def interrupt():
    while not (metrics.exists() and metrics.stat().st_size > 1000):
        pass_on.wait(0.02)
    os.kill(os.getpid(), getattr(signal, sys.argv[2]))

pass_on = threading.Event()
threading.Thread(target=interrupt, daemon=True).start()
try:
    kubetune.train(config)
except KeyboardInterrupt as stopped:
    print("stopped:", *stopped.__notes__)
"""


def start(settings: dict[str, Any], how: str) -> subprocess.Popen[str]:
    """Return a program that trains, and gets a signal once the first steps are done."""
    text = json.dumps(settings, default=str)
    return subprocess.Popen(
        [sys.executable, "-c", STOPPED, text, how], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_ctrl_c_saves_a_checkpoint_and_is_raised(tmp_path: Path) -> None:
    with start(config(tmp_path, max_steps=100_000, compile=False), "SIGINT") as program:
        printed = program.communicate()[0]
    assert program.returncode == 0
    run = kubetune.Run.open(tmp_path / "run")
    step = int(re.search(r"^stopped: .*: stopped after step (\d+);", printed, re.M)[1])
    assert run.last.name == f"step-{step:06d}"
    assert run.exit_status.code == errors.PREEMPTED


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs a kernel that tells of a parent's death")
def test_the_end_of_the_caller_stops_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    with start(config(tmp_path, max_steps=100_000, compile=False), "SIGKILL") as program:
        printed = program.communicate()[0]
    assert program.returncode == -signal.SIGKILL
    assert "[TRAIN] step 1/" in printed
    run = kubetune.Run.open(tmp_path / "run")
    wait_until(lambda: run.exit_status is not None)
    assert run.exit_status.code == errors.PREEMPTED
    assert run.last.is_dir()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Proactor event loop", "ignore::DeprecationWarning")
def test_a_notebook_shows_the_log_and_its_stop_button_saves_a_checkpoint(tmp_path: Path) -> None:
    """A kernel of Jupyter's own, interrupted as Jupyter does: its whole process group gets the signal."""
    manager = pytest.importorskip("jupyter_client.manager")
    kernel, client = manager.start_new_kernel(cwd=str(tmp_path))
    shown: list[str] = []

    def seen(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            shown.append(message["content"]["text"])
            if "[TRAIN] step 3/" in message["content"]["text"]:
                kernel.interrupt_kernel()

    settings = json.dumps(config(tmp_path, max_steps=100_000, compile=False), default=str)
    train = f"import json, kubetune\nrun = kubetune.train(json.loads({settings!r}))"
    after = "run = kubetune.Run.open('run'); print('then', run.exit_status.code, run.last.name)"
    try:
        stopped = client.execute_interactive(train, output_hook=seen, timeout=300)["content"]
        client.execute_interactive(after, output_hook=seen, timeout=60)
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    assert stopped["ename"] == "KeyboardInterrupt"
    output = "".join(shown)
    step = re.search(r"saved checkpoint step-(\d+)", output)[1]
    assert f"then {errors.PREEMPTED} step-{step}" in output
