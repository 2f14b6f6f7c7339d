"""Rewards of answers: built in, functions of three tools' forms, and code that raises, hangs or does worse."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kubetune import errors
from kubetune.base import logs, processes
from kubetune.config import consent
from kubetune.config.schema import Config, GrpoConfig, RewardConfig
from kubetune.config.schema.evaluation import GenerateConfig
from kubetune.scoring import metrics
from kubetune.scoring.rewards import built_in, printed
from kubetune.scoring.rewards.json_schemas import validator_of
from kubetune.scoring.rewards.pool import RewardPool
from kubetune.scoring.rewards.request import Judgement, Request
from tests.ranks import wait_until

CODE = """
import ctypes, os, signal, socket, sys, time
from beside import DOUBLE

def of_trl(prompts, completions, answer, trainer_state, log_metric, **rest):
    assert isinstance(completions[0], list) == isinstance(prompts[0], list)
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    log_metric("lengths", sum(map(len, texts)) / len(texts))
    return [DOUBLE * float(text == right) if text else None for text, right in zip(texts, answer)]

def of_few(completions, answer):
    return [float(text == right) for text, right in zip(completions, answer)]

async def of_async(completions, **rest):
    return [trained(rest["trainer_state"].global_step) for _ in completions]

def trained(step):
    return step / 10

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "source": data_source}

def reward_func(queries, prompts, labels):
    return [float(query == prompt + label) for query, prompt, label in zip(queries, prompts, labels)]

def drawn(completions, **rest):
    yield 1.0

def alarmed(completions, **rest):
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(5)
    signal.alarm(0)
    return [1.0] * len(completions)

def repeats(completions, **rest):
    print(completions[0], end="", file=sys.stderr)
    return [1.0] * len(completions)

def prints_for_ever(completions, **rest):
    while True:
        print("again")

def infinite(completions, **rest):
    return [float("inf")] * len(completions)

def raises(completions, **rest):
    raise KeyError("no such column")

def too_few(completions, **rest):
    return [1.0]

def hangs(completions, **rest):
    while True:
        pass

def hangs_in_c(completions, **rest):
    sum(range(10**15))

def ends(completions, **rest):
    os._exit(0)

def exits(completions, **rest):
    sys.exit("enough")

def eats(completions, **rest):
    return [float(len(bytearray(10 * 2**30)))] * len(completions)

def forks(completions, **rest):
    for _ in range(20):
        if os.fork() == 0:
            time.sleep(1000)
    time.sleep(1000)

def bombs(completions, **rest):
    for _ in range(8):  # 256 processes, and never more: a test must not be able to take the machine
        os.fork()
    time.sleep(1000)

def handles(completions, **rest):
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, lambda *_: None)
    while True:
        time.sleep(1000)

def lies(completions, **rest):
    os.write(int(sys.argv[2]), bytes([255]) * 1000)
    time.sleep(1000)

def replies(text):
    content = text.encode()
    os.write(int(sys.argv[2]), len(content).to_bytes(8, "big") + content)
    time.sleep(1000)

def nests_its_reply(completions, **rest):
    replies("[" * 200000)

def counts_its_metrics(completions, **rest):
    replies('{"rewards": [1, 1], "metrics": 5}')

def nests(completions, **rest):
    for _ in range(3000):
        os.mkdir("d")
        os.chdir("d")
    os.chmod(".", 0)
    return [1.0] * len(completions)

def lends(completions, **rest):
    with open("shell", "wb") as file:
        file.write(b"#!/bin/sh")
    os.chmod("shell", 0o4755)
    os.chmod(".", 0o755)
    try:
        os.chmod("..", 0o755)
    except OSError:
        return [1.0]
    return [0.0]

def overflows(completions, **rest):
    replies('{"rewards": [1%s, 2], "metrics": {}}' % ("0" * 400))

def fills(completions, **rest):
    with open("large", "wb") as file:
        file.truncate(10 * 2**30)
    return [1.0] * len(completions)

def escapes(completions, **rest):
    os.setsid()
    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # it is not to die with its parent
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
    time.sleep(1000)

def writes(completions, **rest):
    for change in (lambda: open(completions[0], "a"), lambda: os.unlink(completions[0]), lambda: os.mkdir(completions[1])):
        try:
            change()
        except OSError:
            continue
        return [1.0] * len(completions)
    os.mkdir("inner")
    open("inner/mine", "w").write("x")
    os.rename("inner/mine", "moved")
    open(os.devnull, "w").write("x")
    return [0.0] * len(completions)

def calls(completions, **rest):
    socket.create_connection(("127.0.0.1", int(completions[0])), timeout=5)
    return [1.0] * len(completions)

def prints(completions, **rest):
    print("a" * 100_000, flush=True)
    os.write(1, b"b" * 100_000)
    return [1.0] * len(completions)

def looks(completions, **rest):
    names = set(os.environ) - {"PATH", "LANG", "HOME", "TMPDIR", "PYTHONPATH", "OMP_NUM_THREADS", "LC_CTYPE"}
    open("left.txt", "w").write("x")
    return [float(len(names))] * len(completions)

class Silent:
    size = 1


def other(a, b):
    return 0

class Scorer:
    def __call__(self, prompts, completions, **rest):
        return [0.25] * len(completions)
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "beside.py").write_text("DOUBLE = 2.0\n")
    path = folder / "rewards.py"
    path.write_text(CODE)
    return path


Ask = Callable[..., list[Judgement]]


@pytest.fixture
def ask() -> Iterator[Ask]:
    """Yield a function that asks a reward process of its own, which ends with the test."""
    pools = []

    def asked(rewards: list[dict[str, Any]], requests: Request, **settings: Any) -> list[Judgement]:
        configs = [RewardConfig.model_validate(reward) for reward in rewards]
        pools.append(RewardPool(configs, GrpoConfig(**settings)))
        return pools[-1].judge(requests)

    yield asked
    for pool in pools:
        pool.close()


def request_of(
    texts: list[str], references: list[str | None], prompt: Any = "2 + 2 = ", **record: Any
) -> Request:
    ids = [list(map(ord, text)) for text in texts]
    return Request(prompt, {"prompt": prompt, **record}, references, texts, ids, step=3)


def rewards_of(judgements: list[Judgement]) -> list[list[float | None]]:
    assert not [judgement.error for judgement in judgements if judgement.error]
    return [judgement.rewards for judgement in judgements]


def test_what_is_built_in(ask: Ask) -> None:
    rewards = [
        {"name": "exact_match"},
        {"name": "contains"},
        {"name": "numeric", "column": "solution"},
        {"name": "regex", "settings": {"pattern": r"(\d+) apples"}},
        {"name": "json_valid"},
        {"name": "json_equal"},
        {"name": "format", "settings": {"pattern": r"It is .*\."}},
        {"name": "length", "settings": {"target": 4}},
        {"name": "repetition", "settings": {"ngram_size": 1}},
        {"name": "think_format_reward"},
        {"name": "get_repetition_penalty_reward", "settings": {"ngram_size": 2, "max_penalty": -2}},
        {
            "name": "get_soft_overlong_punishment",
            "settings": {"max_completion_len": 10, "soft_punish_cache": 4},
        },
    ]
    texts = ["4", "It is 4.", "aaaa", "<think>so</think>4 apples"]
    asked = request_of(texts, ["4"] * len(rewards))
    assert rewards_of(ask(rewards, asked)) == [
        [1.0, 0.0, 0.0, 0.0],
        [1.0, 1.0, 0.0, 1.0],
        [1.0, 1.0, 0.0, 1.0],
        [0.0, 0.0, 0.0, 1.0],
        [1.0, 0.0, 0.0, 0.0],
        [1.0, 0.0, 0.0, 0.0],
        [0.0, 1.0, 0.0, 0.0],
        [0.25, 0.0, 1.0, 0.0],
        pytest.approx([0.0, -1 / 8, -3 / 4, -9 / 25]),
        [0.0, 0.0, 0.0, 1.0],
        pytest.approx([0.0, 0.0, -2 * 2 / 3, -2 * 5 / 24]),
        [0.0, -0.5, 0.0, -1.0],
    ]


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/list"}},
    "required": ["a"],
    "$defs": {"list": {"type": "array", "items": {"$ref": "#/$defs/list"}}},
}


def test_answers_are_checked_by_a_schema_inline_or_of_a_file(ask: Ask, tmp_path: Path) -> None:
    path = tmp_path / "answer.schema.json"
    path.write_text(json.dumps(SCHEMA))
    rewards = [
        {"name": "json_schema", "settings": {"schema": SCHEMA}},
        {"name": "json_schema", "file": str(path)},
    ]
    texts = ['{"a": 1, "b": [[], []]}', '{"a": "1"}', "1", "no", '```json\n{"a": 2}\n```']
    texts.append('{"a": 1, "b": ' + "[" * 900 + "]" * 900 + "}")
    expected = [1.0, 0.0, 0.0, 0.0, 1.0]
    for judgement in ask(rewards, request_of(texts, [None, None])):
        assert not judgement.error
        assert judgement.rewards[:5] == expected
    assert not consent.effects_of(
        Config.model_validate(
            {"model": "m", "data": {"train": "d"}, "task": "grpo", "rewards": rewards[1]}
        )
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "expected a JSON schema"),
        ("[]", "found list; expected an object"),
        ('{"type": "number or text"}', "is no JSON schema: at type: "),
    ],
)
def test_a_schema_that_is_none_is_refused_at_once(
    tmp_path: Path, content: str, reason: str
) -> None:
    path = tmp_path / "answer.schema.json"
    path.write_text(content)
    with pytest.raises(errors.ConfigError) as refusal:
        validator_of(RewardConfig(name="json_schema", file=str(path)))
    assert reason in str(refusal.value)


def test_rewards_are_the_metrics_of_evaluations(ask: Ask) -> None:
    rewards = [
        {"name": "label", "settings": {"labels": ["yes", "no"]}},
        {"name": "rouge_l"},
        {"name": "bleu"},
        {"name": "chrf"},
        {"name": "exact_match"},
    ]
    right = "No, it is not here"
    texts = [right, "yes", f"<think>yes it is</think>{right}"]
    label, rouge, bleu, chrf, exact = rewards_of(ask(rewards, request_of(texts, [right] * 5)))
    assert label == exact == [1.0, 0.0, 1.0]
    for scores in (rouge, bleu, chrf):
        assert scores == pytest.approx([1.0, scores[1], 1.0])
        assert scores[1] is not None
        assert 0 <= scores[1] < 0.2
    scorer = metrics.measures_of(GenerateConfig(metric=("bleu",)))["bleu"]
    some = request_of(["it is not", "No, it is"], [right])
    rewards_of_bleu = built_in.reward_of(RewardConfig(name="bleu"))(some, right)
    expected = [scorer(text, right) / 100 for text in ("it is not", "No, it is")]
    assert rewards_of_bleu == pytest.approx(expected)


def test_a_record_without_an_answer_is_not_judged_against_it(ask: Ask) -> None:
    asked = request_of(["4", "5"], [None])
    assert rewards_of(ask([{"name": "exact_match"}], asked)) == [[None, None]]


def test_functions_of_three_tools(ask: Ask, code: Path) -> None:
    names = ("of_trl", "of_async", "compute_score", "reward_func", "alarmed", "Scorer", "of_few")
    rewards = [{"file": str(code), "function": name} for name in names]
    asked = request_of(["4", "5", ""], ["4"] * len(names), answer="4", data_source="sums")
    expected = [
        [2.0, 0.0, None],
        [0.3, 0.3, 0.3],
        [1.0, 0.0, 0.0],
        [1.0, 0.0, 0.0],
        [1.0, 1.0, 1.0],
        [0.25, 0.25, 0.25],
        [1.0, 0.0, 0.0],
    ]
    judgements = ask(rewards, asked)
    assert rewards_of(judgements) == expected
    assert judgements[0].metrics == {"lengths": pytest.approx(2 / 3)}
    chat = request_of(
        ["4", "5", ""], ["4"] * len(names), [{"role": "user", "content": "2 + 2?"}], answer="4"
    )
    assert rewards_of(ask(rewards[:3], chat)) == expected[:3]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", "KeyError: 'no such column'"),
        ("too_few", "returned [1.0]; expected a list of 2 numbers"),
        ("hangs", "took longer than 1 s and was stopped"),
        pytest.param("hangs_in_c", "took longer than 1 s and was stopped", marks=pytest.mark.slow),
        ("ends", "ended the reward process (exit code 0)"),
        ("exits", "SystemExit: enough"),
        ("eats", "MemoryError"),
        pytest.param("forks", "took longer than 1 s and was stopped", marks=pytest.mark.slow),
        pytest.param("handles", "took longer than 1 s and was stopped", marks=pytest.mark.slow),
        ("lies", "wrote something that is no reply"),
        ("nests_its_reply", "wrote something that is no reply"),
        ("counts_its_metrics", "wrote something that is no reply"),
        ("fills", "File too large"),
    ],
)
def test_code_that_fails_gives_no_reward_and_spoils_none(
    ask: Ask, code: Path, name: str, reason: str
) -> None:
    rewards = [
        {"file": str(code), "function": name},
        {"file": str(code), "function": "compute_score"},
    ]
    asked = request_of(["4", "5"], ["4", "4"])
    bad, good = ask(rewards, asked, reward_timeout_seconds=1)
    assert bad.rewards == [None, None]
    assert reason in bad.error
    assert good.rewards == [1.0, 0.0]
    assert not _left_behind()


def only(name: str, code: Path, **settings: Any) -> RewardPool:
    """Return the pool of one function."""
    return RewardPool([RewardConfig(file=str(code), function=name)], GrpoConfig(**settings))


def list_of(pid: int) -> str:
    """Return the name of the list that a process is on, empty where it is gone."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return ""


def on_list(name: str) -> list[int]:
    """Return the processes that are on a list and have not ended; one that has may wait for its parent for long."""
    pids = [int(place.name) for place in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if list_of(pid) == name and processes.is_alive(pid)]


@pytest.mark.parametrize("name", ["bombs", "escapes", "forks"])
def test_no_process_of_a_function_outlives_it(code: Path, name: str) -> None:
    # The count comes long before its deadline, also on a machine that is busy.
    pool = only(name, code, reward_timeout_seconds=30 if name == "bombs" else 1)
    try:
        if not pool.is_separate:
            pytest.skip("the kernel gives no list of processes of its own")
        assert pool.process is not None
        [first] = processes.children(pool.process.pid)
        name_of_list = list_of(first)
        assert on_list(name_of_list) == [first]
        (judgement,) = pool.judge(request_of(["4"], [None]))
    finally:
        pool.close()
    expected = "it had more than 128 processes" if name == "bombs" else "took longer than 1 s"
    assert expected in judgement.error
    assert judgement.rewards == [None]
    wait_until(lambda: not on_list(name_of_list))


def test_functions_write_to_their_folder_alone(code: Path, tmp_path: Path) -> None:
    pool = only("writes", code)
    try:
        if {"mounts", "Landlock"} <= set(pool.refused):
            pytest.skip("the kernel has neither mounts nor Landlock for it")
        outside = tmp_path / "outside"
        outside.write_text("kept")
        (judgement,) = pool.judge(request_of([str(outside), str(tmp_path / "new")], [None]))
    finally:
        pool.close()
    assert not judgement.error
    assert judgement.rewards == [0.0, 0.0]
    assert outside.read_text() == "kept"


def test_a_reward_that_no_float_can_hold_is_none(ask: Ask, code: Path) -> None:
    rewards = [{"file": str(code), "function": "overflows"}]
    [judgement] = ask(rewards, request_of(["4", "5"], [None]))
    assert judgement.rewards == [None, 2.0]


def test_deep_folders_are_removed_now_and_at_the_next_start(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    # pytest itself could not remove them.
    request.addfinalizer(lambda: subprocess.run(["rm", "-rf", str(tmp_path)], check=False))
    # Other tests remove what killed ranks leave in the usual folder.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    [left] = (pool := only("nests", code)).judge(request_of(["4"], [None]))
    assert pool.process is not None
    folder = Path(pool.process.folder).parent
    # As a rank does that is killed and whose process number nobody has now.
    of_the_dead = tmp_path / f"kubetune-rewards-{2**22 + 1}-x"
    folder.rename(of_the_dead)
    pool.close()
    assert left.rewards == [1.0]
    assert of_the_dead.is_dir()
    pool = only("nests", code)
    assert not of_the_dead.exists()
    pool.judge(request_of(["4"], [None]))
    pool.close()
    assert list(tmp_path.glob("kubetune-rewards-*")) == []


def test_what_functions_leave_can_be_run_by_nobody_else(code: Path) -> None:
    pool = only("lends", code)
    try:
        if "mounts" in pool.refused or not pool.is_separate:
            pytest.skip("the kernel gives no mounts of its own")
        assert pool.process is not None
        [judgement] = pool.judge(request_of(["4"], [None]))
        folder = Path(pool.process.folder)
        assert (folder / "shell").stat().st_mode & 0o7777 == 0o4755
        assert folder.parent.stat().st_mode & 0o777 == 0o700
    finally:
        pool.close()
    assert judgement.rewards == [1.0], judgement.error


def _left_behind() -> list[str]:
    """Return processes that a reward process has started and that outlive it."""
    lines = subprocess.run(["ps", "-eo", "ppid,args"], capture_output=True, text=True).stdout
    return [
        line
        for line in lines.splitlines()
        if "kubetune.scoring.rewards.worker" in line and line.split()[0] == "1"
    ]


def test_an_error_ends_the_run_where_that_is_asked_for(ask: Ask, code: Path) -> None:
    rewards = [{"file": str(code), "function": "raises"}]
    with pytest.raises(errors.ConfigError, match=r"raises: .*(\n.*)*no such column"):
        ask(rewards, request_of(["4"], [None]), on_reward_error="stop")


def test_what_functions_print_is_no_reply(ask: Ask, code: Path) -> None:
    rewards = [{"file": str(code), "function": "prints"}]
    assert rewards_of(ask(rewards, request_of(["4"], [None]))) == [[1.0]]


def test_what_functions_print_is_in_the_log_without_secrets(
    code: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MY_SECRET", "a-value-that-nobody-may-read")
    caplog.set_level("INFO", "kubetune")
    logs.scrub_tracebacks()
    token = f"hf_{'abcdefghij' * 4}"
    monkeypatch.setattr(printed, "_MOST_LINES", 3)
    pool = only("repeats", code)
    try:
        text = f"a-value-that-nobody-may-read and {token}\nno end of the line"
        pool.judge(request_of([text], [None]))
        pool.judge(request_of(["x" * 3000], [None]))
        pool.judge(request_of(["line\n" * 10], [None]))
    finally:
        pool.close()
    assert caplog.messages == [
        "[secret] and [secret]",
        "no end of the line",
        f"{'x' * 2000}… (1,000 more characters)",
        "line",
        "line",
        "line",
        "… and 7 more lines",
    ]


def test_a_function_that_prints_without_end_is_stopped(code: Path) -> None:
    pool = only("prints_for_ever", code, reward_timeout_seconds=1)
    try:
        [judgement] = pool.judge(request_of(["4"], [None]))
    finally:
        pool.close()
    assert "took longer than 1 s and was stopped" in judgement.error


def test_an_infinite_reward_is_an_error(ask: Ask, code: Path) -> None:
    rewards = [{"file": str(code), "function": "infinite"}]
    [judgement] = ask(rewards, request_of(["4"], [None]))
    assert judgement.rewards == [None]
    assert "returned inf; expected a finite number" in judgement.error


@pytest.mark.parametrize(("name", "settings", "message"), [
    ("repetition", {"ngram_size": 0}, "ngram_size: found 0; expected at least 1"),
    ("repetition", {"max_penalty": 1}, "max_penalty: found 1; expected 0 or less"),
    ("length", {"target": 0}, "target: found 0; expected at least 1"),
    ("length", {"min_tokens": 9, "max_tokens": 3}, "min_tokens is 9, max_tokens 3"),
])  # fmt: skip
def test_settings_by_which_no_answer_is_better_are_refused(
    name: str, settings: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RewardConfig(name=name, settings=settings)


def test_functions_see_nothing_of_the_run(
    ask: Ask, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    rewards = [{"file": str(code), "function": "looks"}]
    assert rewards_of(ask(rewards, request_of(["4"], [None]))) == [[0.0]]
    assert not Path("left.txt").exists()


def test_functions_reach_no_network_where_the_kernel_allows_that(code: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        reward = RewardConfig(file=str(code), function="calls")
        pool = RewardPool([reward], GrpoConfig())
        try:
            port = str(server.getsockname()[1])
            [judgement] = pool.judge(request_of([port], [None]))
        finally:
            pool.close()
    is_refused = pool.is_separate or "system calls" not in pool.refused
    assert (judgement.rewards == [None]) == is_refused
    assert ("Permission denied" in judgement.error) == ("system calls" not in pool.refused)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nowhere", "has no function nowhere"),
        (
            "Silent",
            "Silent gives an object of Silent, which has no `__call__`; expected a function",
        ),
        ("drawn", "drawn is a generator, and its values are never read"),
        ("other", "other(a, b) is no reward function; expected f(prompts, completions"),
    ],
)
def test_what_is_no_reward_function_is_refused_at_once(
    ask: Ask, code: Path, name: str, reason: str
) -> None:
    rewards = [{"file": str(code), "function": name}, {"name": "exact_match"}]
    with pytest.raises(errors.ConfigError) as refusal:
        ask(rewards, request_of(["4"], [None, None]))
    assert reason in str(refusal.value)


def test_a_file_that_cannot_be_run_is_refused_with_its_traceback(ask: Ask, tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("x = 1\ny = x / 0\n")
    with pytest.raises(errors.ConfigError, match="line 2") as refusal:
        ask([{"file": str(path), "function": "f"}], request_of(["4"], [None]))
    assert "ZeroDivisionError" in str(refusal.value)
    with pytest.raises(errors.ConfigError, match="is no file"):
        ask([{"file": str(tmp_path / "no.py"), "function": "f"}], request_of(["4"], [None]))


def test_the_reward_process_ends_with_the_rank(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests remove what killed ranks leave in the usual folder.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = (
        "import sys, time\n"
        "from kubetune.config.schema import GrpoConfig, RewardConfig\n"
        "from kubetune.scoring.rewards.pool import RewardPool\n"
        "pool = RewardPool([RewardConfig(name='json_valid')], GrpoConfig())\n"
        "print(pool.process.pid, pool.process.folder, flush=True)\n"
        "time.sleep(1000)\n"
    )
    rank = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=os.getcwd()
    )
    assert rank.stdout is not None
    with rank, rank.stdout:
        pid, folder = rank.stdout.readline().split()
        family = [int(pid), *processes.children(int(pid))]
        rank.kill()
    require_ended(family)
    # What the functions have left goes when the next process begins.
    assert Path(folder).is_dir()
    ask([{"name": "json_valid"}], request_of(["4"], [None]))
    assert not Path(folder).exists()


def test_a_reward_process_whose_rank_ended_while_it_started_ends_too(tmp_path: Path) -> None:
    file = tmp_path / "hangs.py"
    file.write_text("while True:\n    pass\n")
    reward = RewardConfig(file=str(file), function="never")
    content = b""
    for message in (2**32, [reward]):
        pickled = pickle.dumps(message)
        content += len(pickled).to_bytes(8, "big") + pickled
    with worker(content) as process:
        # Without namespaces of its own the process is tied to the rank before it runs its first line.
        if process.wait(30) == 0:
            pytest.skip("this kernel lets no process have a list of processes of its own")
        assert process.returncode == 1


def test_a_reward_process_that_was_asked_nothing_ends(tmp_path: Path) -> None:
    with worker(b"") as process:
        assert process.wait(30) == 0


@contextlib.contextmanager
def worker(content: bytes) -> Iterator[subprocess.Popen[bytes]]:
    """Start a reward process whose rank wrote `content` and ended before the process was there."""
    read_requests, requests = os.pipe()
    replies, write_replies = os.pipe()
    os.write(requests, content)
    os.close(requests)
    command = [sys.executable, "-m", "kubetune.scoring.rewards.worker"]
    process = subprocess.Popen(
        [*command, str(read_requests), str(write_replies)],
        pass_fds=(read_requests, write_replies),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for number in (read_requests, write_replies, replies):
            os.close(number)


def require_ended(pids: list[int]) -> None:
    """Fail if one of the processes still runs after a while; one that nobody has waited for yet does not run."""
    deadline = time.monotonic() + 10
    while any(map(processes.is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in pids if processes.is_alive(pid)] == []
