"""`task: distill` with a teacher on vLLM servers: the same numbers as one in memory, and an end in time without them."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kubetune import errors
from kubetune.batching.batch import collate
from kubetune.batching.feed import empty_batch
from kubetune.batching.shared_beginnings import collate_shared
from kubetune.config.consent import effects_of
from kubetune.config.schema import Config, DistillConfig
from kubetune.data.text.tokenizer import load_tokenizer
from kubetune.distributed.process_group import World
from kubetune.models.acceleration import Workload
from kubetune.models.learner import Learner
from kubetune.models.model_spec import ModelSpec
from kubetune.rundir import checkpoints, metrics, starts
from kubetune.tasks import distill
from kubetune.training import worker
from kubetune.training.reference import server_meetings
from kubetune.training.reference.served_teacher import TeacherOnServers
from kubetune.training.rollouts.servers.vllm_client import Server
from tests import toy
from tests.architectures import save_model
from tests.ranks import started, wait_all, wait_until
from tests.run.test_distill import config_of, inputs, rows_of
from tests.run.test_export_elsewhere import PEERS, SIZE, needs_vllm, vllm_server
from tests.vllm_server import FakeServer, running

__all__ = ["inputs"]
slow = pytest.mark.slow
# Settings that vLLM answers, by its model runner.
ON_VLLM: dict[str, tuple[dict[str, Any], ...]] = {
    "first": (
        {"support": "teacher_k", "top_k": 16, "beta": 0.5},
        {"support": "teacher_k", "top_k": 64, "rest": "renormalise", "temperature": 0.7},
        {"support": "teacher_k", "top_k": 512, "lmbda": 1, "max_completion_length": 6},
    ),
    "second": (
        {"support": "student_k", "top_k": 16},
        {
            "support": "student_k",
            "top_k": 64,
            "rest": "renormalise",
            "temperature": 0.7,
            "beta": 0.5,
        },
        {"support": "student_k", "top_k": 512, "lmbda": 1, "max_completion_length": 6},
    ),
}
WAYS = {"teacher_k": "/v1/completions", "student_k": "/inference/v1/generate"}
FLAGS = "--max-logprobs 512 --enable-scale-out"


@pytest.fixture(scope="module")
def farm(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[FakeServer]]:
    with running(inputs / "teacher", tmp_path_factory.mktemp("servers"), 2) as started_servers:
        yield list(started_servers)


@pytest.fixture
def servers(farm: list[FakeServer]) -> Iterator[list[FakeServer]]:
    """Yield two servers that do all right, and leave them so."""
    for server in farm:
        server.set_flags(FLAGS)
        server.set_fault("")
    yield farm
    for server in farm:
        # A request that hangs holds the model.
        if server.fault in ("hang", "trickle", "die"):
            server.restart()


def served_config(
    inputs: Path,
    farm: list[FakeServer],
    training: dict[str, Any] | None = None,
    **settings: Any,
) -> Config:
    teacher = [server.url for server in farm]
    served = {"teacher": teacher, "support": "teacher_k", "timeout_seconds": 30, **settings}
    return config_of(inputs, training, distill=served)


def learner_of(inputs: Path, settings: DistillConfig) -> Learner:
    config = config_of(inputs)
    spec = replace(ModelSpec.of(config), distill=settings)
    return distill.TASK.build(spec, config.training, World(), Workload(0))


def asking(settings: DistillConfig, urls: list[str], tokenizer: Any) -> TeacherOnServers:
    number = min(settings.top_k, 512)
    servers = [Server(url) for url in urls]
    met = server_meetings.meet(servers, settings, number, 512, 100, tokenizer)
    of_student = settings.support == "student_k"
    return TeacherOnServers(
        servers, met.model, met.most_tokens, number, 512, 30, 0, of_student=of_student
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"beta": 0.0, "support": "teacher_k", "top_k": 20},
        {
            "beta": 1.0,
            "support": "teacher_k",
            "top_k": 20,
            "rest": "renormalise",
            "temperature": 0.7,
        },
        {"beta": 1.0, "support": "student_k", "top_k": 20},
        {
            "beta": 0.5,
            "support": "student_k",
            "top_k": 20,
            "rest": "renormalise",
            "temperature": 2.0,
        },
        {"beta": 0.5, "support": "teacher_k", "top_k": 512},
        {"beta": 0.1, "support": "student_k", "top_k": 600, "lmbda": 0, "sft_weight": 0.3},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_servers_say_what_a_teacher_in_memory_does(
    inputs: Path, servers: list[FakeServer], settings: dict[str, Any]
) -> None:
    urls = [server.url for server in servers]
    of_run = DistillConfig.model_validate({"teacher": urls, **settings})
    learner = learner_of(inputs, of_run)
    tokenizer = load_tokenizer(config_of(inputs).model)
    in_memory = learner_of(inputs, of_run)
    teacher = distill.TASK.build(
        ModelSpec.of(
            config_of(inputs, model=str(inputs / "teacher"), distill={"teacher": "org/other"})
        ),
        config_of(inputs).training,
        World(),
        Workload(0),
    )
    teacher.model.eval()
    in_memory = replace(in_memory, teacher=teacher)
    served = replace(learner, served_teacher=asking(of_run, urls, tokenizer))
    rows = rows_of()
    for batch in (collate(rows), collate_shared(rows), collate(rows[3:4]), empty_batch(1, None)):
        results = []
        for each in (in_memory, served):
            each.model.zero_grad()
            numbers = distill.TASK.backward(each, batch, 1 / 100)
            gradients = [p.grad.flatten() for p in each.model.parameters() if p.grad is not None]
            results.append((numbers.numpy(), np.concatenate(gradients)))
        (expected, gradient), (got, of_served) = results
        assert abs(got[0] - expected[0]) <= 1e-5
        np.testing.assert_allclose(of_served, gradient, atol=1e-5 * np.abs(gradient).max())


def losses_of(run_dir: Path) -> list[float]:
    return [line["loss"] for line in metrics.read_metrics(run_dir) if "loss" in line]


def test_given_answers_are_asked_for_once_and_learnt_from_as_in_memory(
    inputs: Path, servers: list[FakeServer], tmp_path: Path
) -> None:
    cache = {"cache": str(tmp_path / "cache")}
    settings: dict[str, Any] = {"top_k": 8, "beta": 0.5}
    config = served_config(inputs, servers, {"max_steps": 10}, **settings)
    config = config.model_copy(update={"data": config.data.model_copy(update=cache)})
    before = len(servers[0].calls("/v1/completions"))
    one = toy.finished(tmp_path / "one", config)
    asked = servers[0].calls("/v1/completions")[before:]
    # About half of 50 rows and of 13 for evaluation, once, and four questions at the start.
    assert 25 < len(asked) < 45
    in_memory = config_of(
        inputs, {"max_steps": 10}, distill={**settings, "support": "teacher_k"}, data=cache
    )
    local = toy.finished(tmp_path / "local", in_memory)
    np.testing.assert_allclose(losses_of(one), losses_of(local), atol=1e-5)

    two = toy.finished(tmp_path / "two", config, 2)
    assert ": found" in toy.log_of(two)
    toy.require_like(one, two)


DRAWING: dict[str, Any] = {
    "lmbda": 1, "max_completion_length": 6, "num_generations": 2, "generation_batch_size": 4
}  # fmt: skip


@pytest.mark.parametrize("support", ["student_k", "teacher_k"])
def test_drawn_answers_are_judged_on_servers(
    inputs: Path, servers: list[FakeServer], tmp_path: Path, support: str
) -> None:
    settings = {**DRAWING, "support": support, "top_k": 8, "teacher_prompt": "Again: {prompt}"}
    training = {"max_steps": 3}
    one = toy.finished(tmp_path / "one", served_config(inputs, servers, training, **settings))
    local = toy.finished(tmp_path / "local", config_of(inputs, training, distill=settings))
    np.testing.assert_allclose(losses_of(one), losses_of(local), atol=1e-5)
    line = next(line for line in metrics.read_metrics(one) if "loss" in line)
    assert 0 < line["teacher_mass"] < 1
    # A server that is asked for the student's tokens does not say which are its own likeliest.
    assert ("agreement" in line) == (support == "teacher_k")
    if support == "student_k":
        two = toy.finished(
            tmp_path / "two", served_config(inputs, servers, training, **settings), 2
        )
        toy.require_like(one, two)


@slow
@pytest.mark.parametrize("support", ["student_k", "teacher_k"])
def test_slices_ask_as_copies_do(
    inputs: Path, servers: list[FakeServer], tmp_path: Path, support: str
) -> None:
    settings = {**DRAWING, "support": support, "top_k": 8}
    config = served_config(inputs, servers, {"max_steps": 4}, **settings)
    sharded = config.training.model_copy(update={"parallelism": "fsdp"})
    copies = toy.finished(tmp_path / "ddp", config, 2)
    slices = toy.finished(tmp_path / "fsdp", config.model_copy(update={"training": sharded}), 2)
    toy.require_like(copies, slices)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("nan", "nan"),
        ("fewer places", "answered"),
        ("die", "broke off|refused"),
        pytest.param("hang", "timed out|time is up", marks=slow),
        pytest.param("500", "EngineCore encountered an issue", marks=slow),
        pytest.param("half", "broke off", marks=slow),
        pytest.param("trickle", "timed out|time is up", marks=slow),
        pytest.param("not json", "not JSON", marks=slow),
        pytest.param("positive", "0.5", marks=slow),
        pytest.param("fewer tokens", "answered", marks=slow),
        pytest.param("no numbers", "answered no", marks=slow),
        pytest.param("another prompt", "another prompt", marks=slow),
        pytest.param("token beyond", "answered", marks=slow),
        pytest.param("null", "answered", marks=slow),
    ],
)
@pytest.mark.parametrize("support", ["student_k", pytest.param("teacher_k", marks=slow)])
def test_a_teacher_that_does_wrong_ends_the_run_by_name(
    inputs: Path,
    servers: list[FakeServer],
    tmp_path: Path,
    fault: str,
    message: str,
    support: str,
) -> None:
    settings = {**DRAWING, "support": support, "top_k": 8, "timeout_seconds": 4}
    config = served_config(inputs, servers, {"max_steps": 40}, **settings)
    run_dir = toy.make_run(tmp_path / "run", config, 2)
    with started(worker.main, 2, [str(run_dir)]) as ranks:
        wait_until(lambda: (run_dir / "metrics.jsonl").exists() and losses_of(run_dir))
        learnt = len(losses_of(run_dir))
        servers[1].set_fault(fault)
        began = time.monotonic()
        codes = wait_all(ranks)
    assert errors.ENVIRONMENT in codes
    assert time.monotonic() - began < 60
    log = toy.log_of(run_dir)
    assert re.search(
        rf"teacher: rank \d: server {re.escape(servers[1].url)} did not answer .*{message}", log
    )
    assert np.isfinite(losses_of(run_dir)).all()
    assert len(losses_of(run_dir)) >= learnt


@pytest.mark.parametrize(
    ("support", "ranks"),
    [pytest.param("student_k", 2, marks=slow), ("teacher_k", 1)],
)
def test_a_stop_while_a_teacher_hangs_saves_and_goes_on(
    inputs: Path, servers: list[FakeServer], tmp_path: Path, support: str, ranks: int
) -> None:
    settings = {**DRAWING, "support": support, "top_k": 8, "timeout_seconds": 600}
    config = served_config(inputs, servers, {"max_steps": 40}, **settings)
    run_dir = toy.make_run(tmp_path / "run", config, ranks)
    with started(worker.main, ranks, [str(run_dir)]) as processes:
        wait_until(lambda: (run_dir / "metrics.jsonl").exists() and losses_of(run_dir))
        servers[1].set_fault("hang")
        # A step of eight rows asks both.
        seen = len(servers[1].calls(WAYS[support]))
        wait_until(lambda: len(servers[1].calls(WAYS[support])) > seen)
        for process in processes:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGTERM)
        assert wait_all(processes) == [errors.PREEMPTED] * ranks
    stopped = checkpoints.newest_step(run_dir)
    assert 0 < stopped < 40
    servers[1].restart()
    servers[1].set_fault("")
    assert toy.train(run_dir, ranks) == [0] * ranks
    whole = toy.finished(tmp_path / "whole", config, ranks)
    assert toy.digests(run_dir) == toy.digests(whole)


def test_vocabularies_that_are_padded_otherwise_are_compared_where_they_are_alike(
    inputs: Path, tmp_path: Path
) -> None:
    save_model(tmp_path / "padded", hidden_size=96, vocab_size=576)
    training = {"max_steps": 3}
    settings = {**DRAWING, "support": "student_k", "top_k": 8, "rest": "renormalise"}
    with running(tmp_path / "padded", tmp_path / "servers") as (server,):
        server.set_flags(FLAGS)
        one = toy.finished(tmp_path / "one", served_config(inputs, [server], training, **settings))
        of_memory = {**settings, "teacher": str(tmp_path / "padded")}
        local = toy.finished(tmp_path / "local", config_of(inputs, training, distill=of_memory))
        np.testing.assert_allclose(losses_of(one), losses_of(local), atol=1e-5)
        config = served_config(inputs, [server], **{**settings, "rest": "tail"})
        run_dir = toy.make_run(tmp_path / "tail", config)
        assert toy.train(run_dir) == [errors.USER]
        assert "expected `rest: renormalise`" in toy.log_of(run_dir)


def test_a_teacher_on_servers_may_move_between_two_starts() -> None:
    before = {"distill.teacher": "http://a:8000"}
    moved = {"distill.teacher": ["http://b:8000", "http://c:8000"]}
    assert starts.moved_numbers(before, moved) == []
    # What was typed at the first start is typed again.
    assert starts.moved_numbers(before, moved, with_addresses=True)
    assert starts.moved_numbers(before, {"distill.teacher": "org/model"})


def test_rows_are_sent_only_with_consent(inputs: Path) -> None:
    config = config_of(inputs, distill={"teacher": "http://a:8000", "support": "teacher_k"})
    (effect,) = effects_of(config, ["distill.teacher"])
    assert (effect.does, effect.what) == ("has data sent", "to http://a:8000")


# What a start refuses.


def test_another_teacher_is_refused_with_both_names(
    inputs: Path, servers: list[FakeServer], tmp_path: Path
) -> None:
    save_model(tmp_path / "narrow", vocab_size=100)
    save_model(tmp_path / "words")
    file = tmp_path / "words" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(tokenizer))
    for name, message in (("narrow", "fewer than the 512"), ("words", "has other tokens than")):
        with running(tmp_path / name, tmp_path / f"{name}-server") as (other,):
            other.set_flags(FLAGS)
            config = served_config(inputs, [other])
            run_dir = toy.make_run(tmp_path / f"{name}-run", config)
            assert toy.train(run_dir) != [0]
            log = toy.log_of(run_dir)
            assert message in log
            assert f"base on {other.url}" in log
            assert str(inputs / "model") in log


def test_other_weights_under_the_same_name_are_noticed(inputs: Path, tmp_path: Path) -> None:
    save_model(tmp_path / "other", hidden_size=128)
    cache = {"cache": str(tmp_path / "cache")}
    with running(inputs / "teacher", tmp_path / "servers") as (server,):
        server.set_flags(FLAGS)
        config = served_config(inputs, [server], {"max_steps": 2})
        config = config.model_copy(update={"data": config.data.model_copy(update=cache)})
        one = toy.finished(tmp_path / "one", config)
        drawing = served_config(inputs, [server], {"max_steps": 3}, **DRAWING)
        stopped = toy.make_run(tmp_path / "stopped", drawing)
        assert toy.train(stopped, environ={"KUBETUNE_FAULT": "signal 9:micro-batch:3"}) == [-9]
        server.kill()
        server.model = tmp_path / "other"
        server.start()
        assert toy.train(stopped) == [errors.USER]
        assert "is not the teacher that this run began with" in toy.log_of(stopped)
        # What is kept under the name is of the other weights, and stays for them.
        again = toy.finished(tmp_path / "again", config)
        assert "computed in" in toy.log_of(again)
        assert losses_of(again) != losses_of(one)
        once_more = toy.finished(tmp_path / "once more", config)
        assert "computed in" not in toy.log_of(once_more)
        assert losses_of(again) == losses_of(once_more)
        with running(inputs / "teacher", tmp_path / "second") as (second,):
            second.set_flags(FLAGS)
            both = toy.make_run(tmp_path / "both", served_config(inputs, [server, second]))
            assert toy.train(both) == [errors.USER]
            assert "expected one teacher" in toy.log_of(both)


@pytest.mark.parametrize(
    ("flags", "settings", "message"),
    [
        ("--enable-scale-out", {}, "greater than max allowed: 20. It needs --max-logprobs 64"),
        (
            "--max-logprobs 64",
            {"support": "student_k"},
            "Restart vllm serve with --enable-scale-out",
        ),
        ("--max-logprobs 64 --max-model-len 20", {}, "start it with --max-model-len"),
    ],
)
def test_a_server_without_what_the_run_needs_is_refused_by_its_flag(
    inputs: Path,
    servers: list[FakeServer],
    tmp_path: Path,
    flags: str,
    settings: dict[str, Any],
    message: str,
) -> None:
    servers[1].set_flags(flags)
    run_dir = toy.make_run(tmp_path / "run", served_config(inputs, servers, **settings))
    assert toy.train(run_dir) == [errors.USER]
    log = toy.log_of(run_dir)
    assert message in log
    assert servers[1].url in log


def test_nobody_there_ends_the_start_in_time(inputs: Path, tmp_path: Path) -> None:
    served = {"teacher": "http://127.0.0.1:9", "support": "teacher_k", "timeout_seconds": 2}
    run_dir = toy.make_run(tmp_path / "run", config_of(inputs, distill=served))
    assert toy.train(run_dir) == [errors.ENVIRONMENT]
    assert "server http://127.0.0.1:9 did not answer within 2 s" in toy.log_of(run_dir)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"support": "all"}, "distill.support: found all"),
        ({"temperature": 0.9}, "expected `rest: renormalise`, or a temperature of 1"),
        ({"teacher": "http://x/v1"}, "without /v1"),
        ({"teacher": ["http://x", "http://x"]}, "named twice"),
        ({"teacher": ["http://x", "org/model"]}, "found org/model"),
        ({"teacher": ["org/a", "org/b"]}, "expected one model, or addresses"),
        ({"revision": "main"}, "revision means nothing to a server"),
        ({"timeout_seconds": 1800}, "expected less than training.timeout_seconds"),
        (
            {"teacher": "org/model", "timeout_seconds": 9},
            "means nothing to a teacher that the run loads",
        ),
    ],
)
def test_what_servers_cannot_answer_is_refused(
    inputs: Path, settings: dict[str, Any], message: str
) -> None:
    served = {"teacher": "http://x:8000", "support": "teacher_k", **settings}
    with pytest.raises(ValueError, match=re.escape(message)):
        config_of(inputs, distill=served)


# Against vLLM itself.


@slow
@needs_vllm
@pytest.mark.parametrize("runner", ["first", "second"])
def test_vllm_says_what_a_teacher_in_memory_does(tmp_path: Path, runner: str) -> None:
    inputs = toy.make_inputs(tmp_path / "toy", **SIZE)
    wide = {**SIZE, "hidden_size": 192, "intermediate_size": 256}
    save_model(inputs / "teacher", "qwen3", **wide)
    words = ("--max-logprobs=512", "--enable-scale-out")
    # With adapters vLLM 0.32 cannot compute log-probabilities of prompts on a CPU.
    server: dict[str, Any] = {"adapters": ()}
    if runner == "second":
        server["program"] = (str(PEERS / "interpreted_vllm.py"),)
    with vllm_server(inputs / "teacher", tmp_path / "server.log", *words, **server) as url:
        for number, settings in enumerate(ON_VLLM[runner]):
            served = {"teacher": url, "timeout_seconds": 60, **settings}
            training = {"max_steps": 3, "eval_steps": 3, "save_steps": 3}
            on_server = toy.finished(
                tmp_path / f"{number}", config_of(inputs, training, distill=served), seconds=300
            )
            local = toy.finished(
                tmp_path / f"local-{number}", config_of(inputs, training, distill=settings)
            )
            np.testing.assert_allclose(losses_of(on_server), losses_of(local), atol=1e-5)

        # Without Triton there is no second runner, which alone scores tokens that are asked for.
        if runner == "first":
            newer = {"teacher": url, "support": "student_k", "timeout_seconds": 60}
            run_dir = toy.make_run(tmp_path / "newer", config_of(inputs, distill=newer))
            assert toy.train(run_dir) == [errors.USER]
            assert "requires the V2 model runner" in toy.log_of(run_dir)
