"""Answers drawn by servers: as many and as right as the model's own, whatever servers do; resumed bit for bit."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kubetune import errors
from kubetune.config.schema import Config, GrpoConfig
from kubetune.rundir import checkpoints, metrics
from kubetune.training import worker
from kubetune.training.rollouts import rollout_records
from kubetune.training.rollouts.model_answers import Slot
from kubetune.training.rollouts.servers import adapters, calls, requests
from kubetune.training.rollouts.servers.adapters import Adapter
from kubetune.training.rollouts.servers.completions import answers_in
from kubetune.training.rollouts.servers.vllm_client import Server, ServerTrouble
from tests import toy
from tests.ranks import started, wait_all, wait_until
from tests.run.test_grpo import KILLED, config_of
from tests.vllm_server import FakeServer, running

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def farm(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[FakeServer]]:
    with running(inputs / "model", tmp_path_factory.mktemp("servers"), 2) as started_servers:
        yield list(started_servers)


@pytest.fixture
def servers(farm: list[FakeServer]) -> Iterator[list[FakeServer]]:
    """Yield two servers that do all right, and leave them so."""
    yield farm
    for server in farm:
        server.set_fault("")


def served_config(
    inputs: Path, farm: list[FakeServer], training: dict[str, Any] | None = None, **settings: Any
) -> Config:
    urls = [server.url for server in farm]
    section = {"urls": urls, "timeout_seconds": 30, **settings.pop("servers", {})}
    return config_of(inputs, training, servers=section, **settings)


def names_loaded(server: FakeServer) -> list[str]:
    return [call["lora_name"] for call in server.calls("/v1/load_lora_adapter")]


WAYS: dict[str, dict[str, Any]] = {
    "lag-0": {},
    "lag-1": {"servers": {"lag": 1}},
    "lag-1-window": {"servers": {"lag": 1}, "steps_per_generation": 2},
}


@pytest.fixture(scope="module")
def whole(
    inputs: Path, farm: list[FakeServer], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Return a function that returns the run nobody disturbs with these settings, made at the first question."""

    @cache
    def run_of(way: str) -> Path:
        for server in farm:
            server.set_fault("")
        config = served_config(inputs, farm, **WAYS[way])
        return toy.finished(tmp_path_factory.mktemp("whole") / "run", config)

    return run_of


def test_servers_draw_what_the_model_would_by_its_newest_weights(
    servers: list[FakeServer], whole: Callable[[str], Path]
) -> None:
    lines = [line for line in metrics.read_metrics(whole("lag-0")) if "reward" in line]
    assert len(lines) == 6
    # The servers compute as the training does, so what differs would be the weights.
    assert all(line["sampling_difference"] < 1e-5 for line in lines)
    assert all(line["entropy"] > 0 for line in lines)
    timings = (whole("lag-0") / "timings.jsonl").read_text().splitlines()
    assert all(json.loads(line)["sync_seconds"] > 0 for line in timings)
    answers = [
        answer
        for group in rollout_records.read_groups(whole("lag-0"), 5)
        for answer in group.answers
    ]
    assert len(answers) == 16
    assert len({tuple(answer.ids) for answer in answers}) > 12


def test_with_a_lag_answers_are_by_the_weights_before(
    servers: list[FakeServer], whole: Callable[[str], Path]
) -> None:
    differences = [
        line["sampling_difference"]
        for line in metrics.read_metrics(whole("lag-1"))
        if "sampling_difference" in line
    ]
    assert differences[0] < 1e-5
    assert all(difference > 1e-4 for difference in differences[2:])


def test_versions_have_names_of_their_own_and_leave_when_they_are_old(
    inputs: Path, servers: list[FakeServer], tmp_path: Path
) -> None:
    before = [len(names_loaded(server)) for server in servers]
    run_dir = toy.finished(tmp_path / "run", served_config(inputs, servers))
    for number, server in enumerate(servers):
        names = names_loaded(server)[before[number] :]
        steps = [re.fullmatch(r"kubetune-\w{8}-(\d{6})-\w{8}", name) for name in names]
        assert [int(match[1]) for match in steps if match] == list(range(6))
        assert not server.adapters()
    assert not list((run_dir / "adapters").iterdir())


def test_each_answer_has_a_seed_of_its_own(
    servers: list[FakeServer], whole: Callable[[str], Path]
) -> None:
    run_dir = whole("lag-0")
    firsts = set()
    seeds: set[int] = set()
    for server in servers:
        for call in server.calls("/v1/completions"):
            assert call["n"] == 4
            assert call["repetition_penalty"] == 1.0
            firsts.add(call["seed"])
            seeds.update(range(call["seed"], call["seed"] + 4))
    assert len(seeds) == 4 * len(firsts)
    groups = [group for step in range(6) for group in rollout_records.read_groups(run_dir, step)]
    assert len(firsts) >= len(groups)


@pytest.mark.parametrize("way", [pytest.param("lag-0", marks=slow), "lag-1"])
def test_any_number_of_ranks_asks_for_the_same_answers(
    inputs: Path, servers: list[FakeServer], whole: Callable[[str], Path], tmp_path: Path, way: str
) -> None:
    config = served_config(inputs, servers, **WAYS[way])
    two = toy.finished(tmp_path / "2", config, 2)
    of_one = rollout_records.read_groups(whole(way), 0)
    assert of_one == rollout_records.read_groups(two, 0)
    toy.require_like(whole(way), two)


@slow
def test_slices_learn_from_servers_as_copies_do(
    inputs: Path, servers: list[FakeServer], tmp_path: Path
) -> None:
    # Log-probabilities are asked of the model while answers come to the ranks at different times.
    config = served_config(inputs, servers, beta=0.05, num_iterations=2)
    sharded = config.training.model_copy(update={"parallelism": "fsdp"})
    copies = toy.finished(tmp_path / "ddp", config, 2)
    slices = toy.finished(tmp_path / "fsdp", config.model_copy(update={"training": sharded}), 2)
    assert rollout_records.read_groups(copies, 0) == rollout_records.read_groups(slices, 0)
    toy.require_like(copies, slices)


@pytest.mark.parametrize(
    ("way", "point", "nth"),
    [
        ("lag-0", "reward", 13),
        pytest.param("lag-1", "micro-batch", 11, marks=slow),
        pytest.param("lag-0", "sync", 5, marks=slow),
        pytest.param("lag-1", "generation", 6, marks=slow),
        pytest.param("lag-1-window", "micro-batch", 7, marks=slow),
        pytest.param("lag-0", "adapter.sealed", 3, marks=slow),
        pytest.param("lag-1", "adapter.sealed", 3, marks=slow),
        pytest.param("lag-1", "commit.sealed", 2, marks=slow),
        pytest.param("lag-1-window", "sync", 3, marks=slow),
    ],
)
def test_a_killed_run_ends_as_one_that_was_never_killed(
    inputs: Path,
    servers: list[FakeServer],
    whole: Callable[[str], Path],
    tmp_path: Path,
    way: str,
    point: str,
    nth: int,
) -> None:
    run_dir = toy.make_run(tmp_path / "run", served_config(inputs, servers, **WAYS[way]))
    assert toy.train(run_dir, 1, {"KUBETUNE_FAULT": f"signal 9:{point}:{nth}"}) == [KILLED]
    assert toy.train(run_dir) == [0], toy.log_of(run_dir)
    assert toy.digests(run_dir) == toy.digests(whole(way))
    # What the killed start had loaded is gone too.
    assert not any(server.adapters() for server in servers)


def hurried(run_dir: str) -> int:
    """Train as a rank that gives servers a second to unload."""
    adapters._UNLOAD_SECONDS = 1.0
    return worker.main([run_dir])


def test_a_stop_while_servers_draw_saves_and_goes_on(
    inputs: Path, servers: list[FakeServer], whole: Callable[[str], Path], tmp_path: Path
) -> None:
    run_dir = toy.make_run(tmp_path / "run", served_config(inputs, servers))
    with started(hurried, 1, str(run_dir)) as [process]:
        wait_until(lambda: rollout_records.file_of(run_dir, 2).exists())
        for server in servers:
            server.set_fault("hang")
        time.sleep(1)
        began = time.monotonic()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
        assert wait_all([process]) == [errors.PREEMPTED]
        assert time.monotonic() - began < 25
    assert checkpoints.newest_step(run_dir) >= 2
    for server in servers:
        server.set_fault("")
        server.restart()
    assert toy.train(run_dir) == [0]
    assert toy.digests(run_dir) == toy.digests(whole("lag-0"))


@pytest.mark.parametrize("lag", [0, pytest.param(1, marks=slow)])
def test_a_server_that_is_killed_and_comes_again_is_asked_again(
    inputs: Path, servers: list[FakeServer], whole: Callable[[str], Path], tmp_path: Path, lag: int
) -> None:
    config = served_config(inputs, servers, servers={"lag": lag})
    run_dir = toy.make_run(tmp_path / "run", config)
    with started(worker.main, 1, [str(run_dir)]) as [process]:
        for step in (1, 3):
            wait_until(lambda step=step: rollout_records.file_of(run_dir, step).exists())
            servers[1].kill()
            time.sleep(1)
            servers[1].start()
        assert wait_all([process]) == [0], toy.log_of(run_dir)
    assert toy.digests(run_dir) == toy.digests(whole(f"lag-{lag}"))


@pytest.mark.parametrize(
    "fault",
    [
        "half",
        pytest.param("500", marks=slow),
        pytest.param("fewer", marks=slow),
        pytest.param("not json", marks=slow),
        pytest.param("short", marks=slow),
    ],
)
def test_a_fault_that_passes_changes_nothing(
    inputs: Path,
    servers: list[FakeServer],
    whole: Callable[[str], Path],
    tmp_path: Path,
    fault: str,
) -> None:
    servers[0].set_fault(fault)
    run_dir = toy.make_run(tmp_path / "run", served_config(inputs, servers))
    log = run_dir / "logs" / "rank-0.log"
    complaint = f"server {servers[0].url} is asked again"
    with started(worker.main, 1, [str(run_dir)]) as [process]:
        wait_until(lambda: log.exists() and complaint in log.read_text())
        servers[0].set_fault("")
        assert wait_all([process]) == [0], toy.log_of(run_dir)
    assert toy.digests(run_dir) == toy.digests(whole("lag-0"))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        pytest.param("hang", "timed out|time is up", marks=slow),
        pytest.param("500", "EngineCore encountered an issue", marks=slow),
        pytest.param("trickle", "timed out|time is up", marks=slow),
        ("bad request", "max_tokens is too large"),
        pytest.param("more tokens", "expected at most 8", marks=slow),
        pytest.param("other prompt", "another prompt", marks=slow),
        pytest.param("abort", "'abort'", marks=slow),
    ],
)
def test_a_fault_that_stays_ends_the_run_by_name(
    inputs: Path, servers: list[FakeServer], tmp_path: Path, fault: str, message: str
) -> None:
    servers[1].set_fault(fault)
    training = {"max_steps": 2, "eval_steps": 2}
    config = served_config(inputs, servers, training, servers={"timeout_seconds": 4})
    run_dir = toy.make_run(tmp_path / "run", config, 2)
    began = time.monotonic()
    codes = toy.train(run_dir, 2)
    assert errors.ENVIRONMENT in codes
    assert time.monotonic() - began < 60
    log = toy.log_of(run_dir)
    assert re.search(
        rf"generation: rank \d: server {re.escape(servers[1].url)} did not answer", log
    )
    assert re.search(message, log)
    # The prompts of the other server are kept, and no other ones are lost.
    servers[1].set_fault("")
    if fault in ("hang", "trickle"):
        servers[1].restart()
    assert toy.train(run_dir) == [0], toy.log_of(run_dir)
    for step in range(2):
        groups = rollout_records.read_groups(run_dir, step)
        assert [group.slot for group in groups] == list(range(len(groups)))


def test_a_server_that_is_gone_ends_the_run_by_name(
    inputs: Path, servers: list[FakeServer], tmp_path: Path
) -> None:
    run_dir = toy.make_run(
        tmp_path / "run", served_config(inputs, servers, servers={"timeout_seconds": 3})
    )
    servers[1].kill()
    assert toy.train(run_dir) == [errors.ENVIRONMENT]
    log = toy.log_of(run_dir)
    assert f"sync: rank 0: server {servers[1].url} did not load the adapter" in log
    # Said at once: a server that may still start is asked for long.
    assert f"server {servers[1].url} is asked for 3 s to load the adapter, as it broke off" in log
    assert "Connection refused" in log
    assert not servers[0].adapters()
    servers[1].start()


@slow
def test_a_server_that_is_frozen_ends_the_run_by_name(
    inputs: Path, servers: list[FakeServer], tmp_path: Path
) -> None:
    run_dir = toy.make_run(
        tmp_path / "run", served_config(inputs, servers, servers={"timeout_seconds": 3})
    )
    servers[1].stop_process()
    assert toy.train(run_dir) == [errors.ENVIRONMENT]
    assert f"sync: rank 0: server {servers[1].url} did not load" in toy.log_of(run_dir)
    servers[1].restart()


def test_an_adapter_that_one_server_refuses_is_rolled_back(
    inputs: Path, servers: list[FakeServer], tmp_path: Path
) -> None:
    servers[1].set_fault("refuse adapters")
    config = served_config(inputs, servers, servers={"timeout_seconds": 3})
    run_dir = toy.make_run(tmp_path / "run", config)
    assert toy.train(run_dir) == [errors.ENVIRONMENT]
    log = toy.log_of(run_dir)
    assert "LoRA rank 4 is greater than max_lora_rank 2" in log
    assert "no server keeps it" in log
    assert not servers[0].adapters()


def test_a_server_that_has_lost_the_adapter_is_given_it_again(
    inputs: Path, servers: list[FakeServer], whole: Callable[[str], Path], tmp_path: Path
) -> None:
    run_dir = toy.make_run(tmp_path / "run", served_config(inputs, servers))
    # A killed server forgets, also between the load and the first request.
    with started(
        worker.main, 1, [str(run_dir)], environ={"KUBETUNE_FAULT": "signal 19:generation:4"}
    ) as [process]:
        wait_until(lambda: toy.is_stopped(process.pid))
        for server in servers:
            server.restart()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGCONT)
        assert wait_all([process]) == [0], toy.log_of(run_dir)
    assert toy.digests(run_dir) == toy.digests(whole("lag-0"))


# The answers of a server.

SETTINGS = GrpoConfig(num_generations=2, max_completion_length=4)


def reply_of(**changes: Any) -> dict[str, Any]:
    choices = []
    for index in range(2):
        choice = {
            "index": index,
            "token_ids": [5, 6, 2],
            "logprobs": {"token_logprobs": [-0.5, -1.5, -1.0]},
            "finish_reason": "stop",
            "prompt_token_ids": [7, 8],
        }
        choices.append(choice)
    choices[1] |= changes
    return {"choices": choices}


def test_an_answer_is_taken_as_it_is() -> None:
    cut = reply_of(
        token_ids=[5, 6, 7, 9],
        logprobs={"token_logprobs": [-0.5, None, float("nan"), -1.5]},
        finish_reason="length",
    )
    first, second = answers_in(cut, [7, 8], SETTINGS, [2, 3], 100)
    assert first.ids == [5, 6, 2]
    assert first.logps == [-0.5, -1.5, -1.0]
    assert sum(first.entropies) / 3 == 1.0
    assert not first.is_cut
    assert second.is_cut
    assert [logp != logp for logp in second.logps] == [False, True, True, False]
    assert second.entropies == [0.5, 1.5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index": 0}, "expected 0 to 1"),
        ({"token_ids": None}, "no token_ids"),
        ({"token_ids": []}, "no token_ids"),
        ({"token_ids": [5, 6, 100]}, "the token 100"),
        ({"token_ids": [5, True, 2]}, "the token True"),
        ({"token_ids": [5, 6]}, "3 log-probabilities for 2 tokens"),
        ({"token_ids": [5] * 5, "logprobs": {"token_logprobs": [-1.0] * 5}}, "at most 4"),
        ({"logprobs": None}, "no log-probabilities"),
        ({"logprobs": {"token_logprobs": [-1.0, 0.5, -1.0]}}, "the log-probability 0.5"),
        ({"logprobs": {"token_logprobs": [-1.0, "x", -1.0]}}, "the log-probability 'x'"),
        ({"finish_reason": "length"}, "--max-model-len"),
        ({"finish_reason": "abort"}, "'abort'"),
        ({"prompt_token_ids": [7]}, "another prompt"),
    ],
)
def test_an_answer_that_was_not_asked_for_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ServerTrouble, match=re.escape(message)):
        answers_in(reply_of(**changes), [7, 8], SETTINGS, [2, 3], 100)


@pytest.mark.parametrize("reply", [{}, {"choices": None}, {"choices": [1, 2]}, {"choices": [{}]}])
def test_a_reply_without_answers_is_refused(reply: dict[str, Any]) -> None:
    with pytest.raises(ServerTrouble):
        answers_in(reply, [7, 8], SETTINGS, [2, 3], 100)


class Stuck(Server):
    def complete(self, request: dict[str, Any], deadline: float) -> dict[str, Any]:
        time.sleep(60)
        return {}


def test_a_thread_that_does_not_come_back_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_GRACE_SECONDS", 0.1)
    asking = requests.Asking(
        servers=[Stuck("http://stuck:8000")],
        settings=SETTINGS,
        eos_ids=[2],
        vocabulary=100,
        seed=1,
        rank=3,
        seconds=0.2,
    )
    stuck = requests.Requests(asking, 7, Adapter("a", "/a", 7), [Slot(5, 9, [7, 8])])
    with pytest.raises(
        errors.EnvironmentFault,
        match=r"rank 3: server http://stuck:8000 .* prompt 5 \(row 9\) of step 7",
    ):
        stuck.arrived(1.0)


def test_nobody_there_is_said_at_once() -> None:
    with pytest.raises(ServerTrouble, match="refused"):
        Server("http://127.0.0.1:9").models(time.monotonic() + 5)


# The settings.


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"urls": []}, "urls"),
        ("ftp://x", "expected such as"),
        ("http://x/v1", "without /v1"),
        (["http://x", "http://x"], "named twice"),
        ({"urls": ["http://x"], "lag": 2}, "lag"),
        ({"urls": ["http://x"], "timeout_seconds": 1800}, "expected less than"),
    ],
)
def test_servers_that_cannot_be_asked_are_refused(inputs: Path, section: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        config_of(inputs, servers=section)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (None, "no new weights of a whole model"),
        ({"use_dora": True}, "lora.use_dora"),
        ({"modules_to_save": ["lm_head"]}, "lora.modules_to_save"),
        ({"r": 600}, "a rank of at most 512"),
    ],
)
def test_what_servers_cannot_load_is_refused(lora: Any, message: str) -> None:
    section = {
        "task": "grpo",
        "model": "x",
        "data": {"train": "x.jsonl"},
        "rewards": ["exact_match"],
        "grpo": {"servers": "http://x"},
        "lora": lora,
    }
    with pytest.raises(ValueError, match=re.escape(message)):
        Config.model_validate(section)


def test_what_servers_draw_is_corrected_unless_the_run_file_says_otherwise() -> None:
    served = GrpoConfig.model_validate({"servers": "http://x:8000"})
    assert served.importance_sampling_correction == "token_truncate"
    assert served.servers is not None
    assert served.servers.urls == ("http://x:8000",)
    plain = {"servers": ["http://x"], "importance_sampling_correction": "none"}
    assert GrpoConfig.model_validate(plain).importance_sampling_correction == "none"
    assert GrpoConfig().importance_sampling_correction == "none"
