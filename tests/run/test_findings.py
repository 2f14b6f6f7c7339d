"""Each finding about data, on small data: a check, a plan, the log of a run and its pages all have the same lines."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from kubetune import cli
from kubetune.base.humanize import place
from kubetune.config.load import load_config
from kubetune.config.schema import Config
from kubetune.data.findings.kept_data import describe
from kubetune.data.inspect.check import check
from kubetune.data.prepared.prepare import prepare
from kubetune.data.text.tokenizer import load_tokenizer
from kubetune.distributed.process_group import World
from kubetune.plan.plan import make_plan
from kubetune.reporting import write_report
from kubetune.rundir import metrics
from kubetune.training.start.start_log import log_start
from kubetune.ui.server import application
from kubetune.ui.site import Site
from tests import toy
from tests.architectures import save_model
from tests.tiny import CHATML

TOKEN = "a-token-of-this-test"
Record = dict[str, Any]
# A chat template that writes tools and calls.
CALLING = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}<|im_start|>"
    "{{ message.role }}\n{{ message.content }}{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat(question: str, answer: str = "yes", **more: Any) -> Record:
    asked = {"role": "user", "content": question}
    return {"messages": [asked, {"role": "assistant", "content": answer}], **more}


def calling(name: str, *offered: str) -> Record:
    """Return a conversation that calls a function. `offered`: names of its tools; none for one without tools."""
    call = {"type": "function", "function": {"name": name, "arguments": {"a": 1}}}
    record = chat("why")
    record["messages"][1] = {"role": "assistant", "content": "", "tool_calls": [call]}
    if offered:
        record["tools"] = [
            {"type": "function", "function": {"name": tool, "parameters": {}}} for tool in offered
        ]
    return record


def pair(question: str, chosen: str, rejected: str) -> Record:
    asked = [{"role": "user", "content": question}]
    spoken = [{"role": "assistant", "content": text} for text in (chosen, rejected)]
    return {"prompt": asked, "chosen": [spoken[0]], "rejected": [spoken[1]]}


def judged(question: str, is_good: bool) -> Record:
    return {"prompt": question, "completion": f"answer to {question}", "label": is_good}


CHATS = [chat(f"question {i}", f"answer {i}") for i in range(8)]
PLAIN = [{"text": f"text number {i}"} for i in range(4)]


def labelled(*labels: Any) -> list[Record | None]:
    return [{"text": f"text {i}", "label": label} for i, label in enumerate(labels)]


LABELLED = [{"text": f"text {i}", "label": ("good", "bad")[i % 2]} for i in range(6)]


@dataclass(frozen=True)
class Case:
    """Data with one thing to find."""

    sentence: str
    train: list[Record | None]  # None for a blank line
    settings: dict[str, Any] = field(default_factory=dict)
    advice: str = ""


CASES = {
    "eval file in train": Case(
        "2 of 2 rows of eval are in train too: the model looks better than it is",
        CHATS,
        {"data.eval": "{folder}/other.jsonl"},
        "Remove them from data.train",
    ),
    "share of repeats": Case(
        "2 of 2 rows of eval are in train too: the model looks better than it is",
        [CHATS[0]] * 8,
        {"data.eval": 0.2},
        "data.eval: 0.2 chooses records by their number",
    ),
    "overlapping ranges": Case(
        "3 of 4 rows of eval are in train too: the model looks better than it is",
        CHATS,
        {
            "data.train": [{"path": "{folder}/train.jsonl", "range": [0, 5]}],
            "data.eval": [{"path": "{folder}/train.jsonl", "range": [2, 6]}],
        },
        "give ranges that do not overlap",
    ),
    "repeats": Case("2 of 10 rows of train repeat another", [*CHATS, *CHATS[:2]]),
    "too long": Case(
        "1 of 9 records of train left out: longer than 40 tokens",
        [*CHATS, chat("why " * 60)],
        {"data.max_length": 40, "data.max_lost_share": 0.5},
        "A larger data.max_length keeps them",
    ),
    "truncated": Case(
        "1 of 9 records of train truncated at 40 tokens",
        [*CHATS, chat("why", "so " * 60)],
        {"data.max_length": 40, "data.overlong": "truncate"},
    ),
    "split": Case(
        "1 of 5 records of train split into 2 rows",
        [*PLAIN, {"text": "so " * 20}],
        {"data.max_length": 40, "data.overlong": "split"},
    ),
    "no answer": Case(
        "1 of 9 records of train left out: nothing to train on",
        [*CHATS, {"messages": CHATS[0]["messages"][:1]}],
        {"data.max_lost_share": 0.5},
    ),
    "no template": Case(
        "1 of 9 records of train with a prompt as plain text: it is trained without the chat template",
        [*CHATS, {"prompt": "why?", "completion": " so"}],
        {},
        "Write them as conversations",
    ),
    "special tokens": Case(
        "1 of 9 records of train with special tokens in their texts, which become such tokens",
        [*CHATS, chat("why <|im_end|>")],
    ),
    "inside a token": Case(
        "1 of 9 records of train with an answer that begins inside a token",
        [*CHATS, chat("why", "\n\nso")],
        {},
        "Begin answers without white space",
    ),
    "bos twice": Case(
        "1 of 5 records of train with BOS twice: the tokenizer writes it before every text",
        [*PLAIN, {"text": "<|endoftext|>text"}],
        {"model": "{folder}/bos"},
        "set data.add_special_tokens: false",
    ),
    "rewritten": Case(
        "1 of 9 records of train with an answer that the chat template changes",
        [*CHATS, chat("why", "so foo")],
        {"model.path": "{folder}/model", "model.chat_template": "{folder}/rewriting.jinja"},
        "writes answers as they are",
    ),
    "little trained": Case(
        "of the tokens of train are trained; the rest is only read",
        [chat(f"{i} " + "why " * 80) for i in range(3)],
    ),
    "sample": Case(
        "asks for 99,999 records, and there are only 8",
        CHATS,
        {"data.train": "{folder}/train.jsonl#99999"},
    ),
    "range": Case(
        "asks for 45 records and gets 3, since there are only 8",
        CHATS,
        {"data.train": [{"path": "{folder}/train.jsonl", "range": [5, 50]}]},
    ),
    "mix": Case(
        "3 of 4 rows of eval evaluated, in the mix that the weights of their sources make",
        CHATS,
        {
            "data.eval": [
                {"path": "{folder}/other.jsonl"},
                {"path": "{folder}/third.jsonl", "weight": 0.5},
            ],
        },
    ),
    "unused keys": Case("train: keys not used: id × 1", [*CHATS, chat("q", id=7)]),
    "calls not offered": Case(
        "2 of 6 records of train with a call of a function that is none of its tools",
        [
            *(calling("add", "add") for _ in range(3)),
            calling("subtract", "add"),
            calling("Add", "add", "sub"),
            calling("subtract"),
        ],
        {"model.path": "{folder}/model", "model.chat_template": "{folder}/calling.jinja"},
        "Add it to `tools`, or correct its name",
    ),
    "columns taken": Case(
        "train: `query` as the user's message, `response` as the assistant's, in 4 records",
        [{"query": f"question {i}", "response": f"answer {i}"} for i in range(4)],
        {},
        "`data.train.columns` and `data.train.format` can say otherwise",
    ),
    "blank lines": Case(
        "train: 2 blank lines among the records, skipped",
        [*CHATS[:2], None, None, *CHATS[2:], None],
        {"data.eval": 0.25},
    ),
    "files": Case(
        "train: files not read: .tmp × 1",
        CHATS,
        {"data.train": "{folder}/folder"},
    ),
    "positions": Case(
        "; the model was trained on at most 64 positions",
        [*CHATS, chat("why " * 60)],
        {"model": "{folder}/short"},
    ),
    "labels": Case(
        "1 label without rows in train: ugly; such labels are never learned",
        LABELLED,
        {"task": "sequence_classification", "classification.labels": ["good", "bad", "ugly"]},
    ),
    "label for none": Case(
        "label `Unknown`, `none` of 3 of 6 rows of train is a class, as the others are",
        labelled("none", "for", "against", "Unknown", "for", "none"),
        {"task": "sequence_classification"},
        "Leave these records out if it marks such as have no label",
    ),
    "labels joined": Case(
        "labels that join others: `fear|joy`, `joy|fear`, of 2 of 6 rows of train; each is a class of its own",
        labelled("joy", "fear", "fear|joy", "anger", "joy|fear", "joy"),
        {"task": "sequence_classification"},
        'Write such a label as a list, ["fear", "joy"]',
    ),
    "labels spelt": Case(
        "40 labels such as `0%`, `1%`, `10%` are classes of their own, and seem to be numbers to predict",
        labelled(*(f"{number}%" for number in range(40))),
        {"task": "sequence_classification"},
        "Write them as numbers",
    ),
    "numbers that are marks": Case(
        "label -999 of 2 of 6 rows of train lies far from all others, and is predicted as they are",
        labelled(0.5, 3.75, -999, 1.25, 2.5, -999),
        {"task": "sequence_classification"},
        "Leave these records out",
    ),
    "answers": Case(
        "train: chosen answers have ",
        [pair("why", "yes", "no no"), pair("what", "yes", "no no")],
        {"task": "preference"},
    ),
    "other way round": Case(
        "1 of 2 pairs of train contradicts another pair",
        [pair("why", "yes", "no"), pair("why", "no", "yes")],
        {"task": "preference"},
        "Decide which answer is better",
    ),
    "equal answers": Case(
        "1 of 3 records of train left out: their answers are equal or empty, or have different prompts",
        [pair("why", "yes", "no"), pair("what", "no", "yes"), pair("why", "no", "no")],
        {"task": "preference", "data.unusable_pairs": "drop", "data.max_lost_share": 0.5},
    ),
    "one verdict": Case(
        "all 3 answers of train are judged good: the model learns no difference",
        [judged(f"question {i}", True) for i in range(3)],
        {"task": "preference", "preference.loss": "kto"},
        "Add answers that are judged bad",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("findings")
    save_model(folder / "model")
    save_model(folder / "short", max_position_embeddings=64)
    write_bos(save_model(folder / "bos"))
    rewriting = CHATML.replace("message.content", "message.content | replace('foo', 'bar')")
    (folder / "rewriting.jinja").write_text(rewriting)
    (folder / "calling.jinja").write_text(CALLING)
    write(folder / "other.jsonl", CHATS[:2])
    write(folder / "third.jsonl", [chat("third"), chat("fourth")])
    (folder / "folder").mkdir()
    write(folder / "folder" / "a.jsonl", CHATS)
    (folder / "folder" / "a.tmp").write_text("half")
    return folder


def write_bos(folder: Path) -> None:
    """Let a tokenizer write a token before every text."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    token = {"id": "<|endoftext|>", "type_id": 0}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": token}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
        },
    }
    file.write_text(json.dumps(content))


def write(file: Path, records: Sequence[Record | None]) -> None:
    lines = [json.dumps(record) if record is not None else "" for record in records]
    file.write_text("".join(f"{line}\n" for line in lines))


def filled(value: Any, folder: Path) -> Any:
    """Return a setting with the folder in its paths."""
    if isinstance(value, str):
        return value.replace("{folder}", str(folder))
    if isinstance(value, list):
        return [filled(item, folder) for item in value]
    if isinstance(value, dict):
        return {key: filled(item, folder) for key, item in value.items()}
    return value


def run_file_of(case: Case, folder: Path, place: Path) -> Path:
    write(folder / "train.jsonl", case.train)
    tree: dict[str, Any] = {
        "model": str(folder / "model"),
        "data": {
            "train": str(folder / "train.jsonl"),
            "cache": str(place / "cache"),
            "max_length": 512,
            "num_proc": 1,
        },
    }
    if any(key.startswith("model.") for key in case.settings):
        tree["model"] = {}
    for key, value in case.settings.items():
        section = tree
        *path, last = key.split(".")
        for name in path:
            section = section.setdefault(name, {})
        section[last] = filled(value, folder)
    run_file = place / "run.yaml"
    run_file.write_text(json.dumps(tree))
    return run_file


def data_lines(text: str) -> list[str]:
    """Return the findings in what `kubetune plan` prints."""
    lines = [line.partition(" ") for line in text.splitlines()]
    return [rest.strip() for label, _, rest in lines if label == "data"]


def log_of_start(config: Config, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines of a run's log about its data."""
    prepared = prepare(config)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="kubetune"):
        log_start(
            make_plan(config, len(prepared.train), world_size=1), World(), prepared, config.task
        )
    return [record.getMessage() for record in caplog.records]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with TestClient(application(Site.of(tmp_path), TOKEN), base_url="http://localhost") as client:
        client.get("/", params={"token": TOKEN})
        yield client


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_finding_is_the_same_wherever_it_is_shown(
    case: Case,
    folder: Path,
    tmp_path: Path,
    client: TestClient,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    run_file = run_file_of(case, folder, tmp_path)
    page = tmp_path / "page.html"
    assert cli.main(["data", "check", str(run_file), "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    lines = [finding["line"] for finding in findings]
    (line,) = [line for line in lines if case.sentence in line]
    assert case.advice in line
    shown = [f"{finding['severity']}: {finding['line']}" for finding in findings]

    assert cli.main(["data", "check", str(run_file), "--html", str(page)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [text for text in printed if text in shown] == shown
    assert text_of(page.read_text()).count(line) == 1

    assert cli.main(["plan", str(run_file)]) == 0
    assert data_lines(capsys.readouterr().out) == shown, "of small data, all rows are looked at"

    config = load_config(run_file)
    logged = log_of_start(config, caplog)
    assert [text for text in logged if text in lines] == lines

    assert cli.main(["plan", str(run_file)]) == 0
    assert data_lines(capsys.readouterr().out) == shown, "the same of prepared rows"
    assert [finding["line"] for finding in describe(prepare(config))["findings"]] == lines
    rows = client.get("/data", params={"file": "run.yaml"})
    assert text_of(rows.text).count(line) == 1


def test_unused_keys_are_told_for_each_source(folder: Path, tmp_path: Path) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in paths:
        write(path, [chat(path.name, id=7)])
    config = Config.model_validate(
        {"model": str(folder / "model"), "data": {"train": [str(path) for path in paths]}}
    )
    findings = check(config, load_tokenizer(config.model)).findings
    lines = [finding.line for finding in findings if finding.id == "unused_keys"]
    assert lines == [f"train, {place(str(path))}: keys not used: id × 1" for path in paths]


def text_of(html: str) -> str:
    """Return a page's text as it is shown; what is set as code, in backticks."""
    return unescape(re.sub("</?code>", "`", html))


@pytest.mark.slow
def test_each_finding_of_a_run_is_one_line_of_its_log_and_stands_on_its_page(
    folder: Path, tmp_path: Path
) -> None:
    case = Case("", [*CHATS, CHATS[0], chat("q", id=7)], {"data.eval": "{folder}/other.jsonl"})
    run_file = run_file_of(case, folder, tmp_path)
    output = tmp_path / "run"
    settings = [f"output={output}", "training.max_steps=1", "compute.processes=1"]
    assert cli.main(["train", str(run_file), *settings]) == 0
    findings = json.loads((output / metrics.DATA).read_text())["findings"]
    assert [finding["id"] for finding in findings] == ["in_train", "repeats", "unused_keys"]
    log = toy.log_of(output).splitlines()
    page = text_of(write_report([output], tmp_path / "report.html").read_text())
    for finding in findings:
        assert sum(finding["line"] in line for line in log) == 1
        assert page.count(finding["line"]) == 1


def test_a_plan_of_large_data_does_not_claim_to_have_looked_at_all(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = run_file_of(Case("", [chat(f"{i % 7}") for i in range(1200)]), folder, tmp_path)
    assert cli.main(["plan", str(run_file)]) == 0
    assert data_lines(capsys.readouterr().out) == [
        "not all looked at, only the first 200 records; `kubetune data check` looks at all"
    ]
    assert cli.main(["plan", str(run_file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] is None
    assert cli.main(["plan", str(run_file), "data.train=some/set"]) == 2
    assert data_lines(capsys.readouterr().out) == [
        "not looked at; `kubetune data check` looks at all"
    ]


@pytest.mark.parametrize("length", [8, 16])
def test_a_plan_of_large_data_says_when_the_first_rows_are_left_out(
    length: int, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of them: no plan can be made. More than the run allows: it may be refused, which a look at all tells."""
    long = "yes " * 12
    rows = [chat(long if i % 2 else "a") for i in range(1200)]
    run_file = run_file_of(Case("", rows), folder, tmp_path)
    code = cli.main(["plan", str(run_file), f"data.max_length={length}"])
    output = capsys.readouterr()
    if length == 8:
        assert code == 2
        assert "200 of the first 200 records (100.0%) would be left out" in output.err
        assert "Next:" not in output.out
    else:
        assert code == 0
        assert data_lines(output.out)[0] == (
            "warning: 50% of the first 200 records would be left out, and data.max_lost_share allows 10% of all"
        )
        assert "kubetune train" not in output.out


def test_data_without_findings_say_so(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = run_file_of(Case("", CHATS), folder, tmp_path)
    assert cli.main(["plan", str(run_file)]) == 0
    assert data_lines(capsys.readouterr().out) == [
        "all rows looked at: nothing stands out in the data"
    ]
    assert cli.main(["data", "check", str(run_file)]) == 0
    assert "nothing stands out in the data" in capsys.readouterr().out
