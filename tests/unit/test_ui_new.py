"""The page's form for a new run: made from the schema, planned as one types, written down, and begun."""

from __future__ import annotations

import errno
import html
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import kubetune
from kubetune.base.files import IrregularFileError
from kubetune.cli import main
from kubetune.config import consent
from kubetune.config.consent import CODE
from kubetune.config.load import load_config
from kubetune.config.resolved import resolved
from kubetune.errors import USER
from kubetune.reporting.look.line_breaks import spans
from kubetune.rundir import checkpoints
from kubetune.supervisor.run_folder import create_run_dir
from kubetune.ui import jobs
from kubetune.ui.form import at_hand
from kubetune.ui.form.fixes import as_run_name, field_of
from kubetune.ui.form.form_fields import form
from kubetune.ui.jobs import Jobs
from kubetune.ui.server import application
from kubetune.ui.site import Site
from tests import browser

MODEL = Path(kubetune.__file__).parent / "cli" / "local" / "embedded" / "model"
TOKEN = "a-token-of-this-test"
OURS = {"origin": "http://localhost"}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with TestClient(
        application(Site.of(tmp_path / "outputs"), TOKEN), base_url="http://localhost"
    ) as opened:
        opened.get("/", params={"token": TOKEN})
        yield opened


@pytest.fixture
def values(tmp_path: Path) -> dict[str, str]:
    data = tmp_path / "train.jsonl"
    turns = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "a word"}]
    data.write_text("".join(json.dumps({"messages": turns, "n": i}) + "\n" for i in range(40)))
    return {
        "name": "first", "model.path": str(MODEL), "data.train": str(data), "lora": "true", "lora.r": "4",
        "training.num_train_epochs": "2", "data.eval": "0.1", "training.global_batch_size": "8",
    }  # fmt: skip


def ask(client: TestClient, path: str, **body: Any) -> Any:
    return client.post(path, json=body, headers=OURS).json()


def test_the_form_has_every_key_but_those_that_run_code(client: TestClient) -> None:
    first, groups = form()
    keys = {field.key for field in (*first, *(field for group in groups for field in group.fields))}
    page = client.get("/new").text
    assert all(f'name="{key}"' in page for key in keys)
    assert {
        "training.optim",
        "compute.gpus_per_node",
        "kubernetes.namespace",
        "data.overlong",
    } <= keys
    assert not [key for key in keys if key.startswith(CODE)]
    assert "to see what is learned, such as <code>0.05</code>, or a file" in page
    assert "`" not in page
    choices = {field.key: dict(field.choices) for group in groups for field in group.fields}
    assert {"cosine", "linear", "constant"} <= choices["training.lr_scheduler_type"].keys()


def test_what_is_typed_is_planned(client: TestClient, values: dict[str, str]) -> None:
    answer = ask(client, "/new/plan", values=values)
    assert answer["problems"] == []
    facts = dict(answer["facts"])
    assert facts["method"].startswith("lora-r4")
    assert facts["steps"].startswith("10 (2 epochs)")
    card = {cell["label"]: cell for cell in answer["card"]}
    assert card["Steps"]["value"] == "10"
    assert card["Memory"]["percent"] >= 1
    assert " % of " in card["Memory"]["about"]
    assert "r: 4" in answer["yaml"]
    wrong = ask(
        client, "/new/plan", values={**values, "training.learning_rate": "fast", "modell": "x"}
    )
    assert any("learning_rate" in text for text in wrong["problems"])
    assert any("modell" in text for text in wrong["problems"])
    torn = ask(client, "/new/plan", values={**values, "lora": ""})
    assert "lora.r: for LoRA only" in "".join(torn["problems"]), (
        "nothing that is typed is left out in silence"
    )
    full = ask(client, "/new/plan", values={**values, "lora": "", "lora.r": ""})
    assert dict(full["facts"])["method"].startswith("full")


@pytest.mark.parametrize(
    ("name", "text", "task", "about", "label", "fixed"),
    [
        (
            "sums.csv",
            "request,reply\n" + "".join(f"{i} + 1?,it is {i + 1}\n" for i in range(30)),
            "",
            "30 rows. Chat and text: prompts and answers",
            "Map columns: prompt = request, completion = reply",
            {"data.train.columns.prompt": "request", "data.train.columns.completion": "reply"},
        ),
        (
            "pairs.jsonl",
            "".join(f'{{"prompt": "{i}?", "chosen": "a", "rejected": "b"}}\n' for i in range(30)),
            "causal_lm",
            "30 rows. Better and worse answers",
            "Set task to Better and worse answers (DPO)",
            {"task": "preference"},
        ),
        (
            "films.tsv",
            "text\tlabel\n" + "a film\tgood\nno film\tbad\n" * 15,
            "",
            "30 rows. Classes for texts",
            "Set task to Classes for texts",
            {"task": "sequence_classification"},
        ),
        (
            "reviews.tsv",
            "review\tsentiment\n" + "a film\tgood\nno film\tbad\n" * 15,
            "sequence_classification",
            "30 rows. Classes for texts",
            "Map columns: text = review, label = sentiment",
            {"data.train.columns.text": "review", "data.train.columns.label": "sentiment"},
        ),
        (
            "verdicts.tsv",
            "review\tverdict\n" + "a film\thappy\nno film\tunhappy\n" * 15,
            "sequence_classification",
            "30 rows. Classes for texts",
            "Map columns: text = review, label = verdict",
            {"data.train.columns.text": "review", "data.train.columns.label": "verdict"},
        ),
        (
            "schemas.jsonl",
            '{"question": "How many?", "context": "CREATE TABLE t", "answer": "SELECT 1"}\n' * 30,
            "",
            "30 rows. Chat and text: conversations",
            "Map columns: instruction = question, input = context, output = answer",
            {
                "data.train.columns.instruction": "question",
                "data.train.columns.input": "context",
                "data.train.columns.output": "answer",
            },
        ),
        (
            "prompts.jsonl",
            '{"prompt": [{"role": "user", "content": "1 + 1?"}], "ground_truth": "2"}\n' * 30,
            "",
            "30 rows. Learning by reward",
            "Set task to Learning by reward (GRPO)",
            {"task": "grpo", "rewards": "numeric"},
        ),
        (
            "moods.jsonl",
            "".join(
                f'{{"text": "The film {i}.", "verdict": "{i % 2}", "mood": "{i % 3}"}}\n'
                for i in range(30)
            ),
            "reward_model",
            "30 rows. Chat and text: plain texts: every token is learned. `mood` (3 values) is not used",
            "Set task to Chat and text",
            {"task": "causal_lm"},
        ),
    ],
)
def test_a_look_at_data_shows_rows_and_a_button_that_fixes_the_form(
    client: TestClient,
    tmp_path: Path,
    values: dict[str, str],
    name: str,
    text: str,
    task: str,
    about: str,
    label: str,
    fixed: dict[str, str],
) -> None:
    (tmp_path / name).write_text(text)
    typed = {**values, "data.train": str(tmp_path / name), "task": task}
    seen = ask(client, "/new/look", values=typed)
    assert len(seen["rows"]) == 3
    assert len(seen["rows"][0]) == len(seen["columns"])
    assert seen["about"].startswith(about)
    assert seen["fixes"] == [{"label": label, "values": fixed}]
    # The form sends settings without a field, such as columns, before all others.
    after = {**fixed, **{key: value for key, value in typed.items() if key not in fixed}}
    assert ask(client, "/new/look", values=after)["fixes"] == [], "the button has done its work"
    assert ask(client, "/new/plan", values=after)["problems"] == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "few.csv",
            "question,answer\n" + "".join(f"What is {n} + 1?,{n + 1}\n" for n in range(60)),
        ),
        ("tiny.csv", "prompt,completion\n" + "".join(f"{n}?,{n}\n" for n in range(12))),
        ("large.csv", "prompt,completion\n" + "".join(f"{n}?,{n}\n" for n in range(6000))),
        ("plain.txt", "A text to learn.\nAnother one.\n" * 600),
        ("films.tsv", "review\tverdict\n" + "a film\thappy\nno film\tunhappy\n" * 15),
        ("marks.csv", "text,label\n" + "".join(f"film {n},{n / 7:.2f}\n" for n in range(30))),
        (
            "pairs.jsonl",
            "".join(f'{{"prompt": "{n}?", "chosen": "a", "rejected": "b"}}\n' for n in range(30)),
        ),
        (
            "judged.jsonl",
            "".join(
                f'{{"prompt": "{n}?", "completion": "a", "label": {str(n % 2 == 0).lower()}}}\n'
                for n in range(30)
            ),
        ),
        (
            "sums.jsonl",
            '{"prompt": [{"role": "user", "content": "1 + 1?"}], "ground_truth": "2"}\n' * 30,
        ),
    ],
)
def test_the_form_fills_in_what_init_writes(
    client: TestClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    typed = {"data.train": name, "model.path": str(MODEL)}
    seen = ask(client, "/new/look", values=typed, touched=list(typed))
    assert seen["fixes"] == []
    filled = {key: value for key, value in seen["suits"].items() if value}
    main(["init", name, "--model", str(MODEL), "-o", "made.yaml"])
    written = resolved(load_config(tmp_path / "made.yaml"))
    overrides = [f"{key}={value}" for key, value in sorted({**typed, **filled}.items())]
    proposed = resolved(load_config(None, overrides=overrides))
    assert written.pop("output") == f"outputs/{written['name']}"
    proposed.pop("output")
    assert proposed == written


def test_what_somebody_has_touched_is_left_alone(client: TestClient, tmp_path: Path) -> None:
    file = tmp_path / "few.csv"
    file.write_text("prompt,completion\n" + "".join(f"{n}?,{n}\n" for n in range(160)))
    values = {"data.train": str(file), "training.num_train_epochs": "1", "data.eval": "0.05"}
    seen = ask(client, "/new/look", values=values, touched=["training.num_train_epochs"])
    assert "training.num_train_epochs" not in seen["suits"]
    assert seen["suits"]["data.eval"] == "0.1"
    assert seen["suits"]["name"] == "few"
    assert seen["filled"][:2] == ["Evaluation data = 0.1", "Batch size = 8"]
    assert "Epochs" not in " ".join(seen["filled"])
    reviews = tmp_path / "films.tsv"
    reviews.write_text("review\tverdict\n" + "a film\thappy\nno film\tunhappy\n" * 15)
    seen = ask(client, "/new/look", values={"data.train": str(reviews)}, touched=[])
    assert "Task = Classes for texts" in seen["filled"]
    # An empty field is a choice too: full fine-tuning, and nothing held out.
    chosen = {"lora": "", "data.eval": "", "task": "causal_lm"}
    full = ask(client, "/new/look", values={**values, **chosen}, touched=list(chosen))["suits"]
    assert not [key for key in full if key.startswith(("lora", "data.eval", "evaluation"))]
    assert full["training.learning_rate"] == "1e-05"
    # Another task than the rows are for has its own learning rate, and the epochs that suit the rows.
    other = ask(client, "/new/look", values={**values, "task": "preference"}, touched=["task"])
    assert other["suits"]["training.learning_rate"] == "5e-06"
    assert other["suits"]["training.num_train_epochs"] == "3"
    assert not [key for key in other["suits"] if key.startswith("evaluation")]
    assert other["fixes"][0]["values"] == {"task": "causal_lm"}
    # The settings of a run that is repeated are its own.
    assert "suits" not in ask(client, "/new/look", values=values, touched=None)
    # A name that a run has is not proposed, and without data only what suits any rows is.
    (tmp_path / "outputs" / "few").mkdir(parents=True)
    assert ask(client, "/new/look", values=values, touched=[])["suits"]["name"] == "few-2"
    none = ask(client, "/new/look", values={"data.train": "nowhere"}, touched=[])["suits"]
    assert none["training.num_train_epochs"] == "1"
    assert "name" not in none


@pytest.mark.parametrize(
    ("typed", "problem", "label", "fixed"),
    [
        ({"lora": ""}, "lora.r: for LoRA only", "Set method to LoRA", {"lora": "true"}),
        ({"name": "First Run!"}, "name: found", "Call it first-run", {"name": "first-run"}),
        (
            {"training.learning_rate": "fast"},
            "training.learning_rate: found",
            "Empty “Learning rate”",
            {"training.learning_rate": ""},
        ),
        ({"modell": "x"}, "modell: unknown key", "Empty “modell”", {"modell": ""}),
        (
            {"data.train": "trian.jsonl"},
            "trian.jsonl does not exist",
            "Use train.jsonl",
            {"data.train": "train.jsonl"},
        ),
        (
            {"training.global_batch_size": "1"},
            "a step of fewer than 8 rows",
            "Set batch size to 32",
            {"training.global_batch_size": "32"},
        ),
        (
            {"data.max_length": "8"},
            "data.train: 36 of 36 records",
            "Allow rows of 16 tokens",
            {"data.max_length": "16"},
        ),
        (
            {"data.max_length": "8", "data.max_lost_share": "1"},
            "36 of 36 records of train left out: longer than 8 tokens",
            "Cut longer rows instead",
            {"data.overlong": "truncate"},
        ),
    ],
)
def test_each_problem_has_the_button_that_fixes_it(
    client: TestClient,
    values: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    typed: dict[str, str],
    problem: str,
    label: str,
    fixed: dict[str, str],
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = ask(client, "/new/plan", values={**values, **typed})
    (fix,) = [fix for fix in answer["fixes"] if fix["of"].startswith(problem)]
    assert fix["of"] in (*answer["problems"], *answer["warnings"])
    assert fix["label"].startswith(label)
    assert fix["values"] == fixed
    after = ask(client, "/new/plan", values={**values, **typed, **fix["values"]})
    assert fix["of"] not in (*after["problems"], *after["warnings"]), "it has done its work"


def test_all_mistakes_are_found_at_once_each_at_its_field(
    client: TestClient, values: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "small").mkdir(parents=True)
    (tmp_path / "outputs" / "first").mkdir(parents=True)
    wrong = {"model.path": "models/smal", "data.train": "trian.jsonl"}
    answer = ask(client, "/new/plan", values={**values, **wrong})
    fields = {text: answer["fields"][text] for text in answer["problems"]}
    assert set(fields.values()) == {"name", "model.path", "data.train"}, fields
    fixed: dict[str, str] = {}
    for fix in answer["fixes"]:
        fixed |= fix["values"]
    right = {"model.path": "./models/small", "data.train": "train.jsonl", "name": "first-2"}
    assert fixed == right
    # What is no config hides neither a file that is not there, nor a word that is nearly right.
    typed = {"training.learning_rate": "fast", "training.lr_scheduler_type": "cosin"}
    answer = ask(client, "/new/plan", values={**values, **typed, "data.train": "trian.jsonl"})
    assert {answer["fields"][text] for text in answer["problems"]} == {*typed, "data.train"}
    assert {"training.lr_scheduler_type": "cosine"} in [fix["values"] for fix in answer["fixes"]]
    assert answer["yaml"] == answer["command"] == answer["summary"] == ""
    # A path that is a part of another one, or a key below a field.
    typed = {"data.train": "train.jsonl", "data.eval": "data/train.jsonl"}
    assert field_of("data/train.jsonl:3: is no JSON", typed) == "data.eval"
    assert field_of("train.jsonl:3: is no JSON", typed) == "data.train"
    assert field_of("data.train.columns.text: found 1", typed) == "data.train"
    assert field_of("a step is noisy; set training.global_batch_size: 8", typed) == (
        "training.global_batch_size"
    )
    assert field_of("the server is tired", typed) == ""


def test_what_is_wrong_with_a_field_is_one_plain_sentence(
    client: TestClient, values: dict[str, str]
) -> None:
    wrong = {
        "name": "bad name/x", "model.path": "models/nothing", "data.train": "data/nowhere.jsonl",
        "data.eval": "1.7", "training.learning_rate": "fast", "training.lr_scheduler_type": "cosin",
    }  # fmt: skip
    answer = ask(client, "/new/plan", values={**values, **wrong})
    sentences = {answer["fields"][text]: answer["sentences"][text] for text in answer["problems"]}
    offline = "models/nothing is neither a folder nor downloaded, and the hub cannot be reached; choose one at hand"
    assert sentences == {
        "name": "Expected at most 40 lower case letters, digits and inner dashes, such as support-bot",
        "model.path": offline,
        "data.train": "data/nowhere.jsonl does not exist",
        "data.eval": "Expected a share of the rows below 1, such as 0.05, or a file",
        "training.learning_rate": "Expected a number above 0 and below 10",
        "training.lr_scheduler_type": "Did you mean cosine?",
    }


def test_a_bare_share_says_what_it_is_a_share_of(
    client: TestClient, values: dict[str, str]
) -> None:
    def said(**typed: str) -> str:
        shown = {**values, **typed}
        return str(ask(client, "/new/look", values=shown, touched=[])["held_out"])

    values.pop("data.eval")
    assert said() == "10 % of the 40 rows"
    assert said(**{"data.train": ""}) == "5 % of the rows"
    answer = ask(client, "/new/look", values={**values, "data.eval": "held.jsonl"}, touched=None)
    assert answer["held_out"] == ""


def test_a_name_that_is_taken_has_a_button_with_a_free_one(
    client: TestClient, values: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "outputs" / "first").mkdir(parents=True)
    # What it holds keeps no run from starting under another name.
    (tmp_path / "outputs" / "first" / "notes.txt").touch()
    taken = ask(client, "/new/plan", values=values)
    assert taken["problems"] == ["A run is called first already."]
    assert [(fix["label"], fix["values"]) for fix in taken["fixes"]] == [
        ("Call it first-2", {"name": "first-2"})
    ]
    assert as_run_name("-- A b/C 1 " + "x" * 50) == "a-b-c-1-" + "x" * 31
    assert as_run_name("…") == ""


def test_a_plan_is_summed_up_in_a_line(client: TestClient, values: dict[str, str]) -> None:
    answer = ask(client, "/new/plan", values=values)
    assert re.match(r"10 steps · [\d.]+\sMiB", answer["summary"]), answer["summary"]
    labels = [label for label, _ in answer["facts"]]
    assert "steps" in labels
    assert not [text for _, text in answer["facts"] if text.startswith(("warning: ", "error: "))]


def test_models_and_files_at_hand_are_listed(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "work"
    for folder in ("models/small", "data", ".hidden", "run"):
        (place / folder).mkdir(parents=True)
    (place / "models/small/config.json").write_text("{}")
    (place / "models/small/model.safetensors").write_text("")
    for file in ("data/train.jsonl", ".hidden/x.jsonl", "run/metrics.jsonl", "notes.md"):
        (place / file).write_text("{}\n")
    (place / "run/resolved.json").write_text("{}")
    snapshot = tmp_path / "hub/models--Qwen--Qwen3-8B/snapshots/1a"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_text("")
    monkeypatch.chdir(place)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    listed = client.get("/new/at-hand").json()
    assert listed["models"]["choices"] == [
        ["Qwen/Qwen3-8B", "Qwen/Qwen3-8B (downloaded)"],
        ["models/small", "models/small (folder)"],
    ]
    assert listed["data"] == {
        "choices": [["data/train.jsonl", "data/train.jsonl (3 B)"]],
        "left_out": 0,
        "ran_out": False,
    }
    monkeypatch.setattr(at_hand, "_MOST_SENT", 1)
    monkeypatch.setattr(at_hand, "_SECONDS", -1)
    listed = client.get("/new/at-hand").json()
    assert listed["models"]["ran_out"]
    assert listed["data"] == {"choices": [], "left_out": 0, "ran_out": True}
    monkeypatch.setattr(at_hand, "_SECONDS", 60)
    assert client.get("/new/at-hand").json()["models"]["left_out"] == 1


def test_a_model_that_several_runs_began_with_is_listed_once_at_hand(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {"here": "12", "elsewhere": "12", "changed": "123"}
    for place, text in weights.items():
        folder = tmp_path / place / "models/small"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_text(text)
    for name, place in (("a", "elsewhere"), ("b", "here"), ("c", "changed"), ("d", "elsewhere")):
        run_dir = tmp_path / "outputs" / name
        run_dir.mkdir(parents=True)
        path = tmp_path / place / "models/small"
        config = load_config(None, overrides=[f"model.path={path}", "data.train=x.jsonl"])
        (run_dir / "resolved.json").write_text(json.dumps(resolved(config)))
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert client.get("/new/at-hand").json()["models"]["choices"] == [
        ["models/small", "models/small (base of 3 runs)"],
        [str(tmp_path / "changed/models/small"), "models/small (base of c)"],
    ]


def test_data_that_were_trained_on_come_first_at_hand(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "work"
    for folder in ("data", "search/trials"):
        (place / folder).mkdir(parents=True)
    for age, name in enumerate(["test", "newest", "older", "used", "held_out-2", "latest-eval"]):
        file = place / "data" / f"{name}.jsonl"
        file.write_text("{}\n")
        os.utime(file, (1e9 - age, 1e9 - age))
    # The record of a sweep holds no rows.
    for name in ("sweep.json", "trials.json", "trials/x.jsonl"):
        (place / "search" / name).write_text("{}")
    used = place / "data/used.jsonl"
    before = tmp_path / "outputs" / "before"
    before.mkdir(parents=True)
    config = load_config(None, overrides=[f"model.path={MODEL}", f"data.train={used}"])
    (before / "resolved.json").write_text(json.dumps(resolved(config)))
    monkeypatch.chdir(place)
    listed = client.get("/new/at-hand").json()["data"]["choices"]
    names = [Path(path).stem for path, _ in listed]
    assert names == ["used", "newest", "older", "test", "held_out-2", "latest-eval"]


def test_the_demo_is_begun_beside_the_runs(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(Jobs, "start", lambda self, name, words: begun.append((name, list(words))))
    for page in ("/", "/compare", "/data", "/chat"):
        text = client.get(page).text
        assert "data-demo" in text, page
        assert '<a class="button main" href="/new">Start a run</a>' in text, page
    folder = tmp_path / "outputs" / "demo"
    answer = ask(client, "/new/demo")
    assert answer == {
        "problems": [],
        "job": "demo/run",
        "command": f"kubetune demo --output {folder}",
    }
    assert begun == [("demo/run", ["demo", "--output", str(folder)])]
    assert client.get("/new/job", params={"name": "demo/run"}).json()["run"] is None


def test_bad_records_of_the_first_ones_are_named_beside_the_plan(
    client: TestClient, values: dict[str, str]
) -> None:
    data = Path(values["data.train"])
    answer = ask(client, "/new/plan", values=values)
    assert answer["warnings"][0].startswith("4 of 4 rows of eval are in train too")
    notes = [text for label, text in answer["facts"] if label == "data"]
    assert notes[-2:] == ["note: train: keys not used: n × 36", "note: eval: keys not used: n × 4"]
    data.write_text("{torn\n" + data.read_text() + '{"messages": "none"}\n')
    answer = ask(client, "/new/plan", values=values)
    problems = [line.partition(": ")[0] for line in answer["problems"]]
    assert problems == [f"{data}:1", f"{data}:42"]
    assert answer["bad"] == [], "each is named once"
    data.write_text("{torn\n" * 2)
    assert f"{data}:1: " in "".join(ask(client, "/new/plan", values=values)["problems"]), (
        "of all that there are"
    )


HOLDER = """
import sys
from pathlib import Path
from kubetune.supervisor.place import hold
with hold(Path(sys.argv[1]), 0):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_run_is_stopped_by_whoever_holds_it_and_nobody_else_is(
    client: TestClient, tmp_path: Path
) -> None:
    from tests.run.test_report_long import write_run

    (tmp_path / "outputs").mkdir()
    run_dir = write_run(tmp_path / "outputs" / "a", 60)
    assert "Run again<" in client.get("/run?dir=a").text
    lock = run_dir / "logs" / "node-0.lock"
    command = [sys.executable, "-P", "-c", HOLDER, str(run_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        page = client.get("/run?dir=a").text
        assert "data-stop" in page
        assert f">kubetune stop {run_dir}</code>" in browser.unmarked(page)
        assert "data-continue" not in page
        assert ask(client, "/run/stop", dir="a") == {"problems": []}
        assert process.wait() == -signal.SIGTERM
        content = lock.read_text()
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as foreign:
            for text in (
                content,
                content.replace(f" {process.pid} ", f" {foreign.pid} "),
                "process 1 on\n",
                "\xff",
            ):
                lock.write_text(text)
                assert "does not run on this machine" in "".join(
                    ask(client, "/run/stop", dir="a")["problems"]
                ), text
            assert foreign.poll() is None
            foreign.communicate(b"\n")
    assert "no run of this name" in "".join(ask(client, "/run/stop", dir="../a")["problems"])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert main(["stop", str(run_dir)]) == 0
        assert process.poll() is not None, "its input is open: only the signal ends it"
    assert main(["stop", str(run_dir)]) == main(["stop", str(tmp_path)]) == 2


def test_a_run_goes_on_by_its_file_and_what_its_start_was_told_beside_it(
    client: TestClient, values: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(Jobs, "start", lambda self, name, words: begun.append((name, list(words))))
    run_dir = tmp_path / "outputs" / "of a team" / "old"
    settings = {
        "model": str(MODEL),
        "data": {"train": values["data.train"]},
        "lora": {"r": 8, "alpha": 32},
    }
    overrides = ["lora.r=16", "training.learning_rate=0.001"]
    source = tmp_path / "run.yaml"
    source.write_text(json.dumps(settings))
    config = load_config(source, overrides=[*overrides, f"output={run_dir}"])
    create_run_dir(config, run_dir, source=source.read_text())
    told_by_page = browser.unmarked(client.get("/run?dir=of a team/old").text)
    answer = ask(client, "/run/continue", dir="of a team/old")
    words = ["train", f"{run_dir}/config.yaml", f"output={run_dir}", *overrides]
    assert answer == {
        "problems": [],
        "job": "of a team/old",
        "command": shlex.join(["kubetune", *words]),
    }
    assert f">{html.escape(answer['command'])}</code>" in told_by_page.replace("&#39;", "&#x27;")
    assert begun == [("of a team/old", words)]
    assert client.get("/new/job", params={"name": "of a team/old"}).json()["held"] is False
    assert client.get("/new/job", params={"name": "of a team/../old"}).status_code == 400
    assert load_config(Path(words[1]), overrides=words[2:]) == config


def test_a_value_of_the_command_line_is_shown_there_and_mended(
    client: TestClient, values: dict[str, str], tmp_path: Path
) -> None:
    run_dir = tmp_path / "outputs" / "old"
    data = {"train": values["data.train"]}
    source = tmp_path / "run.yaml"
    source.write_text(
        json.dumps({"name": "old", "model": str(MODEL), "data": data, "lora": {"r": 8}})
    )
    overrides = ['lora.target_modules=["qproj"]', "training.max_steps=3"]
    config = load_config(source, overrides=[*overrides, f"output={run_dir}"])
    create_run_dir(config, run_dir, source=source.read_text())
    reason = "lora.target_modules: this model has no module named qproj; did you mean q_proj?"
    ended = {"code": 2, "reason": reason, "step": None, "error": "ConfigError"}
    (run_dir / "exit.json").write_text(json.dumps(ended))
    (run_dir / "logs").mkdir(exist_ok=True)
    (run_dir / "logs" / "rank-0.log").write_text(f"one line\n[ERROR] {reason}\n")
    page = html.unescape(browser.unmarked(client.get("/run?dir=old").text))
    assert "given on the command line" in page
    assert """<span class="here"><b></b>'lora.target_modules=["qproj"]'""" in page
    again = f"train {run_dir}/config.yaml name=old-2 output={run_dir}-2 training.max_steps=3"
    assert f"""{again} 'lora.target_modules=["q_proj"]'</code>""" in page
    assert "Continue: " not in page, "it would fail the same way"
    assert '<span class="error">[ERROR] lora' in page
    # Of the file, the line is shown only if it sets the key.
    text = "lora: {r: 8, target_modules: [qproj]}\nname: old\n"
    section = "lora:\n  r: 8\nname: old\ntarget_modules: of another\n"
    for content, is_shown in (
        (text, True),
        (text.replace("target_modules", "alpha"), False),
        (section, False),
    ):
        (run_dir / "config.yaml").write_text(content)
        assert ('<span class="here"><b>1</b>lora' in client.get("/run?dir=old").text) == is_shown
    assert "The line of the file" not in client.get("/run?dir=old").text


@pytest.mark.parametrize("section", [None, {}, {"r": 8, "alpha": 32}])
def test_a_run_is_run_again_with_its_settings(
    client: TestClient, values: dict[str, str], tmp_path: Path, section: dict[str, int] | None
) -> None:
    run_dir = tmp_path / "outputs" / "old"
    run_dir.mkdir(parents=True)
    settings = {"name": "old", "model": str(MODEL), "data": {"train": values["data.train"]}, "output": str(run_dir),
             "tracking": {"mlflow": {"tags": {"team": "nlp"}}}}  # fmt: skip
    old = load_config(settings if section is None else {**settings, "lora": section})
    (run_dir / "resolved.json").write_text(json.dumps(resolved(old)))
    consent.allow(consent.effects_of(old))  # as its start did
    page = client.get("/new?dir=old").text
    typed = {
        html.unescape(key): html.unescape(text)
        for key, text in re.findall(r'name="([^"]+)" value="([^"]+)"', page)
    }
    for chosen in re.findall(
        r'<select id="f-([^"]+)".*?<option value="([^"]+)" selected', page, re.DOTALL
    ):
        if "</select>" not in chosen[0]:
            typed[chosen[0]] = chosen[1]
    extra = json.loads(html.unescape(re.findall(r'data-extra="([^"]*)"', page)[0]))
    again = ask(client, "/new/plan", values={**extra, **typed, "name": "again"}, base="old")
    assert again["problems"] == []
    (tmp_path / "again.yaml").write_text(again["yaml"])
    new = load_config(tmp_path / "again.yaml")
    assert new.model_copy(update={"name": "old", "output": old.output}) == old


@pytest.mark.parametrize(
    "typed",
    [
        {"hooks.on_event": "touch /tmp/x"},
        {"hooks": "{on_event: touch /tmp/x}"},
        {
            "evaluation.metrics.file": "x.py",
            "evaluation.metrics.functions": "[f]",
            "evaluation.generate": "{}",
        },
        {"model.trust_remote_code": "true", "model.revision": "a" * 40},
    ],
)
def test_nothing_that_runs_code_is_taken_from_a_page(
    client: TestClient, values: dict[str, str], typed: dict[str, str], tmp_path: Path
) -> None:
    for path in ("/new/plan", "/new/start"):
        assert "has code run" in "".join(ask(client, path, values={**values, **typed})["problems"])
    assert not (tmp_path / "outputs").exists()


def test_no_write_without_token_origin_and_json(
    client: TestClient, values: dict[str, str], tmp_path: Path
) -> None:
    body = {"values": values}
    assert client.post("/new/start", json=body).status_code == 403
    assert (
        client.post("/new/start", json=body, headers={"origin": "http://evil.example"}).status_code
        == 403
    )
    form = {**OURS, "content-type": "text/plain"}
    assert client.post("/new/start", content=json.dumps(body), headers=form).status_code == 400
    assert client.post(
        "/run/stop", content="[" * 1_100_000, headers={**OURS, "content-type": "application/json"}
    )
    client.cookies.clear()
    changes = (
        "/new/plan",
        "/new/start",
        "/run/mend",
        "/run/stop",
        "/run/result/start",
        "/run/result/cancel",
    )
    for path in (*changes, "/chat/say"):
        assert client.post(path, json=body, headers=OURS).status_code == 401, path
        assert client.get(path).status_code == 401, path
    assert not (tmp_path / "outputs").exists()


def test_a_start_writes_the_file_that_the_command_names(
    client: TestClient, values: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(Jobs, "start", lambda self, name, words: begun.append((name, list(words))))
    assert "name: left out" in "".join(
        ask(client, "/new/start", values={**values, "name": ""})["problems"]
    )
    answer = ask(client, "/new/start", values=values)
    file = tmp_path / "outputs" / "first.yaml"
    assert answer == {"problems": [], "job": "first", "command": f"kubetune train {file}"}
    assert begun == [("first", ["train", str(file)])]
    config = load_config(file)
    assert (config.name, config.output) == ("first", str(tmp_path / "outputs" / "first"))
    other = ask(client, "/new/start", values={**values, "lora.r": "8"})
    assert "with other settings" in "".join(other["problems"])
    assert load_config(file) == config
    (tmp_path / "outputs" / "first").mkdir()
    assert "is there already" in "".join(ask(client, "/new/start", values=values)["problems"])
    assert len(begun) == 1
    assert client.get("/new/job", params={"name": "../x"}).status_code == 400


def test_a_failed_run_is_mended_and_started_under_another_name(
    client: TestClient, values: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[list[str]] = []
    monkeypatch.setattr(Jobs, "start", lambda self, name, words: begun.append(list(words)))
    wide = {**values, "training.per_device_train_batch_size": "8"}
    assert ask(client, "/new/start", values=wide)["problems"] == []
    run_dir = tmp_path / "outputs" / "first"
    run_dir.mkdir()
    settings = resolved(load_config(tmp_path / "outputs" / "first.yaml"))
    (run_dir / "resolved.json").write_text(json.dumps(settings))
    reason = "rank 0 ran out of memory (CUDA)"
    ended = {"code": 3, "reason": reason, "step": None, "error": "OutOfMemory"}
    (run_dir / "exit.json").write_text(json.dumps(ended))
    assert "Set per_device_train_batch_size to 4, and start" in client.get("/run?dir=first").text
    answer = ask(client, "/run/mend", dir="first")
    assert (answer["problems"], answer["job"]) == ([], "first-2")
    assert begun[-1] == ["train", str(tmp_path / "outputs" / "first-2.yaml")]
    mended = load_config(tmp_path / "outputs" / "first-2.yaml")
    assert mended.training.per_device_train_batch_size == 4
    assert mended.lora == load_config(tmp_path / "outputs" / "first.yaml").lora
    assert mended.output == str(tmp_path / "outputs" / "first-2")


def test_a_disk_that_takes_nothing_more_is_told_and_holds_no_half_file(
    client: TestClient, values: dict[str, str], tmp_path: Path
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        (problem,) = ask(client, "/new/start", values=values)["problems"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "allow larger files (ulimit -f)" in problem
    assert list((tmp_path / "outputs").iterdir()) == []


def test_a_start_that_is_refused_leaves_no_file_and_no_process(
    client: TestClient, values: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    log = tmp_path / "outputs" / ".kubetune-ui" / "first.log"
    log.mkdir(parents=True)
    (problem,) = ask(client, "/new/start", values=values)["problems"]
    assert "first.log: Is a directory" in problem
    log.rmdir()
    monkeypatch.setattr(jobs, "write_atomic", full)
    (problem,) = ask(client, "/new/start", values=values)["problems"]
    assert "No space left" in problem
    begun: Jobs = client.app._app.state.site.jobs  # type: ignore[attr-defined]
    assert begun._children["first"].poll() is not None, "what was begun does not go on"
    assert not (tmp_path / "outputs" / "first.yaml").exists()


@pytest.mark.parametrize("name", ["run.log", "run.out", "run.json", ""])
def test_a_log_that_leads_out_of_a_received_folder_is_not_written(
    tmp_path: Path, name: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "run.log").write_text("precious")
    folder = tmp_path / "received" / ".kubetune-ui"
    if name:
        folder.mkdir(parents=True)
        (folder / name).symlink_to(outside / "run.log")
    else:
        folder.parent.mkdir()
        folder.symlink_to(outside)
    jobs = Jobs(folder.parent)
    with pytest.raises(IrregularFileError, match="leads out of"):
        jobs.start("run", ["runs"])
    with pytest.raises(IrregularFileError, match="leads out of"):
        jobs.look("run")
    assert (outside / "run.log").read_text() == "precious"


def test_commands_outlive_the_server_that_began_them(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path)
    jobs.start("x", ["runs", str(tmp_path / "nowhere")])
    child = jobs._children["x"]
    assert Jobs(tmp_path).is_running("x") or child.wait() is not None
    child.wait()
    seen = jobs.look("x")
    assert (seen["running"], seen["code"]) == (False, USER)
    assert "no such folder" in seen["lines"][-1]
    later = Jobs(tmp_path)
    assert not later.is_running("x")
    assert later.look("x")["words"][0] == "runs"
    record = tmp_path / ".kubetune-ui" / "x.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "pid": 1}))
    assert later.process("x") is None, "the number is another's by now"


def test_a_start_that_failed_leaves_its_name_free(
    client: TestClient, values: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: Jobs = client.app._app.state.site.jobs  # type: ignore[attr-defined]
    file = tmp_path / "outputs" / "first.yaml"
    jobs.start("first", ["train", str(file)])
    jobs._children["first"].wait()
    file.write_text("by: hand\n")
    assert "with other settings" in "".join(ask(client, "/new/start", values=values)["problems"])
    os.utime(file, (0, 0))
    monkeypatch.setattr(Jobs, "start", lambda self, name, words: None)
    assert ask(client, "/new/start", values={**values, "lora.r": "8"})["problems"] == []
    assert "r: 8" in file.read_text()


def test_one_asks_a_run_for_what_its_task_gives(
    client: TestClient, values: dict[str, str], tmp_path: Path
) -> None:
    from tests.run.test_report_long import write_run

    (tmp_path / "outputs").mkdir()
    run_dir = write_run(tmp_path / "outputs" / "a", 60)
    (run_dir / "exit.json").write_text(json.dumps({"code": 0, "reason": "done", "step": 60}))
    checkpoints.commit(run_dir, checkpoints.State(step=50), lambda folder: None)
    settings = json.loads((run_dir / "resolved.json").read_text())
    kinds = {
        "causal_lm": ("Chat", True),
        "preference": ("Chat", True),
        "sequence_classification": ("Classify", False),
        "reward_model": ("Score", False),
    }
    for task, (title, is_beside_base) in kinds.items():
        (run_dir / "resolved.json").write_text(json.dumps({**settings, "task": task}))
        page = client.get("/chat?dir=a&beside=base").text
        assert f"<h1>{title}</h1>" in page
        assert ("Before fine-tuning" in page) == is_beside_base
        named = "Compare answers" if task == "preference" else title
        assert f">{named}</a>" in client.get("/run?dir=a").text


def test_held_out_rows_are_offered_to_a_classifier(
    client: TestClient, values: dict[str, str], tmp_path: Path
) -> None:
    from tests.run.test_report_long import write_run

    (tmp_path / "outputs").mkdir()
    run_dir = write_run(tmp_path / "outputs" / "a", 60)
    checkpoints.commit(run_dir, checkpoints.State(step=50), lambda folder: None)
    held_out = tmp_path / "held-out.jsonl"
    rows = [("a good film", "good"), ("a fine film", "good"), ("no film", "bad"), ("", 3)]
    held_out.write_text("".join(json.dumps({"text": t, "label": n}) + "\n" for t, n in rows))
    config = load_config(
        None,
        overrides=[
            f"model.path={MODEL}",
            f"data.train={values['data.train']}",
            f"data.eval={held_out}",
            "task=sequence_classification",
        ],
    )
    (run_dir / "resolved.json").write_text(json.dumps(resolved(config)))
    page = client.get("/chat?dir=a").text
    assert re.findall('data-prompt="([^"]+)"', page) == ["a good film", "no film"]
    assert re.findall("<small>its label: (.+?)</small>", page) == ["good", "bad"]
    held_out.unlink()
    assert "data-prompt" not in client.get("/chat?dir=a").text


def test_a_new_run_begins_as_an_earlier_one_or_with_the_demo(
    client: TestClient, tmp_path: Path
) -> None:
    from tests.run.test_report_long import write_run

    (tmp_path / "outputs").mkdir(exist_ok=True)
    begun = client.get("/new").text
    assert "Try the demo" in begun
    for number in range(6):
        write_run(tmp_path / "outputs" / f"run-{number}", 60)
    begun = client.get("/new").text
    assert begun.count('href="/new?dir=run-') == 4, "the newest of many"
    assert "Try the demo" not in begun
    assert "Or begin as" not in client.get("/new?dir=run-1").text


def test_chat_takes_turns_and_numbers_only(client: TestClient, tmp_path: Path) -> None:
    from tests.run.test_report_long import write_run

    (tmp_path / "outputs").mkdir()
    write_run(tmp_path / "outputs" / "a", 60)
    assert "No model to talk to yet" in client.get("/chat").text
    turn = {"role": "user", "content": "hello"}
    for body, message in [
        ({"dir": "../a", "messages": [turn]}, "no run of this name"),
        ({"dir": "a", "messages": []}, "expected a list of turns"),
        ({"dir": "a", "messages": [{"role": "root", "content": "x"}]}, "expected turns of role"),
        ({"dir": "a", "messages": [turn], "temperature": "hot"}, "expected numbers"),
        ({"dir": "a", "messages": [turn], "top_p": 3}, "top_p"),
    ]:
        answer = client.post("/chat/say", json=body, headers=OURS)
        assert answer.status_code in (400, 404), body
        assert message in answer.text
    assert client.get("/chat/stay?dir=a&dir=b&dir=c").status_code == 400


def test_words_between_backticks_are_code_and_nothing_is_html() -> None:
    assert spans("`a<b>` & `c`, or `") == "<code>a&lt;b&gt;</code> &amp; <code>c</code>, or `"


def test_what_is_wrong_is_said_without_places_of_a_terminal(client: TestClient) -> None:
    answer = ask(client, "/new/plan", values={"name": "First Run", "training.seed": "x"})
    problems = answer["problems"]
    assert answer["needed"] == ["Training data", "Model"]
    assert not any(": missing" in line for line in problems), "that nobody has come to yet"
    assert any(line.startswith("name: found") for line in problems)
    assert not [line for line in problems if line.startswith(("command line", "override"))]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/new/plan", "[" * 100_000, 400),
        (
            "/new/plan",
            '{"base": "\\ud800", "values": {"name": "x", "model.path": "x", "data.train": "x"}}',
            200,
        ),
        ("/run/stop", '{"dir": "\\ud800"}', 200),
        ("/run/stop", '{"dir": "a\\u0000"}', 200),
        ("/chat/say", '{"dir": "a\\u0000"}', 404),
    ],
)
def test_what_no_page_would_send_is_no_bug(
    client: TestClient, path: str, body: str, status: int
) -> None:
    headers = {**OURS, "content-type": "application/json"}
    assert client.post(path, content=body, headers=headers).status_code == status
    assert client.get("/new/job", params={"name": "a\0"}).status_code == 400
    assert client.get("/new/job", params={"name": "a file (1).data"}).status_code == 200
