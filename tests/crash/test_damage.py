"""Files of a run that a disk has spoilt: the run goes on, or ends with 2 or 3 and says why; never a traceback."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kubetune import errors
from kubetune.base import processes
from kubetune.cli import main
from kubetune.config.resolved import load_resolved
from kubetune.plan.plan import make_plan
from kubetune.rundir import exit_status, metrics
from kubetune.rundir.status import progress
from kubetune.supervisor.place import read_place
from kubetune.supervisor.run_folder import check_run_dir, create_run_dir
from kubetune.training import worker
from tests import toy
from tests.ranks import started, wait_all, wait_until

EXPLAINED = (errors.OK, errors.USER, errors.ENVIRONMENT)
LINES = ("metrics.jsonl", "timings.jsonl", "events.jsonl")


def tear(path: Path, draw: random.Random) -> None:
    """Cut the file off at any byte."""
    os.truncate(path, draw.randint(0, max(0, path.stat().st_size - 1)))


def blank(path: Path, draw: random.Random) -> None:
    """Turn a run of bytes, newlines too, into NULs, as fsck leaves them."""
    content = bytearray(path.read_bytes())
    begin = draw.randint(0, len(content))
    end = begin + draw.randint(1, 400)
    content[begin:end] = bytes(len(content[begin:end]))
    path.write_bytes(content)


def litter(path: Path, draw: random.Random) -> None:
    """Put a line in that nobody wrote."""
    lines = path.read_bytes().splitlines(keepends=True)
    lines.insert(draw.randint(0, len(lines)), bytes(draw.randrange(256) for _ in range(60)) + b"\n")
    path.write_bytes(b"".join(lines))


def nest(path: Path, draw: random.Random) -> None:
    """Hold JSON that is nested more deeply than a parser may follow."""
    deep = b'{"files":' * 20_000 + b"{}" + b"}" * 20_000
    path.write_bytes(draw.choice([deep, b"[" * 100_000]) + b"\n")


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "tear": tear,
    "blank": blank,
    "litter": litter,
    "nest": nest,
}


@pytest.fixture(scope="module")
def stopped(toy_inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that was stopped at step 7 of 14."""
    run_dir = toy.make_run(tmp_path_factory.mktemp("stopped") / "run", toy.make_config(toy_inputs))
    assert toy.train(run_dir, 1, {"KUBETUNE_FAULT": "signal 15:step:7"}) == [errors.PREEMPTED]
    metrics.record_event(run_dir, "launch", node=0, nodes=1, processes=1)
    exit_status.write_exit_status(run_dir, exit_status.ExitStatus(errors.PREEMPTED, "stopped", 7))
    (run_dir / "report.json").write_text(json.dumps({"steps": 7, "samples": 50}))
    return run_dir


def copy_of(stopped: Path, folder: Path) -> Path:
    shutil.copytree(stopped, folder / "run", symlinks=True)
    return folder / "run"


def files_of(run_dir: Path) -> list[str]:
    """Return what kubetune reads of a run, but for the tensors, which have checksums."""
    paths = [
        *run_dir.glob("*.json*"),
        *run_dir.glob("logs/*.json"),
        *run_dir.glob("checkpoints/step-*/manifest.json"),
    ]
    return sorted(str(path.relative_to(run_dir)) for path in paths)


def test_a_run_goes_on_when_its_numbers_are_damaged_and_counts_right(
    stopped: Path, toy_inputs: Path, tmp_path: Path
) -> None:
    whole = toy.finished(tmp_path / "whole", toy.make_config(toy_inputs))
    run_dir = copy_of(stopped, tmp_path)
    events = (run_dir / "events.jsonl").read_bytes() + b'{"time": "2026'
    (run_dir / "events.jsonl").write_bytes(events)
    blank(run_dir / "timings.jsonl", random.Random(1))
    path = run_dir / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + b"\0" * 100)
    for name in ("report.json", "data.json", "logs/rank-0.exit.json"):
        nest(run_dir / name, random.Random(0))
    assert toy.train(run_dir) == [0]
    log = toy.log_of(run_dir)
    assert "metrics.jsonl: steps 3-7 are missing (5 of 7)" in log
    assert f"events.jsonl: line {len(events.splitlines())} is damaged" in log
    assert "Traceback" not in log
    report, expected = (
        json.loads((folder / "report.json").read_text()) for folder in (run_dir, whole)
    )
    same = (
        "steps",
        "samples",
        "tokens",
        "trained_tokens",
        "loss_first",
        "loss_last",
        "eval_last",
        "best_step",
    )
    assert {key: report[key] for key in same} == {key: expected[key] for key in same}
    assert report["samples"] == 2 * toy.ROWS
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        assert toy.digests(run_dir)[name] == toy.digests(whole)[name]
    page = tmp_path / "page.html"
    assert main(["report", str(run_dir), "-o", str(page)]) == errors.OK
    assert "metrics.jsonl lacks 5 of 14 steps" in page.read_text()


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("train/tokens.u32", 1000),
        pytest.param("train/trained.u8", 50, marks=pytest.mark.slow),
        pytest.param("train/offsets.i64", 160, marks=pytest.mark.slow),
        pytest.param("train/offsets.i64", 166, marks=pytest.mark.slow),
        pytest.param("eval/tokens.u32", 40, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_goes_on_notices_damaged_prepared_data(
    toy_inputs: Path, tmp_path: Path, name: str, place: int
) -> None:
    """One wrong bit in the cache: the run says so, prepares the rows again, and comes to the same numbers."""
    config = toy.make_config(toy_inputs, data={"cache": str(tmp_path / "cache")})
    whole = toy.finished(tmp_path / "whole", config)
    run_dir = toy.make_run(tmp_path / "run", config)
    assert toy.train(run_dir, 1, {"KUBETUNE_FAULT": "signal 15:step:7"}) == [errors.PREEMPTED]
    victim = next((tmp_path / "cache" / "prepared").glob(f"*/{name}"))
    content = bytearray(victim.read_bytes())
    content[place] ^= 1
    victim.write_bytes(content)
    assert toy.train(run_dir) == [0]
    log = toy.log_of(run_dir)
    assert f"has damage in {name} (its checksum differs): they are prepared again" in log
    assert "Traceback" not in log
    for file in ("adapter_model.safetensors", "optimizer.safetensors"):
        assert toy.digests(run_dir)[file] == toy.digests(whole)[file]
    new_run = toy.make_run(tmp_path / "new", config)
    assert toy.train(new_run) == [0]
    assert toy.digests(new_run) == toy.digests(whole)
    assert "prepared again" not in toy.log_of(new_run)


def look_at(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run everything that reads a run without training it."""
    assert main(["report", str(run_dir), "-o", str(run_dir.parent / "page.html")]) in EXPLAINED
    assert main(["watch", str(run_dir), "--once", "--json"]) in EXPLAINED
    progress(run_dir)
    exit_status.read_rank_exit_statuses(run_dir)
    for read in (lambda: read_place(run_dir), lambda: start_again(run_dir)):
        with suppress(errors.ConfigError, errors.EnvironmentFault):
            read()
    assert "Traceback" not in "".join(capsys.readouterr())


def start_again(run_dir: Path) -> None:
    """Read what a launcher looks at before anything starts."""
    config = load_resolved(run_dir / "resolved.json")
    check_run_dir(config, run_dir, make_plan(config, world_size=1))


@given(data=st.data(), damage=st.sampled_from(sorted(DAMAGES)), seed=st.integers(0, 1000))
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_no_damage_is_a_traceback(
    stopped: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    data: st.DataObject,
    damage: str,
    seed: int,
) -> None:
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    run_dir = copy_of(stopped, tmp_path)
    DAMAGES[damage](run_dir / data.draw(st.sampled_from(files_of(run_dir))), random.Random(seed))
    look_at(run_dir, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_no_damage_of_any_file_is_a_traceback(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    """Each file, looked at and trained on with."""
    for number, name in enumerate(files_of(stopped)):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        run_dir = copy_of(stopped, tmp_path)
        DAMAGES[damage](run_dir / name, random.Random(number))
        look_at(run_dir, capsys)
        (code,) = toy.train(run_dir)
        assert code in EXPLAINED, name
        assert "Traceback" not in toy.log_of(run_dir), name
        if name in LINES:
            assert code == errors.OK


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_config_of_a_run_says_what_and_where(
    stopped: Path, tmp_path: Path, damage: str
) -> None:
    run_dir = copy_of(stopped, tmp_path)
    config = load_resolved(run_dir / "resolved.json")
    DAMAGES[damage](run_dir / "resolved.json", random.Random(2))
    with pytest.raises(errors.KubetuneError, match=r"resolved\.json") as caught:
        check_run_dir(config, run_dir, make_plan(config, world_size=1))
    assert caught.value.exit_code == errors.ENVIRONMENT
    with pytest.raises(errors.KubetuneError, match=r"resolved\.json"):
        load_resolved(run_dir / "resolved.json")


def test_a_damaged_plan_is_written_anew(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = copy_of(stopped, tmp_path)
    config = load_resolved(run_dir / "resolved.json")
    path = run_dir / "plan.json"
    path.write_bytes(b"\0" * 100)
    with pytest.raises(errors.ConfigError, match=r"plan\.json: not a plan .*; start the run again"):
        read_place(run_dir)
    plan = make_plan(config, world_size=1)
    check_run_dir(config, run_dir, plan)
    create_run_dir(config, run_dir, plan)
    assert "plan.json: not a plan" in capsys.readouterr().err
    assert read_place(run_dir).nodes == 1


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_directory_that_is_deleted_is_noticed_at_the_next_step(
    toy_inputs: Path, tmp_path: Path, world_size: int
) -> None:
    config = toy.make_config(
        toy_inputs, {"save_steps": 100, "eval_steps": 100}, data={"eval": None}
    )
    run_dir = toy.make_run(tmp_path / "run", config, world_size)
    fault = {"KUBETUNE_FAULT": "signal 19:step:3"}
    with started(worker.main, world_size, [str(run_dir)], environ=fault) as ranks:
        toy.wait_until_stopped(ranks[0])
        shutil.rmtree(run_dir.rename(tmp_path / "doomed"))
        toy.go_on(ranks[0])
        assert wait_all(ranks)[0] == errors.ENVIRONMENT
    assert not run_dir.exists(), "nobody makes it anew"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "moment"),
    [
        (1, "step:3"),
        (2, "step:3"),
        (2, "step:3:1"),
        (2, "joining:1:1"),
        (2, "save:1"),
        (2, "commit.written:1"),
    ],
)
def test_the_agent_of_a_run_directory_that_is_deleted_says_so(
    toy_inputs: Path, tmp_path: Path, world_size: int, moment: str
) -> None:
    config = toy.make_config(toy_inputs, data={"eval": None}, compute={"processes": world_size})
    run_dir = toy.make_run(tmp_path / "run", config, world_size)
    command = [sys.executable, "-P", "-m", "kubetune.agent", str(run_dir)]
    environ = {**os.environ, "KUBETUNE_FAULT": f"signal 19:{moment}"}
    with subprocess.Popen(
        command, env=environ, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        wait_until(lambda: stopped_ranks(process.pid))
        shutil.rmtree(run_dir.rename(tmp_path / "doomed"))
        began = time.monotonic()
        for rank in stopped_ranks(process.pid):
            os.kill(rank, signal.SIGCONT)
        output = "".join(process.communicate(timeout=60))
        assert time.monotonic() - began < 20, (
            "it ends at the next step, and waits for no grace time"
        )
    assert process.returncode == errors.ENVIRONMENT, output
    assert f"{run_dir} was deleted or moved away while the run went on" in output
    assert "Traceback" not in output
    assert not run_dir.exists(), sorted(run_dir.rglob("*"))


def stopped_ranks(agent_pid: int) -> list[int]:
    """Return the process ids of an agent's ranks that have been stopped by SIGSTOP."""
    pids = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            words = (environ.parent / "cmdline").read_bytes().split(b"\0")
            is_ours = f"{processes.AGENT_PID}={agent_pid}\0".encode() in environ.read_bytes()
            if is_ours and b"kubetune.worker" in words and toy.is_stopped(int(environ.parent.name)):
                pids.append(int(environ.parent.name))
        except OSError:
            continue  # it has ended just now, or is somebody else's
    return pids


@pytest.mark.parametrize("name", [*LINES, "resolved.json", "plan.json", "exit.json", "logs"])
def test_a_folder_where_a_file_was_is_no_traceback(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    run_dir = copy_of(stopped, tmp_path)
    if name == "logs":
        shutil.rmtree(run_dir / name)
        (run_dir / name).write_text("")
    else:
        (run_dir / name).unlink()
        (run_dir / name).mkdir()
    for argv in (["report", str(run_dir)], ["runs", str(tmp_path)]):
        assert main(argv) in EXPLAINED
    assert "Traceback" not in "".join(capsys.readouterr())
