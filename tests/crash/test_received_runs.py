"""A run directory of somebody else: whatever poison lies in it, no verb, page or tool runs, shows or waits for any of it.

Each case plants one poison in a whole run and has the manifest sealed again, as whoever planted it would.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kubetune import cli, errors
from kubetune.base import files
from kubetune.config import consent
from kubetune.config.load import read_config
from kubetune.rundir import checkpoints, metrics
from kubetune.rundir.checkpoints import State
from tests import toy

SECRET = "hunter2-of-somebody-else"
SECONDS = 60
"""In which a verb must be done with a poisoned run; a pipe would keep it for ever."""
EVIL = "import pathlib\npathlib.Path({canary!r}).touch()\nraise SystemExit('evil ran')\n"
TASKS = (
    "causal_lm",
    "preference",
    "reward_model",
    "sequence_classification",
    "vision_language",
)


class Place:
    """A received run, the canary that no code may touch, and a secret outside of it."""

    def __init__(self, run: Path, outside: Path) -> None:
        self.run = run
        self.canary = outside / "canary"
        self.secret = outside / "secret.json"
        self.secret.write_text(json.dumps({"secret": SECRET}) + "\n")
        self.step = run / "checkpoints" / "step-000001"

    def settle(self, **changes: Any) -> None:
        """Change resolved.json and config.yaml, section by section."""
        known = json.loads((self.run / "resolved.json").read_text())
        for section, values in changes.items():
            known[section] = {**(known.get(section) or {}), **values}
        (self.run / "resolved.json").write_text(json.dumps(known))
        (self.run / "config.yaml").write_text(json.dumps(known))

    def change(self, name: str, **values: Any) -> None:
        """Change a JSON file of the checkpoint."""
        path = self.step / name
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**known, **values}))

    def seal(self) -> None:
        sums = {
            str(path.relative_to(self.step)): {
                "sha256": files.sha256_file(path),
                "bytes": path.stat().st_size,
            }
            for path in sorted(self.step.rglob("*"))
            if path.is_file() and path.name != checkpoints.MANIFEST
        }
        text = json.dumps({"version": 1, "files": sums}, indent=1) + "\n"
        (self.step / checkpoints.MANIFEST).write_text(text)

    def code(self, name: str) -> None:
        (self.step / name).write_text(EVIL.format(canary=str(self.canary)))


def code_in_the_checkpoint(place: Place) -> None:
    place.code("modeling_evil.py")
    names = {"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.LM"}
    place.change("config.json", model_type="evil", auto_map=names)
    place.settle(model={"trust_remote_code": True, "revision": "0" * 40, "path": "/nonexistent"})
    place.seal()


def code_of_a_known_architecture(place: Place) -> None:
    """As before, where transformers has classes of its own too."""
    place.code("modeling_evil.py")
    place.change("config.json", auto_map={"AutoModelForCausalLM": "modeling_evil.LM"})
    place.settle(model={"trust_remote_code": True, "revision": "0" * 40})
    place.seal()


def code_of_another_repository(place: Place) -> None:
    place.change("config.json", auto_map={"AutoModelForCausalLM": "evil/repo--modeling.LM"})
    place.settle(model={"trust_remote_code": True, "revision": "0" * 40})
    place.seal()


def code_nobody_asked_for(place: Place) -> None:
    """A config.json that only code can read, in a run that says nothing of code: asked on the terminal?"""
    place.code("evil.py")
    place.change("config.json", model_type="evil", auto_map={"AutoConfig": "evil.Config"})
    place.seal()


def code_of_tokenizer_and_processor(place: Place) -> None:
    place.code("evil.py")
    classes = {"AutoTokenizer": ["evil.T", "evil.T"], "AutoProcessor": "evil.P"}
    place.change("tokenizer_config.json", tokenizer_class="Evil", auto_map=classes)
    place.change("processor_config.json", processor_class="Evil", auto_map=classes)
    place.change("preprocessor_config.json", auto_map={"AutoImageProcessor": "evil.I"})
    place.settle(model={"path": "/nonexistent"})
    place.seal()


def code_for_generation(place: Place) -> None:
    (place.step / "custom_generate").mkdir()
    place.code("custom_generate/generate.py")
    place.seal()


def hooks(place: Place) -> None:
    place.settle(hooks={"on_event": f"touch {place.canary}"})


def metrics_of_its_own(place: Place) -> None:
    file = place.run / "mine.py"
    file.write_text(EVIL.format(canary=str(place.canary)))
    own = {"file": str(file), "functions": ["score"]}
    place.settle(evaluation={"metrics": own, "generate": {"rows": 2}})


def tasks_of_its_own(place: Place) -> None:
    folder = place.run / "tasks"
    folder.mkdir()
    (folder / "evil.yaml").write_text("task: evil\ndoc_to_text: !function evil.text\n")
    (folder / "evil.py").write_text(EVIL.format(canary=str(place.canary)))
    place.settle(evaluation={"benchmarks": {"tasks": ["evil"], "tasks_folder": str(folder)}})


class Bomb:
    """Pickled, it makes a file when it is read."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self._canary}",)


def pickles_for_weights(place: Place) -> None:
    (place.step / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "adapter_model.bin", "training_args.bin"):
        (place.step / name).write_bytes(pickle.dumps(Bomb(place.canary)))
    place.seal()


def a_pickle_by_another_name(place: Place) -> None:
    (place.step / "model.safetensors").write_bytes(pickle.dumps(Bomb(place.canary)))
    place.seal()


def an_index_that_leads_out(place: Place) -> None:
    weights = place.step / "model.safetensors"
    shutil.move(weights, place.canary.parent / "outside.safetensors")
    index = {"weight_map": {"lm_head.weight": str(place.canary.parent / "outside.safetensors")}}
    (place.step / "model.safetensors.index.json").write_text(json.dumps(index))
    place.seal()


def another_index_that_leads_out(place: Place) -> None:
    place.change("config.json", transformers_weights="x.safetensors.index.json")
    index = {"weight_map": {"lm_head.weight": "../../../outside.safetensors"}}
    (place.step / "x.safetensors.index.json").write_text(json.dumps(index))
    place.seal()


def names_that_lead_out_of_the_manifest(place: Place) -> None:
    place.seal()
    manifest = json.loads((place.step / checkpoints.MANIFEST).read_text())
    size = place.secret.stat().st_size
    known = {"sha256": files.sha256_file(place.secret), "bytes": size}
    manifest["files"] |= {"../../../outside/secret.json": known, str(place.secret): known}
    (place.step / checkpoints.MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def a_pipe_for_a_manifest(place: Place) -> None:
    (place.step / checkpoints.MANIFEST).unlink()
    os.mkfifo(place.step / checkpoints.MANIFEST)


def an_endless_manifest(place: Place) -> None:
    (place.step / checkpoints.MANIFEST).unlink()
    (place.step / checkpoints.MANIFEST).symlink_to("/dev/zero")


def pipes_for_numbers(place: Place) -> None:
    for name in (metrics.METRICS, metrics.EVENTS, metrics.PLAN, metrics.REPORT, "exit.json"):
        (place.run / name).unlink(missing_ok=True)
        os.mkfifo(place.run / name)


def a_pipe_for_a_lock(place: Place) -> None:
    (place.run / "logs").mkdir(exist_ok=True)
    for name in ("node-0.lock", "rank-0.beat.json", "rank-0.exit.json", "export.lock"):
        os.mkfifo(place.run / "logs" / name)


def sockets(place: Place) -> None:
    here = os.getcwd()
    os.chdir(place.step)
    with socket.socket(socket.AF_UNIX) as listening:
        (place.step / "state.json").unlink()
        listening.bind("state.json")
    os.chdir(here)


def links_to_a_secret(place: Place) -> None:
    (place.run / "logs").mkdir(exist_ok=True)
    names = ("logs/rank-0.log", metrics.EVENTS, metrics.REPORT, metrics.METRICS, metrics.ANSWERS)
    for name in names:
        (place.run / name).unlink(missing_ok=True)
        (place.run / name).symlink_to(place.secret)


def a_folder_that_leads_out(place: Place) -> None:
    elsewhere = place.canary.parent / "checkpoints"
    shutil.move(place.run / "checkpoints", elsewhere)
    (elsewhere / "step-000001" / "generation_config.json").write_text(SECRET)
    (place.run / "checkpoints").symlink_to(elsewhere)


def an_adapter_beside_the_weights(place: Place) -> None:
    """By which transformers would load the model that the adapter names."""
    place.change("adapter_config.json", peft_type="LORA", base_model_name_or_path="/etc")
    place.seal()


def a_resolved_file_that_is_a_pipe(place: Place) -> None:
    (place.run / "resolved.json").unlink()
    os.mkfifo(place.run / "resolved.json")


POISONS: list[Callable[[Place], None]] = [
    code_in_the_checkpoint, code_of_a_known_architecture, code_of_another_repository, code_nobody_asked_for,
    code_of_tokenizer_and_processor, code_for_generation, hooks, metrics_of_its_own, tasks_of_its_own,
    pickles_for_weights, a_pickle_by_another_name, an_index_that_leads_out, another_index_that_leads_out,
    names_that_lead_out_of_the_manifest, a_pipe_for_a_manifest, an_endless_manifest, pipes_for_numbers,
    a_pipe_for_a_lock, sockets, links_to_a_secret, a_folder_that_leads_out, an_adapter_beside_the_weights,
    a_resolved_file_that_is_a_pipe,
]  # fmt: skip
READING = ("report", "runs", "watch", "serve")
"""Verbs that show a run, and load no model of it."""
LOADING = ("generate", "chat", "evaluate", "export", "push")
HARMLESS_TO_MODELS = {
    hooks, metrics_of_its_own, tasks_of_its_own, pipes_for_numbers, a_pipe_for_a_lock, links_to_a_secret,
    code_for_generation, code_of_tokenizer_and_processor,
}  # fmt: skip
"""Poisons that leave the weights whole: a verb that loads may refuse the run, or do what it is for."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, toy_inputs: Path) -> Path:
    """A run of full fine-tuning that has ended, made without training."""
    run = tmp_path_factory.mktemp("whole") / "run"
    config = toy.make_config(toy_inputs, {"max_steps": 1}, lora=None)
    toy.make_run(run, config)
    model = toy_inputs / "model"

    def write(folder: Path) -> None:
        for path in model.iterdir():
            shutil.copy(path, folder)

    checkpoints.commit(run, State(step=1, saved_step=1), write)
    for name in ("best", "last"):
        checkpoints.link(run, name, 1)
    (run / "exit.json").write_text(
        json.dumps({"code": errors.PREEMPTED, "reason": "stopped", "step": 1, "error": None})
    )
    return run


@pytest.fixture
def place(whole: Path, tmp_path: Path) -> Place:
    (tmp_path / "outside").mkdir()
    run = tmp_path / "received" / "run"
    shutil.copytree(whole, run, symlinks=True)
    return Place(run, tmp_path / "outside")


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
    "generate": ["generate", "RUN", "hello", "--max-new-tokens", "2"],
    "chat": ["chat", "RUN", "--max-new-tokens", "2"],
    "evaluate": ["evaluate", "RUN"],
    "export": ["export", "RUN"],
    "push": ["push", "RUN", "org/name"],
}


def ask(
    place: Place, verb: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    """Exit code and words of a verb, with an answer at hand for whoever asks on the terminal."""
    given = {"RUN": str(place.run), "FOLDER": str(place.run.parent)}
    words = [given.get(word, word) for word in WORDS[verb]]
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))
    with bounded():
        code = cli.main(words)
    told = capfd.readouterr()
    return code, told.out + told.err


def require_harmless(place: Place, text: str) -> None:
    assert not place.canary.exists()
    assert SECRET not in text
    assert "Traceback" not in text
    written = [path for path in place.run.rglob("*.html") if SECRET in path.read_text()]
    assert not written


@pytest.mark.parametrize("poison", POISONS)
def test_reading(
    place: Place, poison: Callable[[Place], None],
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    poison(place)
    for verb in READING:
        code, text = ask(place, verb, monkeypatch, capfd)
        assert code in (errors.OK, errors.USER, errors.ENVIRONMENT), text
        require_harmless(place, text)


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize(
    "verb", ["generate", *(pytest.param(verb, marks=pytest.mark.slow) for verb in LOADING[1:])]
)
def test_loading(
    place: Place, poison: Callable[[Place], None], verb: str,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    poison(place)
    code, text = ask(place, verb, monkeypatch, capfd)
    require_harmless(place, text)
    if poison not in HARMLESS_TO_MODELS:
        assert code in (errors.USER, errors.ENVIRONMENT), text
    assert text.strip()


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    "poison", [code_in_the_checkpoint, a_pipe_for_a_manifest, links_to_a_secret]
)
def test_every_task(
    place: Place, task: str, poison: Callable[[Place], None],
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    poison(place)
    known = json.loads((place.run / "resolved.json").read_text())
    (place.run / "resolved.json").write_text(json.dumps({**known, "task": task}))
    for verb in ("generate", "evaluate", "export"):
        code, text = ask(place, verb, monkeypatch, capfd)
        assert code in (errors.USER, errors.ENVIRONMENT), text
        require_harmless(place, text)


def test_a_whole_run_is_asked(
    place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing of the above is refused for another reason."""
    assert ask(place, "generate", monkeypatch, capfd)[0] == errors.OK


def test_allowed_code_is_asked_for_once(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The digest that the refusal names lets this very code run, here, from now on; other code is refused again."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    code_in_the_checkpoint(place)
    code = [consent.of_folder(place.step)]
    with pytest.raises(errors.ConfigError, match="nobody allowed here") as refused:
        consent.require(code, place.run)
    digest = str(refused.value).split("--trust-code ")[1].split()[0]
    with pytest.raises(errors.ConfigError, match="not the digest of this code"):
        consent.require(code, place.run, "0" * 40)
    consent.require(code, place.run, digest)
    consent.require(code, place.run)
    (place.step / "modeling_evil.py").write_text("other = 1\n")
    with pytest.raises(errors.ConfigError):
        consent.require([consent.of_folder(place.step)], place.run, digest)


@pytest.mark.parametrize("poison", [hooks, metrics_of_its_own, tasks_of_its_own])
def test_code_that_was_started_here(
    place: Place, poison: Callable[[Place], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """To start a run allows what its file names, and nothing that is put in its place later."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    poison(place)
    (code,) = consent.code_of(read_config(place.run))
    assert not consent.is_allowed(code)
    consent.allow([code])
    assert consent.is_allowed(code)
    for path in (place.run / "mine.py", place.run / "tasks" / "evil.py"):
        if path.exists():
            path.write_text("other = 1\n")
    place.settle(hooks={"on_event": "touch other"})
    assert not any(consent.is_allowed(code) for code in consent.code_of(read_config(place.run)))


def test_defaults_of_this_machine_allow(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hooks(place)
    defaults = tmp_path / "defaults.yaml"
    defaults.write_text(f"hooks: {{on_event: touch {place.canary}}}\n")
    monkeypatch.setenv("KUBETUNE_DEFAULTS", str(defaults))
    consent.require(consent.code_of(read_config(place.run)), place.run)


def test_nothing_is_cached_where_a_received_run_says(
    place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    elsewhere = place.canary.parent / "cache"
    place.settle(data={"cache": str(elsewhere)})
    for verb in ("generate", "evaluate"):
        assert ask(place, verb, monkeypatch, capfd)[0] == errors.OK
    assert not elsewhere.exists()


def test_evaluating_asks_before_functions_run(
    place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    metrics_of_its_own(place)
    code, text = ask(place, "evaluate", monkeypatch, capfd)
    assert code == errors.USER
    assert "evaluation.metrics has code run that nobody allowed here" in text
    assert "--trust-code" in text
    assert not place.canary.exists()


@pytest.mark.parametrize(
    "poison", [hooks, metrics_of_its_own, tasks_of_its_own, code_in_the_checkpoint]
)
def test_the_page_neither_continues_nor_repeats_it(
    place: Place, poison: Callable[[Place], None]
) -> None:
    starlette = pytest.importorskip("starlette.testclient")
    from kubetune.ui.server import application
    from kubetune.ui.site import Site

    poison(place)
    page = starlette.TestClient(
        application(Site.of(place.run.parent), "a-token-of-this-test"), base_url="http://localhost"
    )
    ours = {"origin": "http://localhost"}
    with page, bounded():
        assert page.get("/", params={"token": "a-token-of-this-test"}).status_code == 200
        assert page.get("/run", params={"dir": "run"}).status_code == 200
        gone_on = page.post("/run/continue", json={"dir": "run"}, headers=ours).json()
        key = consent.code_of(read_config(place.run))[0].key
        assert any(f"{key} has code run" in problem for problem in gone_on["problems"]), gone_on
        known = json.loads((place.run / "resolved.json").read_text())
        values = {"name": "again", "model.path": known["model"]["path"], "data.train": "x.jsonl"}
        values["data.eval"] = "0.05"
        section, _, _ = key.partition(".")
        values[section] = json.dumps(known[section])
        again = page.post("/new/plan", json={"values": values, "base": "run"}, headers=ours).json()
        assert any("has code run" in problem for problem in again["problems"]), again
    assert not place.canary.exists()


@pytest.mark.parametrize("poison", POISONS)
def test_pages(place: Place, poison: Callable[[Place], None]) -> None:
    starlette = pytest.importorskip("starlette.testclient")
    from kubetune.ui.server import application
    from kubetune.ui.site import Site

    poison(place)
    page = starlette.TestClient(
        application(Site.of(place.run.parent), "a-token-of-this-test"), base_url="http://localhost"
    )
    with page, bounded():
        for address in ("/", "/run?dir=run", "/compare?dir=run", "/data?dir=run", "/new?dir=run"):
            answer = page.get(address, headers={"authorization": "Bearer a-token-of-this-test"})
            token = page.get(address, params={"token": "a-token-of-this-test"})
            for text in (answer.text, token.text):
                require_harmless(place, text)


@pytest.mark.parametrize("poison", POISONS)
def test_tools_of_agents(place: Place, poison: Callable[[Place], None]) -> None:
    from kubetune.cli.installation import mcp

    poison(place)
    tools = mcp.Tools()
    with bounded():
        for look in (tools.status, tools.logs):
            answer = mcp._answering(look)(str(place.run))
            require_harmless(place, json.dumps(answer))


def test_agents_do_not_submit_code(place: Place, tmp_path: Path) -> None:
    from kubetune.cli.installation import mcp

    hooks(place)
    answer = mcp.Tools().submit(str(place.run / "config.yaml"))
    assert answer["exit_code"] == errors.USER
    assert "submit that in a terminal" in answer["messages"]


MINE = """
from transformers import LlamaConfig, LlamaForCausalLM


class Config(LlamaConfig):
    model_type = "mine"


class LM(LlamaForCausalLM):
    config_class = Config
"""


@pytest.fixture(scope="module")
def own_code(tmp_path_factory: pytest.TempPathFactory, toy_inputs: Path) -> Path:
    """A model of an architecture that lies beside its weights, as a user has read it."""
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
    file, run = tmp_path / "run.yaml", str(tmp_path / "run")
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
