"""Observers of a run, with real commands and servers on loopback. One that hangs delays nobody."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kubetune import errors
from kubetune.base.signals import Relay
from kubetune.config.resolved import resolved
from kubetune.config.schema import Config
from kubetune.config.schema.tracking import PrometheusConfig
from kubetune.k8s.manifests.monitoring import alert_rules
from kubetune.plan.plan import make_plan
from kubetune.rundir import events, metrics
from kubetune.rundir.status import progress
from kubetune.supervisor.observers import hooks, kubeflow, observer_process, prometheus

ROOT = Path(__file__).parents[2]
VALID = jsonschema.Draft202012Validator(events.schema(), format_checker=jsonschema.FormatChecker())


def make_run(folder: Path, **settings: Any) -> Config:
    """Return a run directory with a few steps behind it, and its config."""
    config = Config.model_validate(
        {"name": "bot", "model": "m", "data": {"train": "d"}, **settings}
    )
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    (folder / "resolved.json").write_text(json.dumps(resolved(config)))
    plan = make_plan(config, 64, world_size=1)
    (folder / "plan.json").write_text(plan.to_json())
    with metrics.MetricsLog(folder) as log:
        for step in (1, 2):
            log.write(
                step,
                {
                    "loss": 2.0 / step,
                    "learning_rate": 0.1,
                    "grad_norm": 1.0,
                    "tokens": 10,
                    "samples": 1,
                },
            )
            log.write_timing(
                step, {"seconds": 0.5, "tokens_per_second": 20.0, "rank_seconds": [0.2, 0.3, 0.6]}
            )
    return config


def write_events(folder: Path) -> None:
    """Write the events of a start that ends well."""
    metrics.record_event(folder, "launch", node=0, nodes=1, processes=1)
    facts = {"machine": {}, "flops_per_token": 1e9, "peak_tflops": 1.0}
    metrics.record_event(folder, "start", step=0, steps=8, **facts)
    metrics.record_event(
        folder, "evaluation", step=2, best=True, seconds=0.25, metrics={"eval_loss": 1.0}
    )
    metrics.record_event(folder, "save", step=2, seconds=0.1)
    metrics.record_event(folder, "exit", node=0, code=0, reason="done", step=2, error=None)


def follow(folder: Path, *, stops: bool = False) -> float:
    """Write events with observers running, and return the seconds that their end was waited for."""
    with Relay() as relay, observer_process.observed(folder, 0, events.size(folder), relay):
        write_events(folder)
        relay.stopping = "stopped" if stops else None
        began = time.monotonic()
    return time.monotonic() - began


def test_the_schema_knows_every_event_that_the_code_writes() -> None:
    """Their fields, those that are always there, and no kind that nothing writes."""
    # `served` goes to hooks alone (test_serve_check.py compares it with the schema).
    written = {"start", "resume", "killed", "served", "reference", "teacher_numbers"}
    for path in (ROOT / "src" / "kubetune").rglob("*.py"):
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)) if "record_event(" in text else ():
            if (
                not isinstance(node, ast.Call)
                or ast.unparse(node.func).rpartition(".")[2] != "record_event"
            ):
                continue
            kind = (
                ast.literal_eval(node.args[1]) if isinstance(node.args[1], ast.Constant) else None
            )
            if kind is None:  # start or resume; killed; reference or teacher_numbers
                assert ast.unparse(node.args[1]) in ("event", "KILLED", "place.kind")
                continue
            fields = [word.partition(":")[0] for word in events.KINDS[kind][1].split()]
            keywords = {word.arg for word in node.keywords}
            assert keywords - {None} <= {field.removesuffix("?") for field in fields}, (
                f"{path}:{node.lineno}"
            )
            always = {field for field in fields if not field.endswith("?")}
            assert always <= keywords or None in keywords, (
                f"{path}:{node.lineno}"
            )  # None: `**facts`
            written.add(kind)
    assert written == set(events.KINDS)
    page = (ROOT / "docs" / "tracking.md").read_text()
    assert [kind for kind in events.KINDS if f"`{kind}`" not in page] == []


def test_events_of_a_later_version_are_stepped_over(tmp_path: Path) -> None:
    """A kind, and a field of known ones, that this version does not know."""
    make_run(tmp_path)
    write_events(tmp_path)
    known = progress(tmp_path)
    plain = prometheus.NodeNumbers(tmp_path, 0).read()
    written_events = metrics.read_events(tmp_path)
    lines = [json.dumps(event | {"mood": "good"}) for event in written_events]
    lines.insert(
        2,
        json.dumps(
            {"schema_version": 1, "time": written_events[1]["time"], "event": "tea", "cups": 2}
        ),
    )
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    for event in metrics.read_events(tmp_path):
        VALID.validate(event)
    assert [event["event"] for event in metrics.read_events(tmp_path)].count("tea") == 1
    assert progress(tmp_path) == known
    again = prometheus.NodeNumbers(tmp_path, 0).read()
    assert {**again, "checkpoint_age_seconds": 0} == {**plain, "checkpoint_age_seconds": 0}


def test_events_are_as_the_schema_says(tmp_path: Path) -> None:
    write_events(tmp_path)
    run_events = metrics.read_events(tmp_path)
    for event in run_events:
        VALID.validate(event)
    with pytest.raises(jsonschema.ValidationError):
        VALID.validate({**run_events[-1], "code": "0"})


def test_a_command_gets_every_event_and_failures_are_counted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "hook.sh"
    script.write_text(
        'event=$(cat)\nprintf "%s\\n" "$event" >> "$KUBETUNE_RUN_DIR/heard"\n'
        """case $event in *'"save"'*) exec sleep 300 ;; *'"evaluation"'*) exit 3 ;; esac\n"""
    )
    run_dir = tmp_path / "run"
    wanted = {
        "on_event": f"sh {script}",
        "timeout_seconds": 2,
        "events": ["evaluation", "save", "exit"],
    }
    make_run(run_dir, hooks=wanted)
    follow(run_dir)
    heard = [json.loads(line) for line in (run_dir / "heard").read_text().splitlines()]
    assert [event["event"] for event in heard] == ["evaluation", "save", "exit"]
    for event in heard:
        VALID.validate(event)
    last_event = metrics.read_events(run_dir)[-1]
    VALID.validate(last_event)
    assert (
        last_event["event"],
        last_event["ran"],
        last_event["failed"],
        last_event["left_out"],
    ) == ("hooks", 3, 2, 0)
    stderr = capfd.readouterr().err
    assert "hooks.on_event failed; the run goes on: evaluation: exit code 3" in stderr
    assert (
        "hooks.on_event failed for 2 of 3 events, 0 were left out; last: save: not done after 2 s"
        in stderr
    )


def test_what_a_command_prints_reaches_its_log_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_canary0123456789")
    monkeypatch.setenv("MY_PASSWORD", 'hunter2"hunter2')
    monkeypatch.setenv("DATABASE_URL", "postgres://me:correct-horse@db/x")
    script = tmp_path / "hook.sh"
    # 3 MB of lines, more than one piece; and a child that keeps the output open.
    script.write_text(
        "echo $HF_TOKEN $MY_PASSWORD $DATABASE_URL; printf '\\377\\n'\n"
        'awk \'BEGIN { for (i = 0; i < 100000; i++) print i, ENVIRON["HF_TOKEN"], "filler" }\'\n'
        "echo to stderr $HF_TOKEN >&2\n"
        # No variable of the environment has this one.
        "echo ghp_c4n4ryc4n4ryc4n4ryc4n4ry >&2\n"
        "sleep 300 &\necho $! > $KUBETUNE_RUN_DIR/child\n"
    )
    run_dir = tmp_path / "run"
    make_run(run_dir, hooks={"on_event": f"sh {script}", "events": ["save"]})
    follow(run_dir)
    log = (run_dir / "logs" / hooks.LOG).read_bytes()
    for secret in (b"canary", b"hunter2", b"correct-horse", b"c4n4ry"):
        assert secret not in log
    assert log.startswith(
        b"[secret] [secret] postgres://me:[secret]@db/x\n\xff\n0 [secret] filler\n"
    )
    assert b"\n99999 [secret] filler\nto stderr [secret]\n[secret]\n" in log
    os.kill(int((run_dir / "child").read_text()), signal.SIGKILL)


@pytest.mark.parametrize(("wanted", "message"), [
    ({"on_event": "no-such-command-1 x"}, "there is no command 'no-such-command-1'"),
    ({"on_event": "sh 'x"}, "No closing quotation"),
    ({"events": ["exit"]}, r"there is no hooks\.on_event to call for them"),
    ({"on_event": "sh", "events": ["finish"]}, "there is no event finish; expected launch, start"),
])  # fmt: skip
def test_a_command_that_cannot_be_called_is_refused_before_anything_starts(
    wanted: dict[str, Any], message: str
) -> None:
    config = Config.model_validate({"model": "m", "data": {"train": "d"}, "hooks": wanted})
    with pytest.raises(errors.ConfigError, match=message):
        hooks.require_command(config.hooks)


class _Server(ThreadingHTTPServer):
    """A server that keeps the requests it gets. With `answers` False it never answers."""

    daemon_threads = True

    def __init__(self, *, answers: bool = True, statuses: tuple[int, ...] = ()) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.got: list[tuple[str, dict[str, str], bytes]] = []
        self.answers = answers
        self.statuses = list(statuses)
        self.ended = threading.Event()


class _Request(BaseHTTPRequestHandler):
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.got.append((self.path, dict(self.headers.items()), content))
        if not self.server.answers:
            self.server.ended.wait(300)
            return
        self.send_response(self.server.statuses.pop(0) if self.server.statuses else 200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")


@contextmanager
def served(server: _Server) -> Iterator[_Server]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def kubeflow_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Server]:
    """Yield a status server by Kubeflow's protocol, with a certificate and a token of its own, refusing the first report."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is missing")
    key = tmp_path / "key.pem"
    certificate = tmp_path / "ca.crt"
    command = shlex.split(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        "-subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run(
        [*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True
    )
    server = _Server(statuses=(403,))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    (tmp_path / "token").write_text("first\n")
    path = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/n/trainjobs/bot/status"
    monkeypatch.setenv(kubeflow.URL, f"https://127.0.0.1:{server.server_port}{path}")
    monkeypatch.setenv(kubeflow.CA, str(certificate))
    monkeypatch.setenv(kubeflow.TOKEN, str(tmp_path / "token"))
    with served(server):
        yield server


def test_kubeflow_gets_progress_with_the_token_as_it_is_now(
    tmp_path: Path,
    kubeflow_server: _Server,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(kubeflow, "SECONDS_BETWEEN", 0.05)
    run_dir = tmp_path / "run"
    make_run(run_dir)
    run = observer_process.Observed.read(run_dir, 0, 0)
    thread = threading.Thread(target=kubeflow.observe, args=(run,))
    thread.start()
    while len(kubeflow_server.got) < 2:  # the first is refused, so it comes again
        time.sleep(0.01)
    (tmp_path / "token").write_text("second\n")
    with metrics.MetricsLog(run_dir, 2) as log:
        log.write(2, {"loss": 1.0, "eval_loss": 0.75})
    run.ended.set()
    thread.join()
    path, headers, content = kubeflow_server.got[-1]
    assert path.endswith("/namespaces/n/trainjobs/bot/status")
    assert headers["Authorization"] == "Bearer second"
    status = json.loads(content)["trainerStatus"]
    total = json.loads((run_dir / "plan.json").read_text())["num_steps"]
    assert status["progressPercentage"] == 200 // total
    assert isinstance(status["estimatedRemainingSeconds"], int)
    assert {"name": "eval_loss", "value": "0.75"} in status["metrics"]
    assert status["lastUpdatedTime"].endswith("Z")
    stderr = capfd.readouterr().err
    assert "the TrainJob missed 1 reports of progress; first: HTTP Error 403" in stderr
    assert "first\n" not in stderr


def test_a_status_server_that_hangs_in_the_handshake_is_given_up(
    tmp_path: Path,
    kubeflow_server: _Server,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """By TLS: it accepts, and says nothing. Also one whose token cannot be read, and one that breaks off."""
    monkeypatch.setattr(kubeflow, "_SECONDS_OF_REQUEST", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv(kubeflow.URL, f"https://127.0.0.1:{silent.getsockname()[1]}/status")
        make_run(tmp_path / "run")
        run = observer_process.Observed.read(tmp_path / "run", 0, 0)
        run.ended.set()
        kubeflow.observe(run)
        (tmp_path / "token").unlink()
        kubeflow.observe(run)
    kubeflow.observe(run)
    stderr = capfd.readouterr().err
    assert re.findall(
        "the TrainJob missed 1 reports of progress; first: .*(timed out|No such file|No such file)",
        stderr,
    )
    assert stderr.count("missed 1 reports") == 3
    assert not kubeflow_server.got


def test_a_collector_that_refuses_is_reported_once_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with served(_Server(statuses=(401,) * 9)) as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        make_run(tmp_path)
        follow(tmp_path)
    first, last = capfd.readouterr().err.splitlines()
    assert re.fullmatch(
        "kubetune: OpenTelemetry does not work; the run goes on: Failed to export .*401.*", first
    )
    assert re.fullmatch("kubetune: the OpenTelemetry collector missed [2-9] batches", last)


@pytest.mark.slow
def test_a_collector_that_never_answers_is_waited_for_only_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with served(_Server(answers=False)) as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        make_run(tmp_path)
        assert follow(tmp_path, stops=True) < 30
        assert server.got
    assert "the OpenTelemetry collector missed what was left at the end" in capfd.readouterr().err


@pytest.mark.slow
def test_a_collector_gets_the_run_its_starts_and_what_they_did_as_spans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    with served(_Server()) as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        make_run(tmp_path)
        follow(tmp_path)
    spans = []
    bodies = []
    for path, _, content in server.got:
        if path == "/v1/traces":
            request = ExportTraceServiceRequest.FromString(content)
            spans += [
                span
                for resource in request.resource_spans
                for scope in resource.scope_spans
                for span in scope.spans
            ]
        elif path == "/v1/logs":
            logs = ExportLogsServiceRequest.FromString(content)
            records = (
                r
                for resource in logs.resource_logs
                for scope in resource.scope_logs
                for r in scope.log_records
            )
            bodies += [record.body.string_value for record in records]
    by_id = {span.span_id: span.name for span in spans}
    tree = sorted((span.name, by_id.get(span.parent_span_id)) for span in spans)
    assert tree == [
        ("evaluation", "start"), ("preparation", "start"), ("run", None), ("save", "start"), ("start", "run"),
        ("training", "start"),
    ]  # fmt: skip
    assert len({span.trace_id for span in spans}) == 1
    evaluation = next(span for span in spans if span.name == "evaluation")
    assert evaluation.end_time_unix_nano - evaluation.start_time_unix_nano == 250_000_000
    assert bodies == ["launch", "start", "evaluation", "save", "exit: done"]


def test_prometheus_reads_the_run_as_it_is(tmp_path: Path) -> None:
    make_run(tmp_path)
    write_events(tmp_path)
    values = prometheus.NodeNumbers(tmp_path, 0).read()
    assert values.keys() <= prometheus.METRICS.keys()
    assert (values["step"], values["loss"], values["tokens_per_second"]) == (2, 1.0, 20.0)
    assert values["mfu_ratio"] == pytest.approx(0.02)
    assert values["slowest_rank_ratio"] == pytest.approx(2.0)
    assert (values["step_seconds"], values["restarts"]) == (1.0, 0)
    assert values["lost_seconds"] == max(0.0, values["held_seconds"] - 1.0)
    assert prometheus.NodeNumbers(tmp_path, 1).read() == {}
    (tmp_path / "plan.json").write_text('{"world_size": 1')
    assert values.keys() - prometheus.NodeNumbers(tmp_path, 0).read().keys() == {"mfu_ratio"}, (
        "a damaged plan takes no more"
    )


@pytest.mark.slow
def test_a_real_prometheus_scrapes_a_run_and_promtool_takes_its_rules(tmp_path: Path) -> None:
    server, tool = (
        shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
        for name in ("prometheus", "promtool")
    )
    if server is None or tool is None:
        pytest.skip("prometheus is missing")
    pytest.importorskip("prometheus_client")
    rules = tmp_path / "rules.yml"
    rules.write_text(json.dumps({"groups": [{"name": "kubetune", "rules": alert_rules("bot")}]}))
    subprocess.run([tool, "check", "rules", rules], check=True)
    run_dir = tmp_path / "run"
    make_run(run_dir, tracking={"prometheus": True})
    run = observer_process.Observed.read(run_dir, 0, 0)
    write_events(run_dir)
    with _Server() as free, _Server() as chosen:
        port = free.server_port
        own_port = chosen.server_port
    run.prometheus = PrometheusConfig(port=port)
    thread = threading.Thread(target=prometheus.observe, args=(run,))
    thread.start()
    scrape = {"job_name": "kubetune", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
    settings = {
        "global": {"scrape_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [scrape],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(settings))
    subprocess.run([tool, "check", "config", tmp_path / "prometheus.yml"], check=True)
    text = urllib.request.urlopen(_waiting(f"http://127.0.0.1:{port}/metrics")).read()
    subprocess.run([tool, "check", "metrics"], input=text, check=True)
    process = subprocess.Popen(
        [server, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/store",
         f"--web.listen-address=127.0.0.1:{own_port}"],
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        address = f"http://127.0.0.1:{own_port}/api/v1/query?query=kubetune_loss"
        result: list[Any] = []
        while not result:
            result = json.load(urllib.request.urlopen(_waiting(address)))["data"]["result"]
        labels = {"run": "bot", "node": "0"}
        assert {key: result[0]["metric"][key] for key in labels} == labels
        assert result[0]["value"][1] == "1"
    finally:
        process.terminate()
        process.wait()
        run.ended.set()
        thread.join()


def _waiting(address: str) -> str:
    """Return the address, once something answers there."""
    while True:
        try:
            with urllib.request.urlopen(address):
                return address
        except OSError:
            time.sleep(0.05)
