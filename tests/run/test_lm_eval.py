"""Benchmarks of lm-evaluation-harness, where it is installed: log-likelihoods of its own Hugging Face model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kubetune import cli, errors, extras
from kubetune.batching.batch import collate
from kubetune.config.schema.evaluation import BenchmarksConfig
from kubetune.distributed.process_group import World
from kubetune.models import prefix_sharing
from kubetune.models.acceleration import Workload
from kubetune.models.model_spec import ModelSpec
from kubetune.models.padding_free import own_attention
from kubetune.reporting import write_report
from kubetune.result.forms.wanted import WantedExport
from kubetune.result.publishing.exporting import export_run
from kubetune.rundir import exit_status, metrics
from kubetune.scoring import harness, verdict
from kubetune.tasks import causal_lm
from kubetune.training.judgement import open_judge
from tests import toy

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
{how}
"""
KINDS = {
    "toy_choice": ("multiple_choice", 'doc_to_choice: "{{choices}}"\ndoc_to_target: label'),
    "toy_likely": (
        "loglikelihood",
        'doc_to_target: "{{choices[0]}}"\nmetric_list: [{metric: acc}, {metric: perplexity}]',
    ),
    "toy_words": (
        "generate_until",
        'doc_to_target: "{{choices[0]}}"\ngeneration_kwargs: {until: ["\\n"], max_gen_toks: 6}\n'
        "metric_list: [{metric: exact_match}]",
    ),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model, data, and task files."""
    folder = tmp_path_factory.mktemp("toy")
    return write_tasks(toy.make_inputs(folder))


@pytest.fixture(scope="module")
def run_dir(inputs: Path) -> Path:
    pytest.importorskip("lm_eval.models.huggingface")
    return toy.finished(inputs / "run", toy.make_config(inputs, {"max_steps": 4}))


def write_tasks(folder: Path) -> Path:
    rows = [
        {
            "question": f"{n} the quick brown",
            "choices": [" fox jumps", " dog", " a lazy one"],
            "label": n % 3,
        }
        for n in range(17)
    ]
    (folder / "tasks").mkdir()
    (folder / "tasks" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, (kind, how) in KINDS.items():
        text = TASK.format(name=name, data=folder / "tasks" / "rows.jsonl", kind=kind, how=how)
        (folder / "tasks" / f"{name}.yaml").write_text(text)
    return folder


def their_model(run_dir: Path, adapter: Path | None) -> Any:
    """Return the harness's model of plain transformers and PEFT.

    Its own option `peft` would cut the head down to the tokenizer's size, and so change every probability.
    """
    from lm_eval.models.huggingface import HFLM
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = str(run_dir.parent / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    return HFLM(
        PeftModel.from_pretrained(model, str(adapter)) if adapter else model,
        tokenizer=folder,
        batch_size=1,
    )


@pytest.mark.slow
def test_three_tasks_give_what_the_harness_gives(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(run_dir.parent / "datasets"))
    folder = run_dir.parent / "tasks"
    tasks = list(KINDS)
    options = [
        "--benchmarks",
        ",".join(tasks),
        "--tasks-folder",
        str(folder),
        "--with-base",
        "--json",
    ]
    assert cli.main(["evaluate", str(run_dir), *options]) == errors.OK
    ours = json.loads(capsys.readouterr().out)
    for side, adapter in (("tuned", run_dir / "checkpoints" / "best"), ("base", None)):
        theirs = simple_evaluate(
            their_model(run_dir, adapter), tasks=list(tasks), bootstrap_iters=0,
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        )  # fmt: skip
        assert theirs is not None
        for task in tasks:
            wanted = {
                name: value
                for name, value in theirs["results"][task].items()
                if isinstance(value, float)
            }
            assert ours[side][task] == pytest.approx(wanted, rel=1e-5), (side, task)
            assert wanted


def test_likelihoods_are_the_harness_s_own(run_dir: Path) -> None:
    from kubetune.result.inference.result import default_device, open_result
    from kubetune.scoring.harness import harness_model

    result = open_result(run_dir)
    learner = result.task.load(result.spec, result.checkpoint, default_device())
    learner.model.eval()
    ours = harness_model(learner, result.checkpoint)
    requests = [
        (("", ""), [5 + n, 9, 17, 30][: 1 + n % 4], [7, 40 + n, 11][: 1 + n % 3]) for n in range(13)
    ] + [
        (("", ""), list(range(5, 305)), list(range(9, 260)))
    ]  # longer than the model: cut on the left
    likelihoods = ours._loglikelihood_tokens(requests)
    theirs = their_model(run_dir, result.checkpoint)._loglikelihood_tokens(
        requests, disable_tqdm=True
    )
    assert [value for value, _ in likelihoods] == pytest.approx(
        [value for value, _ in theirs], rel=1e-5
    )
    assert [greedy for _, greedy in likelihoods] == [greedy for _, greedy in theirs]


def test_likelihoods_are_those_of_each_sequence_alone(inputs: Path) -> None:
    config = toy.make_config(inputs, lora={"r": 4, "dropout": 0.1})
    learner = causal_lm.TASK.build(
        ModelSpec.of(config),
        config.training,
        World(),
        Workload(0),
    )
    learner.model.eval()
    assert not prefix_sharing.why_not(learner), "dropout does nothing while it is evaluated"
    context = list(range(40, 140))
    pairs = [([*context, 7 + n], [9, 11 + n, 30][: 1 + n % 3]) for n in range(9)] + [
        ([5], [6]),
        (context, [9]),
    ] * 2
    pairs.append(
        (list(range(5, 305)), list(range(9, 209)))
    )  # longer than what is looked at: cut on the left
    likelihoods = harness.log_likelihoods(learner, pairs, max_length := 256)
    with torch.no_grad(), own_attention(learner.lm):
        for (context, continuation), (value, greedy) in zip(pairs, likelihoods, strict=True):
            ids = torch.tensor([context + continuation])[:, -(max_length + 1) :]
            batch = collate([(ids[0, :-1].numpy().astype("uint32"), [False] * (ids.shape[1] - 1))])
            logits = causal_lm.TASK.plain_logits(learner.lm, batch)
            scores = torch.cat([logits[:1] * 0, logits])[-len(continuation) :].log_softmax(-1)
            alone = scores[-len(continuation) :].gather(1, ids[0, -len(continuation) :, None]).sum()
            assert value == pytest.approx(float(alone), rel=1e-5)
            assert greedy == bool((scores.argmax(-1) == ids[0, -len(continuation) :]).all())


def test_the_gate_waits_for_benchmarks(inputs: Path, tmp_path: Path) -> None:
    evaluation = {
        "benchmarks": ["arc_easy"],
        "gate": {"arc_easy": ">= 0.4", "arc_easy/acc_norm": ">= +0.1"},
    }
    config = toy.make_config(inputs, evaluation=evaluation)
    verdict.conclude(config.evaluation, tmp_path, 7)
    gate = metrics.read_verdict(tmp_path, 7)["gate"]
    assert not gate["passed"]
    assert "eval_arc_easy was not measured, expected >= 0.4" in gate["checks"][0]["message"]
    values = {"arc_easy/acc": 0.5, "arc_easy/acc_norm": 0.4}
    lines = [{"metric": name, "before": 0.4, "after": after} for name, after in values.items()]
    with pytest.raises(
        errors.GateFailed, match=r"acc_norm is 0.4, expected >= \+0.1 of the base model's 0.4"
    ):
        verdict.judge_benchmarks(config.evaluation, tmp_path, 7, lines)
    verdict.judge_benchmarks(config.evaluation, tmp_path, 7, [lines[0], lines[1] | {"after": 0.6}])
    assert metrics.read_verdict(tmp_path, 7)["gate"]["passed"]


def test_benchmarks_are_refused_before_the_model_is_loaded_where_they_cannot_be_run(
    inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(errors.ConfigError, match="absent is no folder"):
        harness.task_manager(BenchmarksConfig(tasks=("x",), tasks_folder="absent"))
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    config = toy.make_config(inputs, evaluation={"benchmarks": "gsm8k"})
    with pytest.raises(errors.ConfigError, match="pip install 'kubetune\\[benchmarks\\]'"):
        open_judge(config.evaluation, (), None, World())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="found it with `task: vision_language`"):
        toy.make_config(inputs, task="vision_language", evaluation={"benchmarks": "gsm8k"})


@pytest.mark.slow
def test_a_run_ends_with_its_benchmarks_and_their_gate(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval.models.huggingface")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(inputs / "datasets"))
    tasks = {"tasks": list(KINDS), "tasks_folder": str(inputs / "tasks")}
    config = toy.make_config(
        inputs,
        {"max_steps": 3},
        evaluation={"benchmarks": tasks, "gate": {"toy_choice": ">= 2", "loss": "< 100"}},
    )
    run_file = tmp_path / "run.yaml"
    run_dir = tmp_path / "run"
    run_file.write_text(
        json.dumps(
            json.loads(config.model_dump_json(exclude_unset=True)) | {"output": str(run_dir)}
        )
    )
    assert cli.main(["train", str(run_file)]) == errors.GATE
    status = exit_status.read_exit_status(run_dir)
    assert status is not None
    assert "the gate failed: eval_toy_choice is 0." in status.reason
    benchmarks = metrics.read_benchmarks(run_dir, 3)
    lines = {line["metric"]: line for line in benchmarks["compared"]}
    assert lines["toy_choice/acc"]["rows"] == 17
    assert lines["toy_choice/acc"]["test"] == "McNemar"
    assert (
        lines["toy_words/exact_match"]["after"]
        == benchmarks["tuned"]["toy_words"]["exact_match,none"]
    )
    page = write_report([run_dir], tmp_path / "report.html").read_text()
    assert "toy_likely/perplexity" in page
    card = (
        export_run(run_dir, "best", wanted=WantedExport(out=tmp_path / "export")).path / "README.md"
    ).read_text()
    assert "| toy_choice/acc | " in card
    assert cli.main(["train", str(run_file)]) == errors.GATE
    assert metrics.read_benchmarks(run_dir, 3)["time"] == benchmarks["time"], (
        "a second start measures nothing again"
    )


def test_options_that_do_not_go_together_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["evaluate", "run", "--compare", "base", "--benchmarks", "gsm8k"]) == errors.USER
    )
    assert cli.main(["evaluate", "run", "--limit", "3"]) == errors.USER
    stderr = capsys.readouterr().err
    assert "--compare and --benchmarks ask for different things" in stderr
    assert "--limit is for --benchmarks" in stderr
