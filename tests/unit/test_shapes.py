"""Each JSON file that a run writes, with every value in it of another type: pages and lists name the file, and go on."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kubetune import errors
from kubetune.cli import main
from kubetune.config.schema import EvaluationConfig
from kubetune.reporting.page import page_of, write_report
from kubetune.reporting.reading import read_run
from kubetune.reporting.rendering import render
from kubetune.rundir import checkpoints, metrics, rollout_files
from kubetune.rundir.checkpoints import State
from kubetune.rundir.status import read_status
from kubetune.scoring import verdict
from kubetune.ui.run_index import _losses, spark
from tests import toy

# Variants of a file that are tried; there are thousands.
N = 12
WRONG: tuple[Any, ...] = (None, True, -1, 0.5, 10**400, "text", [], [1], {}, {"a": 1}, [[]], [{}])
TIME = "2026-11-20T10:15:00.123Z"
COUNTS = dict.fromkeys(
    ("records", "rows", "overlong", "truncated", "no_label", "unusable", "tokens", "trained_tokens", "longest"), 3
)  # fmt: skip
COMPARED = {
    "metric": "exact_match", "rows": 2, "before": 0.1, "after": 0.2, "before_interval": [0.0, 0.2],
    "after_interval": [0.1, 0.3], "difference": 0.1, "gained": 1, "lost": 0, "p_value": 0.5, "test": "McNemar",
}  # fmt: skip
TURNED = {"prompt": "a", "reference": "b", "answer": "b", "before": "c", "scores": {}}
# The files of a run, each with every part that a page shows.
FILES: dict[str, dict[str, Any]] = {
    "data.json": {
        "fingerprint": "5f", "findings": [{"severity": "warning", "line": "Rows are long."}],
        "splits": {"train": {**COUNTS, "sources": [{**COUNTS, "path": "a.jsonl"}], "lengths": [[1, 2, 3]]}},
    },
    "evaluation.json": {"confusion": [[8, 2], [1, 3]], "names": ["good", "bad"], "checkpoint": "best", "data": "eval.csv"},
    "verdict.json": {
        "step": 1, "base": {"eval_exact_match": 0.1}, "best": {"eval_exact_match": 0.2}, "answers": [COMPARED],
        "turned": {"exact_match": {"gained": [TURNED], "lost": [TURNED]}}, "lengths": {"before": [[0, 1, 2]]},
        "gate": {"passed": True, "checks": [{"holds": True, "message": "eval_loss < 2"}]},
    },
    "benchmarks.json": {"step": 1, "compared": [{**COMPARED, "metric": "arc/acc"}]},
    "report.json": {
        "schema_version": 1, "steps": 1, "seconds": 2.0, "tokens": 9, "trained_tokens": 5, "peak_memory_bytes": 99,
        "throughput": {
            "tokens_per_second": 4.5, "trained_tokens_per_second": 2.5, "tflops_per_device": 0.1, "peak_tflops": 1.0,
            "peak_source": "measured: a product", "mfu": 0.1, "counted": "All.",
        },
        "loss_runaway": {"first": 1.0, "last": 9.0, "steps": 5},
        "nothing_learnt": {"answers": 4, "reward": 0.0, "unjudged": False},
        "data_fingerprint": "5f", "config_sha256": "a1", "versions": {"torch": "2"}, "finished": TIME,
        "preflight": {"forecast_bytes": 9, "measured_bytes": 9, "tokens": 9},
        "actuals": {
            "memory": {"forecast_bytes": 9, "measured_bytes": 9, "relative_error": 0.0},
            "hours": {"forecast": 1.0, "step_hours": 1.0, "total_hours": 1.0, "relative_error": 0.0, "source": "runs"},
            "price": {"forecast": 1.0, "steps": 1.0, "total": 1.0, "relative_error": 0.0, "per_device_hour": 1.0},
        },
    },
    "experts.json": {"steps": [1, 2], "layers": {"0": [1, 2, 3]}, "dropped_tokens": 0},
    "hang.json": {"rank": 0, "phase": "training", "waiting": False, "step": 1, "seconds": 9.0, "time": TIME},
    "exit.json": {"code": 0, "reason": "done", "step": 1, "error": None, "time": TIME},
    "labels.json": {"title": "a", "note": "b", "tags": ["c"], "archived": False},
    "logs/rank-0.beat.json": {"rank": 0, "phase": "training", "step": 1, "waiting": False, "since": 1.0, "time": 2.0},
    "logs/node-0.waits.json": {"node": 0, "waits_for": "node 1", "since": 1.0, "time": 9e9},
}  # fmt: skip
FILES[metrics.BASE] = {"metrics": {"eval_loss": 2.0, "eval_exact_match": None}, "functions": "5f"}
# The fixture writes them as a run does.
STATE_FILE = f"checkpoints/step-000001/{checkpoints.STATE}"
MANIFEST_FILE = f"checkpoints/step-000001/{checkpoints.MANIFEST}"
WRITTEN = (metrics.PLAN, STATE_FILE, MANIFEST_FILE)
LINES: dict[str, dict[str, Any]] = {
    metrics.METRICS: {
        "step": 1, "epoch": 0.5, "loss": 1.0, "learning_rate": 0.1, "grad_norm": 1.0, "samples": 2, "tokens": 9,
        "trained_tokens": 5, "accuracy": 0.5, "reward": 0.5, "reward/a": 0.5, "kl": 0.1, "expert_load_max": 1.0,
        "zero_variance": 0.0, "eval_loss": 1.0,
    },
    metrics.TIMINGS: {
        "step": 1, "seconds": 1.0, "tokens_per_second": 9.0, "peak_memory_bytes": 99, "rank_seconds": [0.5, 0.6],
    },
    metrics.EVENTS: {
        "schema_version": 1, "time": TIME, "event": "exit", "node": 0, "nodes": 1, "processes": 1, "step": 1, "steps": 2,
        "code": 1, "reason": "why", "error": None, "machine": {
            "gpus": ["H100"], "cores": 2, "memory_bytes": 9, "git_commit": "a", "git_dirty": True, "versions": {"a": "1"},
        },
    },
    metrics.LOAD: {
        "step": 1, "cpu_percent": 5.0, "memory_bytes": 9, "gpus": [{"index": 0, "percent": 0.5, "memory_bytes": 9}],
    },
    metrics.BEFORE_AFTER: {
        "teacher": "b",
        "prompt": "a", "expected": "b", "before": "c", "after": "b", "step": 1, "tools": ["t"],
        "messages": [{"role": "user", "content": "a"}], "answers": [{"step": 1, "answer": "a"}],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run directory that holds all files, made without training."""
    folder = tmp_path_factory.mktemp("received")
    run = folder / "run"
    toy.make_run(run, toy.make_config(toy.make_inputs(folder), {"max_steps": 1}))
    checkpoints.commit(run, State(step=1, saved_step=1), lambda _: None)
    (run / "logs").mkdir(exist_ok=True)
    for name, content in FILES.items():
        (run / name).write_text(json.dumps(content))
    for name, content in LINES.items():
        (run / name).write_text(json.dumps(content) + "\n")
    return run


def foreign(value: Any) -> Iterator[Any]:
    """Yield an object again and again, each time with one value of another type, or without one."""
    yield from WRONG
    if isinstance(value, dict):
        for key, inner in value.items():
            yield {name: other for name, other in value.items() if name != key}
            for wrong in foreign(inner):
                yield {**value, key: wrong}
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            for wrong in foreign(inner):
                yield [*value[:index], wrong, *value[index + 1 :]]


def look(run: Path) -> list[str]:
    """Read a run as its pages and the list of runs do, and return what they name as damaged."""
    record = read_run(run)
    template, shown = page_of([record])
    page_of([record, record])
    assert main(["runs", str(run)]) == errors.OK
    read_status(run)
    spark(_losses(run))
    assert render(template, **shown)
    return [*record.damage]


def test_the_whole_run_is_shown(run_dir: Path) -> None:
    assert look(run_dir) == []


@pytest.mark.parametrize("name", [*FILES, *WRITTEN, *LINES])
def test_no_value_of_another_type_ends_a_page(run_dir: Path, name: str) -> None:
    """Of the thousands of variants of a file some, by chance but always the same ones."""
    whole = (run_dir / name).read_text()
    variants = list(foreign(json.loads(whole)))
    try:
        for variant in random.Random(name).sample(variants, min(len(variants), N)):
            (run_dir / name).write_text(json.dumps(variant) + "\n")
            try:
                look(run_dir)
            except Exception as error:
                error.add_note(f"{name}: {json.dumps(variant)[:3000]}")
                raise
    finally:
        (run_dir / name).write_text(whole)


def test_the_page_names_the_file_and_the_place(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = (run_dir / metrics.DATA).read_text()
    (run_dir / metrics.DATA).write_text(json.dumps({"findings": [{"line": "no severity"}]}))
    try:
        page = write_report([run_dir], tmp_path / "page.html").read_text()
        assert main(["runs", str(run_dir.parent)]) == errors.OK
    finally:
        (run_dir / metrics.DATA).write_text(whole)
    assert "data.json is damaged (findings.0.severity: Field required)" in page
    assert "Curves" in page
    assert "Traceback" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("key", ["tflops_per_device", "peak_tflops", "peak_source"])
def test_a_share_of_a_peak_comes_with_both(run_dir: Path, key: str) -> None:
    path = run_dir / metrics.REPORT
    whole = path.read_text()
    report = json.loads(whole)
    report["throughput"][key] = None
    path.write_text(json.dumps(report))
    try:
        damage = look(run_dir)
    finally:
        path.write_text(whole)
    assert f"mfu: expected {key} beside it" in "".join(damage)


def test_no_value_of_another_type_ends_what_goes_on_from_a_run(run_dir: Path) -> None:
    """What a resumed run reads, too: its checkpoint, and how the model was before training."""
    folder = checkpoints.folder_of(run_dir, 1)
    wanted = EvaluationConfig()
    for name in (STATE_FILE, MANIFEST_FILE, metrics.BASE):
        whole = (run_dir / name).read_text()
        variants = list(foreign(json.loads(whole)))
        try:
            for variant in random.Random(name).sample(variants, min(len(variants), 4 * N)):
                (run_dir / name).write_text(json.dumps(variant))
                checkpoints.verify(folder)
                with suppress(errors.KubetuneError):
                    state = checkpoints.load_state(folder)
                    assert state.is_last(1, evaluates=True, patience=1) in (True, False)
                    assert state.step + state.tokens + state.seconds + state.loss_scale >= 0
                with suppress(errors.KubetuneError):
                    verdict.conclude(wanted, run_dir, 1)
        finally:
            (run_dir / name).write_text(whole)


def test_no_value_of_another_type_ends_a_page_of_answers(tmp_path: Path) -> None:
    answer = {"text": "a", "rewards": {"r": 1.0}, "tokens": [1]}
    line = {"made_by": "9f", "slot": 0, "row": 17, "text": "q", "prompt": [1], "answers": [answer]}
    file = rollout_files.file_of(tmp_path, 1)
    file.parent.mkdir()
    read = 0
    for variant in foreign(line):
        content = json.dumps(variant) + "\n"
        file.write_text(content)
        found = rollout_files.read_line(tmp_path, 1, (0, len(content)))
        for shown in found["answers"] if found else ():
            rollout_files.weighted_sum(shown["rewards"], [("r", 0.5)])
            read += 1
    assert read
