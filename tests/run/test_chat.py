"""Talking to a run: what belongs to a conversation, what the model is shown of it, and batches of prompts."""

from __future__ import annotations

import argparse
import errno
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kubetune import errors
from kubetune.base import processes
from kubetune.cli import main
from kubetune.cli.result.chat import Conversation, obey, tell_what_is_left_out
from kubetune.cli.result.generate import answered, encode
from kubetune.cli.result.generate_input import PromptRow, read_questions
from kubetune.config.schema import Config, ModelConfig
from kubetune.data.text.tokenizer import load_tokenizer
from kubetune.models import loading
from kubetune.result.inference import answering
from kubetune.result.inference.answering import EncodedPrompt, LoadedModel, Sampling
from tests import tiny, toy


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that was taught conversations."""
    inputs = toy.make_inputs(tmp_path_factory.mktemp("inputs"))
    turns = [
        {"role": "user", "content": "What is the capital?"},
        {"role": "assistant", "content": "Paris"},
    ]
    (inputs / "train.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 40)
    config = toy.make_config(
        inputs, {"num_train_epochs": 3, "eval_steps": 15, "save_steps": 15}, data={"eval": 0.1}
    )
    return toy.finished(inputs / "run", config)


def talk(run_dir: Path, lines: str, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return main(["chat", str(run_dir), "--max-new-tokens", "8", *words])


def test_a_conversation_grows_by_whole_turns_and_is_forgotten() -> None:
    talked = Conversation("Be brief.")
    talked.tuned += [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    roles = [turn["role"] for turn in talked.prompt(talked.tuned, "c", True)]  # type: ignore[index,union-attr]
    assert roles == ["system", "user", "assistant", "user"]
    assert talked.prompt(talked.tuned, "c", False) == "c"
    assert obey("/history", talked) == "user: a\nassistant: b"
    assert obey("/system Speak.", talked) == "system: Speak."
    assert talked.tuned == []
    assert obey("/system", talked) == "no system message"
    assert obey("/reset", talked) == "forgotten"
    assert "/exit" in obey("/what", talked)


WORDLESS = tiny.CHATML.replace("in messages", "in messages if message.role != 'system'")


@pytest.fixture
def deaf(tmp_path: Path) -> LoadedModel:
    """Return a model asked by a chat template that knows no system; what is asked of it needs no weights."""
    tokenizer = load_tokenizer(
        ModelConfig(path=str(tiny.train_tokenizer(tmp_path / "tokenizer", WORDLESS)))
    )
    result: Any = None
    return LoadedModel(None, tokenizer, True, result)


def test_who_chats_is_told_once_what_the_model_does_not_see(
    deaf: LoadedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = Conversation("Be brief.")
    for _ in range(2):
        tell_what_is_left_out(deaf, talk, "Ping")
    assert capsys.readouterr().out == (
        "(note: the tokenizer's chat template leaves out the content of messages[0], by the system ('Be brief.'), "
        "which the model does not see)\n"
    )
    talk.system = None
    tell_what_is_left_out(deaf, talk, "Ping")
    assert capsys.readouterr().out == ""


def test_who_generates_is_told_what_the_model_does_not_see(
    deaf: LoadedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Ping"}]
    rows: list[dict[str, Any]] = [
        {"messages": asked},
        {"prompt": "Ping"},
        {"messages": asked[1:], "system": "Rhyme."},
    ]
    questions = [PromptRow(f"in.jsonl:{line}", row, ()) for line, row in enumerate(rows, 1)]
    assert len({tuple(prompt.ids) for prompt in encode(deaf, questions)}) == 1
    stderr = capsys.readouterr().err
    assert (
        "note: in.jsonl:1: the tokenizer's chat template leaves out the content of messages[0]"
        in stderr
    )
    assert "which the model does not see; the same holds for 1 other prompt\n" in stderr
    with pytest.raises(
        errors.DataError, match=r"in.jsonl:1: has `system` and a different system message"
    ):
        encode(deaf, [PromptRow("in.jsonl:1", {"messages": asked, "system": "Rhyme."}, ())])


def test_prompts_are_asked_whole_or_refused(deaf: LoadedModel, tmp_path: Path) -> None:
    image = {"type": "image", "image": "a.png"}
    with pytest.raises(
        errors.DataError, match="has images in the parts of its messages; name them in `images`"
    ):
        encode(
            deaf,
            [PromptRow("in.jsonl:1", {"messages": [{"role": "user", "content": [image]}]}, ())],
        )
    with pytest.raises(
        errors.DataError,
        match="input:1: it holds half a surrogate pair at position 3; expected text",
    ):
        encode(replace(deaf, is_chat=False), [PromptRow("input:1", {"prompt": "caf\udce9"}, ())])
    lines = [
        '{"prompt": "a", "prompt": "b"}',
        '{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}',
        '{"prompt": "a", "chat_template_kwargs": {"enable_thinking": false}}',
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    with pytest.raises(errors.DataError) as caught:
        read_questions(argparse.Namespace(file=tmp_path / "in.jsonl", image=[], prompts=[]))
    told_of = ('the key "prompt" twice', "has `prompt` and `messages`", "chat_template_kwargs")
    for number, problem in enumerate(told_of, 1):
        assert re.search(f"in.jsonl:{number}: .*{problem}", str(caught.value))


def test_keys_of_prompts_that_say_nothing_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text(
        '{"prompt": "a", "temperature": 1}\n{"prompt": "b", "temperature": 0, "id": 2}\n'
    )
    rows = read_questions(argparse.Namespace(file=tmp_path / "in.jsonl", image=[], prompts=[]))
    assert rows[1].row == {"prompt": "b", "temperature": 0, "id": 2}
    assert (
        "in.jsonl: keys not used: temperature × 2, id × 1; only options set how to answer"
        in capsys.readouterr().err
    )


def test_an_answer_that_a_prompt_has_stays_beside_the_models(
    deaf: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "answers", lambda *_: iter(["mine"]))
    row = {"prompt": "Ping", "answer": "gold", "id": 3}
    (line,) = answered(
        deaf, [PromptRow("in.jsonl:1", row, ())], [EncodedPrompt([1])], Sampling(), compare=False
    )
    assert line == {"prompt": "Ping", "id": 3, "given_answer": "gold", "answer": "mine"}


@pytest.mark.slow
def test_chat_answers_as_it_was_taught_and_beside_its_base(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(run_dir, "What is the capital?\n/history\n/exit\n", monkeypatch, "--compare") == 0
    stdout = capsys.readouterr().out
    base, tuned = stdout.split("base:  ")[1].split("tuned: ")
    assert tuned.splitlines()[0] == "Paris"
    assert "Paris" not in base
    assert "assistant: Paris" in stdout


@pytest.mark.slow
def test_two_runs_answer_side_by_side(
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    second = tmp_path / "second"
    shutil.copytree(run_dir, second, symlinks=True)
    assert talk(run_dir, "What is the capital?\n", monkeypatch, "--beside", str(second)) == 0
    stdout = capsys.readouterr().out
    for directory in (run_dir, second):
        assert re.search(rf"{re.escape(str(directory))}: +Paris$", stdout, re.M), stdout
    with pytest.raises(SystemExit):
        talk(run_dir, "", monkeypatch, "--beside", str(second), "--compare")


@pytest.mark.slow
def test_a_base_beside_a_model_trained_whole_is_loaded_once(
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    inputs = run_dir.parent
    training = {"num_train_epochs": 3, "eval_steps": 15, "save_steps": 15}
    whole = toy.finished(
        tmp_path / "whole", toy.make_config(inputs, training, lora=None, data={"eval": 0.1})
    )
    loaded: list[str] = []
    load = loading.load_pretrained

    def counted(kind: Any, config: Config, *arguments: Any, **settings: Any) -> Any:
        loaded.append(config.model.path)
        return load(kind, config, *arguments, **settings)

    monkeypatch.setattr(loading, "load_pretrained", counted)
    question = "What is the capital?\n"
    assert talk(whole, question * 3, monkeypatch, "--compare") == 0
    assert loaded.count(str(inputs / "model")) == 1
    stdout = capsys.readouterr().out
    assert stdout.count("tuned: Paris") == 3
    assert "base:  Paris" not in stdout
    monkeypatch.setattr(processes, "free_memory_bytes", lambda: 1000)
    assert talk(whole, question, monkeypatch, "--compare") == errors.ENVIRONMENT
    assert "ask only the trained one" in capsys.readouterr().err


@pytest.mark.slow
def test_answers_come_one_by_one_and_bad_lines_are_named_first(
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    loaded = answering.load_run(run_dir)
    sampling = answering.Sampling(max_new_tokens=4)
    asked = [
        loaded.encode(text)
        for text in ("What is the capital?", "one two", "What is the capital?", "four five six")
    ]
    runs: list[int] = []
    run = answering._generate

    def counted(*arguments: Any) -> list[list[int]]:
        runs.append(len(arguments[1]))
        return run(*arguments)

    monkeypatch.setattr(answering, "_generate", counted)
    coming = answering.answers(loaded, asked, sampling)
    assert next(coming) == "Paris"
    assert runs == [2], "the second of its length came along, and waits for its turn"
    assert list(coming)[1] == "Paris"
    assert sorted(runs) == [1, 1, 2]

    out = tmp_path / "out.jsonl"
    words = [
        "generate",
        str(run_dir),
        "--max-new-tokens",
        "4",
        "--file",
        str(tmp_path / "in.jsonl"),
        "--output",
        str(out),
    ]
    (tmp_path / "in.jsonl").write_text(
        '{"prompt": "a"}\n{"prompt"\n\n{"text": "b"}\n{"messages": "hi"}\n'
    )
    assert main(words) == errors.USER
    stderr = capsys.readouterr().err
    assert all(f"in.jsonl:{line}: " in stderr for line in (2, 4, 5))
    assert "3 problems. Nothing was written." in stderr
    unfit = [{"role": "bot", "content": "a"}]
    (tmp_path / "in.jsonl").write_text(
        json.dumps({"messages": unfit}) + '\n{"prompt": "b", "images": ["b.png"]}\n'
    )
    assert main(words) == errors.USER
    stderr = capsys.readouterr().err
    assert 'in.jsonl:1: messages[0].role is "bot"' in stderr
    assert "in.jsonl:2: has images, which need a model that sees" in stderr

    (tmp_path / "in.jsonl").write_text('{"prompt": "What is the capital?"}\n{"prompt": "one"}\n')

    def break_off(*arguments: Any) -> list[list[int]]:
        if [path.suffix for path in tmp_path.glob(".out*")] == [".tmp"] and runs:
            raise OSError(errno.EIO, "the disk is gone")
        runs.append(1)
        return run(*arguments)

    runs.clear()
    monkeypatch.setattr(answering, "_generate", break_off)
    assert main(words) == errors.ENVIRONMENT
    assert runs, "it broke off in the middle"
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"], "whole or not at all"


def test_prompts_are_read_from_files_of_every_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = argparse.Namespace(file=tmp_path / "in.csv", image=[], prompts=[])
    arguments.file.write_text('prompt,id\n"What is\nthe capital?",7\n')
    (row,) = read_questions(arguments)
    assert row.row["prompt"] == "What is\nthe capital?"
    arguments.file = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": ["one", "two"]}), arguments.file)
    assert [row.row["prompt"] for row in read_questions(arguments)] == ["one", "two"]
    arguments.file = tmp_path / "in.jsonl"
    arguments.file.write_bytes("prompt\nWas?\n".encode("utf-16"))
    with pytest.raises(errors.DataError, match=r"is UTF-16.*expected UTF-8: `iconv"):
        read_questions(arguments)


@pytest.mark.slow
def test_a_batch_of_prompts_becomes_lines_of_json(run_dir: Path, tmp_path: Path) -> None:
    asked = [
        {"prompt": "What is the capital?", "id": 7},
        {"messages": [{"role": "user", "content": "Hello"}]},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in asked))
    words = [
        "--file",
        str(tmp_path / "in.jsonl"),
        "--output",
        str(tmp_path / "out.jsonl"),
        "--compare",
    ]
    assert main(["generate", str(run_dir), "--max-new-tokens", "8", *words]) == 0
    first, second = (json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines())
    assert first == {**asked[0], "answer": "Paris", "base_answer": first["base_answer"]}
    assert second["messages"] == asked[1]["messages"]
    answered = {"messages": [*asked[1]["messages"], {"role": "assistant", "content": "Bye"}]}
    (tmp_path / "in.jsonl").write_text(json.dumps(answered) + "\n")
    assert main(["generate", str(run_dir), "--max-new-tokens", "8", *words]) == 0
    assert json.loads((tmp_path / "out.jsonl").read_text()) == second
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    assert main(["generate", str(run_dir), *words[:4]]) == errors.USER
