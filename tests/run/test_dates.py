"""Chat templates that write today's date: a run keeps that of its first start, so that its tokens stay the same."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kubetune import cli
from kubetune.config.schema import Config
from kubetune.data.prepared.fingerprint import fingerprint
from kubetune.data.spec import DataSpec
from kubetune.data.text.tokenizer import load_tokenizer
from kubetune.data.text.turns.limited_template import LimitedTemplate
from kubetune.rundir import starts
from kubetune.supervisor.run_folder import create_run_dir
from tests.architectures import save_model
from tests.tiny import CHATML

DATED = "<|im_start|>system\nToday is {{ strftime_now('%d %b %Y') }}.<|im_end|>\n" + CHATML


@pytest.fixture
def config(tmp_path: Path) -> Config:
    save_model(tmp_path / "model")
    (tmp_path / "template.jinja").write_text(DATED)
    messages = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "jumps"}]
    (tmp_path / "train.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    model = {"path": str(tmp_path / "model"), "chat_template": str(tmp_path / "template.jinja")}
    data = {"train": str(tmp_path / "train.jsonl"), "cache": str(tmp_path / "cache"), "num_proc": 1}
    return Config.model_validate({"model": model, "data": data, "output": str(tmp_path / "run")})


def prepared(run_dir: Path, cache: Path) -> tuple[str, str]:
    """Return the fingerprint and the text of the only row that a process makes which knows nothing but the run directory."""
    shutil.rmtree(cache, ignore_errors=True)
    done = subprocess.run(
        [sys.executable, "-m", "kubetune.data.findings.prepare_worker", run_dir],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (path for path in (cache / "prepared").iterdir() if path.is_dir())
    manifest = json.loads((folder / "manifest.json").read_text())
    rows = {file.name: file.read_bytes().hex() for file in (folder / "train").iterdir()}
    return manifest["fingerprint"], json.dumps(rows, sort_keys=True)


@pytest.mark.slow
def test_a_run_keeps_the_date_of_its_first_start(
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The process that prepares has the real clock; only the launcher's is another."""
    run_dir = tmp_path / "run"
    cache = tmp_path / "cache"
    monkeypatch.setattr(starts, "today", lambda: "2024-02-29")
    create_run_dir(config, run_dir)
    assert json.loads((run_dir / "resolved.json").read_text())["data"]["date"] == "2024-02-29"
    first = prepared(run_dir, cache)
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')  # it has begun
    monkeypatch.setattr(starts, "today", lambda: "2024-03-01")
    create_run_dir(config, run_dir)
    assert prepared(run_dir, cache) == first
    assert not capsys.readouterr().err
    dated = config.model_copy(
        update={"data": config.data.model_copy(update={"date": "2024-03-02"})}
    )
    create_run_dir(dated, run_dir)
    assert "data.date is 2024-02-29 since the first start" in capsys.readouterr().err
    assert json.loads((run_dir / "resolved.json").read_text())["data"]["date"] == "2024-02-29"
    create_run_dir(config, tmp_path / "another")
    assert prepared(tmp_path / "another", cache) != first


def test_the_date_counts_only_where_the_template_writes_it(config: Config) -> None:
    days = ("2024-02-29", "2024-03-01", None)
    dated = {
        fingerprint(DataSpec.of(config), load_tokenizer(config.model, date=day)) for day in days
    }
    assert len(dated) == 3
    model = config.model.model_copy(update={"chat_template": "chatml"})
    undated = {fingerprint(DataSpec.of(config), load_tokenizer(model, date=day)) for day in days}
    assert len(undated) == 1


def test_a_template_is_told_the_date_of_the_run_or_the_real_one() -> None:
    asked = [{"role": "user", "content": "the fox"}]
    assert "Today is 29 Feb 2024." in LimitedTemplate(DATED, {}, date="2024-02-29").render(asked)
    assert "2024" not in LimitedTemplate(DATED, {}).render(asked)


def test_a_check_shows_the_date(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(config.model_dump(mode="json", by_alias=True, exclude_unset=True)))
    assert cli.main(["data", "check", str(file), "data.date=2024-02-29"]) == 0
    assert "the chat template writes a date: 2024-02-29 (data.date)" in capsys.readouterr().out
    assert cli.main(["data", "check", str(file), "data.date=2024-02-30"]) == 2
    assert "expected a day such as 2026-11-22" in capsys.readouterr().err
