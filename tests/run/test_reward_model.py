"""Reward models: the loss of plain transformers, what they learn on held-out pairs, and what their exports say."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
)

import kubetune
from kubetune import cli, errors
from kubetune.batching.batch import Batch
from kubetune.batching.shared_beginnings import collate_shared
from kubetune.data.prepared.prefix_rules import GRAIN
from kubetune.distributed.process_group import World
from kubetune.models.acceleration import Workload
from kubetune.models.learner import Learner
from kubetune.models.model_spec import ModelSpec
from kubetune.models.padding_free import Route
from kubetune.models.prefix_sharing import why_not
from kubetune.rundir import metrics
from kubetune.tasks import reward_model
from tests import reviews, toy
from tests.preferences import Row, batch_of, draw, write_pairs

ROWS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.make_inputs(tmp_path_factory.mktemp("toy"))


def batch_with_margins(rows: list[Row], first: int) -> Batch:
    batch = replace(batch_of(rows, first, collate_shared), reference=None)
    assert (batch.tree is not None) == (len(rows[0].prompt) > GRAIN)
    return batch


def begun_alike(rows: list[Row]) -> list[Row]:
    """Return rows with the same beginning, and of the first pair one answer that the other goes on from."""
    rows = [row._replace(prompt=[*range(5, 42), *row.prompt]) for row in rows]
    answer = rows[0].answers[0]
    return [rows[0]._replace(answers=(answer, answer + answer)), *rows[1:]]


@pytest.mark.parametrize(("center", "begun"), [(None, list), (0.1, list), (None, begun_alike)])
def test_loss_and_gradient_are_those_of_plain_transformers(
    folder: Path, center: float | None, begun: Any
) -> None:
    preference = {} if center is None else {"center_coefficient": center}
    config = toy.make_config(folder, task="reward_model", preference=preference, lora=None)
    learner = reward_model.TASK.build(ModelSpec.of(config), config.training, World(), Workload(0))
    assert learner.route.padding_free
    model = learner.lm
    rows = begun(draw(ROWS))
    assert not why_not(learner)

    def gradient() -> torch.Tensor:
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        model.zero_grad()
        return flat

    def score(prompt: list[int], answer: list[int]) -> torch.Tensor:
        # Its own code, with an attention of its own: the padding-free one wants a packed batch declared.
        return plain(input_ids=torch.tensor([prompt + answer])).logits[0, 0]

    plain: Any = AutoModelForSequenceClassification.from_config(
        deepcopy(model.config), attn_implementation="eager"
    )
    plain.load_state_dict(model.state_dict())
    scores = [[score(row.prompt, answer) for answer in row.answers] for row in rows]
    losses = [
        -torch.log(torch.sigmoid(w - lost - float(row.good)))
        for (w, lost), row in zip(scores, rows, strict=True)
    ]
    loss = (
        torch.stack(losses).mean()
        + (center or 0) * torch.stack([(w + lost) ** 2 for w, lost in scores]).mean()
    )
    loss.backward()
    wanted = torch.cat([p.grad.flatten() for p in plain.parameters()])
    for size in (8, 4, 1):
        batches = [
            batch_with_margins(rows[start : start + size], start) for start in range(0, ROWS, size)
        ]
        value = sum(
            reward_model.TASK.backward(learner, batch, 1 / ROWS)[0].item() for batch in batches
        )
        assert value == pytest.approx(loss.item(), rel=1e-6)
        assert float((gradient() - wanted).norm()) <= 1e-6 * float(wanted.norm())


def test_an_encoder_does_not_share_what_it_sees_from_both_sides() -> None:
    config = BertConfig(
        vocab_size=320, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=1
    )
    learner = Learner(BertForSequenceClassification(config), Route(True), reward_model.REWARD)
    assert "encoder" in why_not(learner)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sections", "attention"),
    [
        ({"lora": None}, "auto"),
        ({"lora": {"r": 4}}, "auto"),
        ({"lora": None}, "eager"),
    ],
    ids=["full", "lora", "one by one"],
)
def test_a_sharded_model_learns_and_is_exported_as_one_of_one_rank(
    folder: Path, tmp_path: Path, sections: dict[str, Any], attention: str
) -> None:
    """Its new head is drawn alike too. Of the optimizer's slices one rank has none of the head's only row."""
    model = {"path": str(folder / "model"), "attention": attention}
    data = write_pairs(folder)

    def train(name: str, ranks: int, **training: Any) -> Path:
        settings = {
            "max_steps": 4,
            "save_steps": 2,
            "eval_steps": 2,
            "learning_rate": 1e-3,
            **training,
        }
        config = toy.make_config(
            folder, settings, task="reward_model", data=data, model=model, **sections
        )
        return toy.finished(tmp_path / name, config, ranks)

    sharded = train("sharded", 2, parallelism="fsdp")
    alone = train("alone", 1)
    assert "UserWarning" not in toy.log_of(sharded)
    assert toy.losses(sharded) == pytest.approx(toy.losses(alone), abs=1e-5)
    pairs = [("How?", "So."), ("How?", "No.")]
    rewards = [
        [scored["reward"] for scored in kubetune.classify(run_dir, pairs)]
        for run_dir in (sharded, alone)
    ]
    assert rewards[0] == pytest.approx(rewards[1], abs=1e-4)
    merge = ["--merge"] * bool(sections["lora"])
    assert cli.main(["export", str(sharded), *merge, "-o", str(tmp_path / "export")]) == 0
    assert "vllm serve . --runner pooling" in (tmp_path / "export" / "README.md").read_text()
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "export")
    assert (exported.config.num_labels, exported.score.weight.shape[0]) == (1, 1)


@pytest.mark.slow
def test_an_encoder_is_not_sharded_and_says_why(folder: Path, tmp_path: Path) -> None:
    settings = {"max_steps": 1, "parallelism": "fsdp"}
    data = write_pairs(folder)
    model = reviews.save_model(tmp_path / "bert")
    facts = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(facts | {"eos_token": "[SEP]"}))
    config = toy.make_config(
        folder, settings, task="reward_model", data=data, model=str(model), lora=None
    )
    run_dir = toy.make_run(tmp_path / "run", config, 2)
    assert toy.train(run_dir, 2) == [2, 2]
    assert "is an encoder. Use ddp" in toy.log_of(run_dir)


@pytest.mark.slow
def test_it_learns_held_out_pairs_and_its_export_says_the_same(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = {"num_train_epochs": 3, "metric_for_best_model": "accuracy", "learning_rate": 1e-2}
    config = toy.make_config(folder, settings, task="reward_model", data=write_pairs(folder))
    run_dir = toy.finished(tmp_path / "run", config)
    evaluations = [line for line in metrics.read_metrics(run_dir) if "eval_loss" in line]
    assert max(line["eval_accuracy"] for line in evaluations) >= 0.9
    assert {"accuracy", "margin", "reward_chosen", "reward_rejected"} <= metrics.read_metrics(
        run_dir
    )[0].keys()
    records = [json.loads(line) for line in (folder / "held-out.jsonl").read_text().splitlines()][
        :3
    ]
    lines = [f"{row['prompt']}\t{row[side]}" for row in records for side in ("chosen", "rejected")]
    capsys.readouterr()
    assert cli.main(["generate", str(run_dir), *lines, "--json"]) == 0
    rewards = [json.loads(line)["reward"] for line in capsys.readouterr().out.splitlines()]
    pairs = [tuple(line.split("\t")) for line in lines]
    asked = [pairs[0], {"prompt": pairs[1][0], "completion": pairs[1][1]}, *pairs[2:]]
    assert [scored["reward"] for scored in kubetune.classify(run_dir, asked)] == pytest.approx(
        rewards
    )
    assert cli.main(["generate", str(run_dir), lines[0] + " word" * 400, lines[1]]) == 0
    assert "1 of 2 texts longer than" in caplog.text
    with pytest.raises(errors.ConfigError, match="number 2 is one text"):
        kubetune.classify(run_dir, [pairs[0], "alone"])
    with pytest.raises(errors.ConfigError, match=r"kubetune\.classify asks it"):
        kubetune.generate(run_dir, ["alone"])
    assert cli.main(["export", str(run_dir), "--merge", "-o", str(tmp_path / "export")]) == 0
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "export")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert model.config.num_labels == 1
    for line, reward in zip(lines, rewards, strict=True):
        ids = tokenizer(line.replace("\t", ""), return_tensors="pt").input_ids
        if tokenizer.eos_token_id != ids[0, -1]:
            ids = torch.cat([ids, torch.tensor([[tokenizer.eos_token_id]])], 1)
        assert model(input_ids=ids).logits.item() == pytest.approx(reward, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{"r": 4}, None], ids=["lora", "full"])
def test_an_export_reads_at_the_end_that_stands_in_for_padding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lora: dict[str, Any] | None
) -> None:
    """transformers takes an end that is the token for padding for such, and reads the score one token before it."""
    folder = toy.make_inputs(tmp_path)
    names = folder / "model" / "tokenizer_config.json"
    named = json.loads(names.read_text())
    names.write_text(json.dumps({**named, "pad_token": named["eos_token"]}))
    facts = folder / "model" / "config.json"
    end = AutoTokenizer.from_pretrained(folder / "model").eos_token_id
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "pad_token_id": end}))
    config = toy.make_config(
        folder, {"max_steps": 1}, task="reward_model", data=write_pairs(folder), lora=lora
    )
    run_dir = toy.finished(tmp_path / "run", config)
    row = json.loads((folder / "held-out.jsonl").read_text().splitlines()[0])
    capsys.readouterr()
    line = f"{row['prompt']}\t{row['chosen']}"
    assert cli.main(["generate", str(run_dir), line, "--json"]) == 0
    reward = json.loads(capsys.readouterr().out)["reward"]
    merge = ["--merge"] if lora else []
    assert cli.main(["export", str(run_dir), *merge, "-o", str(tmp_path / "export")]) == 0
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "export")
    ids = AutoTokenizer.from_pretrained(tmp_path / "export")(line.replace("\t", "")).input_ids
    if ids[-1] != end:
        ids.append(end)
    assert model.config.pad_token_id is None
    assert model(input_ids=torch.tensor([ids])).logits.item() == pytest.approx(reward, abs=1e-4)
