"""`kubetune init DATA`: the run that data are for, written down with a reason for each choice; and what it refuses."""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kubetune import cli, errors
from kubetune.base.yaml_reader import read_file
from kubetune.cli.busy import busy
from kubetune.cli.local.demo import EMBEDDED
from kubetune.cli.prepare.starter import TASKS
from kubetune.cli.program import program
from kubetune.cli.result import generate_input
from kubetune.config.load import load_config
from kubetune.config.schema import Config, ModelConfig, SourceConfig
from kubetune.config.starting_values import starting_values
from kubetune.data.proposed.proposing import propose
from kubetune.data.text.tokenizer import load_tokenizer

MODEL = str(EMBEDDED / "model")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def table(name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Write a CSV or TSV and return its name."""
    with open(name, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="\t" if name.endswith(".tsv") else ",")
        writer.writerows([columns, *rows])
    return name


def lines(name: str, records: Sequence[dict[str, Any]]) -> str:
    """Write JSON lines and return the name of the file."""
    Path(name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return name


def written(*words: str, model: str = MODEL) -> tuple[Any, str]:
    """Return the config that `init` writes for these words, and the text of its file."""
    assert cli.main(["init", *words, "--model", model, "-o", "run.yaml"]) == 0
    text = Path("run.yaml").read_text()
    return load_config(Path("run.yaml")), text


def test_a_table_of_questions_by_other_names(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [(f"{n} + 1?", f"It is {n + 1}.") for n in range(300)]
    config, text = written(table("my Data.csv", ("Question", "solution"), rows))
    [source] = config.data.train
    assert (config.task, config.name, source.format) == ("causal_lm", "my-data", "question_answer")
    assert source.columns == {"prompt": "Question", "completion": "solution"}
    assert (config.lora.r, config.training.global_batch_size, config.data.eval) == (16, 8, 0.1)
    assert config.data.max_length == 512
    assert config.output == "outputs/my-data"
    for reason in ("`Question` is taken as the question", "about 30 of 300 rows", "300 records"):
        assert reason in text
    # What it says to do next works when pasted, and knows nothing bad about the data.
    output = capsys.readouterr().out
    assert f"Next: {program()} plan run.yaml · {program()} train run.yaml" in output
    assert cli.main(["data", "check", "run.yaml"]) == 0
    assert "ready to train" in capsys.readouterr().out


def test_headers_with_blanks_are_the_names_of_their_columns() -> None:
    rows = [(f"{n} + 1?", f"It is {n + 1}.") for n in range(30)]
    config, _ = written(table("data.csv", ("question ", " answer "), rows))
    assert config.data.train[0].columns == {"prompt": "question ", "completion": " answer "}
    assert cli.main(["data", "check", "run.yaml"]) == 0


def test_a_prompt_with_a_solution_is_learned_unless_a_reward_is_asked_for(tmp_path: Path) -> None:
    data = tmp_path / "sums.jsonl"
    data.write_text(
        "".join(f'{{"prompt": "{n} + 1?", "solution": "{n + 1}"}}\n' for n in range(40))
    )
    proposal = propose(SourceConfig(path=str(data)))
    assert proposal.task.value == "causal_lm"
    assert {key: choice.value for key, choice in proposal.columns.items()} == {
        "completion": "solution"
    }
    assert propose(SourceConfig(path=str(data)), "grpo").columns == {}


def test_labels_make_a_classifier() -> None:
    rows = [(f"film {n}", ("bad", "good")[n % 2]) for n in range(40)]
    config, text = written(table("reviews.tsv", ("review", "sentiment"), rows))
    assert config.task == "sequence_classification"
    assert config.data.train[0].columns == {"text": "review", "label": "sentiment"}
    assert "2 labels: bad × 20, good × 20" in text
    assert "longer texts are cut to it" in text, "unlike rows of other tasks, which are left out"


# Records by what is in them, and the columns of a classifier of them.
CLASSES_BY_SHAPE = {
    "yes or no beside a passage": (
        lambda n: {"question": f"is {n} even or odd", "answer": n % 3 == 0, "passage": f"Of {n} a text."},
        {"text": "question", "text_pair": "passage", "label": "answer"},
    ),
    "yes or no": (
        lambda n: {"question": f"Is {n} even or odd?", "answer": n % 2},
        {"text": "question", "label": "answer"},
    ),
    "a claim with its evidence": (
        lambda n: {"id": n, "claim": f"It is {n} today.", "evidence": f"They say {n}, or more.", "label": n % 3},
        {"text": "claim", "text_pair": "evidence"},
    ),
    "a grade of a pair": (
        lambda n: {"query": f"Where is number {n}?", "document": f"There is {n} in it.", "relevance": n % 4},
        {"text": "query", "text_pair": "document", "label": "relevance"},
    ),
    "true or false": (
        lambda n: {"text": f"I say {n} of them.", "label": n % 2 == 0},
        {},
    ),
    "a target that is a class": (
        lambda n: {"tweet": f"I say {n} of them.", "target": ("favor", "against")[n % 2]},
        {"text": "tweet", "label": "target"},
    ),
    "grades around zero": (
        lambda n: {"text": f"I say {n} of them.", "sentiment": n % 3 - 1},
        {"label": "sentiment"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSES_BY_SHAPE)
def test_classes_are_known_by_their_shape(name: str) -> None:
    record_of, columns = CLASSES_BY_SHAPE[name]
    config, _ = written(lines("rows.jsonl", [record_of(n) for n in range(60)]))
    assert config.task == "sequence_classification"
    assert dict(config.data.train[0].columns) == columns


def test_a_target_that_follows_an_instruction_stays_an_answer() -> None:
    records = [
        {"input": f"classify: word {n}", "target": ("good", "bad")[n % 2]} for n in range(60)
    ]
    assert written(lines("rows.jsonl", records))[0].task == "causal_lm"


def test_two_columns_of_classes_are_both_offered(capsys: pytest.CaptureFixture[str]) -> None:
    records = []
    for n in range(60):
        sides = {"target": ("Trees", "Films")[n % 2], "stance": ("for", "against")[n // 2 % 2]}
        records.append({"tweet": f"I say {n} of them.", **sides})
    assert cli.main(["init", lines("rows.jsonl", records), "--model", MODEL]) == errors.USER
    said = capsys.readouterr().err
    for label in ("target", "stance"):
        assert f"`--columns text=tweet label={label}`" in said


def test_tests_are_no_second_answer(capsys: pytest.CaptureFixture[str]) -> None:
    records = []
    for n in range(40):
        tests = [f"assert f(1) == {n}", f"assert f(2) == {n}"]
        records.append(
            {
                "prompt": f"Return number {n}.",
                "code": f"def f(x):\n    return {n}",
                "test_list": tests,
            }
        )
    assert cli.main(["init", lines("rows.jsonl", records), "--model", MODEL]) == errors.USER
    assert "`--columns prompt=prompt completion=code`" in capsys.readouterr().err


def test_what_a_text_is_about_is_advised_as_no_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claims = [
        {"claim": f"It is {n} now.", "evidence": f"They say it is {n}.", "verdict": n % 2}
        for n in range(40)
    ]
    facts = lines("rows.jsonl", claims)
    told = "text=claim text_pair=evidence label=verdict"
    assert cli.main(["init", facts, "--model", MODEL, "--task", "causal_lm"]) == errors.USER
    assert told in capsys.readouterr().err
    run = f"model: {MODEL}\ntask: sequence_classification\ndata: {{train: {facts}}}\n"
    Path("run.yaml").write_text(run)
    assert cli.main(["plan", "run.yaml"]) == errors.USER
    assert told in capsys.readouterr().err


def test_a_task_that_is_given_is_kept() -> None:
    file = lines("l.jsonl", [{"text": "a film", "label": 1}] * 20)
    config, _ = written(file, "--task", "causal_lm")
    assert config.task == "causal_lm"
    Path("run.yaml").unlink()
    config, _ = written(
        lines("p.jsonl", [{"prompt": "1 + 1?", "solution": "2"}] * 20), "--task", "grpo"
    )
    assert (config.task, config.rewards[0].name, config.data.train[0].columns) == (
        "grpo",
        "numeric",
        {},
    )
    Path("run.yaml").unlink()
    pair = {"prompt": "Hi?", "chosen": "Yes.", "rejected": "No."}
    config, _ = written(lines("p.jsonl", [pair] * 20), "--task", "reward_model")
    assert config.task == "reward_model"


WORKING = "First she takes a few of them and then some more of them, so that there are"


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        (["3/10", r"\frac{7}{10}", "-2", "1,250", "50%"], "numeric"),
        ([f"{WORKING} 4 and 5\n#### 9", f"{WORKING} 3."], "numeric"),
        (["14:30", "09:30"], "exact_match"),
        (["1.234,50 €", "9.876,50 €"], "exact_match"),
        (["between 3 and 10", "between 5 and 10"], "exact_match"),
        (["5", "12", "3/4", "(1,4)", "(3,4)", "[2,5]"], "exact_match"),
        # No answer equals such steps, and all of their ends is compared.
        ([f"{WORKING}\n#### 14:30", f"{WORKING}\n#### 12"], "numeric"),
    ],
)
def test_numbers_are_compared_where_all_of_them_are_read(answers: list[str], reward: str) -> None:
    rows = [{"prompt": f"What is {n}?", "solution": answers[n % len(answers)]} for n in range(40)]
    config, _ = written(lines("p.jsonl", rows), "--task", "grpo")
    assert config.rewards[0].name == reward


def test_steps_that_end_with_no_number_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"What is {n}?", "solution": f"{WORKING} {n}."} for n in range(20)]
    rows[7]["solution"] = f"{WORKING} none."
    data = lines("p.jsonl", rows)
    assert cli.main(["init", data, "--task", "grpo", "-o", "run.yaml"]) == errors.USER
    output = capsys.readouterr().err
    assert "1 of 20 end with no number that could be compared" in output
    assert "so that there are none.'" in output


@pytest.mark.parametrize(
    ("record", "task", "loss", "columns"),
    [
        ({"prompt": "Hi?", "chosen": "Yes.", "rejected": "No."}, "preference", "dpo", {}),
        (
            {"question": "Hi?", "winner": "Yes.", "loser": "No."},
            "preference",
            "dpo",
            {"prompt": "question", "chosen": "winner", "rejected": "loser"},
        ),
        ({"prompt": "Hi?", "completion": "Yes.", "label": True}, "preference", "kto", {}),
    ],
)
def test_answers_that_are_compared_or_judged(
    record: dict[str, Any], task: str, loss: str, columns: dict[str, str]
) -> None:
    config, _ = written(lines("pairs.jsonl", [record] * 30))
    assert (config.task, config.preference.loss) == (task, loss)
    assert config.data.train[0].columns == columns
    # Plain prompts go through the template of a model that has one.
    assert config.data.train[0].format == "messages"
    assert cli.main(["data", "check", "run.yaml", "--samples", "0"]) == 0


def test_conversations_of_a_model_without_a_template(tmp_path: Path) -> None:
    plain = tmp_path / "model"
    plain.mkdir()
    for file in Path(MODEL).iterdir():
        if file.name != "chat_template.jinja":
            shutil.copy(file, plain)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
    config, text = written(lines("c.jsonl", [{"messages": turns}] * 3), model=str(plain))
    assert config.model.chat_template == "chatml"
    assert "3 rows: too few to hold some out" in text


def test_a_file_name_that_is_no_image_is_no_image() -> None:
    config, _ = written(lines("t.jsonl", [{"text": "A page.", "filename": "a.md"}] * 20))
    assert (config.task, config.data.train[0].columns) == ("causal_lm", {})


def test_text_and_unknown_models(capsys: pytest.CaptureFixture[str]) -> None:
    Path("book.txt").write_text("One paragraph.\n\nAnother.\n")
    said = refused(capsys, "book.txt", "--model", "acme/not-here", writes=True)
    assert "model acme/not-here is not in the local cache and the hub cannot be reached" in said
    text = Path("run.yaml").read_text()
    config = load_config(Path("run.yaml"))
    assert (config.task, config.data.train[0].format) == ("causal_lm", "auto")
    assert "not on this machine yet" in text
    # Without a model an example is written, and without a file it is printed.
    capsys.readouterr()
    assert cli.main(["init", "book.txt"]) == 0
    assert "model: Qwen/Qwen3-0.6B" in capsys.readouterr().out


def test_a_column_that_nothing_reads_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The look at the data names it, and so does each split of the verdict."""
    rows = []
    for n in range(60):
        asked = {"role": "user", "content": f"What is {n}?"}
        answered = {"role": "assistant", "content": f"It is {n}."}
        rows.append({"messages": [asked, answered], "reasoning": f"I count to {n}, so"})
    written(lines("talks.jsonl", rows))
    output = capsys.readouterr()
    assert (output.out + output.err).count("`reasoning` (thoughts) is not used") == 1


def refused(capsys: pytest.CaptureFixture[str], *words: str, writes: bool = False) -> str:
    """Return what is said of words that `init` refuses, which leaves no file but as a start where `writes`."""
    Path("run.yaml").unlink(missing_ok=True)
    assert cli.main(["init", *words, "-o", "run.yaml"]) == errors.USER
    assert Path("run.yaml").exists() is writes
    return capsys.readouterr().err


def test_what_it_can_make_no_run_of_it_refuses_in_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = table("odd.csv", ("foo", "bar"), [(1, 2)])
    output = refused(capsys, file)
    assert "has the columns `foo` and `bar`" in output
    assert "--columns prompt=NAME completion=NAME" in output, "numbers are no question"

    # What it says to paste works.
    table("odd.csv", ("foo", "bar"), [("What is it?", "That is it.")])
    assert "--columns prompt=foo completion=bar" in refused(capsys, file)
    config, _ = written(file, "--columns", "prompt=foo", "completion=bar")
    assert config.data.train[0].columns == {"prompt": "foo", "completion": "bar"}

    Path("photos/cat").mkdir(parents=True)
    Path("photos/cat/1.png").touch()
    # Neither files of other programs nor unfinished copies are images or records.
    for name in ("._1.png", ".1.png.1a2b.tmp", ".rows.jsonl"):
        Path("photos", "cat", name).touch()
    output = refused(capsys, "photos")
    assert "holds 1 image and no file of records" in output
    assert 'photos/train.jsonl with lines such as {"image": "cat/1.png"' in output
    table("photos/labels.csv", ("file_name", "label"), [("cat/1.png", "cat")])
    assert "add a column `prompt`" in refused(capsys, "photos")
    table("photos/labels.csv", ("file_name", "label", "prompt"), [("cat/1.png", "cat", "What?")])
    refused(capsys, "photos", "--model", "acme/sees", writes=True)
    config = load_config(Path("run.yaml"))
    assert (config.task, config.data.train[0].columns) == (
        "vision_language",
        {"image": "file_name", "completion": "label"},
    )
    lines("photos/labels.jsonl", [{"image": "cat/1.png", "prompt": "?", "completion": "A cat."}])
    Path("photos/labels.csv").unlink()
    said = refused(capsys, "photos", "--model", MODEL, writes=True)
    assert f"model {MODEL} (llama) takes no images" in said
    assert "does not exist" in refused(capsys, "none.csv")
    Path("empty.csv").touch()
    assert "is blank; expected a header" in refused(capsys, "empty.csv")
    assert "DATA, which is missing" in refused(capsys, "--columns", "prompt=a")


def test_a_rejected_answer_is_never_proposed_to_be_learned(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pairs = [{"prompt": f"{n}?", "chosen": f"It is {n}", "rejected": f"no {n}"} for n in range(40)]
    said = refused(capsys, lines("pairs.jsonl", pairs), "--task", "causal_lm")
    assert "is preference data, by `chosen` and `rejected`" in said
    assert "completion=rejected" not in said


@pytest.mark.parametrize("task", sorted(TASKS))
def test_a_starter_of_each_task_loads(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", "--task", task, "-o", "run.yaml"]) == 0
    assert load_config(Path("run.yaml")).task == task


@pytest.mark.parametrize(
    ("rows", "share", "batch"),
    [(None, 0.05, 32), (5, None, 8), (100, 0.1, 8), (10_000, 0.05, 32), (1_000_000, 0.002, 32)],
)
def test_values_fit_the_number_of_rows(rows: int | None, share: float | None, batch: int) -> None:
    start = starting_values(rows)
    assert start["data.eval"].value == share
    assert start["training.global_batch_size"].value == batch


def test_a_small_step_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    lines("d.jsonl", [{"prompt": f"{n}", "completion": " x"} for n in range(30)])
    words = ["plan", "--model", MODEL, "--data", "d.jsonl"]
    assert cli.main([*words, "--batch", "2"]) == 0
    assert "a step of fewer than 8 rows is noisy" in capsys.readouterr().out
    assert cli.main(words) == 0
    assert "noisy" not in capsys.readouterr().out


def test_the_program_is_named_as_the_shell_finds_it(tmp_path: Path) -> None:
    code = "from kubetune.cli.program import program; print(program())"
    beside = Path(sys.executable).with_name("kubetune")
    for path, expected in ((beside.parent, "kubetune"), (tmp_path, str(beside))):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PATH": str(path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == expected


def on_a_terminal(stream: io.StringIO) -> io.StringIO:
    """Return a stream that says that it is a terminal."""
    stream.isatty = lambda: True  # type: ignore[method-assign]
    return stream


def test_a_terminal_is_asked_for_a_prompt_and_sees_that_work_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = argparse.Namespace(prompts=[], file=None)
    monkeypatch.setattr(sys, "stdin", on_a_terminal(io.StringIO("What is a pod?\nmore\n")))
    assert generate_input._typed_lines(args) == [("prompt:1", "What is a pod?")]
    assert capsys.readouterr().err == "prompt> "
    monkeypatch.setattr(sys, "stdin", on_a_terminal(io.StringIO("")))
    with pytest.raises(errors.ConfigError, match="no prompt was given"):
        generate_input._typed_lines(args)

    # A pipe is read as before, and a log shows no bar.
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(errors.ConfigError, match="standard input is empty"):
        generate_input._typed_lines(args)
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n"))
    assert [line for _, line in generate_input._typed_lines(args)] == ["a", "b"]
    capsys.readouterr()
    with busy("loading"):
        pass
    assert capsys.readouterr().err == ""
    terminal = on_a_terminal(io.StringIO())
    monkeypatch.setattr(sys, "stderr", terminal)
    with busy("loading [a model]"):
        pass
    assert "loading [a model]" in terminal.getvalue()
    with busy("loading") as work:
        work.count("evaluating rows", 2000, 1500)
        work.tell("merging")
    shown = terminal.getvalue()
    assert "evaluating rows" in shown
    assert "1,500/2,000" in shown
    # A step stays, also where no terminal is.
    assert capsys.readouterr().out == "… merging\n"


def written_for(tmp_path: Path, rows: list[dict[str, Any]], *arguments: str) -> Config:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = tmp_path / "made.yaml"
    assert cli.main(["init", str(data), "-o", str(file), *arguments]) == 0
    return load_config(read_file(file))


def test_a_run_for_questions_and_answers_measures_before_and_after(tmp_path: Path) -> None:
    short = [{"question": f"How many are {n}?", "answer": f"{n} pieces"} for n in range(60)]
    config = written_for(tmp_path, short)
    assert config.needs_base
    assert config.evaluation.generate is not None
    assert config.evaluation.generate.metric == ("exact_match",)
    (tmp_path / "made.yaml").unlink()

    long = [
        {"question": f"Why {n}?", "answer": f"Because of {n} " + "and more " * 20}
        for n in range(60)
    ]
    config = written_for(tmp_path, long)
    assert config.evaluation.generate is not None
    assert config.evaluation.generate.metric == ("token_f1",)
    # Without the tokenizer: the longest answer has 193 bytes.
    assert config.evaluation.generate.max_new_tokens == 200


@pytest.mark.parametrize(("letters", "metric"), [(6, "exact_match"), (21, "token_f1")])
def test_answers_without_spaces_are_counted_by_the_tokenizer(
    tmp_path: Path, letters: int, metric: str
) -> None:
    sentence = "今天天气很好我们去公园散步看到许多花朵和小鸟"
    rows = [{"question": f"为什么{n}?", "answer": sentence[:letters]} for n in range(60)]
    generate = written_for(tmp_path, rows, "--model", MODEL).evaluation.generate
    assert generate is not None
    assert generate.metric == (metric,)
    tokens = len(load_tokenizer(ModelConfig(path=MODEL)).encode_text(sentence[:letters]))
    assert tokens <= generate.max_new_tokens < max(33, 2 * tokens)


def test_a_run_for_prompts_measures_their_reward(tmp_path: Path) -> None:
    prompts = [{"prompt": f"{n} + 1?", "solution": str(n + 1)} for n in range(60)]
    config = written_for(tmp_path, prompts, "--task", "grpo")
    assert config.needs_base
    assert config.training.metric_for_best_model == "eval_reward"


def test_where_nothing_is_held_out_nothing_is_asked(tmp_path: Path) -> None:
    few = [{"question": f"How many are {n}?", "answer": f"{n} pieces"} for n in range(6)]
    assert written_for(tmp_path, few).evaluation.generate is None


ANSWERS_THAT_ARE_NO_TEXTS = {
    "truth": (
        {"question": "Is {n} even, if it is divided by two?", "passage": "Of the number {n} we speak."},
        lambda n: {"answer": n % 2 == 0},
        "true",
    ),
    "choice": (
        {"question": "What is {n} plus one in usual arithmetic?"},
        lambda n: {"choices": [f"first {n}", f"second {n}"], "answer": 0},
        "first 0",
    ),
    "object": (
        {"instruction": "Write order {n} as an object", "input": "order {n} of it's three apples"},
        lambda n: {"output": {"order": n}},
        '{"order": 0}',
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS_THAT_ARE_NO_TEXTS)
def test_the_command_that_makes_answers_texts_works_when_pasted(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, answers, first = ANSWERS_THAT_ARE_NO_TEXTS[name]
    records = []
    for n in range(40):
        records.append({**{key: text.format(n=n) for key, text in texts.items()}, **answers(n)})
    lines("some rows.jsonl", records)
    words = ["init", "some rows.jsonl", "--model", MODEL, "--task", "causal_lm"]
    assert cli.main(words) == errors.USER
    command = capsys.readouterr().err.split("`")[-2]
    subprocess.run(command, shell=True, check=True, executable="/bin/sh")
    config, _ = written("some rows-texts.jsonl")
    assert config.task == "causal_lm"
    made = [json.loads(line) for line in Path("some rows-texts.jsonl").read_text().splitlines()]
    assert len(made) == len(records)
    assert made[0].get("answer", made[0].get("output")) == first


def test_an_article_with_highlights_is_a_prompt_with_its_answer() -> None:
    records = [
        {"article": f"A long article {n} about many things.", "highlights": f"Of {n} in short, many things."}
        for n in range(40)
    ]  # fmt: skip
    config, _ = written(lines("news.jsonl", records))
    assert dict(config.data.train[0].columns) == {"prompt": "article", "completion": "highlights"}


def test_a_text_beside_a_text_is_not_dropped_in_silence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    records = [
        {"article": f"A long article {n} about many things.", "gist": f"Of {n} in short, there are many things."}
        for n in range(40)
    ]  # fmt: skip
    file = lines("news.jsonl", records)
    assert cli.main(["init", file, "--model", MODEL]) == errors.USER
    told = capsys.readouterr().err
    assert "`--columns prompt=article completion=gist`" in told
    # It would leave the gist out, which only the user decides.
    assert "text=article" not in told
    for words in ("prompt=article completion=gist", "text=article"):
        Path("run.yaml").unlink(missing_ok=True)
        written(file, "--columns", *words.split())
