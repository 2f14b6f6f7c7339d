"""A run directory of somebody else: whatever poison lies in it, no verb, page or tool runs, shows or waits for any of it.

Each case plants one poison in a whole run and has the manifest sealed again, as whoever planted it would.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import transformers
from fsspec.core import url_to_fs

from kubetune import cli, errors
from kubetune.base import fault_injection
from kubetune.config import consent
from kubetune.config.load import load_config
from kubetune.config.resolved import read_config
from kubetune.config.schema import Config
from kubetune.k8s.manifests import local_files, sent_from_outside
from kubetune.rundir import checkpoints
from kubetune.rundir.checkpoints import State
from tests import pictures, preferences, reviews, s3, toy
from tests.crash.poisons import (
    POISONS,
    SECRET,
    Poison,
    Received,
    a_pipe_for_a_lock,
    code_for_generation,
    code_in_the_checkpoint,
    code_of_tokenizer_and_processor,
    data_from_outside,
    hooks,
    links_to_a_secret,
    metrics_of_its_own,
    pipes_for_numbers,
    places_outside,
    tasks_of_its_own,
)  # fmt: skip

# In which a verb must be done with a poisoned run; a pipe would keep it for ever.
SECONDS = 60
# Verbs that show a run, and load no model of it.
READING = ("report", "compare", "runs", "watch", "serve", "plan", "check", "render", "resume")
LOADING = ("generate", "chat", "evaluate", "export", "push")
# Verbs that start what a run file says, which allows what it names: code, and places to write and send to.
STARTING = ("train", "verify-resume", "sweep")
ALLOWED_BY_NAME = {hooks, metrics_of_its_own, tasks_of_its_own, places_outside}
# Poisons that leave the weights whole: a verb that loads may refuse the run, or do what it is for.
HARMLESS_TO_MODELS = {
    hooks, metrics_of_its_own, tasks_of_its_own, pipes_for_numbers, a_pipe_for_a_lock, links_to_a_secret,
    code_for_generation, code_of_tokenizer_and_processor, places_outside, data_from_outside,
}  # fmt: skip
HARMLESS_CODES = (errors.OK, errors.USER, errors.ENVIRONMENT)


def causal_lm(folder: Path) -> Config:
    toy.make_inputs(folder)
    return toy.make_config(folder, STEP, lora=None)


def preference(folder: Path) -> Config:
    toy.make_inputs(folder)
    return toy.make_config(
        folder, STEP, task="preference", data=preferences.write_pairs(folder), lora=None
    )


def reward_model(folder: Path) -> Config:
    toy.make_inputs(folder)
    return toy.make_config(
        folder, STEP, task="reward_model", data=preferences.write_pairs(folder), lora=None
    )


def sequence_classification(folder: Path) -> Config:
    reviews.make_inputs(folder)
    return reviews.make_config(folder, STEP)


def vision_language(folder: Path) -> Config:
    pictures.save_seeing_model(folder / "model")
    data = {
        name: str(pictures.write_questions(folder, name, 8, seed))
        for seed, name in enumerate(("train", "eval"))
    }
    return toy.make_config(folder, STEP, task="vision_language", data=data, lora=None)


STEP = {"max_steps": 1}
# For each task the config of a small run of full fine-tuning, with the inputs that it needs in a folder.
RUNS = {
    make.__name__: make
    for make in (causal_lm, preference, reward_model, sequence_classification, vision_language)
}
# What config.json of a trained head says.
HEADS = {
    "reward_model": {"id2label": {0: "reward"}, "problem_type": "regression"},
    "sequence_classification": {
        "id2label": {0: "0", 1: "1"},
        "problem_type": "single_label_classification",
    },
}


def write_whole(task: str, folder: Path) -> Path:
    """Write a run directory of a task that has ended, made without training."""
    config = RUNS[task](folder)
    run = folder / "run"
    toy.make_run(run, config)

    def write(checkpoint: Path) -> None:
        for path in (folder / "model").iterdir():
            shutil.copy(path, checkpoint)
        if task in HEADS:
            facts = transformers.AutoConfig.from_pretrained(folder / "model", **HEADS[task])
            model = transformers.AutoModelForSequenceClassification.from_config(facts)
            model.save_pretrained(checkpoint)

    checkpoints.commit(run, State(step=1, saved_step=1), write)
    for name in ("best", "last"):
        checkpoints.link(run, name, 1)
    (run / "exit.json").write_text(
        json.dumps({"code": errors.PREEMPTED, "reason": "stopped", "step": 1, "error": None})
    )
    return run


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the whole run of a task, made once."""
    return cache(lambda task: write_whole(task, tmp_path_factory.mktemp(task)))


def receive(whole: Path, folder: Path) -> Received:
    (folder / "outside").mkdir()
    run = folder / "received" / "run"
    shutil.copytree(whole, run, symlinks=True)
    return Received(run, folder / "outside")


@pytest.fixture(scope="module")
def stopped(toy_inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of full fine-tuning that was stopped after its first step of two, and would go on."""
    config = toy.make_config(toy_inputs, {"max_steps": 2}, lora=None, compute={"gpus_per_node": 0})
    run = toy.make_run(tmp_path_factory.mktemp("stopped") / "run", config)
    fault = {fault_injection.FAULT: "signal 15:step:1"}
    assert toy.train(run, environ=fault) == [errors.PREEMPTED]
    return run


@pytest.fixture
def received(wholes: Callable[[str], Path], tmp_path: Path) -> Received:
    return receive(wholes("causal_lm"), tmp_path)


@contextmanager
def bounded() -> Iterator[None]:
    """Fail what waits: a pipe without a writer would keep this process for ever."""

    def stop(number: int, frame: object) -> None:
        raise AssertionError(f"not done after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


WORDS = {
    "report": ["report", "RUN"],
    "runs": ["runs", "FOLDER"],
    "watch": ["watch", "RUN", "--once"],
    "serve": ["serve", "--render", "RUN"],
    "plan": ["plan", "CONFIG"],
    "check": ["data", "check", "CONFIG"],
    "resume": ["resume", "RUN"],
    "generate": ["generate", "RUN", "hello", "--max-new-tokens", "2"],
    "chat": ["chat", "RUN", "--max-new-tokens", "2"],
    "evaluate": ["evaluate", "RUN"],
    "export": ["export", "RUN"],
    "push": ["push", "RUN", "org/name"],
    "compare": ["report", "RUN", "--compare", "RUN", "-o", "PAGE"],
    "render": ["render", "CONFIG", "kubernetes.image=any:1"],
    "train": ["train", "CONFIG", "OUTPUT"],
    "verify-resume": ["verify-resume", "CONFIG", "--steps", "2"],
    "sweep": [
        "sweep", "CONFIG", "training.learning_rate=1e-3,1e-2", "--sampler", "grid", "--trials", "1", "-o", "SWEEP"
    ],
    "sync": ["sync", "RUN", "s3://runs/copy"],
}  # fmt: skip


def ask(
    received: Received,
    verb: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> tuple[int, str]:
    """Return the exit code and the output of a verb, with an answer at hand for whoever asks on the terminal."""
    paths = {
        "RUN": received.run,
        "FOLDER": received.run.parent,
        "CONFIG": received.run / "config.yaml",
        "PAGE": received.run / "comparison.html",
        "SWEEP": received.run.parent / "sweep",
        "OUTPUT": f"output={received.run}",
    }
    words = [str(paths.get(word, word)) for word in WORDS[verb]]
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))
    with bounded():
        code = cli.main(words)
    printed = capfd.readouterr()
    return code, printed.out + printed.err


def require_harmless(received: Received, text: str) -> None:
    assert not received.canary.exists()
    assert SECRET not in text
    assert "Traceback" not in text
    written = [path for path in received.run.rglob("*.html") if SECRET in path.read_text()]
    assert not written


@pytest.mark.parametrize("poison", POISONS)
def test_reading(
    received: Received, poison: Poison,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    poison(received)
    for verb in READING:
        code, text = ask(received, verb, monkeypatch, capfd)
        assert code in HARMLESS_CODES, (verb, text)
        require_harmless(received, text)


@pytest.mark.parametrize("poison", POISONS)
def test_loading(
    received: Received, poison: Poison,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """By one verb; `test_every_task` asks all of them."""
    poison(received)
    code, text = ask(received, "generate", monkeypatch, capfd)
    require_harmless(received, text)
    if poison not in HARMLESS_TO_MODELS:
        assert code in (errors.USER, errors.ENVIRONMENT), text
    assert text.strip()


@pytest.mark.slow
@pytest.mark.parametrize("poison", [poison for poison in POISONS if poison not in ALLOWED_BY_NAME])
@pytest.mark.parametrize("verb", STARTING)
def test_starting(
    stopped: Path, poison: Poison, verb: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A run file that the user names may have its own code run; nothing else of its run directory is."""
    received = receive(stopped, tmp_path)
    poison(received)
    _, text = ask(received, verb, monkeypatch, capfd)
    require_harmless(received, text)


@pytest.mark.slow
@pytest.mark.parametrize("verb", STARTING)
def test_a_whole_run_is_started(
    stopped: Path, verb: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Without poison each of these verbs trains."""
    code, text = ask(receive(stopped, tmp_path), verb, monkeypatch, capfd)
    assert code == errors.OK, text


@pytest.fixture(scope="module")
def store() -> Iterator[s3.Store]:
    with s3.serving() as serving:
        yield serving


@pytest.mark.slow
@pytest.mark.parametrize("poison", POISONS)
def test_copying(
    received: Received, poison: Poison, store: s3.Store, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """What a copy in an object store holds is the run's own."""
    poison(received)
    address = f"s3://runs/{tmp_path.name}"
    monkeypatch.setitem(WORDS, "sync", ["sync", "RUN", address])
    _, text = ask(received, "sync", monkeypatch, capfd)
    require_harmless(received, text)
    remote, _ = url_to_fs(address, skip_instance_cache=True)
    for name in remote.find(address):
        # Settings hold the secret's path, and never what stands in it.
        assert SECRET.encode() not in remote.cat_file(name), name


@pytest.mark.slow
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("task", RUNS)
def test_every_task(
    task: str, poison: Poison, wholes: Callable[[str], Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A run of each task, each poison, every verb that opens a run: one table, and nothing happens."""
    received = receive(wholes(task), tmp_path)
    poison(received)
    for verb in (*READING, *LOADING):
        code, text = ask(received, verb, monkeypatch, capfd)
        assert code in HARMLESS_CODES, (verb, text)
        if verb in LOADING and poison not in HARMLESS_TO_MODELS:
            assert code != errors.OK, (verb, text)
        require_harmless(received, text)


@pytest.mark.slow
@pytest.mark.parametrize("task", RUNS)
def test_a_whole_run_of_each_task_is_asked(
    task: str, wholes: Callable[[str], Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Without poison the same verbs work, so that nothing above is refused for another reason."""
    received = receive(wholes(task), tmp_path)
    for verb in ("report", "compare", "plan", "check", "evaluate", "export", "verify-resume"):
        code, text = ask(received, verb, monkeypatch, capfd)
        assert code == errors.OK, (verb, text)


def test_a_whole_run_is_asked(
    received: Received, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing of the above is refused for another reason."""
    assert ask(received, "generate", monkeypatch, capfd)[0] == errors.OK


def test_allowed_code_is_asked_for_once(
    received: Received, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The digest that the refusal names lets this very code run, here, from now on; other code is refused again."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    code_in_the_checkpoint(received)
    code = [consent.of_folder(received.step)]
    with pytest.raises(errors.ConfigError, match="nobody allowed here") as refused:
        consent.require(code, received.run)
    digest = str(refused.value).split("--trust-code ")[1].split()[0]
    with pytest.raises(errors.ConfigError, match="not the digest of this code"):
        consent.require(code, received.run, "0" * 40)
    consent.require(code, received.run, digest)
    consent.require(code, received.run)
    (received.step / "modeling_evil.py").write_text("other = 1\n")
    with pytest.raises(errors.ConfigError):
        consent.require([consent.of_folder(received.step)], received.run, digest)


@pytest.mark.parametrize("poison", [hooks, metrics_of_its_own, tasks_of_its_own])
def test_code_that_was_started_here(
    received: Received, poison: Poison, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """To start a run allows what its file names, and nothing that is put in its place later."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    poison(received)
    (code,) = consent.effects_of(read_config(received.run), consent.CODE)
    assert not consent.is_allowed(code)
    consent.allow([code])
    assert consent.is_allowed(code)
    for path in (received.run / "mine.py", received.run / "tasks" / "evil.py"):
        if path.exists():
            path.write_text("other = 1\n")
    received.settle(hooks={"on_event": "touch other"})
    assert not any(
        consent.is_allowed(code)
        for code in consent.effects_of(read_config(received.run), consent.CODE)
    )


def test_defaults_of_this_machine_allow(
    received: Received, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hooks(received)
    defaults = tmp_path / "defaults.yaml"
    defaults.write_text(f"hooks: {{on_event: touch {received.canary}}}\n")
    monkeypatch.setenv("KUBETUNE_DEFAULTS", str(defaults))
    consent.require(consent.effects_of(read_config(received.run), consent.CODE), received.run)


def test_nothing_is_cached_where_a_received_run_says(
    received: Received, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    elsewhere = received.canary.parent / "cache"
    received.settle(data={"cache": str(elsewhere)})
    for verb in ("generate", "evaluate"):
        assert ask(received, verb, monkeypatch, capfd)[0] == errors.OK
    assert not elsewhere.exists()


@pytest.mark.parametrize("path", ["/data/prepare", "/data/check"])
def test_the_page_prepares_nothing_where_a_received_run_says(received: Received, path: str) -> None:
    starlette = pytest.importorskip("starlette.testclient")
    from kubetune.ui.server import application
    from kubetune.ui.site import Site

    received.settle(data={"cache": str(received.canary.parent / "cache")})
    site = Site.of(received.run.parent)
    page = starlette.TestClient(
        application(site, "a-token-of-this-test"), base_url="http://localhost"
    )
    with page:
        page.get("/", params={"token": "a-token-of-this-test"})
        ours = {"origin": "http://localhost"}
        answer = page.post(path, json={"dir": "run"}, headers=ours).json()
    assert ": data.cache has " in answer["problems"][0]
    assert not site.jobs.look("run.data")["words"]
    assert not site.jobs.look("run.check")["words"]


def test_evaluating_asks_before_functions_run(
    received: Received, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    metrics_of_its_own(received)
    code, text = ask(received, "evaluate", monkeypatch, capfd)
    assert code == errors.USER
    assert "evaluation.metrics has code run that nobody allowed here" in text
    assert "--trust-code" in text
    assert not received.canary.exists()


@pytest.mark.parametrize(
    "poison", [hooks, metrics_of_its_own, tasks_of_its_own, code_in_the_checkpoint]
)
def test_the_page_neither_continues_nor_repeats_it(received: Received, poison: Poison) -> None:
    starlette = pytest.importorskip("starlette.testclient")
    from kubetune.ui.server import application
    from kubetune.ui.site import Site

    poison(received)
    page = starlette.TestClient(
        application(Site.of(received.run.parent), "a-token-of-this-test"),
        base_url="http://localhost",
    )
    ours = {"origin": "http://localhost"}
    with page, bounded():
        assert page.get("/", params={"token": "a-token-of-this-test"}).status_code == 200
        assert page.get("/run", params={"dir": "run"}).status_code == 200
        gone_on = page.post("/run/continue", json={"dir": "run"}, headers=ours).json()
        key = consent.effects_of(read_config(received.run), consent.CODE)[0].key
        assert any(f"{key} has code run" in problem for problem in gone_on["problems"]), gone_on
        known = json.loads((received.run / "resolved.json").read_text())
        values = {"name": "again", "model.path": known["model"]["path"], "data.train": "x.jsonl"}
        values["data.eval"] = "0.05"
        section, _, _ = key.partition(".")
        values[section] = json.dumps(known[section])
        again = page.post("/new/plan", json={"values": values, "base": "run"}, headers=ours).json()
        assert any("has code run" in problem for problem in again["problems"]), again
    assert not received.canary.exists()


@pytest.mark.parametrize("poison", POISONS)
def test_pages(received: Received, poison: Poison) -> None:
    starlette = pytest.importorskip("starlette.testclient")
    from kubetune.ui.server import application
    from kubetune.ui.site import Site

    poison(received)
    page = starlette.TestClient(
        application(Site.of(received.run.parent), "a-token-of-this-test"),
        base_url="http://localhost",
    )
    with page, bounded():
        for address in ("/", "/run?dir=run", "/compare?dir=run", "/data?dir=run", "/new?dir=run"):
            answer = page.get(address, headers={"authorization": "Bearer a-token-of-this-test"})
            token = page.get(address, params={"token": "a-token-of-this-test"})
            for text in (answer.text, token.text):
                require_harmless(received, text)


@pytest.mark.parametrize("poison", POISONS)
def test_tools_of_agents(received: Received, poison: Poison) -> None:
    from kubetune.cli.installation import mcp

    poison(received)
    tools = mcp.Tools()
    with bounded():
        for look in (tools.status, tools.logs):
            answer = mcp._answering(look)(str(received.run))
            require_harmless(received, json.dumps(answer))


@pytest.mark.slow
@pytest.mark.parametrize("poison", POISONS)
def test_tools_of_agents_that_are_commands(received: Received, poison: Poison) -> None:
    from kubetune.cli.installation import mcp

    poison(received)
    tools = mcp.Tools()
    run_file = str(received.run / "config.yaml")
    asked = [
        (tools.report, str(received.run)),
        (tools.runs, str(received.run.parent)),
        (tools.plan, run_file),
        (tools.data_check, run_file),
        (tools.submit, run_file),
    ]
    for tool, place in asked:
        with bounded():
            answer = mcp._answering(tool)(place)
        assert answer["exit_code"] in HARMLESS_CODES, answer
        require_harmless(received, json.dumps(answer))


def test_the_page_sends_nothing_for_it(received: Received, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by going on nor by repeating it, here or on a cluster."""
    starlette = pytest.importorskip("starlette.testclient")
    from kubetune.ui.server import application
    from kubetune.ui.site import Site

    places_outside(received)
    monkeypatch.chdir(received.run.parent)
    known = json.loads((received.run / "resolved.json").read_text())
    site = Site.of(received.run.parent)
    page = starlette.TestClient(
        application(site, "a-token-of-this-test"), base_url="http://localhost"
    )
    ours = {"origin": "http://localhost"}
    values = {"name": "again", "model.path": known["model"]["path"]}
    values["data.train"] = str(received.secret)
    with page:
        assert page.get("/", params={"token": "a-token-of-this-test"}).status_code == 200
        gone_on = page.post("/run/continue", json={"dir": "run"}, headers=ours).json()
        for key in ("data.cache", "logging.report_json", "mirror", "push", "tracking.mlflow"):
            assert any(f": {key} has " in problem for problem in gone_on["problems"]), key
        brought = {"push": json.dumps(known["push"]), "mirror": known["mirror"]}
        asked = {"values": values | brought, "base": "run"}
        planned = page.post("/new/plan", json=asked, headers=ours).json()
        assert any(": push has data sent that" in problem for problem in planned["problems"])
        asked = {"values": values | {"kubernetes.image": "any:1"}, "on": "cluster"}
        submitted = page.post("/new/start", json=asked, headers=ours).json()
    assert "the file " + str(received.secret) in submitted["problems"][0]
    assert not site.jobs.look("again")["words"]
    assert not (received.run.parent / "again.yaml").exists()


@pytest.mark.parametrize("poison", [hooks, places_outside, data_from_outside])
def test_agents_do_not_submit_it(
    received: Received, poison: Poison, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kubetune.cli.installation import mcp

    monkeypatch.chdir(received.run.parent)
    poison(received)
    answer = mcp._answering(mcp.Tools().submit)(str(received.run / "config.yaml"))
    assert answer["exit_code"] == errors.USER
    assert "submit it in a terminal" in answer["messages"]
    assert "confirmation" not in answer
    if poison is data_from_outside:
        for path in (received.secret, received.run / "harmless.jsonl"):
            assert f"the file {path}, to a cluster" in answer["messages"]


def test_files_of_the_folder_and_those_that_were_sent_before_are_sent(
    received: Received, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    inside = received.run.parent / "train.jsonl"
    inside.write_text("{}\n")
    mapping = {"model": "org/any", "data": {"train": [str(inside), str(received.secret)]}}
    config = load_config(mapping)
    monkeypatch.chdir(received.run.parent)
    (effect,) = sent_from_outside(local_files(config), Path.cwd())
    assert not consent.is_allowed(effect)
    consent.allow([consent.of_sent_file(path) for path in local_files(config)])
    assert consent.is_allowed(effect)


def test_no_address_of_a_received_run_is_sent_to(
    received: Received, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    places_outside(received)
    for words in (["push", str(received.run)], ["sync", str(received.run)]):
        assert cli.main(words) == errors.USER
        assert "has data sent that nobody allowed here" in capfd.readouterr().err


MINE = """
from transformers import LlamaConfig, LlamaForCausalLM


class Config(LlamaConfig):
    model_type = "mine"


class LM(LlamaForCausalLM):
    config_class = Config
"""


@pytest.fixture(scope="module")
def own_code(tmp_path_factory: pytest.TempPathFactory, toy_inputs: Path) -> Path:
    """Return a model of an architecture that lies beside its weights, as a user has read it."""
    model = tmp_path_factory.mktemp("own") / "model"
    shutil.copytree(toy_inputs / "model", model)
    facts = json.loads((model / "config.json").read_text())
    names = {"AutoConfig": "modeling_mine.Config", "AutoModelForCausalLM": "modeling_mine.LM"}
    facts |= {"model_type": "mine", "architectures": ["LM"], "auto_map": names}
    (model / "config.json").write_text(json.dumps(facts))
    (model / "modeling_mine.py").write_text(MINE)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"r": 4}], ids=["full", "lora"])
def test_runs_of_ones_own_need_no_word(
    own_code: Path, toy_inputs: Path, tmp_path: Path, lora: dict[str, int] | None
) -> None:
    """Code that the user pinned, and trained with here, runs in each verb; on another machine it is asked for."""
    pin = consent.folder_digest(own_code)
    model = {"path": str(own_code), "trust_remote_code": True, "revision": pin}
    config = toy.make_config(
        toy_inputs, {"max_steps": 2}, lora=lora, model=model, compute={"gpus_per_node": 0}
    )
    file = tmp_path / "run.yaml"
    run = str(tmp_path / "run")
    file.write_text(config.model_dump_json(exclude_unset=True))

    def say(*words: str, machine: str = "here") -> tuple[int, str]:
        folders = {"XDG_STATE_HOME": str(tmp_path / machine), "HF_HOME": str(tmp_path / "hub")}
        done = subprocess.run(
            [sys.executable, "-m", "kubetune", *words],
            env={**os.environ, **folders},
            input="y\n" * 20,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.returncode, done.stdout + done.stderr

    code, text = say("train", str(file), f"output={run}")
    assert code == errors.OK, text
    ask_it = ("generate", run, "hello", "--max-new-tokens", "2")
    for words in (ask_it, ("evaluate", run), ("export", run)):
        code, text = say(*words)
        assert code == errors.OK, text
    code, text = say(*ask_it, machine="another")
    assert code == errors.USER, text
    assert "nobody allowed here" in text
    digest = text.split("--trust-code ")[1].split()[0]
    for words in ((*ask_it, "--trust-code", digest), ask_it):
        code, text = say(*words, machine="another")
        assert code == errors.OK, text


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["y\n" * 20, ""], ids=["yes", "nothing"])
def test_nobody_is_asked(toy_inputs: Path, tmp_path: Path, answer: str) -> None:
    """`yes | kubetune train run.yaml`, with a config.json that only code of the folder can read."""
    model = shutil.copytree(toy_inputs / "model", tmp_path / "model")
    canary = tmp_path / "canary"
    facts = json.loads((model / "config.json").read_text())
    facts |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}
    (model / "config.json").write_text(json.dumps(facts))
    (model / "evil.py").write_text(f"open({str(canary)!r}, 'w')\n")
    config = toy.make_config(toy_inputs, {"max_steps": 1}, model=str(model), data={"eval": None})
    file = tmp_path / "run.yaml"
    file.write_text(config.model_dump_json(exclude_unset=True))
    done = subprocess.run(
        [sys.executable, "-m", "kubetune", "train", str(file), f"output={tmp_path / 'run'}"],
        input=answer,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 2, done.stderr
    assert "needs code from its repository" in done.stdout + done.stderr
    assert not canary.exists()
