"""Trackers that refuse, break off, are silent or are not one: training goes on, and it is said what they lack."""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kubetune.rundir.tracking import mlflow_tracker, tracker_queue
from kubetune.rundir.tracking.trackers import open_tracker
from tests.broken_store import WAYS, serving
from tests.ranks import started, wait_all
from tests.toy import tracked_run

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

STEPS, NUMBERS = 3, 2
# What a healthy server says to what a run begins with; {} to everything else.
ANSWERS: dict[str, dict[str, Any]] = {
    "experiments/get-by-name": {"experiment": {"experiment_id": "1", "name": "kubetune"}},
    "runs/create": {
        "run": {"info": {"run_id": "r", "experiment_id": "1", "status": "RUNNING"}, "data": {}}
    },
}
REQUESTS_TO_BEGIN = 5

# Threads that have sent something by HTTP.
SENDERS: list[int] = []
sys.addaudithook(
    lambda event, _: SENDERS.append(threading.get_ident()) if event == "http.client.send" else None
)


class _Healthy(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        name = self.path.partition("?")[0].partition("/mlflow/")[2]
        content = json.dumps(ANSWERS.get(name, {})).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_PATCH = do_GET


@pytest.fixture(scope="module")
def healthy() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Healthy) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


QUICK = {("garbage", "at once"), ("500", "in the middle")}


@pytest.mark.parametrize(
    ("way", "when"),
    [
        pytest.param(way, when, marks=() if (way, when) in QUICK else pytest.mark.slow)
        for way in WAYS
        for when in ("at once", "in the middle")
    ],
)
def test_a_server_that_fails_ends_no_training_and_is_told_of_once(
    healthy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    way: str,
    when: str,
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    for module in (mlflow_tracker, tracker_queue):
        for limit in ("SECONDS_TO_SEND_THE_REST", "SECONDS_FOR_FILES"):
            monkeypatch.setattr(module, limit, 4.0)
    monkeypatch.setattr(tracker_queue, "SECONDS_TO_BEGIN", 4.0)
    monkeypatch.setattr(tracker_queue, "SECONDS_BETWEEN_SENDS", 0.0)
    with serving(healthy, way, REQUESTS_TO_BEGIN if when == "in the middle" else 0) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
        began = time.monotonic()
        with open_tracker(tracked_run(tmp_path, mlflow={}), tmp_path) as tracker:
            SENDERS.clear()
            for step in range(1, STEPS + 1):
                tracker.log(step, {"loss": 1.0, "learning_rate": 0.1})
            waited = threading.get_ident() in SENDERS
        seconds = time.monotonic() - began
    assert not waited, "no step waits for a server"
    assert seconds < 60, "a silent server is given up"
    warnings = [message for message in caplog.messages if "MLflow" in message]
    assert (
        sum(
            "MLflow does not work and gets no more numbers; training goes on: " in m
            for m in warnings
        )
        == 1
    ), warnings
    assert (
        sum(
            f"MLflow lacks {STEPS * NUMBERS} numbers" in m and "metrics.jsonl has them" in m
            for m in warnings
        )
        == 1
    ), warnings
    assert "Traceback" not in caplog.text


@pytest.mark.slow
def test_a_server_of_wandb_that_is_silent_slows_no_step_and_is_given_up_at_the_end(
    healthy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("wandb")
    from kubetune.rundir.tracking import wandb_tracker

    for module in (wandb_tracker, tracker_queue):
        for limit in ("SECONDS_TO_SEND_THE_REST", "SECONDS_FOR_FILES"):
            monkeypatch.setattr(module, limit, 4.0)
    monkeypatch.setattr(tracker_queue, "SECONDS_TO_BEGIN", 4.0)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    with serving(healthy, "silent") as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        with open_tracker(tracked_run(tmp_path, wandb={}), tmp_path) as tracker:
            opened = time.monotonic()
            for step in range(1, STEPS + 1):
                tracker.log(step, {"loss": 1.0, "learning_rate": 0.1})
            stepped = time.monotonic() - opened
    assert stepped < 4, "no step waits for a server"
    assert server.asked
    warnings = [message for message in caplog.messages if "W&B" in message]
    assert (
        "W&B does not work and gets no more numbers; training goes on: no answer within 4 s"
        in warnings
    )
    assert f"W&B lacks {STEPS * NUMBERS} numbers; metrics.jsonl has them" in warnings


def test_a_healthy_server_gets_everything(
    healthy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(healthy) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
        with open_tracker(tracked_run(tmp_path, mlflow={}), tmp_path) as tracker:
            tracker.log(1, {"loss": 1.0})
    assert server.asked > REQUESTS_TO_BEGIN
    assert not any("does not work" in m or "lacks" in m for m in caplog.messages)


def log_beyond_the_limit(folder: str) -> int:
    """Train in a process whose files may grow to 2 KB: TensorBoard's is full long before the last step."""
    os.dup2(os.open(Path(folder) / "said", os.O_WRONLY | os.O_CREAT), 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    with open_tracker(
        tracked_run(Path(folder), tensorboard=True), Path(folder), resume_step=1
    ) as tracker:
        for step in range(2, 2000):
            tracker.log(step, {"loss": 1.0, "learning_rate": 0.1})
    return 0


def test_a_disk_that_is_full_for_tensorboard_ends_no_training(tmp_path: Path) -> None:
    with started(log_beyond_the_limit, 1, str(tmp_path)) as ranks:
        assert wait_all(ranks) == [0]
    log = (tmp_path / "said").read_text()
    assert log.count("TensorBoard does not work and gets no more numbers; training goes on: ") == 1
    assert "File too large" in log
    assert "TensorBoard lacks " in log
    assert "; metrics.jsonl has them" in log
    assert "Traceback" not in log


def test_a_folder_that_tensorboard_cannot_have_ends_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tensorboard").write_text("a file")
    with open_tracker(tracked_run(tmp_path, tensorboard=True), tmp_path) as tracker:
        tracker.log(1, {"loss": 1.0})
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "TensorBoard does not work and gets no more numbers; training goes on",
        "TensorBoard lacks 1 number; metrics.jsonl has them",
    ]
