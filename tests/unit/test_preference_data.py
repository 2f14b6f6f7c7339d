"""Answers to be compared or judged, in every peer's spelling, as rows and as batches."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kubetune import cli
from kubetune.batching.feed import batch_of
from kubetune.config.schema import Config, DataConfig, ModelConfig, RecordKind, SourceConfig
from kubetune.data.inspect.estimate import estimate_lengths
from kubetune.data.prepared.pipeline import BatchResult, RecordBatch
from kubetune.data.prepared.prepare import Prepared, prepare
from kubetune.data.prepared.row_maker import RowMaker
from kubetune.data.prepared.rows import Rows
from kubetune.data.reading import conversations, messages
from kubetune.data.reading.examples import Chat, Judged, Pair, Preference
from kubetune.data.reading.formats import convert
from kubetune.data.reading.record import Record
from kubetune.data.spec import DataSpec
from kubetune.data.text.tokenizer import Tokenizer, load_tokenizer
from kubetune.errors import DataError
from kubetune.plan.plan import make_plan
from kubetune.result.inference.classify import answer_of
from tests.tiny import train_tokenizer

ASKED = {"role": "user", "content": "why?"}
GOOD = {"role": "assistant", "content": "yes"}
BAD = {"role": "assistant", "content": "no"}
SYSTEM = {"role": "system", "content": "be"}
HUMAN = {"from": "human", "value": "why?"}
GPT = {"from": "gpt", "value": "yes"}
BOT = {"from": "gpt", "value": "no"}

CHATS: dict[str, dict[str, Any]] = {
    "trl": {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
    "trl, implicit prompt": {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    "ultrafeedback": {
        "prompt": "why?", "prompt_id": "a", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD],
        "messages": [ASKED, GOOD], "score_chosen": 8.5, "score_rejected": 7.0,
    },
    "hh": {"chosen": "\n\nHuman: why?\n\nAssistant: yes", "rejected": "\n\nHuman: why?\n\nAssistant: no"},
    "hh in trl's style": {"prompt": "\n\nHuman: why?\n\nAssistant:", "chosen": " yes", "rejected": " no"},
    "llama_factory sharegpt": {"conversations": [HUMAN], "chosen": GPT, "rejected": BOT},
    "llama_factory alpaca": {"instruction": "why?", "input": "", "chosen": "yes", "rejected": "no"},
    "llama_factory ranking": {"instruction": "why?", "input": "", "output": ["yes", "no"]},
    "llama_factory messages": {"chosen_messages": [ASKED, GOOD], "rejected_messages": [ASKED, BAD]},
    "llama_factory openai": {"messages": [ASKED], "chosen": GOOD, "rejected": BAD},
    "ms_swift": {"messages": [ASKED, GOOD], "rejected_response": "no"},
    "ms_swift query": {"query": "why?", "response": "yes", "rejected_response": "no"},
    "ms_swift turns": {"messages": [ASKED, GOOD], "rejected_response": [BAD]},
    "ms_swift messages": {"messages": [ASKED, GOOD], "rejected_messages": [ASKED, BAD]},
    "ms_swift conversation": {"conversation": [{"human": "why?", "assistant": "yes"}], "rejected_response": "no"},
    "ms_swift from": {"conversation": [HUMAN, GPT], "rejected_response": "no"},
    "axolotl chat_template": {"messages": [ASKED], "chosen": [GOOD], "rejected": "no"},
    "axolotl argilla_chat": {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD], "chosen_rating": 5.0},
    "axolotl intel": {"system": "", "question": "why?", "chosen": "yes", "rejected": "no"},
    "axolotl icr": {"system": None, "input": "why?", "chosen": "yes", "rejected": "no"},
    "axolotl argilla": {"instruction": "why?", "chosen_response": "yes", "rejected_response": "no"},
    "axolotl prompt_pairs": {"system": "", "prompt": "why?", "chosen": "yes", "rejected": "no"},
    "axolotl ultra": {"prompt": "why?", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
}  # fmt: skip
WANTED = Preference(Chat((ASKED, GOOD), context=1), Chat((ASKED, BAD), context=1))

JUDGED: dict[str, dict[str, Any]] = {
    "trl": {"prompt": [ASKED], "completion": [BAD], "label": False},
    "ms_swift": {"messages": [ASKED, BAD], "label": False},
    "llama_factory sharegpt": {"messages": [ASKED, BAD], "kto_tag": False},
    "llama_factory conversations": {"conversations": [HUMAN, BOT], "kto_tag": False},
    "llama_factory alpaca": {"instruction": "why?", "input": "", "output": "no", "kto_tag": False},
    "axolotl argilla": {"instruction": "why?", "completion": "no", "label": 0},
    "axolotl argilla_chat": {"prompt": [ASKED], "completion": [ASKED, BAD], "label": "False"},
    "axolotl intel": {"question": "why?", "completion": "no", "label": False},
}


@pytest.mark.parametrize("name", CHATS)
def test_every_spelling_of_a_pair_is_one_pair(name: str) -> None:
    assert convert(CHATS[name], kind="pair") == WANTED


@pytest.mark.parametrize("name", JUDGED)
def test_every_spelling_of_a_judged_answer_is_one(name: str) -> None:
    assert convert(JUDGED[name], kind="judged") == Judged(WANTED.rejected, False)


def test_plain_texts_stay_plain_unless_the_format_says_messages() -> None:
    record = {"prompt": "why?", "chosen": " yes", "rejected": " no"}
    assert convert(record, kind="pair") == Preference(Pair("why?", " yes"), Pair("why?", " no"))
    spoken = {"prompt": "why?", "chosen": "yes", "rejected": "no"}
    assert convert(spoken, "messages", kind="pair") == WANTED
    shared = {"chosen": "It is like this", "rejected": "It is love"}
    assert convert(shared, kind="pair") == Preference(
        Pair("It is", " like this"), Pair("It is", " love")
    )


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return load_tokenizer(ModelConfig(path=str(tokenizer_folder)))


def encode(
    record: dict[str, Any], tokenizer: Tokenizer, kind: RecordKind = "pair", **data: Any
) -> BatchResult:
    source = SourceConfig(path="a.jsonl")
    settings = DataConfig(train=(source,), **data)
    worker = RowMaker(tokenizer, settings, {"train": (source,)}, kind=kind)
    return worker.encode(RecordBatch(0, "train", [(0, Record("a.jsonl", 7, record))]))


def write(file: Path, records: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def prepared(
    folder: Path, records: list[dict[str, Any]], tokenizer: Path, **settings: Any
) -> Prepared:
    file = write(folder / "pairs.jsonl", records)
    data = {
        "train": str(file),
        "cache": str(folder / "cache"),
        "num_proc": 1,
        **settings.pop("data", {}),
    }
    return prepare(
        Config.model_validate(
            {"model": str(tokenizer), "task": "preference", "data": data, **settings}
        )
    )


def texts(rows: Rows, index: int, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Return the text of each sequence of a row, and of its labels."""
    return [
        tuple(
            tokenizer.decode(part.tolist(), skip_special_tokens=False)
            for part in (ids, ids[trained])
        )  # type: ignore[misc]
        for ids, trained in rows.sequences(index)
    ]


def test_a_pair_is_one_row_and_two_sequences(
    tmp_path: Path, tokenizer_folder: Path, tokenizer: Tokenizer
) -> None:
    longer = {
        "chosen": [SYSTEM, ASKED, GOOD],
        "rejected": [SYSTEM, ASKED, {**BAD, "content": "no, no and no"}],
    }
    data = prepared(tmp_path, [CHATS["trl"], longer], tokenizer_folder)
    start = "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    assert data.train.splits is not None
    assert data.train.targets is None
    assert texts(data.train, 0, tokenizer) == [
        (f"{start}yes<|im_end|>\n", "yes<|im_end|>"),
        (f"{start}no<|im_end|>\n", "no<|im_end|>"),
    ]
    assert data.train.lengths.tolist() == [
        sum(len(ids) for ids, _ in data.train.sequences(i)) for i in (0, 1)
    ]
    assert data.longest == len(data.train.sequences(1)[1][0])
    batch = batch_of(data.train, np.array([1, 0]), None)
    sequences = [ids for i in (1, 0) for ids, _ in data.train.sequences(i)]
    assert batch.cu_seqlens == (0, *np.cumsum([len(ids) for ids in sequences]).tolist())
    assert batch.samples == (1, 0)
    assert batch.input_ids.tolist() == np.concatenate(sequences).tolist()
    assert batch.position_ids[list(batch.cu_seqlens[:-1])].tolist() == [0, 0, 0, 0]
    assert batch.input_ids[batch.rows + 1].tolist() == batch.labels.tolist()


def test_judged_answers_are_one_sequence_each_with_a_target(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    records = [JUDGED["trl"], {**JUDGED["trl"], "label": True}]
    rows = prepared(tmp_path, records, tokenizer_folder, preference={"loss": "kto"}).train
    assert rows.splits is None
    assert not rows.is_labelled
    batch = batch_of(rows, np.array([0, 1]), None)
    assert batch.targets is not None
    assert batch.targets.tolist() == [[0.0], [1.0]]
    assert rows.trained_counts.tolist() == [3, 3]
    assert batch.samples == (0, 1)


def test_a_reward_model_has_margins(tmp_path: Path, tokenizer_folder: Path) -> None:
    records = [CHATS["trl"], {**CHATS["trl"], "margin": 2}]
    rows = prepared(tmp_path, records, tokenizer_folder, task="reward_model").train
    assert rows.targets is not None
    assert rows.targets.tolist() == [[0.0], [2.0]]
    assert rows.splits is not None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "equal": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "same answer"),
    "equal conversations": ({"chosen": [ASKED, GOOD], "rejected": [ASKED, GOOD]}, "same answer"),
    "empty": ({"prompt": "a", "chosen": "b", "rejected": ""}, "rejected is empty"),
    "empty message": (
        {"prompt": [ASKED], "chosen": [GOOD], "rejected": [{**BAD, "content": " "}]},
        "rejected[0]",
    ),
    "other prompts": (
        {"chosen": [ASKED, GOOD], "rejected": [{**ASKED, "content": "who?"}, GOOD]},
        "prompts that differ: message 1 of chosen is the user's",
    ),
    "another prompt beside": (
        {"prompt": "who?", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
        "`prompt` that",
    ),
    "no answer": ({"chosen": [ASKED, GOOD], "rejected": [ASKED]}, "no rejected answer"),
    "ranked answers": (
        {"prompt": "a", "answers": [{"answer": "b", "rank": 1}]},
        "has 1 `answers` to one prompt",
    ),
    "no rejected": ({"prompt": "a", "chosen": "b"}, "expected two answers"),
    "two prompts": (
        {"prompt": "a", "question": "b", "chosen": "c", "rejected": "d"},
        "`question` and `prompt`",
    ),
    "two chosen": (
        {"prompt": "a", "chosen": "b", "chosen_response": "c", "rejected": "d"},
        "`chosen_response`",
    ),
    "half a conversation": (
        {"prompt": "a", "chosen": [ASKED, GOOD], "rejected": "d"},
        "whole conversations",
    ),
    "no prompt": ({"chosen": "yes", "rejected": "no"}, "share no beginning"),
    "other images": (
        {**CHATS["ms_swift"], "rejected_images": ["a.png"]},
        "`rejected_images` other than",
    ),
    "images": ({**CHATS["trl"], "images": ["a.png"]}, "set `preference.images: true`"),
    "video": ({**CHATS["trl"], "videos": ["a.mp4"]}, "has `videos`"),
    "answer of the user": (
        {"prompt": [ASKED], "chosen": [GOOD], "rejected": [ASKED]},
        "one answer with its prompt",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_pair_is_refused_with_its_line(name: str, tokenizer: Tokenizer) -> None:
    record, words = REFUSED[name]
    ((where, problem),) = encode(record, tokenizer).problems
    assert where == "a.jsonl:7"
    assert words in problem


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt": "a", "completion": "b"}, "expected a `label`"),
        ({"prompt": "a", "completion": "b", "label": 2}, "expected true for a good answer"),
        (
            {"prompt": "a", "completion": "b", "label": True, "kto_tag": False},
            "say different things",
        ),
        ({**CHATS["trl"], "label": True}, "has two answers"),
        ({"messages": [ASKED], "label": True}, "ends with a message of the user"),
    ],
)
def test_what_is_not_judged_is_refused_with_its_line(
    record: dict[str, Any], words: str, tokenizer: Tokenizer
) -> None:
    ((where, problem),) = encode(record, tokenizer, "judged").problems
    assert where == "a.jsonl:7"
    assert words in problem


def test_pairs_are_dropped_cut_or_refused_by_their_longest_answer(tokenizer: Tokenizer) -> None:
    long = {"prompt": [ASKED], "chosen": [GOOD], "rejected": [{**BAD, "content": "no " * 60}]}
    whole = encode(long, tokenizer).chunk
    limit = whole.splits[0]
    assert encode(long, tokenizer, max_length=limit).tally.overlong == 1
    assert (
        "tokens; data.max_length is"
        in encode(long, tokenizer, max_length=limit, overlong="error").problems[0][1]
    )
    cut = encode(long, tokenizer, max_length=limit, overlong="truncate")
    assert cut.tally.truncated == 1
    assert cut.chunk.tokens == whole.tokens[: 2 * limit]
    assert cut.chunk.splits[0] == limit
    away = encode(long, tokenizer, max_length=10, overlong="truncate")
    assert away.tally.no_label == 1
    assert not away.chunk.lengths


def test_lost_pairs_end_the_preparation(tmp_path: Path, tokenizer_folder: Path) -> None:
    with pytest.raises(DataError, match="would be left out"):
        prepared(
            tmp_path,
            [CHATS["trl"]],
            tokenizer_folder,
            data={"max_length": 10, "overlong": "truncate"},
        )


def test_unusable_pairs_are_left_out_where_that_is_wished(tokenizer: Tokenizer) -> None:
    for name in (
        "equal",
        "equal conversations",
        "empty",
        "empty message",
        "other prompts",
        "no answer",
    ):
        encoded = encode(REFUSED[name][0], tokenizer, unusable_pairs="drop")
        assert not encoded.problems
        assert (
            encoded.tally.records,
            encoded.tally.unusable,
            encoded.tally.rows,
            encoded.tally.refused,
        ) == (1, 1, 0, 0)
    assert encode(REFUSED["two prompts"][0], tokenizer, unusable_pairs="drop").problems


def check_of(file: Path, tokenizer: Path, *args: str) -> dict[str, Any]:
    command = ("data", "check", str(file), "--model", str(tokenizer), "--json", *args)
    stdout, code = run_cli(*command)
    report = json.loads(stdout)
    assert (code == 0) == report["ok"]
    return report  # type: ignore[no-any-return]


def run_cli(*args: str) -> tuple[str, int]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = cli.main([*args])
        except SystemExit as end:
            code = int(end.code or 0)
    return out.getvalue(), code


def test_a_check_shows_both_answers_and_counts_them(tmp_path: Path, tokenizer_folder: Path) -> None:
    file = write(
        tmp_path / "pairs.jsonl",
        [CHATS["hh"], CHATS["ms_swift"], {**CHATS["trl"], "chosen": "yes and yes"}],
    )
    report = check_of(file, tokenizer_folder, "task=preference")
    assert report["sample_answers"] == ["chosen", "rejected"] * 2
    shown = [
        "".join(f"[{p['text']}]" if p["trained"] else p["text"] for p in s)
        for s in report["samples"]
    ]
    prompt = "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    assert shown == [f"{prompt}[yes<|im_end|>]\n", f"{prompt}[no<|im_end|>]\n"] * 2
    assert report["splits"]["train"]["answers"]["chosen_longer"] >= 1
    assert "the chosen one is longer" in str(
        [finding["sentence"] for finding in report["findings"]]
    )
    bad = write(
        tmp_path / "bad.jsonl", [CHATS["trl"], REFUSED["equal"][0], REFUSED["other prompts"][0]]
    )
    report = check_of(bad, tokenizer_folder, "task=preference")
    assert [line.split(": ")[0] for line in report["problems"]["first"]] == [f"{bad}:2", f"{bad}:3"]
    seen, _ = run_cli(
        "data", "check", str(file), "--model", str(tokenizer_folder), "task=preference"
    )
    assert "row 1 (the chosen answer stands between ⟦ and ⟧)" in seen
    assert "⟦no<|im_end|>⟧" in seen


def test_a_check_without_a_model_knows_pairs(tmp_path: Path) -> None:
    records = [CHATS["hh"], CHATS["ms_swift"], JUDGED["trl"], {"messages": [ASKED, GOOD]}]
    stdout, code = run_cli("data", "check", str(write(tmp_path / "a.jsonl", records)), "--json")
    assert code == 0
    assert json.loads(stdout)["records"] == {"Preference": 2, "Judged": 1, "Chat": 1}


def test_the_page_of_the_data_shows_both_answers(tmp_path: Path, tokenizer_folder: Path) -> None:
    records = [CHATS["hh"], CHATS["ms_swift"], REFUSED["equal"][0]]
    file = write(tmp_path / "pairs.jsonl", records)
    page = tmp_path / "page.html"
    settings = ("task=preference", "data.unusable_pairs=drop", "data.max_lost_share=0.5")
    check_of(file, tokenizer_folder, *settings, "--html", str(page))
    text = page.read_text("utf-8")
    assert (
        "1 of 3 records of train left out: their answers are equal or empty, or have different prompts"
        in text
    )
    assert (
        "<td>3</td><td>2</td><td>0</td><td>0</td><td>1</td>" in text
    )  # the columns add up to the records
    assert "pairs of answers" in text
    # Where they differ, both answers are marked.
    assert '<span class="piece trained rejected"><mark>no</mark></span>' in text
    assert '<mark class="piece trained"><mark>yes</mark></mark>' in text
    assert "<em>rejected:</em>" in text
    # What both are answers to stands there once, and what they begin with alike is not marked.
    rows = text.split('<article class="row">')[1:]
    assert [row.count("why?") for row in rows] == [1] * len(rows)


def test_conversion_writes_one_shape(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    chats = write(tmp_path / "pairs.jsonl", [*CHATS.values(), {**CHATS["trl"], "margin": 2.0}])
    assert run_cli("data", "convert", str(chats), "--to", "preference", "-o", str(output))[1] == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert lines[:-1] == [CHATS["trl"]] * len(CHATS)
    assert lines[-1] == {**CHATS["trl"], "margin": 2.0}
    stdout, code = run_cli("data", "convert", str(chats), "--to", "judged", "-o", str(output))
    assert (code, stdout.partition(" written")[0]) == (
        0,
        f"{2 * len(CHATS) + 2} records, of {len(CHATS) + 1},",
    )
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert lines[:2] == [
        {"prompt": [ASKED], "completion": [GOOD], "label": True},
        {"prompt": [ASKED], "completion": [BAD], "label": False},
    ]
    assert run_cli("data", "convert", str(chats), "--to", "messages", "-o", str(output))[1] == 2


TEXTS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12
).filter(str.strip)


@given(question=TEXTS, chosen=TEXTS, rejected=TEXTS)
def test_ids_are_those_of_inference(
    question: str, chosen: str, rejected: str, tokenizer: Tokenizer
) -> None:
    """What stands before an answer is what a model is prompted with, and each sequence what the template writes."""
    assume(chosen != rejected)
    talk = [{"role": "user", "content": question}]
    answers = [{"role": "assistant", "content": text} for text in (chosen, rejected)]
    chunk = encode(
        {"prompt": talk, "chosen": answers[:1], "rejected": answers[1:]}, tokenizer
    ).chunk
    if not chunk.lengths:
        return  # both are the same to this tokenizer
    prompt = tokenizer.encode_prompt(talk)
    split = chunk.splits[0]
    for answer, ids, trained in (
        (answers[0], chunk.tokens[:split], chunk.trained[:split]),
        (answers[1], chunk.tokens[split:], chunk.trained[split:]),
    ):
        assert ids[: len(prompt)].tolist() == prompt
        assert trained.index(1) == len(prompt)
        written = tokenizer.require_chat().render([*talk, answer])
        assert tokenizer.decode(ids.tolist(), skip_special_tokens=False) == written


@pytest.mark.slow  # it imports TRL
def test_sequences_are_trls(tokenizer_folder: Path, tokenizer: Tokenizer) -> None:
    """Its own processing gives the same prompts and sequences, in every form that it reads."""
    python = Path(__file__).parents[2] / "benchmarks" / ".venv-peers" / "bin" / "python"
    if not python.is_file():
        pytest.skip("TRL is not installed: benchmarks/peers/venv")
    longer = {
        "chosen": [SYSTEM, ASKED, GOOD, ASKED, GOOD],
        "rejected": [SYSTEM, ASKED, GOOD, ASKED, BAD],
    }
    records = [
        CHATS["trl"],
        CHATS["trl, implicit prompt"],
        longer,
        {"prompt": "why?", "chosen": " yes", "rejected": " no"},
    ]
    script = Path(__file__).parents[1] / "peers" / "trl_pairs.py"
    done = subprocess.run(
        [python, script, tokenizer_folder], input="".join(f"{json.dumps(record)}\n" for record in records),
        capture_output=True, text=True, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    for record, line in zip(records, done.stdout.splitlines(), strict=True):
        prompt, chosen, rejected = json.loads(line)
        chunk = encode(record, tokenizer).chunk
        split = chunk.splits[0]
        ids = chunk.tokens.tolist()
        assert (ids[:split], ids[split:]) == ([*prompt, *chosen], [*prompt, *rejected])
        assert chunk.trained.index(1) == len(prompt)


def test_the_estimate_of_a_plan_is_that_of_the_rows(tmp_path: Path, tokenizer_folder: Path) -> None:
    records = [
        CHATS["trl"],
        {**CHATS["trl"], "rejected": [{**BAD, "content": "no " * 60}]},
        REFUSED["empty"][0],
    ]
    sources = {"data": {"unusable_pairs": "drop", "max_lost_share": 0.5, "max_length": 64}}
    data = prepared(tmp_path, records[:1], tokenizer_folder)
    config = Config.model_validate(
        {
            "model": str(tokenizer_folder),
            "task": "preference",
            "data": {"train": str(write(tmp_path / "pairs.jsonl", records)), **sources["data"]},
        }
    )
    lengths = estimate_lengths(DataSpec.of(config), config.training, {})
    assert lengths is not None
    assert (lengths.sampled, lengths.overlong_share, lengths.bad_share) == (
        3,
        1 / 3,
        pytest.approx(1 / 3),
    )
    assert (lengths.tokens_per_row, lengths.longest) == (data.train.lengths[0], data.longest)
    plan = make_plan(config, 3, tokens=lengths.tokens(3))
    assert plan.micro_batch_tokens == 2 * 64
    assert (plan.steps_per_epoch, plan.global_batch_size) == (3, 1)


def test_the_page_shows_records_that_are_read() -> None:
    text = (Path(__file__).parents[2] / "docs" / "preference.md").read_text("utf-8")
    pairs, judged, pictured = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    assert {
        type(convert(json.loads(line), kind="pair")) for line in (pairs + pictured).splitlines()
    } == {Preference}
    assert {type(convert(json.loads(line), kind="judged")) for line in judged.splitlines()} == {
        Judged
    }


def test_judged_answers_are_scored_as_others_are_and_pairs_are_to_be_parted() -> None:
    answer = {"prompt": "Ping", "completion": " Pong"}
    assert [answer_of(answer | verdict) for verdict in ({}, {"label": True}, {"label": False})] == [
        Pair("Ping", " Pong")
    ] * 3
    talk = {
        "messages": [{"role": "user", "content": "Ping"}, {"role": "assistant", "content": "Pong"}]
    }
    assert [answer_of(talk | verdict) for verdict in ({}, {"label": False})] == [
        Chat(tuple(talk["messages"])),
        Chat(tuple(talk["messages"]), context=1),
    ]
    with pytest.raises(
        ValueError, match="two answers, which are scored one at a time; `kubetune data convert"
    ):
        answer_of({"prompt": "Ping", "chosen": " Pong", "rejected": " No."})


def test_each_message_of_a_pair_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt is in both answers' conversations; what is beside the messages is read once too."""
    read: list[str] = []
    for name in ("read_message", "read_tools"):
        function = getattr(messages, name)

        def counted(*words: Any, function: Any = function, name: str = name) -> Any:
            read.append(name)
            return function(*words)

        for module in (messages, conversations):
            monkeypatch.setattr(module, name, counted, raising=False)
    tool = {"name": "add", "parameters": {"type": "object"}}
    record = {
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "2+2?"}],
        "chosen": [{"role": "assistant", "content": "4"}],
        "rejected": [{"role": "assistant", "content": "5"}],
        "tools": [tool],
    }
    assert isinstance(convert(record, kind="pair"), Preference)
    assert sorted(read) == ["read_message"] * 4 + ["read_tools"]


def test_answers_as_text_beside_messages_go_through_the_template_alike() -> None:
    answer = {"role": "assistant", "content": "5"}
    in_both = convert({"prompt": "2+2?", "chosen": "4", "rejected": [answer]}, kind="pair")
    question = {"role": "user", "content": "2+2?"}
    good = Chat((question, {"role": "assistant", "content": "4"}), context=1)
    assert in_both == Preference(good, Chat((question, answer), context=1))
