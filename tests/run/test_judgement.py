"""Evaluations that ask the model: answers as one by one, at any number of ranks, after a kill; the gate at the end."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kubetune import cli, errors
from kubetune.config.schema import Config, GrpoConfig, ModelConfig
from kubetune.config.schema.evaluation import GenerateConfig
from kubetune.data.inspect.check import check
from kubetune.data.prepared.prepare import prepare
from kubetune.data.text.tokenizer import load_tokenizer
from kubetune.distributed.process_group import World
from kubetune.k8s.manifests import local_files
from kubetune.models.learner import Learner
from kubetune.models.padding_free import choose_attention, own_attention
from kubetune.reporting import write_report
from kubetune.result.forms.wanted import WantedExport
from kubetune.result.inference.evaluate_run import evaluate_run
from kubetune.result.publishing.exporting import export_run
from kubetune.rundir import exit_status, metrics
from kubetune.scoring.asking import answer
from kubetune.scoring.counted_draws import uniforms
from kubetune.scoring.generation import until_end
from kubetune.scoring.judge import Judge, Reply, judge_of
from kubetune.scoring.metrics import exact_match
from kubetune.scoring.questions import Question, drawn
from kubetune.training.rollouts.sampler import draw
from tests import toy
from tests.architectures import PADDING_FREE, PROMISED, build_model, random_rows, randomize_lora
from tests.ranks import run_ranks

FAMILIES = {**PROMISED, "gemma3_text": PADDING_FREE["gemma3_text"]}
TOKENS = 12
EVALUATION: dict[str, Any] = {
    "generate": {"metric": ["exact_match", "contains"], "max_new_tokens": 8, "batch_size": 4}
}


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3_text", "gpt2", "mistral"])
def test_answers_in_batches_are_those_of_transformers_one_by_one(name: str, inputs: Path) -> None:
    model = build_model(name, FAMILIES[name])
    randomize_lora(model)
    lengths = (5, 23, 11, 23, 40, 7)
    asked = [
        Question(row, tuple(int(i) for i in ids), (5,))
        for row, (ids, _) in enumerate(random_rows(lengths, seed=3))
    ]
    tokenizer = load_tokenizer(ModelConfig(path=str(inputs / "model")))
    alone = {}
    for question in asked:
        ids = torch.tensor([question.ids])
        out = model.eval().generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False,
            eos_token_id=list(tokenizer.eos_ids), pad_token_id=tokenizer.pad_id,
        )  # fmt: skip
        alone[question.row] = tokenizer.decode(out[0, ids.shape[1] :].tolist()).strip()
    learner = Learner(model.train(), choose_attention(model))
    assert learner.route.padding_free
    wanted = GenerateConfig(metric=("exact_match",), max_new_tokens=TOKENS, batch_size=4)
    replies = answer(Judge(wanted, tokenizer, asked), learner, World(), lambda: False)
    assert replies is not None
    assert {row: of_row.text.strip() for row, [of_row] in replies.items()} == alone
    assert len(set(alone.values())) > 1, "a model that always says the same proves nothing"
    assert learner.model.training
    assert choose_attention(model).padding_free, "and it trains as before"


def test_drawn_answers_are_those_of_the_sampler_and_judged_each(inputs: Path) -> None:
    model = build_model("llama", FAMILIES["llama"])
    tokenizer = load_tokenizer(ModelConfig(path=str(inputs / "model")))
    asked = [
        Question(row, tuple(int(i) for i in ids), (5,))
        for row, (ids, _) in enumerate(random_rows((5, 23, 11, 7), seed=3))
    ]
    wanted = GenerateConfig(
        metric=("exact_match", "rouge_l"), max_new_tokens=TOKENS, batch_size=3, samples=4, temperature=0.8
    )  # fmt: skip
    measures = {"exact_match": exact_match, "rouge_l": lambda *_: 0.0}
    judge = Judge(wanted, tokenizer, asked, measures=measures)
    learner = Learner(model.train(), choose_attention(model))
    replies = answer(judge, learner, World(), lambda: False)
    assert replies is not None
    drawing = GrpoConfig(num_generations=4, max_completion_length=TOKENS, temperature=0.8)
    learner.model.eval()
    for question in asked:
        numbers = [uniforms(TOKENS, "evaluation", question.row, place) for place in range(1, 5)]
        with own_attention(learner.lm):
            tokens = draw(
                learner.lm, [question.ids], np.stack(numbers), drawing, tokenizer.eos_ids, tokenizer.pad_id
            )  # fmt: skip
        expected = []
        for drawn_tokens in tokens:
            ids = until_end(drawn_tokens.ids, tokenizer.eos_ids)
            expected.append(tokenizer.decode(ids).strip())
        assert [reply.text.strip() for reply in replies[question.row][1:]] == expected
        assert len(set(expected)) > 1

    # 1 of 4, none of 4, and so on: pass@1 is the mean of shares, pass@4 the share of questions with any.
    answers = {0: ["x", "5", "y", "z", "w"], 1: ["x"] * 5, 2: ["x", "5", "5", "5", "5"]}
    answers = {
        row: [judge.reference(asked[0]) if text == "5" else text for text in texts]
        for row, texts in answers.items()
    }
    values, lines = judge.score(
        {row: [Reply(text, ()) for text in texts] for row, texts in answers.items()}
    )
    assert values["eval_exact_match"] == 0.0
    assert values["eval_exact_match_pass_at_1"] == pytest.approx((0.25 + 0 + 1) / 3)
    assert values["eval_exact_match_pass_at_4"] == pytest.approx(2 / 3)
    assert "eval_rouge_l_pass_at_1" not in values
    assert lines[0]["samples"] == answers[0][1:]


@pytest.mark.parametrize("several", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_metrics_are_the_same_to_the_last_bit_at_any_number_of_ranks(
    inputs: Path, tmp_path: Path, several: int
) -> None:
    evaluation = {
        "generate": {**EVALUATION["generate"], "samples": 2},
        "forget": f"{inputs}/train.jsonl#9",
    }
    config = toy.make_config(inputs, {"max_steps": 3}, evaluation=evaluation)
    lines = []
    for ranks in (1, several):
        run_dir = toy.finished(tmp_path / str(ranks), config, ranks)
        lines.append((run_dir / metrics.ANSWERS / "step-000003.jsonl").read_text())
        assert len(lines[-1].splitlines()) == 13, "each row once"
        (evaluated,) = (line for line in metrics.read_metrics(run_dir) if "eval_loss" in line)
        base = json.loads((run_dir / metrics.BASE).read_text())["metrics"]
        assert {
            "eval_exact_match",
            "eval_contains",
            "eval_contains_pass_at_1",
            "eval_contains_pass_at_2",
            "eval_forget_loss",
        } <= evaluated.keys() & base.keys()
        assert base["eval_forget_loss"] != evaluated["eval_forget_loss"]
    assert lines[0] == lines[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "lora", [{"r": 4}, pytest.param(None, marks=pytest.mark.slow)], ids=["lora", "full"]
)
def test_a_model_cut_over_ranks_answers_as_one_that_is_whole(
    inputs: Path, tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    answers = []
    for parallelism, ranks in (("ddp", 1), ("fsdp", 2)):
        training = {"max_steps": 2, "parallelism": parallelism}
        config = toy.make_config(inputs, training, lora=lora, evaluation=EVALUATION)
        run_dir = toy.finished(tmp_path / parallelism, config, ranks)
        answers.append(
            [(run_dir / metrics.ANSWERS / f"step-{step:06d}.jsonl").read_text() for step in (0, 2)]
        )
    assert answers[0] == answers[1]
    assert len(set(answers[0][0].splitlines())) > 1


@pytest.mark.slow
def test_training_is_the_same_with_and_without_questions(inputs: Path, tmp_path: Path) -> None:
    plain = toy.finished(tmp_path / "plain", toy.make_config(inputs, {"max_steps": 4}))
    asked = toy.finished(
        tmp_path / "asked", toy.make_config(inputs, {"max_steps": 4}, evaluation=EVALUATION)
    )
    assert toy.losses(plain) == toy.losses(asked)
    weights = {
        name: digest for name, digest in toy.digests(asked).items() if name.endswith("safetensors")
    }
    assert weights.items() <= toy.digests(plain).items()


def test_the_best_checkpoint_is_the_one_with_the_best_answers(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(
        "calls = []\n\n\ndef early(prompt, answer, reference, record):\n"
        "    assert record['prompt'].startswith(prompt[:3])\n"
        "    calls.append(answer)\n    return -len(calls)\n"
    )
    metrics_file = {"file": str(tmp_path / "own.py"), "functions": "early"}
    training = {"max_steps": 9, "metric_for_best_model": "early"}
    run_dir = toy.finished(
        tmp_path / "run",
        toy.make_config(inputs, training, evaluation={**EVALUATION, "metrics": metrics_file}),
    )
    assert (run_dir / "checkpoints" / "best").resolve().name == "step-000003"
    assert cli.main(["runs", str(run_dir)]) == errors.OK
    shown = capsys.readouterr().out
    assert "early -20" in shown, "the metric that it is chosen by, of the checkpoint that it chose"


@pytest.mark.parametrize(
    ("gate", "code", "ranks"),
    [
        pytest.param(
            {"exact_match": ">= 0.9", "loss": "< 100"}, errors.GATE, 2, marks=pytest.mark.slow
        ),
        ({"exact_match": ">= 0.9", "loss": "< 100"}, errors.GATE, 1),
        pytest.param({"loss": "<= +1%"}, errors.OK, 1, marks=pytest.mark.slow),
    ],
)
def test_a_gate_ends_the_run_with_its_own_exit_code(
    inputs: Path, tmp_path: Path, gate: dict[str, str], code: int, ranks: int
) -> None:
    config = toy.make_config(inputs, {"max_steps": 3}, evaluation={**EVALUATION, "gate": gate})
    run_dir = toy.make_run(tmp_path / "run", config, ranks)
    assert toy.train(run_dir, ranks) == [code] * ranks
    verdict = json.loads((run_dir / metrics.VERDICT).read_text())
    assert verdict["gate"]["passed"] is (code == errors.OK)
    assert (run_dir / "checkpoints" / "best" / "manifest.json").is_file()
    assert (run_dir / metrics.REPORT).is_file()
    reason = exit_status.read_rank_exit_statuses(run_dir)[0].reason
    assert ("eval_exact_match is 0, expected >= 0.9" in reason) is (code == errors.GATE)
    assert toy.train(run_dir, ranks) == [code] * ranks, "a second start finds the same"


def test_a_budget_of_time_says_how_many_rows_were_asked(inputs: Path, tmp_path: Path) -> None:
    evaluation = {"generate": {**EVALUATION["generate"], "batch_size": 1, "max_seconds": 1e-9}}
    run_dir = toy.make_run(
        tmp_path / "run", toy.make_config(inputs, {"max_steps": 1}, evaluation=evaluation)
    )
    assert toy.train(run_dir) == [0]
    log = toy.log_of(run_dir)
    assert "1e-09 s are over; 1 of 13 rows were asked, and the metrics are theirs" in log


def test_of_a_pair_the_chosen_answer_is_asked_for_and_no_bad_answer(
    inputs: Path, tmp_path: Path
) -> None:
    judged = [
        {"prompt": "one two", "completion": text, "label": text == " fox"}
        for text in (" dog", " fox")
    ]
    pairs = [{"prompt": "one two", "chosen": " fox", "rejected": " dog"}]
    for loss, rows in (("dpo", pairs), ("kto", judged)):
        file = tmp_path / f"{loss}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = toy.make_config(
            inputs,
            task="preference",
            preference={"loss": loss},
            data={"train": str(file), "eval": str(file)},
        )
        prepared = prepare(config)
        assert prepared.eval is not None
        (question,) = drawn(prepared.eval)
        decode = prepared.tokenizer.decode
        assert (decode(question.ids).strip(), decode(question.answer).strip()) == ("one two", "fox")


def asked_by_two(world: World, inputs: Path) -> dict[int, str] | None:
    model = build_model("llama", FAMILIES["llama"])
    tokenizer = load_tokenizer(ModelConfig(path=str(inputs / "model")))
    asked = [Question(0, (5, 6, 7), (5,)), Question(1, (9, 8), (5,))]
    judge = Judge(GenerateConfig(metric=("exact_match",), batch_size=1), tokenizer, asked)
    return answer(judge, Learner(model, choose_attention(model)), world, lambda: world.rank == 1)


def test_a_stop_on_one_rank_ends_the_questions_of_all(inputs: Path) -> None:
    assert run_ranks(asked_by_two, 2, inputs) == [None, None]


def test_what_cannot_be_judged_is_refused_before_the_model_is_loaded(
    inputs: Path, tmp_path: Path
) -> None:
    metrics_file = {"file": str(tmp_path / "absent.py"), "functions": ["x"]}
    config = toy.make_config(inputs, evaluation={**EVALUATION, "metrics": metrics_file})
    run_dir = toy.make_run(tmp_path / "run", config, 2)
    assert toy.train(run_dir, 2) == [errors.USER] * 2
    assert "absent.py is no file" in exit_status.read_rank_exit_statuses(run_dir)[1].reason
    assert "loading model" not in toy.log_of(run_dir)


_WANTED: list[tuple[dict[str, Any], str, str]] = [
    ({"metric": "numeric"}, "number", "12"),
    ({"metric": "label", "labels": ["good", "bad"]}, "word of evaluation.generate.labels", "bad"),
    ({"metric": "json_equal"}, "JSON", "[1]"),
]


@pytest.mark.parametrize(("wanted", "target", "good"), _WANTED)
def test_references_that_a_measure_finds_nothing_in_are_counted(
    inputs: Path, tmp_path: Path, wanted: dict[str, Any], target: str, good: str
) -> None:
    def config_of(*answers: str) -> Config:
        rows = [{"prompt": f"{n} what", "completion": text} for n, text in enumerate(answers)]
        (tmp_path / "eval.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        data = {"eval": str(tmp_path / "eval.jsonl"), "cache": str(tmp_path / "cache")}
        return toy.make_config(inputs, data=data, evaluation={"generate": wanted})

    def judge(*answers: str) -> Judge:
        config = config_of(*answers)
        prepared = prepare(config)
        assert prepared.eval is not None
        made = judge_of(
            config.evaluation, prepared.tokenizer, config.data.eval, prepared.eval, World()
        )
        assert made is not None
        return made

    (remark,) = judge(good, "a fox", good).remarks
    assert remark.startswith(f"{wanted['metric']} finds no {target} in 1 of 3 references")
    assert "(the first is row 1, 'a fox')" in remark
    assert judge(good, good).remarks == []
    refusal = f"{wanted['metric']} finds no {target} in any of the 2 references"
    with pytest.raises(errors.ConfigError, match=refusal):
        judge("a fox", "the dog")

    # `data check` says so too, and nothing of a reference without one among others that have it.
    config = config_of("a fox", "the dog")
    tokenizer = load_tokenizer(config.model)
    report = check(config, tokenizer)
    assert not report.ok
    assert refusal in report.verdict
    assert check(config_of("a fox", good), tokenizer).ok


def test_a_check_refuses_an_evaluation_that_asks_nothing(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "eval.jsonl").write_text('{"text": "a fox and a dog"}\n' * 3)
    data = {"eval": str(tmp_path / "eval.jsonl"), "cache": str(tmp_path / "cache")}
    config = toy.make_config(inputs, data=data, evaluation=EVALUATION)
    report = check(config, load_tokenizer(config.model))
    assert "no row of the evaluation data has a prompt and an answer" in report.verdict


def test_what_acts_on_greedy_answers_is_told(inputs: Path, tmp_path: Path) -> None:
    model = toy.make_inputs(tmp_path) / "model"
    settings = {"repetition_penalty": 1.3, "temperature": 0.7, "do_sample": True, "min_length": 0}
    (model / "generation_config.json").write_text(json.dumps(settings))
    config = toy.make_config(tmp_path, {"max_steps": 1}, evaluation=EVALUATION)
    run_dir = toy.finished(tmp_path / "run", config)
    line = (
        "answers are greedy, and the model's generation_config acts on them: repetition_penalty 1.3"
    )
    assert f"{line}\n" in toy.log_of(run_dir)
    assert line in evaluate_run(run_dir, "best").remarks
    assert line in json.loads((run_dir / metrics.EVALUATION).read_text())["remarks"]


@pytest.fixture(scope="module")
def judged_run(inputs: Path) -> Path:
    evaluation = {
        **EVALUATION,
        "forget": f"{inputs}/train.jsonl#3",
        "gate": {"exact_match": ">= 0.9"},
    }
    run_dir = toy.make_run(
        inputs / "judged", toy.make_config(inputs, {"max_steps": 6}, evaluation=evaluation)
    )
    assert toy.train(run_dir) == [errors.GATE]
    return run_dir


def test_the_page_and_the_card_show_the_base_model_beside_the_best_checkpoint(
    judged_run: Path, tmp_path: Path
) -> None:
    page = write_report([judged_run], tmp_path / "report.html").read_text()
    assert "The gate failed." in page
    assert "eval_exact_match is 0, expected &gt;= 0.9" in page
    assert "What each evaluation measured; the best by " in page
    verdict = metrics.read_verdict(judged_run)
    card = (
        export_run(judged_run, "best", wanted=WantedExport(out=tmp_path / "export")).path
        / "README.md"
    ).read_text()
    assert (
        f"| eval_loss | {verdict['base']['eval_loss']:.4g} | {verdict['best']['eval_loss']:.4g} | | | | |"
        in card
    )
    assert "| eval_contains | " in card


def test_the_result_of_a_gate_that_failed_is_not_pushed(
    judged_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["push", str(judged_run), "org/name"]) == errors.USER
    assert (
        "missed its gate: eval_exact_match is 0, expected >= 0.9. Nothing was sent"
        in capsys.readouterr().err
    )


def test_a_run_is_compared_with_its_base_model_and_with_others(
    judged_run: Path, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["evaluate", str(judged_run), "--compare", "base"]) == errors.OK
    stdout = capsys.readouterr().out
    assert stdout.startswith("metric ")
    assert "13 rows that both were asked; p: McNemar, two-sided" in stdout
    assert (
        cli.main(["evaluate", str(judged_run), "--compare", str(judged_run), "--json"]) == errors.OK
    )
    same = json.loads(capsys.readouterr().out)
    assert {
        (line["difference"], line["gained"], line["lost"], line["p_value"]) for line in same
    } == {(0, 0, 0, 1)}
    plain = toy.finished(tmp_path / "plain", toy.make_config(inputs, {"max_steps": 1}))
    assert cli.main(["evaluate", str(judged_run), "--compare", str(plain)]) == errors.USER
    assert "keeps no answers of step 1" in capsys.readouterr().err


def test_evaluating_by_hand_finds_what_the_run_found(judged_run: Path) -> None:
    (last,) = (
        line
        for line in metrics.read_metrics(judged_run)
        if line["step"] == 6 and "eval_loss" in line
    )
    values = evaluate_run(judged_run, "6").metrics
    names = ("eval_exact_match", "eval_contains")
    assert [values[name] for name in names] == [last[name] for name in names]
    assert values["eval_forget_loss"] == pytest.approx(last["eval_forget_loss"], rel=1e-6)


@pytest.mark.slow
def test_a_run_killed_within_an_evaluation_asks_and_answers_as_one_that_was_not(
    inputs: Path, tmp_path: Path, judged_run: Path
) -> None:
    (tmp_path / "own.py").write_text(
        "import os\nfrom pathlib import Path\n\n\ndef kills(prompt, answer, reference, record):\n"
        "    with Path(__file__).with_name('calls').open('a') as calls:\n        calls.write('.')\n"
        "        if calls.tell() == 13 + 6:  # of the second evaluation, the first being that of the base model\n"
        "            os.kill(os.getpid(), 9)\n    return 1.0\n"
    )
    metrics_file = {"file": str(tmp_path / "own.py"), "functions": "kills"}
    config = toy.make_config(
        inputs, {"max_steps": 6}, evaluation={**EVALUATION, "metrics": metrics_file}
    )
    run_dir = toy.make_run(tmp_path / "run", config)
    assert toy.train(run_dir) == [-signal.SIGKILL]
    assert not (run_dir / "answers" / "step-000003.jsonl").exists()
    assert toy.train(run_dir) == [0]
    weights = {
        name: digest
        for name, digest in toy.digests(judged_run, "best").items()
        if name.endswith("safetensors")
    }
    assert weights.items() <= toy.digests(run_dir, "best").items()
    for step in (0, 3, 6):
        answers = [
            metrics.read_lines(directory / "answers" / f"step-{step:06d}.jsonl")
            for directory in (run_dir, judged_run)
        ]
        assert [line["answer"] for line in answers[0]] == [line["answer"] for line in answers[1]]


@pytest.mark.slow
def test_functions_that_change_between_two_starts_are_warned_of(
    inputs: Path, tmp_path: Path
) -> None:
    file = tmp_path / "own.py"
    head = "def mine(prompt, answer, reference, record):\n"
    file.write_text(f"{head}    return 0.0\n")
    evaluation = {**EVALUATION, "metrics": {"file": str(file), "functions": "mine"}}
    paused = {"max_steps": 6, "pause_at_step": 3}
    run_dir = toy.make_run(tmp_path / "run", toy.make_config(inputs, paused, evaluation=evaluation))
    toy.train(run_dir)
    log = run_dir / "logs" / "rank-0.log"
    assert "has changed since it measured" not in log.read_text()
    file.write_text(f"{head}    return 1.0\n")
    toy.make_run(run_dir, toy.make_config(inputs, {"max_steps": 6}, evaluation=evaluation))
    assert toy.train(run_dir) == [0]
    warning = f"{file} has changed since it measured the model before training: what mine says"
    assert log.read_text().count(warning) == 2, "at the start, and beside the verdict"


def test_files_of_the_user_s_travel_to_a_cluster(inputs: Path, tmp_path: Path) -> None:
    metrics_file = tmp_path / "own.py"
    general = tmp_path / "general.jsonl"
    metrics_file.write_text("def f(prompt, answer, reference, record):\n    return 1\n")
    general.write_text('{"text": "a"}\n')
    evaluation = {
        **EVALUATION,
        "metrics": {"file": str(metrics_file), "functions": "f"},
        "forget": str(general),
    }
    config = toy.make_config(inputs, evaluation=evaluation)
    assert {str(metrics_file), str(general)} <= local_files(config).keys()
