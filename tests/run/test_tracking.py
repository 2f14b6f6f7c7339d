"""TensorBoard and MLflow for real: what was logged is read back from the files they wrote."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from kubetune import errors, extras
from kubetune.config.metric_names import PREFERENCE_MEASURES
from kubetune.config.resolved import resolved
from kubetune.config.schema.tracking import MlflowConfig, WandbConfig
from kubetune.rundir.tracking import tracker_queue, wandb_tracker
from kubetune.rundir.tracking.mlflow_tracker import MlflowSink, find_store
from kubetune.rundir.tracking.tracker_queue import TrackedRun
from kubetune.rundir.tracking.trackers import Tracker, open_tracker
from tests import toy
from tests.broken_store import WITHHELD, serving
from tests.preferences import write_pairs
from tests.toy import tracked_run

# Of a source of data.
COUNTS = (
    "records", "rows", "overlong", "truncated", "no_label", "tokens", "trained_tokens", "longest",
)  # fmt: skip

pytestmark = [
    # Theirs: SQLAlchemy's of MLflow's models, protobuf's and numpy's of TensorBoard.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_tensorboard_holds_the_curves_and_a_resume_replaces_what_was_lost(tmp_path: Path) -> None:
    wanted = tracked_run(tmp_path, tensorboard=True)
    with open_tracker(wanted, tmp_path) as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {"loss": 2.0 / step, "note": "no number"})
        tracker.log(3, {"eval_loss": 0.5})
    assert scalars(tmp_path / "tensorboard")["eval/loss"] == [(3, 0.5)]
    with open_tracker(wanted, tmp_path, resume_step=2) as tracker:
        tracker.log(3, {"loss": 0.25})
    assert scalars(tmp_path / "tensorboard") == {
        "train/loss": [(1, 2.0), (2, 1.0), (3, 0.25)],
        "eval/loss": [],
    }


@pytest.mark.slow
def test_mlflow_holds_one_run_over_two_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("HF_TOKEN", "canary-value")
    wanted = tracked_run(
        tmp_path, mlflow={"uri": str(tmp_path / "mlruns"), "experiment": "canary-value bots"}
    )
    client = MlflowClient(tracking_uri=find_store(str(tmp_path / "mlruns"))[0])
    with suppress(errors.Preempted), open_tracker(wanted, tmp_path) as tracker:
        tracker.log(1, {"loss": 2.0, "learning_rate": 1e-4})
        raise errors.Preempted(1)
    (run,) = runs(client)
    assert run.info.status == "KILLED"
    with open_tracker(wanted, tmp_path, resume_step=1) as tracker:
        tracker.log(2, {"loss": 1.0})
    (run,) = runs(client)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "bot"
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "loss")] == [
        (1, 2.0),
        (2, 1.0),
    ]
    assert run.data.params["model.path"] == "m"
    assert run.data.params["tracking.mlflow.experiment"] == "[secret] bots"
    assert not any("does not work" in message for message in caplog.messages)
    with closing(sqlite3.connect(tmp_path / "mlruns" / "mlflow.db")) as store:
        assert store.execute("select count(*) from runs").fetchone() == (1,)


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with MLflow's tables, whose making takes longer than all that a test does with them."""
    from mlflow import MlflowClient

    folder = tmp_path_factory.mktemp("store") / "mlruns"
    MlflowClient(tracking_uri=find_store(str(folder))[0]).search_experiments()
    return folder


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """Yield the address of MLflow's own server, which keeps artifacts itself."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += [
        "--backend-store-uri",
        f"sqlite:///{folder}/kept.db",
        "--artifacts-destination",
        f"{folder}/kept",
    ]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=log, start_new_session=True
        )
    try:
        while True:
            assert process.poll() is None, (folder / "server.log").read_text()
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


@pytest.mark.parametrize("place", ["folder", pytest.param("server", marks=pytest.mark.slow)])
def test_mlflow_holds_files_tags_data_and_the_model(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: str,
    empty_store: Path,
) -> None:
    shutil.copytree(empty_store, tmp_path / "mlruns")
    with (
        mlflow_server(tmp_path)
        if place == "server"
        else nullcontext(str(tmp_path / "mlruns")) as uri
    ):
        send_and_find(tmp_path / "run", uri, monkeypatch)
    assert not any("did not take" in message or "lacks" in message for message in caplog.messages)


def send_and_find(run_dir: Path, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("HF_TOKEN", "canary-value")
    settings = {"tags": {"team": "nlp"}, "log_model": True, "registered_model_name": "bots"}
    tmp_path = run_dir.parent
    wanted = tracked_run(tmp_path, mlflow={"uri": uri, **settings})
    (run_dir / "checkpoints" / "best").mkdir(parents=True)
    (run_dir / "checkpoints" / "best" / "adapter_config.json").write_text("{}")
    (run_dir / "resolved.json").write_text(json.dumps(resolved(wanted)))
    (run_dir / "config.yaml").write_text("# canary-value\nmodel: m\n")
    splits = {
        "train": {
            "records": 9,
            "rows": 8,
            "tokens": 90,
            "trained_tokens": 20,
            "sources": [{**dict.fromkeys(COUNTS, 1), "path": "d.jsonl"}],
        }
    }
    (run_dir / "data.json").write_text(json.dumps({"fingerprint": "f" * 64, "splits": splits}))
    with open_tracker(wanted, run_dir, write_page=lambda file: file.write_text("page")) as tracker:
        tracker.log(1, {"loss": 2.0, "epoch": 0.5, "samples": 4})
        tracker.note_load(
            {"cpu_percent": 12.5, "memory_percent": 50.0, "memory_bytes": 1e9, "gpus": []}
        )
    client = MlflowClient(tracking_uri=find_store(uri)[0])
    (run,) = runs(client)
    artifacts = {item.path for item in client.list_artifacts(run.info.run_id)}
    assert {"config.yaml", "data.json", "report.html", "model"} <= artifacts
    assert client.list_artifacts(run.info.run_id, "model")[0].path == "model/adapter_config.json"
    assert (
        "canary-value"
        not in Path(client.download_artifacts(run.info.run_id, "config.yaml")).read_text()
    )
    assert {"epoch", "samples"}.isdisjoint(run.data.metrics)
    assert {"loss", "system/cpu_utilization_percentage"} <= run.data.metrics.keys()
    assert run.data.tags["team"] == "nlp"
    assert run.data.tags["kubetune.method"] == "full"
    assert {"kubetune.host", "kubetune.version.torch"} <= run.data.tags.keys()
    (used,) = run.inputs.dataset_inputs
    assert (used.dataset.name, used.dataset.digest, used.tags[0].value) == (
        "d.jsonl",
        "f" * 36,
        "train",
    )
    assert client.get_model_version("bots", "1").run_id == run.info.run_id


@pytest.mark.slow
def test_trackers_have_the_measures_of_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "toy").mkdir()
    folder = toy.make_inputs(tmp_path / "toy")
    uri = str(tmp_path / "mlruns")
    training = {"max_steps": 2, "eval_steps": 2, "save_steps": 2}
    wanted = {"tensorboard": True, "mlflow": {"uri": uri}}
    pairs = toy.make_config(
        folder, training, task="preference", data=write_pairs(folder), tracking=wanted
    )
    run_dir = toy.finished(tmp_path / "run", pairs)
    (run,) = runs(MlflowClient(tracking_uri=find_store(uri)[0]))
    names = {"loss", *PREFERENCE_MEASURES} - {"kl"}
    assert {*names, *(f"eval_{name}" for name in names)} <= run.data.metrics.keys()
    assert {f"{split}/{name}" for split in ("train", "eval") for name in names} <= scalars(
        run_dir / "tensorboard"
    ).keys()


@pytest.mark.parametrize("damaged", [False, True])
def test_a_start_killed_before_it_knew_the_id_leaves_no_run_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_store: Path, damaged: bool
) -> None:
    """Killed when MLflow had made the run, and its id was not written yet. A claim of another form finds no run."""
    from mlflow import MlflowClient

    class Killed(BaseException):
        pass

    shutil.copytree(empty_store, tmp_path / "mlruns")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    uri = find_store(str(tmp_path / "mlruns"))[0]
    client = MlflowClient(tracking_uri=uri)
    settings = MlflowConfig(uri=str(tmp_path / "mlruns"))
    run = TrackedRun("bot", tmp_path, "causal_lm", "full", "m", {"name": "bot"})
    create = MlflowClient.create_run

    def create_and_die(*arguments: Any, **more: Any) -> None:
        create(*arguments, **more)
        raise Killed

    with monkeypatch.context() as patches, suppress(Killed):
        patches.setattr(MlflowClient, "create_run", create_and_die)
        MlflowSink(settings, run, None).begin()
    assert len(runs(client)) == 1
    if damaged:
        (tmp_path / "tracking.json").write_text(json.dumps({"uri": uri, "claim": "' or '1'='1"}))
    for _ in range(2):
        MlflowSink(settings, run, None).begin()
    assert len(runs(client)) == (2 if damaged else 1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mlflow_server(tmp_path_factory.mktemp("server")) as url:
        yield url


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["runs", "model-versions"])
def test_a_command_killed_before_the_server_answered_makes_one_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str, kind: str
) -> None:
    """The server makes a run, or a version of the model, and its answer does not arrive before kill -9."""
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "toy").mkdir()
    inputs = toy.make_inputs(tmp_path / "toy")
    with serving(server, WITHHELD, until=f"POST /api/2.0/mlflow/{kind}/create") as proxy:
        settings = {
            "uri": proxy.url, "experiment": f"killed at {kind}", "log_model": True,
            "registered_model_name": f"killed-at-{kind}",
        }  # fmt: skip
        training = {"max_steps": 2, "eval_steps": 2, "save_steps": 2}
        config = toy.make_config(inputs, training, tracking={"mlflow": settings})
        sections = json.loads(config.model_dump_json(exclude_unset=True))
        sections |= {"output": str(tmp_path / "run"), "compute": {"gpus_per_node": 0}}
        (tmp_path / "run.yaml").write_text(json.dumps(sections))
        command = [sys.executable, "-m", "kubetune", "train", str(tmp_path / "run.yaml")]
        with subprocess.Popen(command, start_new_session=True) as killed:
            assert proxy.arrived.wait(300)
            os.killpg(killed.pid, signal.SIGKILL)
        proxy.way = ""
        subprocess.run(command, check=True)

    client = MlflowClient(tracking_uri=server)
    experiment = client.get_experiment_by_name(settings["experiment"])
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    (version,) = client.search_model_versions(f"name = '{settings['registered_model_name']}'")
    assert version.run_id == run.info.run_id


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["runs", "model-versions"])
def test_a_request_that_mlflow_repeats_makes_one_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str, kind: str
) -> None:
    """The server makes a run, or a version of the model, and is late, so MLflow's client asks again."""
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    (tmp_path / "checkpoints" / "best").mkdir(parents=True)
    (tmp_path / "checkpoints" / "best" / "adapter_config.json").write_text("{}")
    run = TrackedRun("bot", tmp_path, "causal_lm", "full", "m", {"name": "bot"})
    with serving(server, WITHHELD, until=f"POST /api/2.0/mlflow/{kind}/create") as proxy:

        def recover() -> None:
            proxy.arrived.wait(300)
            proxy.way = ""

        recovery = threading.Thread(target=recover)
        recovery.start()
        settings = MlflowConfig(
            uri=proxy.url, experiment=f"late at {kind}", log_model=True,
            registered_model_name=f"late-at-{kind}",
        )  # fmt: skip
        sink = MlflowSink(settings, run, None)
        sink.begin()
        for _, send in sink.closing("FINISHED"):
            send()
        recovery.join()
    client = MlflowClient(tracking_uri=server)
    experiment = client.get_experiment_by_name(settings.experiment)
    (kept,) = client.search_runs([experiment.experiment_id])
    assert kept.info.status == "FINISHED"
    (version,) = client.search_model_versions(f"name = '{settings.registered_model_name}'")
    assert version.run_id == kept.info.run_id


@pytest.mark.slow
def test_the_report_that_mlflow_holds_is_that_of_a_run_that_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    settings = {"mlflow": {"uri": str(tmp_path / "mlruns")}}
    run_dir = toy.make_run(
        tmp_path / "run", toy.make_config(toy.make_inputs(tmp_path / "toy"), tracking=settings)
    )
    assert toy.train(run_dir) == [0]
    client = MlflowClient(tracking_uri=find_store(str(tmp_path / "mlruns"))[0])
    (run,) = runs(client)
    kept = {
        name: client.download_artifacts(run.info.run_id, name)
        for name in ("report.json", "report.html")
    }
    assert Path(kept["report.json"]).read_text() == (run_dir / "report.json").read_text()
    assert "unfinished" not in Path(kept["report.html"]).read_text()


def test_mlflow_is_told_why_a_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_store: Path
) -> None:
    from mlflow import MlflowClient

    shutil.copytree(empty_store, tmp_path / "mlruns")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("HF_TOKEN", "canary-value")
    wanted = tracked_run(tmp_path, mlflow={"uri": str(tmp_path / "mlruns")})
    with suppress(errors.Diverged), open_tracker(wanted, tmp_path) as tracker:
        tracker.log(1, {"loss": 2.0})
        tracker.tell("loss_runaway", "the loss ran away with canary-value")
        raise errors.Diverged("step 2: loss 99 is above training.loss_watchdog_threshold (20)")
    (run,) = runs(MlflowClient(tracking_uri=find_store(str(tmp_path / "mlruns"))[0]))
    assert run.info.status == "FAILED"
    assert run.data.tags["kubetune.ended"].startswith(
        "step 2: loss 99 is above training.loss_watchdog_threshold"
    )
    assert run.data.tags["kubetune.loss_runaway"] == "the loss ran away with [secret]"


def test_files_that_are_not_taken_end_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    empty_store: Path,
) -> None:
    from mlflow import MlflowClient

    shutil.copytree(empty_store, tmp_path / "mlruns")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    uri = str(tmp_path / "mlruns")
    (tmp_path / "run").mkdir()
    wanted = tracked_run(tmp_path, mlflow={"uri": uri})

    def fail(file: Path) -> None:
        raise OSError("no page")

    with open_tracker(wanted, tmp_path / "run", write_page=fail) as tracker:
        tracker.log(1, {"loss": 2.0})
    client = MlflowClient(tracking_uri=find_store(uri)[0])
    assert [run.info.status for run in runs(client)] == ["FINISHED"]
    assert sum("MLflow did not take the files" in message for message in caplog.messages) == 1


def test_tensorboard_shows_the_settings(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG

    with open_tracker(tracked_run(tmp_path, tensorboard=True), tmp_path) as tracker:
        tracker.log(1, {"loss": 2.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "model:" in text
    assert SESSION_START_INFO_TAG in events.PluginTagToContent("hparams")


def runs(client: Any) -> list[Any]:
    return list(client.search_runs([e.experiment_id for e in client.search_experiments()]))


def test_mlflow_goes_on_in_a_folder_of_its_older_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(tracking_uri=str(tmp_path / "old"))
    client.create_experiment("kubetune")
    with open_tracker(
        tracked_run(tmp_path, mlflow={"uri": str(tmp_path / "old")}), tmp_path
    ) as tracker:
        tracker.log(1, {"loss": 2.0})
    assert [run.data.metrics for run in runs(client)] == [{"loss": 2.0}]
    assert not (tmp_path / "old" / "mlflow.db").exists()


def test_the_environment_names_the_mlflow_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_store: Path
) -> None:
    from mlflow import MlflowClient

    shutil.copytree(empty_store, named := tmp_path / "from-environment")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(named))
    with open_tracker(tracked_run(tmp_path, mlflow={"uri": str(tmp_path / "from-file")}), tmp_path):
        pass
    assert len(runs(MlflowClient(tracking_uri=find_store(str(named))[0]))) == 1
    assert not (tmp_path / "from-file").exists()


def test_a_server_that_is_not_there_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with open_tracker(tracked_run(tmp_path, mlflow={}), tmp_path) as tracker:
        for step in range(1, 4):
            tracker.log(step, {"loss": 1.0})
    assert sum("MLflow does not work" in message for message in caplog.messages) == 1


class Sink:
    """A tracker that begins, and keeps what it is sent; `trouble` is what it does then."""

    def __init__(self, trouble: Callable[[], object] = lambda: None) -> None:
        self.seen: list[int] = []
        self._trouble = trouble

    def begin(self) -> None:
        pass

    def send(self, numbers: Any) -> None:
        self._trouble()
        self.seen += [line.step for line in numbers]

    def tell(self, name: str, text: str) -> None:
        pass

    def load_of(self, load: Any) -> dict[str, float]:
        return {}

    def closing(self, status: str) -> list[Any]:
        return [(1.0, lambda: self.seen.append(-1))]


def fail() -> None:
    raise OSError("gone")


def test_one_failing_tracker_does_not_take_the_other_along(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_queue, "SECONDS_BETWEEN_SENDS", 0.0)
    failing = Sink(fail)
    working = Sink()
    with (
        caplog.at_level(logging.WARNING),
        Tracker({"a": lambda: failing, "b": lambda: working}) as tracker,
    ):
        tracker.log(1, {"loss": math.pi})
        while "does not work" not in caplog.text:
            tracker.log(2, {"loss": 1.0})
        tracker.log(3, {"loss": 1.0})
    assert failing.seen == []
    assert (working.seen[0], working.seen[-2:]) == (1, [3, -1])
    assert caplog.messages[0] == "a does not work and gets no more numbers; training goes on: gone"
    assert caplog.messages[1].startswith("a lacks ")
    assert caplog.messages[1].endswith(
        " numbers, among them of steps 2 to 3; metrics.jsonl has them"
    )


def test_what_a_slow_tracker_has_no_room_for_is_counted_and_no_step_waits(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_queue, "SECONDS_BETWEEN_SENDS", 0.0)
    monkeypatch.setattr(tracker_queue, "MOST_WAITING", 3)
    goes_on = threading.Event()
    has_begun = threading.Event()
    slow = Sink(lambda: (has_begun.set(), goes_on.wait(60)))
    with caplog.at_level(logging.WARNING), Tracker({"a": lambda: slow}) as tracker:
        step = 0
        while not has_begun.is_set():  # as long as nothing is being sent, all is taken
            step = min(step + 1, 2)
            tracker.log(step, {})
            tracker.log(step, {"loss": 1.0}) if step == 1 else None
        for step in range(10, 18):
            tracker.log(step, {"loss": 1.0})
        goes_on.set()
    assert slow.seen[-4:] == [10, 11, 12, -1]
    assert caplog.messages == [
        "a takes too long: numbers are left out, and counted; training goes on",
        "a lacks 5 numbers, among them of steps 13 to 17; metrics.jsonl has them",
    ]


def records(file: Path) -> list[dict[str, Any]]:
    """Return what wandb's own reader finds in a file of a run."""
    environ = {**os.environ, "WANDB_ERROR_REPORTING": "false"}
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", file]
    stdout = subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in stdout.splitlines()]


def test_wandb_holds_one_run_over_two_starts_in_files_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("HF_TOKEN", "canary-value")
    monkeypatch.setattr(
        tracker_queue, "SECONDS_TO_SEND_THE_REST", 60.0
    )  # a busy machine begins no quicker
    wanted = tracked_run(tmp_path, wandb={"project": "bots", "mode": "offline", "tags": ["nlp"]})
    wanted = wanted.model_copy(update={"output": "canary-value/run"})
    with suppress(errors.Preempted), open_tracker(wanted, tmp_path) as tracker:
        tracker.log(1, {"loss": 2.0})
        raise errors.Preempted(1)
    names = {path.name[12:27] for path in (tmp_path / "wandb").glob("offline-run-*")}
    while time.strftime("%Y%m%d_%H%M%S") in names:  # wandb calls its folders by the second
        time.sleep(0.01)
    with open_tracker(wanted, tmp_path, resume_step=1) as tracker:
        tracker.log(2, {"loss": 1.0, "eval_loss": 0.5})
        tracker.tell("ended", "well")
    descriptions = set()
    history = []
    exits = []
    for path in sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb")):
        assert b"canary-value" not in path.read_bytes()
        for record in records(path):
            if record["type"] == "run":
                run = record["run"]
                assert run["resume"], "`wandb sync` goes on with what it has sent before"
                descriptions.add((run["run_id"], run["display_name"], tuple(sorted(run["tags"]))))
            elif record["type"] == "history":
                items = record["history"]["item"]
                history.append(
                    {name: value for name, value in items.items() if not name.startswith("_")}
                )
            elif record["type"] == "exit":
                exits.append(record["exit"]["exit_code"])
    assert descriptions == {(wandb_tracker.run_id(tmp_path), "bot", ("causal_lm", "full", "nlp"))}
    assert history == [
        {"step": 1, "train/loss": 2.0},
        {"step": 2, "train/loss": 1.0, "eval/loss": 0.5},
    ]
    assert exits == [1, 0]


def test_wandb_wants_a_key_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(
        errors.ConfigError, match=r"tracking\.wandb: there is no WANDB_API_KEY.*mode: offline"
    ):
        open_tracker(tracked_run(tmp_path, wandb={}), tmp_path)
    (tmp_path / "keys").write_text("machine api.wandb.ai login user password 1234\n")
    for name, value in (("NETRC", "~/keys"), ("WANDB_IDENTITY_TOKEN_FILE", "/token")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert wandb_tracker.lacks_key(WandbConfig()) is None, name


@pytest.mark.slow
def test_trackio_holds_one_run_over_two_starts(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from tests.toy import tracked_run
from kubetune.rundir.tracking.tracker_queue import TrackedRun
from kubetune.rundir.tracking.trackers import open_tracker
at = Path({str(tmp_path)!r})
wanted = tracked_run(at, trackio={{"project": "bots", "dir": str(at / "trackio")}})
for step in (1, 2):
    with open_tracker(wanted, at, resume_step=step - 1) as tracker:
        tracker.log(step, {{"loss": 2.0 / step}})
"""
    subprocess.run(
        [sys.executable, "-c", code], check=True
    )  # trackio reads where to write when it is imported
    with closing(sqlite3.connect(tmp_path / "trackio" / "bots.db")) as store:
        rows = store.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert [(name, step, json.loads(values)) for name, step, values in rows] == [
        ("bot", 1, {"train/loss": 2.0}),
        ("bot", 2, {"train/loss": 1.0}),
    ]


def test_a_tracker_that_is_not_installed_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(
        errors.ConfigError, match=r"tracking\.mlflow.*pip install 'kubetune\[tracking\]'"
    ):
        open_tracker(tracked_run(tmp_path, mlflow={}), tmp_path)


@pytest.mark.parametrize(
    "uri", ["http://server:5000", "https://server", "sqlite:///x.db", "databricks"]
)
def test_addresses_are_taken_as_they_are(uri: str) -> None:
    assert find_store(uri) == (uri, None)
