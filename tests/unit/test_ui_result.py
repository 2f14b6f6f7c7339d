"""The page of a run's result, asked in this process: what it offers, which command that is, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from starlette.testclient import TestClient

from kubetune import errors, extras
from kubetune.base import processes
from kubetune.config.load import load_config
from kubetune.result.forms.wanted import PROVENANCE
from kubetune.rundir import checkpoints, metrics
from kubetune.rundir.exit_status import DONE, ExitStatus, write_exit_status
from kubetune.tasks import TASKS, task_of
from kubetune.ui.jobs import Jobs, result_job
from kubetune.ui.result.outcomes import end_in_words, state_of_end
from kubetune.ui.server import application
from kubetune.ui.site import Site
from tests.run.test_report_long import write_run

TOKEN = "a-token-of-this-test"
HOSTILE = '"><script>alert(1)</script>'
OURS = {"origin": "http://localhost"}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return a run of LoRA with one checkpoint, which holds no weights."""
    (tmp_path / "outputs").mkdir()
    run_dir = write_run(tmp_path / "outputs" / "bot", 60)
    set_config(run_dir, lora={"r": 4})
    checkpoint = run_dir / "checkpoints" / "step-000060"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    (checkpoint / "state.json").write_text('{"step": 60}')
    (run_dir / "checkpoints" / "last").symlink_to(checkpoint.name)
    return run_dir


def set_config(run_dir: Path, **changes: Any) -> None:
    path = run_dir / "resolved.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setattr(extras, "is_installed", lambda module: True)
    app = application(Site.of(tmp_path / "outputs"), TOKEN)
    with TestClient(app, base_url="http://localhost") as opened:
        opened.get("/", params={"token": TOKEN})
        yield opened


def jobs_of(client: TestClient) -> Jobs:
    jobs: Jobs = client.app._app.state.site.jobs  # type: ignore[attr-defined]
    return jobs


def ask(client: TestClient, verb: str, path: str = "command", **options: Any) -> Any:
    body = {"dir": "bot", "verb": verb, "options": options}
    return client.post(f"/run/result/{path}", json=body, headers=OURS).json()


def test_export_stands_beside_chat_on_a_run_that_is_done(client: TestClient, run_dir: Path) -> None:
    write_exit_status(run_dir, ExitStatus(0, DONE, 60))
    checkpoints.commit(run_dir, checkpoints.State(step=50), lambda folder: None)
    page = client.get("/run?dir=bot").text
    assert page.count('href="/run/result?dir=bot#export"') == 1
    assert (
        page.index('beside=base">Chat</a>')
        < page.index('#export">Export</a>')
        < page.index('class="menu"')
    )


def test_a_result_says_what_there_is_and_opens_with_what_comes_next(
    client: TestClient, run_dir: Path
) -> None:
    def cards_and_tab() -> tuple[dict[str, str], str]:
        page = client.get("/run/result?dir=bot").text
        cards = re.search('<dl class="cards".*?</dl>', page, re.DOTALL)
        assert cards
        first = re.search('<a href="#([a-z]+)" aria-selected="true">', page)
        assert first
        return dict(re.findall("<dt>(.*?)</dt><dd>([^<]*)", cards[0])), first[1]

    checkpoints.commit(run_dir, checkpoints.State(step=50), lambda folder: None)
    cards, tab = cards_and_tab()
    assert (cards["Checkpoint"], cards["Exported"], cards["Pushed"]) == (
        "step 50",
        "not yet",
        "not yet",
    )
    assert tab == "export"
    folder = run_dir / "exports" / "good"
    folder.mkdir(parents=True)
    (folder / PROVENANCE).write_text(provenance(time="once"))
    cards, tab = cards_and_tab()
    assert cards["Exported"] == "adapter"
    assert tab == "push"
    event = {"event": "push", "time": "2026-11-29T10:00:00+00:00", "ok": True, "repo": "org/bot"}
    with (run_dir / metrics.EVENTS).open("a") as events:
        events.write(json.dumps(event) + "\n")
    cards, tab = cards_and_tab()
    assert cards["Pushed"] == "org/bot"
    assert tab == "export"


@pytest.mark.parametrize(
    ("verb", "options", "words"),
    [
        ("export", {}, ""),
        ("export", {"form": "merged", "dtype": "float32"}, " --merge --dtype=float32"),
        ("export", {"form": "gguf", "gguf": "q8_0", "model": "-x"}, " --gguf=q8_0 --model=-x"),
        ("export", {"form": "fp8", "checkpoint": "60"}, " --quantize=fp8 --checkpoint=60"),
        ("export", {"output": "mine"}, " --output=BOT/exports/mine"),
        ("evaluate", {"on": "data", "data": "{path: a b}"}, " '--data={path: a b}'"),
        (
            "evaluate",
            {"on": "benchmarks", "benchmarks": "arc_easy", "limit": "5", "with_base": "on"},
            " --benchmarks=arc_easy --limit=5 --with-base",
        ),
        (
            "push",
            {"repo": "oci://localhost:5000/bot:1", "form": "merged", "modelpack": "on"},
            " oci://localhost:5000/bot:1 --merge --modelpack",
        ),
        ("serve", {"url": "http://h:1", "model": "a b"}, " --check=http://h:1 '--model=a b'"),
    ],
)
def test_what_is_chosen_is_a_command_of_the_verb(
    client: TestClient, run_dir: Path, verb: str, options: dict[str, str], words: str
) -> None:
    answer = ask(client, verb, **options)
    expected = f"kubetune {verb} {run_dir}{words.replace('BOT', str(run_dir))}"
    assert answer == {"problems": [], "command": expected}


@pytest.mark.parametrize(
    ("verb", "options", "problem"),
    [
        ("train", {}, "expected one of evaluate, export, push, serve"),
        ("export", {"checkpoint": "7"}, "no checkpoint '7'; there are: last, step 60"),
        ("export", {"checkpoint": "../x"}, "expected best, last or a step"),
        ("export", {"form": "zip"}, "expected one of plain, merged, gguf, fp8"),
        ("export", {"form": "gguf", "gguf": "q9"}, "gguf: found 'q9'"),
        ("export", {"output": "../mine"}, "expected the name of a folder"),
        ("export", {"output": ".mine"}, "expected the name of a folder"),
        ("export", {"trust_code": "1"}, "trust_code: no option of export"),
        ("export", {"dtype": 1}, "expected a text"),
        ("evaluate", {}, "has no evaluation data"),
        ("evaluate", {"on": "data"}, "which data?"),
        ("evaluate", {"on": "base"}, "keeps no answers of step 0"),
        ("evaluate", {"on": "benchmarks"}, "which benchmarks?"),
        ("push", {}, "where to? give ORG/NAME"),
        ("push", {"repo": "-x/y"}, "is no name of a repository"),
        ("push", {"repo": "nothing"}, "is no name of a repository"),
        ("push", {"repo": "oci://x/y:1", "public": "on"}, "only for the hub"),
        ("push", {"repo": "org/bot", "form": "gguf"}, "expected one of plain, merged"),
        ("serve", {"url": "localhost:8000"}, "address is localhost:8000; expected one such as"),
        ("push", {"repo": "org/bot"}, "no token for the hub"),
    ],
)
def test_what_makes_no_sense_is_refused_in_the_words_of_the_verb(
    client: TestClient,
    run_dir: Path,
    verb: str,
    options: dict[str, Any],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "RESULT_MODEL_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    for path in ("command", "start"):
        answer = ask(client, verb, path, **options)
        assert problem in "\n".join(answer["problems"])
    assert not jobs_of(client).look(result_job("bot"))["words"], "nothing was begun"


def test_what_does_not_fit_a_run_says_why(client: TestClient, run_dir: Path) -> None:
    page = client.get("/run/result?dir=bot").text
    assert "<strong>Adapter</strong>" in page
    assert "there is no adapter to merge" not in page
    assert "has no evaluation data; give some with --data" in page
    set_config(run_dir, lora={"r": 4, "use_dora": True})
    refused = ask(client, "export", form="gguf", gguf="adapter")["problems"]
    assert "llama.cpp loads no adapters with weights of DoRA" in refused[0]
    assert ask(client, "export", form="gguf", gguf="q8_0")["problems"] == []

    set_config(run_dir, lora=None, task="sequence_classification")
    page = client.get("/run/result?dir=bot").text
    assert "<strong>Model</strong>" in page
    assert "trained every weight, so there is no adapter to merge" in page
    assert "sequence_classification is not written as GGUF" in page
    assert "sequence_classification is not quantised to FP8" in page
    assert "benchmarks are for models of text" in page
    assert "Nothing was written" not in page
    for form in ("merged", "gguf", "fp8"):
        assert ask(client, "export", "start", form=form)["problems"]


def test_a_family_that_llama_cpp_does_not_know_is_named(
    client: TestClient, run_dir: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "mamba"}')
    set_config(run_dir, model={"path": str(base)})
    assert "mamba is not written as GGUF" in client.get("/run/result?dir=bot").text


def test_which_models_answer_text_is_the_same_for_settings_and_tasks() -> None:
    for name in TASKS:
        settings: dict[str, Any] = {"model": "org/model", "data": {"train": "x.jsonl"}}
        settings["task"] = name
        if name == "vision_preference":
            settings |= {"task": "preference", "preference": {"images": True}}
        if name == "grpo":
            settings["rewards"] = [{"name": "exact_match"}]
        if name == "distill":
            settings["distill"] = {"teacher": "org/teacher"}
        config = load_config(settings)
        assert config.task_name == name
        assert config.answers_text == (task_of(name).auto_class == "AutoModelForCausalLM"), name


def test_a_run_is_begun_once_and_not_while_it_trains(
    client: TestClient, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing of it needs a model: a run without answers is refused by the verb itself.
    sleeper = [sys.executable, "-c", "import sys; sys.stdin.read(); input()"]
    monkeypatch.setattr(processes, "module", lambda *words: [*sleeper, *words])
    monkeypatch.setattr(subprocess, "DEVNULL", subprocess.PIPE)
    begun = ask(client, "export", "start")
    assert begun["command"] == f"kubetune export {run_dir}"
    (problem,) = ask(client, "evaluate", "start", on="data", data="x.jsonl")["problems"]
    assert problem.startswith(f"bot is busy with kubetune export {run_dir}; wait for its end")
    page = client.get("/run/result?dir=bot").text
    assert 'data-job="bot.result"' in page
    assert "Cancel" in page
    body = {"dirs": ["bot"]}
    refused = client.post("/run/delete", json=body, headers=OURS).json()["problems"]
    assert "is being evaluated, exported or pushed" in refused[0]
    assert run_dir.is_dir()

    body = {"dir": "bot"}
    assert client.post("/run/result/cancel", json=body, headers=OURS).json() == {"problems": []}
    jobs_of(client)._children["bot.result"].communicate()
    page = client.get("/run/result?dir=bot").text
    assert 'class="state stopped"' in page
    assert "It was cancelled before it began (signal 15)" in page
    again = client.post("/run/result/cancel", json=body, headers=OURS).json()
    assert "or it has ended" in again["problems"][0]

    monkeypatch.setattr("kubetune.ui.run_commands.holders", lambda run_dir: [psutil.Process()])
    (problem,) = ask(client, "export", "start")["problems"]
    assert problem.startswith("bot still trains on this machine")
    assert problem in client.get("/run/result?dir=bot").text


def test_a_run_without_a_checkpoint_has_no_result_yet(client: TestClient, tmp_path: Path) -> None:
    (tmp_path / "outputs").mkdir()
    write_run(tmp_path / "outputs" / "bot", 60)
    assert (
        "has no checkpoint, so there is no result of it yet"
        in client.get("/run/result?dir=bot").text
    )
    (problem,) = ask(client, "export", "start")["problems"]
    assert "has no checkpoint" in problem


def test_folders_of_somebody_are_not_written_into(client: TestClient, run_dir: Path) -> None:
    mine = run_dir / "exports" / "mine"
    mine.mkdir(parents=True)
    (mine / "notes.txt").write_text("mine")
    (problem,) = ask(client, "export", "start", output="mine")["problems"]
    assert "holds other files" in problem
    (run_dir / "exports" / "step-000060-merged").write_text("a file")
    (problem,) = ask(client, "export", "start", form="merged")["problems"]
    assert "is a file" in problem


def provenance(**changes: Any) -> str:
    comparison = {
        "what": "checkpoint and export",
        "difference": 3e-7,
        "tolerance": 1e-3,
        "agreement": 1.0,
    }
    facts = {
        "kind": "adapter", "dtype": "float32", "time": "2026-11-28T10:00:00.000Z", "served_by": ["vLLM"],
        "checkpoint": {"name": "step-000060"}, "files": {"adapter_model.safetensors": {"bytes": 3}},
        "base": {"name": "org/model", "revision": None, "licence_files": []},
        "proof": {"rows": 8, "tokens": 900, "origin": f"rows {HOSTILE}", "run_in": "float32",
                  "comparisons": [comparison], "effect_of_adapter": 0.5, "tokenizer_files_equal": ["tokenizer.json"]},
    }  # fmt: skip
    return json.dumps({**facts, **changes})


def test_exports_and_pushes_are_shown_as_their_files_say(client: TestClient, run_dir: Path) -> None:
    for name, text in (("good", provenance()), ("bad", '{"files": 7}'), ("torn", "{")):
        folder = run_dir / "exports" / name
        folder.mkdir(parents=True)
        (folder / PROVENANCE).write_text(text)
    (run_dir / "exports" / "good" / "adapter_model.safetensors").write_text("abc")
    outside = run_dir.parent / "outside.json"
    outside.write_text(provenance(dtype="secret-of-another-file"))
    link = run_dir / "exports" / "link"
    link.mkdir()
    (link / PROVENANCE).symlink_to(outside)
    metrics.record_event(run_dir, "push", repo="org/bot", ok=False, reason=f"no way {HOSTILE}")
    sent = {"repo": "org/bot", "url": "https://hub/org/bot", "commit": "abc", "kind": "adapter"}
    metrics.record_event(run_dir, "push", ok=True, step=60, **sent)

    page = client.get("/run/result?dir=bot").text
    assert "checkpoint and export: 3.0e-07 apart (allowed 1e-03), same first choice 100.0%" in page
    assert "the adapter moves them by 5.0e-01" in page
    assert page.count("Not to be trusted") == 3
    assert "secret-of-another-file" not in page
    assert "arrived whole: adapter of step 60" in page
    assert "refused: no way" in page
    assert HOSTILE not in page
    (run_dir / "exports" / "good" / "adapter_model.safetensors").write_text("ab")
    assert "have another size than when they were proved" in client.get("/run/result?dir=bot").text


def test_an_evaluation_is_shown_with_intervals_and_p(client: TestClient, run_dir: Path) -> None:
    evaluation = {"metrics": {"eval_loss": 1.25}, "checkpoint": "best", "data": None}
    (run_dir / metrics.EVALUATION).write_text(json.dumps({**evaluation, "time": "2026-11-28"}))
    line = {"metric": "exact_match", "before": 0.1, "after": 0.9, "before_interval": [0, 0.2],
            "after_interval": [0.81, 0.95], "gained": 8, "lost": 0, "p_value": 0.0078, "test": "McNemar",
            "rows": 10}  # fmt: skip
    jobs = jobs_of(client)
    jobs.start(result_job("bot"), ["evaluate", str(run_dir), "--compare=base", "--json"])
    jobs._children["bot.result"].wait()
    page = client.get("/run/result?dir=bot").text
    assert "refused; its last line says what to change (exit code 2)" in page
    assert "keeps no answers of step" in page
    jobs.result(result_job("bot")).write_text(json.dumps([line]))
    page = client.get("/run/result?dir=bot").text
    assert "1.25" in page
    cells = re.sub(r"<td [^>]*>", "<td>", page)
    assert "<td>81–95 %</td><td>8</td><td>0</td><td>0.0078</td>" in cells
    assert "p two-sided by McNemar" in page
    jobs.result(result_job("bot")).write_text(json.dumps([{"metric": "x"}]))
    assert client.get("/run/result?dir=bot").status_code == 200


def test_each_exit_code_has_words() -> None:
    codes = [
        value for name, value in vars(errors).items() if name.isupper() and value in range(256)
    ]
    for code in (*codes, -15, -9, None):
        assert end_in_words(code)
    assert end_in_words(errors.PREEMPTED).startswith("was cancelled; nothing half-written")
    assert state_of_end(None) == "ended", "it waits for nothing"


@pytest.mark.parametrize("name", ["../outside", "", "bot/../../outside", "nothing"])
def test_runs_outside_of_the_folder_do_not_exist(
    client: TestClient, run_dir: Path, tmp_path: Path, name: str
) -> None:
    write_run(tmp_path / "outside", 60)
    assert client.get("/run/result", params={"dir": name}).status_code == 404
    body = {"dir": name, "verb": "export", "options": {}}
    for path in ("command", "start", "cancel"):
        answer = client.post(f"/run/result/{path}", json=body, headers=OURS).json()
        assert "no run of this name" in answer["problems"][0]
