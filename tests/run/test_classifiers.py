"""Classifiers trained for real: exactness against transformers, any world size, resuming, adapters."""

from __future__ import annotations

import io
import json
import math
import random
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from kubetune import cli, errors
from kubetune.batching.feed import Feed, evaluation_batches, rows_per_epoch
from kubetune.config.resolved import read_config
from kubetune.data.prepared.prepare import prepare
from kubetune.data.text.class_labels import Labels
from kubetune.distributed.process_group import World
from kubetune.models.acceleration import Workload
from kubetune.models.model_spec import ModelSpec
from kubetune.plan.plan import make_plan
from kubetune.reporting.page import charts_of
from kubetune.reporting.reading import read_run
from kubetune.reporting.run_page import run_facts
from kubetune.rundir import checkpoints, metrics
from kubetune.tasks import sequence_classification as task
from kubetune.training import evaluation
from tests import reviews, toy
from tests.ranks import run_ranks

NO_DROPOUT: dict[str, dict[str, float]] = {
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "albert": {
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "classifier_dropout_prob": 0.0,
    },
    "distilbert": {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "qwen3": {},
    "modernbert": {},
}
ONE_BY_ONE = (
    "modernbert",
)  # it means over all tokens, and looks at neighbours only in some layers


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reviews.make_inputs(tmp_path_factory.mktemp("reviews"))


@pytest.fixture(scope="module")
def full_run(inputs: Path) -> Path:
    return toy.finished(inputs / "full", reviews.make_config(inputs))


@pytest.fixture(scope="module")
def lora_run(inputs: Path) -> Path:
    lora = {"r": 4, "dropout": 0.05, "target_modules": ["query", "value"]}
    return toy.finished(
        inputs / "lora", reviews.make_config(inputs, lora=lora, quantization="auto")
    )


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    return [line for line in metrics.read_metrics(run_dir) if "eval_loss" in line]


@pytest.mark.parametrize("kind", NO_DROPOUT)
def test_loss_and_gradient_equal_the_padded_batch_of_transformers(
    kind: str, tmp_path: Path
) -> None:
    inputs = reviews.make_inputs(tmp_path, kind, **NO_DROPOUT[kind])
    config = reviews.make_config(inputs, {"per_device_train_batch_size": 16})
    data = prepare(config)
    world = World()
    learner = task.TASK.build(
        ModelSpec.of(config), config.training, world, Workload(0, data.labels)
    )
    padding_free = learner.route.padding_free
    assert padding_free == (kind not in ONE_BY_ONE), learner.route.why_not
    plan = make_plan(config, rows_per_epoch(data.train))
    batches = Feed(data.train, plan, 0, world, padding_free=padding_free).step(0).batches
    samples = [sample for batch in batches for sample in batch.samples]
    assert len(batches) == (1 if padding_free else len(samples))
    sums = [task.TASK.backward(learner, batch, 1.0 / len(samples)) for batch in batches]
    loss, accuracy = torch.stack(sums).sum(0).tolist()
    gradient = {
        name: p.grad.clone() for name, p in learner.model.named_parameters() if p.grad is not None
    }
    learner.model.zero_grad()

    rows = [torch.tensor(data.train.row(i)[0].astype(np.int64)) for i in samples]
    targets = torch.cat([batch.labels[:, 0].long() for batch in batches])
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    seen = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    learner.model.set_attn_implementation("eager")
    outputs = learner.model(input_ids=ids, attention_mask=seen, labels=targets)
    wanted = outputs.loss
    wanted.backward()
    assert accuracy == pytest.approx(float((outputs.logits.argmax(1) == targets).float().mean()))
    assert loss == pytest.approx(float(wanted.detach()), rel=1e-5)
    for name, parameter in learner.model.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(gradient[name], parameter.grad, atol=1e-6), name


@pytest.mark.slow
def test_two_ranks_learn_what_one_learns(inputs: Path) -> None:
    fixed = reviews.make_inputs(inputs / "fixed", **NO_DROPOUT["bert"])
    config = reviews.make_config(fixed, {"max_steps": 36})
    alone, two = (toy.finished(fixed / f"ranks-{n}", config, n) for n in (1, 2))
    assert evaluations(alone)[-1]["eval_accuracy"] > 0.95
    # Sums over two ranks round differently, and the next step starts from there.
    assert toy.losses(two) == pytest.approx(toy.losses(alone), rel=1e-4, abs=1e-6)
    for ours, theirs in zip(evaluations(alone), evaluations(two), strict=True):
        assert theirs == pytest.approx(ours, rel=1e-4)


def test_a_metric_that_these_labels_do_not_have_is_found_before_the_model_is_loaded(
    inputs: Path, tmp_path: Path
) -> None:
    config = reviews.make_config(
        inputs, {"metric_for_best_model": "pearson"}
    )  # which numbers would have
    run_dir = toy.make_run(tmp_path / "run", config)
    assert toy.train(run_dir) == [errors.USER]
    log = toy.log_of(run_dir)
    assert (
        "metric_for_best_model is eval_pearson; this task gives eval_loss, eval_accuracy, " in log
    )
    assert "loading model" not in log


def evaluate_on(world: World, run_dir: Path) -> dict[str, float] | None:
    config = read_config(run_dir)
    learner = task.TASK.load(
        ModelSpec.of(config), checkpoints.choose(run_dir, "last"), world.device
    )
    rows = prepare(config).eval
    assert rows is not None
    return evaluation.evaluate(
        task.TASK, learner, rows, make_plan(config, world_size=world.size), world
    )


def test_ranks_report_to_the_last_bit_what_one_reports(full_run: Path) -> None:
    [alone] = run_ranks(evaluate_on, 1, full_run)
    assert alone == {
        name: value for name, value in evaluations(full_run)[-1].items() if name.startswith("eval_")
    }
    for size in (2, 3):
        assert run_ranks(evaluate_on, size, full_run) == [alone] * size


def evaluate_evenly(world: World, run_dir: Path) -> dict[str, float] | None:
    """Evaluate as ranks do that share the weights: each runs as many batches, so that some of them are empty."""

    def even(*arguments: Any, **settings: Any) -> Any:
        split = evaluation_batches(*arguments, **{**settings, "even": True})
        assert any(not len(batch) for share in split for batch in share)
        return split

    with patch.object(evaluation, "evaluation_batches", even):
        return evaluate_on(world, run_dir)


def test_a_rank_that_has_no_rows_left_changes_no_metric(full_run: Path) -> None:
    assert run_ranks(evaluate_evenly, 3, full_run) == run_ranks(evaluate_on, 1, full_run) * 3


def test_it_is_measured_before_training_too(full_run: Path) -> None:
    base = json.loads((full_run / metrics.BASE).read_text())["metrics"]
    assert base["eval_accuracy"] < 1
    judged = json.loads((full_run / metrics.VERDICT).read_text())
    assert judged["base"] == base
    (best,) = [line for line in evaluations(full_run) if line["step"] == judged["step"]]
    accuracies = f"accuracy {base['eval_accuracy']:.4g} → {best['eval_accuracy']:.4g}, f1_macro "
    log = toy.log_of(full_run)
    assert accuracies in log
    # Training says the same of its own rows: in each step, each epoch and at the end.
    steps = [line for line in metrics.read_metrics(full_run) if "loss" in line]
    assert all(0 <= line["accuracy"] <= 1 for line in steps)
    assert re.search(r"\[TRAIN\] step .* loss \d\.\d{4} accuracy [\d.]+ lr", log)
    # With what chooses the best checkpoint, if the epoch was evaluated.
    of_epochs = re.findall(
        r"\[EPOCH\] epoch \d done: mean loss [\d.]+, accuracy [\d.]+, step (\d+)(.*)", log
    )
    assert of_epochs
    scores = {line["step"]: line for line in evaluations(full_run)}
    for step, evaluated in of_epochs:
        last = max(number for number in scores if number <= int(step))
        where = "" if last == int(step) else f" at step {last}"
        values = scores[last]
        accuracy = values["eval_accuracy"]
        f1 = values["eval_f1_macro"]
        assert evaluated == f"; eval_accuracy {accuracy:.4f}, eval_f1_macro {f1:.4f}{where}"
    assert re.search(r"\[RESULT\] accuracy [\d.]+ → [\d.]+ in training", log)

    # The page begins where the run began.
    run = read_run(full_run)
    facts = run_facts(run)
    assert facts["hero"].value.before
    assert facts["hero"].value.before != facts["hero"].value.after
    assert facts["evaluation"]["rows"][0][0] == 0
    (scores,) = [chart for chart in charts_of([run]) if chart.name == "scores"]
    assert {line.series.steps[0] for line in scores.lines} == {0}


@pytest.mark.slow
def test_a_repeat_with_dropout_is_equal_bit_by_bit(inputs: Path, full_run: Path) -> None:
    again = toy.finished(inputs / "again", reviews.make_config(inputs))
    assert toy.digests(again) == toy.digests(full_run)


def test_a_run_resumed_in_the_middle_ends_alike(tmp_path: Path, lora_run: Path) -> None:
    run_dir = shutil.copytree(lora_run, tmp_path / "run", symlinks=True)
    end = checkpoints.folder_of(run_dir, reviews.STEPS)
    (end / "manifest.json").unlink()  # as if the run had died while writing its last checkpoint
    assert toy.train(run_dir) == [0]
    assert toy.digests(run_dir) == toy.digests(lora_run)


def test_an_adapter_loads_with_peft_alone(inputs: Path, lora_run: Path) -> None:
    folder = checkpoints.choose(lora_run, "best")
    config = AutoConfig.from_pretrained(folder)
    assert config.id2label == {0: "0", 1: "1"}
    base = AutoModelForSequenceClassification.from_pretrained(inputs / "model", config=config)
    model = PeftModel.from_pretrained(base, folder).eval()
    ours = task.TASK.load(
        ModelSpec.of(reviews.make_config(inputs, lora={"r": 4})), folder, torch.device("cpu")
    )
    ids = torch.tensor([[2, 5, 12, 13, 3]])
    ours.model.set_attn_implementation("sdpa")
    with torch.no_grad():
        assert torch.allclose(
            model(input_ids=ids).logits, ours.model.eval()(input_ids=ids).logits, atol=1e-6
        )


@pytest.mark.parametrize(
    ("problem_type", "names"),
    [
        ("multi_label_classification", ("bad", "good")),
        pytest.param("regression", ("value",), marks=pytest.mark.slow),
    ],
)
def test_other_problems_are_trained(
    inputs: Path, tmp_path: Path, problem_type: str, names: tuple[str, ...]
) -> None:
    draw = random.Random(3)
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        for _ in range(64):
            good = draw.randrange(2)
            label: Any = ["good"] * good + ["bad"] * (1 - good) if len(names) > 1 else good + 0.5
            file.write(json.dumps({"text": reviews.review(draw, good), "label": label}) + "\n")
    config = reviews.make_config(
        inputs, data={"train": str(path), "eval": str(path)}, output=str(tmp_path / "run")
    )
    config = config.model_copy(
        update={
            "training": config.training.model_copy(update={"metric_for_best_model": "eval_loss"})
        }
    )
    assert prepare(config).labels == Labels(problem_type, names)  # type: ignore[arg-type]
    run_dir = toy.finished(tmp_path / "run", config)
    first = evaluations(run_dir)[0]
    last = evaluations(run_dir)[-1]
    assert last["eval_loss"] < first["eval_loss"]
    name = "eval_f1_macro" if len(names) > 1 else "eval_spearman"
    assert last[name] > 0.7
    # Numbers to predict are not right or wrong.
    steps = [line for line in metrics.read_metrics(run_dir) if "loss" in line]
    assert all(("accuracy" in line) == (len(names) > 1) for line in steps)
    if len(names) > 1:
        assert steps[-1]["accuracy"] > 0.5
    assert "accuracy nan" not in toy.log_of(run_dir)


def test_8_bit_adamw_follows_adamw_and_resumes_bit_by_bit(
    inputs: Path, full_run: Path, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    config = reviews.make_config(inputs, {"optim": "adamw_8bit"})
    run_dir = toy.finished(tmp_path / "run", config)
    assert toy.losses(run_dir)[-1] == pytest.approx(toy.losses(full_run)[-1], abs=0.05)
    before = toy.digests(run_dir)
    sizes = {name: (checkpoints.choose(d, "last") / "optimizer.safetensors").stat().st_size
             for name, d in (("8bit", run_dir), ("32bit", full_run))}  # fmt: skip
    assert (
        sizes["8bit"] < 0.55 * sizes["32bit"]
    )  # master in fp32, and two bytes instead of eight for the moments
    (checkpoints.folder_of(run_dir, reviews.STEPS) / "manifest.json").unlink()
    assert toy.train(run_dir) == [0]
    assert toy.digests(run_dir) == before


def test_evaluate_prints_the_table_and_writes_predictions(
    inputs: Path, full_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "said.jsonl"
    data = tmp_path / "good.tsv"
    lines = (inputs / "eval.tsv").read_text().splitlines()
    good = [line for line in lines[1:] if line.endswith("1")]
    # One of the classes does not occur at all, and one column holds something that nothing reads.
    data.write_text("\n".join([f"{lines[0]}\thint", *(f"{line}\tx" for line in good)]))
    assert (
        cli.main(["evaluate", str(full_run), "--data", str(data), "--predictions", str(out)]) == 0
    )
    printed, stderr = capsys.readouterr()
    assert f"--data: keys not used: hint × {len(good)}" in stderr
    assert "hint" in str(json.loads((full_run / "evaluation.json").read_text())["remarks"])
    predictions = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["record"] for row in predictions] == list(range(len(good)))
    assert {row["label"] for row in predictions} == {"1"}
    right = sum(row["predicted"] == "1" for row in predictions)
    assert f"{'eval_accuracy':<26} {right / len(good):.6g}" in printed
    assert printed.splitlines()[-1].split() == ["1", str(len(good) - right), str(right)]
    assert all(
        math.isclose(sum(row["probabilities"].values()), 1.0, abs_tol=1e-5) for row in predictions
    )


def test_predictions_are_those_of_each_row_alone_and_lie_in_the_run(
    inputs: Path, full_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["evaluate", str(full_run), "--json"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    predictions = [
        json.loads(line) for line in (full_run / "predictions.jsonl").read_text().splitlines()
    ]
    assert f"predictions: {full_run / 'predictions.jsonl'}" in printed.err
    assert len(predictions) == 41
    assert report["eval_accuracy"] == sum(
        row["label"] == row["predicted"] for row in predictions
    ) / len(predictions)
    best = full_run / "checkpoints" / "best"
    model = AutoModelForSequenceClassification.from_pretrained(best)
    tokenizer = AutoTokenizer.from_pretrained(best)
    texts = [line.split("\t")[0] for line in (inputs / "eval.tsv").read_text().splitlines()[1:]]
    with torch.no_grad():
        for row, text in zip(predictions, texts, strict=True):
            alone = model(**tokenizer(text, return_tensors="pt")).logits[0].softmax(-1)
            assert list(row["probabilities"].values()) == pytest.approx(alone.tolist(), abs=1e-5)


def test_evaluate_takes_the_columns_of_the_run_and_sections_as_a_run_file_has_them(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [line.split("\t") for line in (inputs / "eval.tsv").read_text().splitlines()[1:]]
    table = tmp_path / "table.csv"
    plain = tmp_path / "plain.tsv"
    table.write_text("review,stars\n" + "".join(f"{text},{label}\n" for text, label in rows))
    plain.write_text((inputs / "eval.tsv").read_text())
    source = {"path": str(table), "columns": {"text": "review", "label": "stars"}}
    run_dir = toy.finished(
        tmp_path / "run",
        reviews.make_config(inputs, {"max_steps": 1}, data={"train": source, "eval": None}),
    )
    assert cli.main(["evaluate", str(run_dir)]) == errors.USER
    assert "has no evaluation data; give some with --data" in capsys.readouterr().err
    results = []
    for data in (
        str(table),
        f"{{path: {plain}, columns: {{}}}}",
        f"[{{path: {plain}, columns: {{}}}}]",
    ):
        assert cli.main(["evaluate", str(run_dir), "--data", data, "--json"]) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert results[0] == results[1] == results[2]
    for data, message in (
        (
            str(plain),
            "plain.tsv:2: has no column 'review', which data.train.columns gives for 'text'",
        ),
        (f"{{path: {plain}, spilt: test}}", "data.train.spilt: unknown key; did you mean split?"),
        (str(tmp_path / "none.tsv"), "none.tsv does not exist; expected a file"),
        (
            f"{{path: {plain}, columns: {{}}, weight: 2}}",
            "--data: found weight 2, and no source of another weight",
        ),
    ):
        assert cli.main(["evaluate", str(run_dir), "--data", data]) == errors.USER
        assert message in capsys.readouterr().err
    mix = f"[{{path: {plain}, columns: {{}}}}, {{path: {table}, weight: 0.5}}]"
    assert cli.main(["evaluate", str(run_dir), "--data", mix]) == 0
    whole = len(rows)
    half = round(len(rows) / 2)
    assert (
        f"{whole + half} of {2 * whole} rows of --data evaluated, in the mix that the weights of their sources"
        in capsys.readouterr().err
    )
    (tmp_path / "empty.csv").write_text("review,stars\n")
    assert (
        cli.main(["evaluate", str(run_dir), "--data", str(tmp_path / "empty.csv")]) == errors.USER
    )
    assert "empty.csv holds no records" in capsys.readouterr().err
    assert cli.main(["generate", str(run_dir), "--file", str(table)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(rows)


@contextmanager
def counted_positions(model: Any) -> Iterator[list[int]]:
    """Yield how many positions go into the model each time it is called, padding or not."""
    positions: list[int] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(
        lambda _, inputs: positions.append(inputs[0].numel())
    )
    try:
        yield positions
    finally:
        hook.remove()


def test_nothing_is_padded(inputs: Path) -> None:
    config = reviews.make_config(inputs)
    data = prepare(config)
    world = World()
    learner = task.TASK.build(
        ModelSpec.of(config), config.training, world, Workload(0, data.labels)
    )
    plan = make_plan(config, rows_per_epoch(data.train))
    feed = Feed(data.train, plan, 0, world, padding_free=learner.route.padding_free)
    with counted_positions(learner.model) as counts:
        for step in range(plan.steps_per_epoch):
            for batch in feed.step(step).batches:
                task.TASK.evaluate(learner, batch)
    assert sum(counts) == int(data.train.lengths.sum())


def test_nothing_is_padded_where_lengths_differ_as_those_of_sst2(
    inputs: Path, tmp_path: Path
) -> None:
    draw = random.Random(4)
    path = tmp_path / "rows.jsonl"
    lengths = [min(62, max(1, round(draw.lognormvariate(2.1, 0.8)))) for _ in range(640)]
    with path.open("w") as file:
        for number, words in enumerate(lengths):
            text = " ".join(draw.choices(reviews.WORDS, k=words))
            file.write(json.dumps({"text": text, "label": number % 2}) + "\n")
    training = {
        "global_batch_size": 64,
        "per_device_train_batch_size": 64,
        "max_steps": None,
        "num_train_epochs": 1,
    }
    config = reviews.make_config(inputs, training, data={"train": str(path), "eval": None})
    data = prepare(config)
    assert data.train.lengths.tolist() == [words + 2 for words in lengths]
    learner = task.TASK.build(
        ModelSpec.of(config), config.training, World(), Workload(0, data.labels)
    )
    learner.model.eval()
    for ranks in (1, 2):
        plan = make_plan(config, rows_per_epoch(data.train), world_size=ranks)
        assert plan.num_steps == 10
        positions = 0
        for rank in range(ranks):
            feed = Feed(
                data.train,
                plan,
                0,
                World(rank=rank, size=ranks),
                padding_free=learner.route.padding_free,
            )
            for step in range(plan.num_steps):
                with counted_positions(learner.model) as counts:
                    for batch in feed.step(step).batches:
                        task.TASK.evaluate(learner, batch)
                positions += sum(counts)
        assert positions == sum(lengths) + 2 * len(lengths), ranks


def test_generate_prints_label_and_probability(
    full_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "good and great film"}\n{"sentence": "bad and awful film"}\n')
    assert cli.main(["generate", str(full_run), "good and great film", "bad and awful film"]) == 0
    printed = capsys.readouterr().out
    labels, probabilities = zip(*(line.split("\t") for line in printed.splitlines()), strict=True)
    assert labels == ("1", "0")
    assert all(0.5 < float(p) <= 1 for p in probabilities)
    assert cli.main(["generate", str(full_run), "--file", str(file)]) == 0
    assert capsys.readouterr().out == printed
    monkeypatch.setattr("sys.stdin", io.StringIO("good and great film\n\nbad and awful film\n"))
    assert cli.main(["generate", str(full_run)]) == 0
    assert capsys.readouterr().out == printed
    assert cli.main(["generate", str(full_run), "fine", " ", "the film\t"]) == errors.USER
    assert re.findall(r"prompt:\d: holds an empty text", capsys.readouterr().err) == [
        "prompt:2: holds an empty text",
        "prompt:3: holds an empty text",
    ]
    monkeypatch.setattr(
        "sys.stdin", io.StringIO("fine\ncaf\udce9\n")
    )  # as a line that is not UTF-8 is read
    assert cli.main(["generate", str(full_run)]) == errors.USER
    assert "texts:2: it holds half a surrogate pair at position 3" in capsys.readouterr().err
    assert (
        cli.main(
            ["generate", str(full_run), "the film was great", "it is awful\tof a plot", "--json"]
        )
        == 0
    )
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["text"], row["second"]) for row in rows] == [
        ("the film was great", None),
        ("it is awful", "of a plot"),
    ]
    assert rows[0]["predicted"] == "1"  # pairs it has not learned
    assert cli.main(["generate", str(full_run), "fine", "the film was great " * 200]) == 0
    assert re.search(r"1 of 2 texts longer than \d+ tokens \(data.max_length\): cut", caplog.text)
    assert set(rows[0]["probabilities"]) == {"0", "1"}


def test_a_classifier_is_asked_about_texts_alone(
    full_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.main(["generate", str(full_run), "fine", "--compare", "--image", "cat.png"])
        == errors.USER
    )
    assert "--compare and --image" in capsys.readouterr().err
    for option in (
        ["--temperature", "0.7"],
        ["--top-p", "0.9"],
        ["--max-new-tokens", "5"],
        ["--seed", "1"],
    ):
        assert cli.main(["generate", str(full_run), "fine", *option]) == errors.USER
        assert (
            f"{option[0]}: {full_run} is a classifier, which reads texts and writes none; leave it out"
            in (capsys.readouterr().err)
        )


def test_texts_that_look_unlike_those_of_training_are_noted(
    full_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", str(full_run), "fine", "the film was great\t1"]) == 0
    printed = capsys.readouterr()
    assert (
        "note: 1 of 2 texts have a tab, which makes pairs of them; the run was trained on single texts"
        in printed.err
    )
    assert len(printed.out.splitlines()) == 2
    assert cli.main(["generate", str(full_run), "fine"]) == 0
    assert "note" not in capsys.readouterr().err
