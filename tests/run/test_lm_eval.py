"""Benchmarks of lm-evaluation-harness, where it is installed: log-likelihoods of its own Hugging Face model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kubetune import cli, errors
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
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("lm_eval.models.huggingface")
    folder = tmp_path_factory.mktemp("toy")
    inputs = toy.make_inputs(folder)
    rows = [
        {"question": f"{n} the quick brown", "choices": [" fox jumps", " dog", " a lazy one"], "label": n % 3}
        for n in range(17)
    ]
    (folder / "tasks").mkdir()
    (folder / "tasks" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, (kind, how) in KINDS.items():
        text = TASK.format(name=name, data=folder / "tasks" / "rows.jsonl", kind=kind, how=how)
        (folder / "tasks" / f"{name}.yaml").write_text(text)
    return toy.finished(folder / "run", toy.make_config(inputs, {"max_steps": 4}))


def their_model(run_dir: Path, adapter: Path | None) -> Any:
    """The harness's model of plain transformers and PEFT.

    Its own option `peft` would cut the head down to the tokenizer's size, and so change every probability.
    """
    from lm_eval.models.huggingface import HFLM
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = str(run_dir.parent / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    return HFLM(PeftModel.from_pretrained(model, str(adapter)) if adapter else model, tokenizer=folder, batch_size=1)


@pytest.mark.slow
def test_three_tasks_give_what_the_harness_gives(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(run_dir.parent / "datasets"))
    folder, tasks = run_dir.parent / "tasks", list(KINDS)
    options = ["--benchmarks", ",".join(tasks), "--tasks-folder", str(folder), "--with-base", "--json"]
    assert cli.main(["evaluate", str(run_dir), *options]) == errors.OK
    ours = json.loads(capsys.readouterr().out)
    for side, adapter in (("tuned", run_dir / "checkpoints" / "best"), ("base", None)):
        theirs = simple_evaluate(
            their_model(run_dir, adapter), tasks=list(tasks), bootstrap_iters=0,
            task_manager=TaskManager(include_path=str(folder)),
        )  # fmt: skip
        assert theirs is not None
        for task in tasks:
            wanted = {name: value for name, value in theirs["results"][task].items() if isinstance(value, float)}
            assert ours[side][task] == pytest.approx(wanted, rel=1e-5), (side, task)
            assert wanted


def test_likelihoods_are_the_harness_s_own(run_dir: Path) -> None:
    from kubetune.inference.benchmarks import harness_model
    from kubetune.inference.result import default_device, open_result

    result = open_result(run_dir)
    learner = result.task.load(result.config, result.checkpoint, default_device())
    learner.model.eval()
    ours = harness_model(learner, result.checkpoint)
    requests = [(("", ""), [5 + n, 9, 17, 30][: 1 + n % 4], [7, 40 + n, 11][: 1 + n % 3]) for n in range(13)] + [
        (("", ""), list(range(5, 305)), list(range(9, 260)))
    ]  # longer than the model: cut on the left
    found = ours._loglikelihood_tokens(requests)
    theirs = their_model(run_dir, result.checkpoint)._loglikelihood_tokens(requests, disable_tqdm=True)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in theirs], rel=1e-5)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in theirs]


def test_options_that_do_not_go_together_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["evaluate", "run", "--compare", "base", "--benchmarks", "gsm8k"]) == errors.USER
    assert cli.main(["evaluate", "run", "--limit", "3"]) == errors.USER
    said = capsys.readouterr().err
    assert "--compare and --benchmarks ask for different things" in said
    assert "--limit is for --benchmarks" in said
