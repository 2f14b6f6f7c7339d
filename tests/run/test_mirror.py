"""Run directories in a real S3 server: whole checkpoints only, lost connections, and going on from an empty machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kubetune import errors, extras
from kubetune.base import fault_injection
from kubetune.cli import main
from kubetune.config.load import load_config
from kubetune.config.resolved import read_config
from kubetune.library import training
from kubetune.rundir import checkpoints, metrics
from kubetune.rundir.mirror import copier, lease, stored_run
from kubetune.rundir.mirror.sync import Mirror
from tests import s3, toy
from tests.broken_store import WITHHELD, serving
from tests.ranks import free_port, wait_until
from tests.s3 import Store
from tests.toy import run_file

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with s3.serving() as server:
        yield server


@pytest.fixture(scope="module")
def run_dir(inputs: Path) -> Path:
    return toy.finished(inputs / "run", toy.make_config(inputs, {"num_train_epochs": 1}))


def train(folder: Path, config: Path, fault: str | None = None) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **({fault_injection.FAULT: fault} if fault else {})}
    command = [sys.executable, "-m", "kubetune", "train", str(config)]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)


def test_what_is_sent_comes_back_the_same(
    store: Store, run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    address = "s3://runs/same"
    assert main(["sync", str(run_dir), address, "--json"]) == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out)["steps"] == [3, 6, 7]
    assert f"step-000007 is at {address}" in printed.err
    assert main(["sync", address, str(tmp_path / "back")]) == 0
    assert toy.digests(tmp_path / "back") == toy.digests(run_dir)
    for name in ("best", "last"):
        link = Path("checkpoints") / name
        assert (tmp_path / "back" / link).readlink() == (run_dir / link).readlink()
        assert checkpoints.verify(checkpoints.choose(tmp_path / "back", name)) is None


def test_a_checkpoint_without_its_manifest_is_not_there(
    store: Store, run_dir: Path, tmp_path: Path
) -> None:
    copy = Mirror(run_dir, "s3://runs/partial")
    copy.send()
    assert copy.stored.steps() == [3, 6, 7]
    copy.stored.store.rm_file("runs/partial/checkpoints/step-000007/manifest.json")
    copy.stored.store.pipe_file("runs/partial/checkpoints/step-000006/state.json", b"{}")
    assert copy.stored.steps() == [3, 6]
    fetched = Mirror(tmp_path / "back", "s3://runs/partial").fetch()
    assert fetched == 3, "7 is not whole, and 6 is damaged"
    assert checkpoints.steps(tmp_path / "back") == [3]


def test_a_checkpoint_that_is_sent_again_is_not_whole_until_all_of_it_arrived(
    store: Store, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that was stopped before its evaluation is saved once more after it."""
    mine = tmp_path / "run"
    shutil.copytree(run_dir, mine, symlinks=True)
    copy = Mirror(mine, "s3://runs/again")
    copy.send()
    last = checkpoints.folder_of(mine, 7)
    state = checkpoints.load_state(last)

    def write(folder: Path) -> None:
        for path in last.iterdir():
            if path.name != checkpoints.MANIFEST:
                shutil.copy(path, folder)

    checkpoints.commit(mine, replace(state, seconds=state.seconds + 1), write)
    put = copy.sender._put

    def lose(path: Path, name: str) -> int:
        if path.name == checkpoints.STATE:
            put(path, name)
            raise OSError("connection lost")
        return put(path, name)

    monkeypatch.setattr(copy.sender, "_put", lose)
    with pytest.raises(OSError, match="connection lost"):
        copy.send()
    assert copy.stored.steps() == [3, 6]
    monkeypatch.setattr(copy.sender, "_put", put)
    copy.send()
    assert Mirror(tmp_path / "back", "s3://runs/again").fetch() == 7


def test_pruned_steps_go_and_the_newest_there_stays(
    store: Store, run_dir: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "run"
    shutil.copytree(run_dir, mine, symlinks=True)
    copy = Mirror(mine, "s3://runs/pruned")
    copy.send()
    shutil.rmtree(checkpoints.folder_of(mine, 3))
    copy.send()
    assert copy.stored.steps() == [6, 7]
    shutil.rmtree(checkpoints.folder_of(mine, 7))
    copy.send()
    assert copy.stored.steps() == [6, 7]


def test_steps_that_stayed_behind_in_a_move_go_when_they_are_too_many(
    store: Store, run_dir: Path, tmp_path: Path
) -> None:
    address = "s3://runs/left"
    mine = tmp_path / "run"
    Mirror(run_dir, address).send()
    copy = Mirror(mine, address)
    assert copy.fetch() == 7
    came = checkpoints.steps(mine)
    assert len(came) < 3, "only the newest and the best one come"
    copy.send()
    assert copy.stored.steps() == [3, 6, 7], "as many as are kept"
    for step in (8, 9):
        shutil.copytree(checkpoints.folder_of(run_dir, 7), checkpoints.folder_of(mine, step))
    copy.send()
    assert copy.stored.steps() == sorted({*came, 8, 9})


def test_a_run_goes_on_from_the_store_on_an_empty_machine(
    store: Store, inputs: Path, run_dir: Path, tmp_path: Path
) -> None:
    address = "s3://runs/moved"
    first = tmp_path / "first"
    second = tmp_path / "second"
    first.mkdir()
    second.mkdir()
    ended = train(first, run_file(first, inputs, address, num_train_epochs=1), "signal 9:step:6")
    assert ended.returncode not in (0, errors.USER), ended.stderr
    assert Mirror(first / "outputs/runs/moved", address).stored.steps() == [3]
    ended = train(second, run_file(second, inputs, address, num_train_epochs=1))
    assert ended.returncode == 0, ended.stderr
    assert "step 3 and the run so far came from s3://runs/moved" in ended.stderr + ended.stdout
    assert toy.digests(second / "outputs/runs/moved") == toy.digests(run_dir), (
        "bit by bit the uninterrupted run"
    )
    assert Mirror(second, address).stored.steps() == [3, 6, 7]
    log = (second / "outputs/runs/moved/logs/rank-0.log").read_text()
    assert log.count("step 4/7") == 2, "what the first machine logged came along"
    ended = train(first, run_file(first, inputs, address, num_train_epochs=1, learning_rate=1e-3))
    assert ended.returncode == errors.USER
    assert "holds a run with another config" in ended.stderr


def test_an_empty_machine_compares_with_the_base_model_that_the_first_one_measured(
    store: Store, inputs: Path, tmp_path: Path
) -> None:
    address = "s3://runs/judged"
    evaluation = {"generate": {"metric": "contains", "max_new_tokens": 4}}
    verdicts = []
    for name, fault in (("first", "signal 9:step:6"), ("second", None)):
        folder = tmp_path / name
        folder.mkdir()
        config = run_file(folder, inputs, address, num_train_epochs=1)
        config.write_text(json.dumps(json.loads(config.read_text()) | {"evaluation": evaluation}))
        ended = train(folder, config, fault)
        verdicts.append(folder / "outputs/runs/judged" / metrics.VERDICT)
    assert ended.returncode == 0, ended.stderr
    assert not verdicts[0].exists()
    verdict = json.loads(verdicts[1].read_text())
    base = json.loads((verdicts[0].parent / metrics.BASE).read_text())
    assert verdict["base"] == base["metrics"]
    assert [line["metric"] for line in verdict["answers"]] == ["contains"]


def test_two_nodes_go_on_from_the_store_on_an_empty_disk(
    store: Store, inputs: Path, tmp_path: Path
) -> None:
    address = "s3://runs/nodes"
    disk = tmp_path / "disk"
    port = str(free_port())
    config = run_file(tmp_path, inputs, address, num_train_epochs=1)
    train(tmp_path, config, "signal 9:step:6")
    written = json.loads(config.read_text()) | {
        "compute": {"nodes": 2, "gpus_per_node": 0},
        "mirror": address,
    }
    config.write_text(json.dumps({key: value for key, value in written.items() if key != "output"}))

    def start(node: int) -> subprocess.Popen[str]:
        environ = {
            **os.environ,
            "NODE_RANK": str(node),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        command = [sys.executable, "-m", "kubetune.agent", str(disk), "--config", str(config)]
        return subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    second = start(1)
    nodes = [second]
    try:
        wait_until(
            (disk / "resolved.json").is_file
        )  # the other node has already made the directory
        nodes.insert(0, start(0))
        outputs = [node.communicate(timeout=120)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.communicate()
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert f"step 3 and the run so far came from {address}" in outputs[0]
    assert [line["step"] for line in metrics.read_metrics(disk) if "loss" in line] == [*range(1, 8)]
    assert Mirror(disk, address).stored.steps() == [3, 6, 7]


def test_a_store_that_is_away_stops_nothing_and_gets_the_rest_later(
    store: Store, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier, "SECONDS_BETWEEN_LOOKS", 0.05)
    mine = tmp_path / "run"
    shutil.copytree(run_dir, mine, symlinks=True)
    gone = Store()
    monkeypatch.setenv("AWS_ENDPOINT_URL", gone.url)
    stop = threading.Event()
    copy = Mirror(mine, "s3://runs/later")
    follower = threading.Thread(target=copier.follow, args=(copy, stop))
    follower.start()
    try:
        wait_until(
            lambda: any(e["event"] == "mirror" and not e["ok"] for e in metrics.read_events(mine))
        )
        gone.start()
        wait_until(
            lambda: any(e["event"] == "mirror" and e["ok"] for e in metrics.read_events(mine))
        )
    finally:
        stop.set()
        follower.join()
        steps = copy.stored.steps()
        gone.stop()
    assert steps == [3, 6, 7]


def test_a_checkpoint_that_must_be_there_may_be_in_the_store_alone(
    store: Store, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Python too, where another process than the caller's fetches it."""
    monkeypatch.chdir(tmp_path)
    config = run_file(tmp_path, inputs, "s3://runs/only-there", resume="must")
    monkeypatch.setattr(training, "_in_child", lambda *_, **__: {"code": errors.PREEMPTED})
    with pytest.raises(errors.Preempted):
        training.train(config, quiet=True)


def test_an_empty_machine_does_not_start_over_while_the_store_is_away(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    monkeypatch.setattr(copier, "RESTORE_SECONDS", 0.0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", Store().url)
    with pytest.raises(errors.EnvironmentFault, match="s3://runs/away cannot be read"):
        copier.restore(Mirror(tmp_path / "empty", "s3://runs/away"))
    mine = tmp_path / "run"
    shutil.copytree(run_dir, mine, symlinks=True)
    copier.restore(Mirror(mine, "s3://runs/away"))  # what is here is enough to go on


def test_another_run_is_refused_and_changes_nothing(
    store: Store, inputs: Path, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = "s3://runs/owned"
    assert main(["sync", str(run_dir), address]) == 0
    before = Mirror(run_dir, address).stored.files()
    other = tmp_path / "other"
    shutil.copytree(run_dir, other, symlinks=True, ignore=shutil.ignore_patterns(lease.LOCAL))
    for words in ([str(other), address], [address, str(other)]):
        assert main(["sync", *words]) == errors.USER
        assert f"{address} holds another run than {other}" in capsys.readouterr().err
    (tmp_path / "new").mkdir()
    ended = train(
        tmp_path / "new",
        run_file(tmp_path / "new", inputs, address, num_train_epochs=1, learning_rate=1e-3),
    )
    assert ended.returncode == errors.USER
    assert (
        f"learning_rate was 0.01, now is 0.001\n{address} holds a run with another config"
        in ended.stderr
    )
    assert not (tmp_path / "new/outputs/runs/owned/checkpoints").exists(), (
        "nothing of it is fetched"
    )
    assert Mirror(run_dir, address).stored.files() == before
    assert main(["sync", str(run_dir), address]) == 0


def test_of_two_starts_of_a_run_the_later_one_keeps_up_the_copy(
    store: Store,
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(copier, "SECONDS_BETWEEN_LOOKS", 0.05)
    address = "s3://runs/twice"
    here = tmp_path / "here"
    second = tmp_path / "there"
    shutil.copytree(run_dir, here, symlinks=True)
    messages: list[errors.KubetuneError] = []
    stop = threading.Event()

    def follow() -> None:
        try:
            copier.follow(Mirror(here, address), stop)
        except errors.KubetuneError as error:
            messages.append(error)

    follower = threading.Thread(target=follow)
    follower.start()
    try:
        wait_until(lambda: Mirror(here, address).stored.steps() == [3, 6, 7])
        later = Mirror(second, address)
        assert later.fetch() == 7
        later.lease.take()
        wait_until(lambda: not follower.is_alive())
    finally:
        stop.set()
        follower.join()
    assert "is kept up by a later start of this run" in str(messages[0])
    assert [event["ok"] for event in metrics.read_events(here) if event["event"] == "mirror"] == [
        False
    ]
    assert f"what was made since is in {here} alone" in str(messages[0])
    shutil.copytree(checkpoints.folder_of(second, 7), checkpoints.folder_of(second, 8))
    later.send()
    assert main(["sync", str(here), address]) == errors.USER
    assert f"which has gone further than {here}; fetch it" in capsys.readouterr().err
    assert later.stored.steps()[-1] == 8
    assert main(["sync", str(second), address]) == 0


def test_two_that_claim_an_empty_store_at_once_do_not_both_get_it(
    store: Store, run_dir: Path, tmp_path: Path
) -> None:
    copies = []
    for name in ("one", "two"):
        made = tmp_path / name
        shutil.copytree(run_dir, made, symlinks=True, ignore=shutil.ignore_patterns(lease.LOCAL))
        copies.append(Mirror(made, "s3://runs/raced"))
    for _ in range(2):  # the second time as when the answer to the first was lost
        copies[0].lease._create(lease.Owner("first"))
    with pytest.raises(errors.ConfigError, match="holds another run"):
        copies[1].lease._create(lease.Owner("second"))
    copies[0].send()


def test_a_claim_is_known_again_after_a_kill_before_the_store_has_answered(
    store: Store, run_dir: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(run_dir, mine, symlinks=True, ignore=shutil.ignore_patterns(lease.LOCAL))
    command = [sys.executable, "-m", "kubetune", "sync", str(mine), "s3://runs/killed"]
    with serving(store.url, WITHHELD, until="PUT /runs/killed/mirror.json") as proxy:
        environ = {**os.environ, "AWS_ENDPOINT_URL": proxy.url}
        with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE) as killed:
            assert proxy.arrived.wait(60)
            killed.kill()
    again = subprocess.run(command, capture_output=True, text=True)
    assert (again.returncode, again.stderr) == (0, "")
    assert "checkpoints [3, 6, 7]" in again.stdout


def test_what_the_user_allows_is_kept_before_anything_is_sent(
    store: Store, inputs: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "kubetune", "train"]
    command.append(str(run_file(tmp_path, inputs, "s3://runs/allowed")))
    state = tmp_path / "state"
    with serving(store.url, WITHHELD, until="PUT /runs/allowed/mirror.json") as proxy:
        environ = {**os.environ, "AWS_ENDPOINT_URL": proxy.url, "XDG_STATE_HOME": str(state)}
        with subprocess.Popen(command, env=environ, cwd=tmp_path) as killed:
            assert proxy.arrived.wait(60)
            allowed = [json.loads(file.read_text())["key"] for file in state.rglob("*.json")]
            killed.kill()
    assert allowed == ["mirror"]


def test_a_claim_with_nothing_beside_it_is_taken_over(
    store: Store, run_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = "s3://runs/claimed"
    copies = []
    for name in ("first", "second"):
        made = tmp_path / name
        shutil.copytree(run_dir, made, symlinks=True, ignore=shutil.ignore_patterns(lease.LOCAL))
        copies.append(Mirror(made, address))
    first, second = copies
    first.lease.take()
    with pytest.raises(errors.ConfigError, match="holds another run"):
        second.fetch()
    second.lease.take()
    assert f"{address} was claimed by another run" in caplog.text
    # It still lives, and does not take the copy back.
    with pytest.raises(errors.ConfigError, match="or delete what is there, which is no whole run"):
        first.send()
    second.send()
    with pytest.raises(errors.ConfigError, match=f"fetch that one .*: kubetune sync {address} DIR"):
        first.send()
    assert second.stored.steps() == [3, 6, 7]


def test_a_fetch_that_was_cut_off_is_done_again(
    store: Store, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Mirror(run_dir, "s3://runs/cut").send()
    copy = Mirror(tmp_path / "back", "s3://runs/cut")
    names = []
    monkeypatch.setattr(
        copy.fetcher,
        "_fetch_newest",
        lambda steps: names.append(toy_names(tmp_path / "back")) or 1 / 0,
    )
    with pytest.raises(ZeroDivisionError):
        copy.fetch()
    assert "resolved.json" in names[0]
    monkeypatch.undo()
    assert Mirror(tmp_path / "back", "s3://runs/cut").fetch() == 7
    assert toy.digests(tmp_path / "back") == toy.digests(run_dir)


def toy_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_an_address_is_an_output_and_a_missing_library_is_named(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(run_file(tmp_path, inputs, "gs://bucket/some/run"))
    assert (config.output, config.mirror) == ("outputs/bucket/some/run", "gs://bucket/some/run")
    for wrong in ("s3://", "s3://bucket", "gs:///run"):
        with pytest.raises(
            errors.ConfigError,
            match=f"output: found {wrong}; expected a folder, or SCHEME://BUCKET",
        ):
            load_config(tmp_path / "run.yaml", overrides=[f"output={wrong}"])
    for wrong in ("s3://", "s3://b/run"):
        with pytest.raises(
            errors.ConfigError, match=f"^{wrong}: is an address of .*: `kubetune sync s3://BUCKET"
        ):
            read_config(Path(wrong))
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(errors.ConfigError, match=r"leave one out, or make them agree"):
        load_config(tmp_path / "run.yaml", overrides=["mirror=s3://other/run"])
    with pytest.raises(errors.ConfigError, match=r"pip install 'kubetune\[gs\]'"):
        stored_run.check_installed("gs://bucket/some/run")
    for wrong in ("ftp://bucket/run", "s3://bucket", "s3://bucket/"):
        with pytest.raises(
            errors.ConfigError, match=r"expected SCHEME://BUCKET/PATH with one of s3, gs"
        ):
            stored_run.check_installed(wrong)


def test_ctrl_c_while_the_store_is_frozen_ends_within_the_grace_time(
    store: Store, inputs: Path, tmp_path: Path
) -> None:
    config = run_file(tmp_path, inputs, "s3://runs/frozen", num_train_epochs=1)
    written = json.loads(config.read_text()) | {"kubernetes": {"image": "x", "grace_seconds": 10}}
    config.write_text(json.dumps(written))
    command = [sys.executable, "-m", "kubetune", "train", str(config)]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as started:
        made = tmp_path / "outputs/runs/frozen"
        wait_until(lambda: checkpoints.steps(made))
        store.freeze()
        try:
            started.send_signal(signal.SIGTERM)
            _, stderr = started.communicate(timeout=90)
        finally:
            store.thaw()
    assert "send it: kubetune sync" in stderr
    assert main(["sync", str(made)]) == 0
    assert Mirror(made, "s3://runs/frozen").stored.steps() == checkpoints.steps(made)
