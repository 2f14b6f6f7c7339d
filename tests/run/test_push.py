"""Uploads to a hub and to a registry on this machine: whole or not at all, and gone on with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kubetune import errors
from kubetune.base import files
from kubetune.data.prepared import identity
from kubetune.rundir import exit_status, metrics
from tests import registry as registries
from tests import toy
from tests.push_hub import TOKEN, Hub, serving

ONE_EPOCH = {"num_train_epochs": 1, "eval_steps": 7, "save_steps": 7}
WHOLE = {
    "README.md",
    "provenance.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "tokenizer.json",
}


@pytest.fixture(scope="module")
def run_dir(inputs: Path) -> Path:
    return toy.finished(inputs / "run", toy.make_config(inputs, ONE_EPOCH))


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving() as server:
        yield server


def environment(hub: Hub, **more: str) -> dict[str, str]:
    """Return what makes the hub's client speak to ours, without Xet, whose servers are closed source."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("HF_HUB_OFFLINE", "HF_TOKEN")
    }
    return {**kept, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN, **more}


def push(*words: str, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kubetune", "push", *words]
    return subprocess.run(command, env=dict(environ), capture_output=True, text=True)


@pytest.mark.slow
def test_a_push_arrives_whole_in_one_commit_and_again_sends_nothing_twice(
    hub: Hub, run_dir: Path
) -> None:
    pushed = push(str(run_dir), "org/bot", "--merge", environ=environment(hub))
    assert pushed.returncode == 0, pushed.stderr
    assert f"pushed to {hub.url}/org/bot (private)" in pushed.stdout
    folder = run_dir / "exports" / "step-000007-merged"
    assert hub.files("org/bot") == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(hub.repos["org/bot"]["commits"]) == 1
    assert any("/upload/" in line and line.endswith("/2") for line in hub.requests), (
        "large files go in parts"
    )
    event = [event for event in metrics.read_events(run_dir) if event["event"] == "push"][-1]
    assert (event["ok"], event["repo"], event["kind"], event["step"]) == (
        True,
        "org/bot",
        "merged",
        7,
    )

    hub.requests.clear()
    hub.files("org/bot")["model-00001-of-00002.safetensors"] = b"of an earlier push"
    again = push(str(run_dir), "org/bot", "--merge", "--json", environ=environment(hub))
    assert "exported already" in again.stderr
    assert json.loads(again.stdout).keys() >= {"url", "commit", "private", "kind", "step"}
    assert hub.sent() == 0
    assert "model-00001-of-00002.safetensors" not in hub.files("org/bot")


@pytest.mark.slow
def test_a_lost_connection_is_gone_on_with(hub: Hub, run_dir: Path) -> None:
    hub.breaks["PUT"] = 2  # the client itself tries again
    pushed = push(str(run_dir), environ=environment(hub, RESULT_MODEL_ID="org/bot"))
    assert pushed.returncode == 0, pushed.stderr
    assert hub.files("org/bot").keys() >= WHOLE
    assert hub.breaks["PUT"] == 0


@pytest.mark.slow
def test_an_upload_that_broke_off_sends_only_the_rest(
    hub: Hub, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "import sys; from kubetune.result.publishing import hub_upload\n"
        "hub_upload.WAITS_SECONDS = (0.0,) * int(sys.argv[1]);"
        "from kubetune.cli import main; sys.exit(main(['push', sys.argv[2], 'org/bot', '--merge']))"
    )

    def attempt(waits: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script, str(waits), str(run_dir)]
        return subprocess.run(command, env=environment(hub), capture_output=True, text=True)

    hub.breaks["commit"] = 1
    ended = attempt(0)
    assert ended.returncode == errors.ENVIRONMENT
    assert "What has arrived stays there" in ended.stderr
    assert hub.files("org/bot") == {}, "nobody sees half a model"
    sent = hub.sent()
    assert sent > 1
    hub.breaks["commit"] = 1
    ended = attempt(1)
    assert ended.returncode == 0, ended.stderr
    assert "going on in 0 s" in ended.stdout
    assert hub.sent() == sent
    assert "model.safetensors" in hub.files("org/bot")


@pytest.mark.slow
def test_refusals_say_what_to_do(hub: Hub, run_dir: Path) -> None:
    known = environment(hub)
    no_token = {name: value for name, value in known.items() if name != "HF_TOKEN"} | {
        "HF_HOME": str(run_dir)
    }
    for words, environ, code, message in (
        (["org/bot"], no_token, errors.USER, "set HF_TOKEN"),
        (
            ["org/bot"],
            known | {"HF_TOKEN": "hf_" + "x" * 34},
            errors.ENVIRONMENT,
            "token in HF_TOKEN is not valid",
        ),
        (["forbidden/bot"], known, errors.ENVIRONMENT, "may not write to forbidden"),
        (["bot"], known, errors.USER, "expected ORG/NAME"),
        ([], known, errors.USER, "RESULT_MODEL_ID"),
        (["org/bot"], known | {"HF_HUB_OFFLINE": "1"}, errors.USER, "HF_HUB_OFFLINE is set"),
    ):
        ended = push(str(run_dir), *words, environ=environ)
        assert ended.returncode == code, ended.stderr
        assert message in ended.stderr
        assert "Traceback" not in ended.stderr
        assert TOKEN not in ended.stderr
    assert "org/bot" not in hub.repos


@pytest.mark.slow
@pytest.mark.parametrize("refusing", [None, 401])
def test_the_last_stage_of_a_run_is_never_its_failure(
    refusing: int | None, hub: Hub, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.refusing = refusing
    config = toy.make_config(inputs, ONE_EPOCH, push="org/bot", compute={"processes": 2})
    made = toy.make_run(tmp_path / "run", config, 2)
    command = [sys.executable, "-m", "kubetune.agent", str(made)]
    ended = subprocess.run(command, env=environment(hub), capture_output=True, text=True)
    assert ended.returncode == errors.OK, ended.stderr
    status = exit_status.read_exit_status(made)
    assert status is not None
    assert status.code == errors.OK
    events = [event["event"] for event in metrics.read_events(made)]
    assert events.index("exit") < events.index("push"), "after every rank has ended"
    if refusing is None:
        assert hub.files("org/bot").keys() >= WHOLE
        assert f"pushed to {hub.url}/org/bot" in ended.stdout
    else:
        assert f"Again: kubetune push {made}" in ended.stderr
        hub.refusing = None
        assert push(str(made), environ=environment(hub)).returncode == 0
        assert hub.files("org/bot").keys() >= WHOLE


@pytest.mark.slow
def test_a_push_to_a_registry_is_of_the_same_export(run_dir: Path) -> None:
    with registries.serving() as registry:
        address = f"oci://{registry.host}/team/bot:1"
        known = dict(os.environ)
        pushed = push(str(run_dir), address, "--json", environ=known)
        assert pushed.returncode == 0, pushed.stderr
        facts = json.loads(pushed.stdout)
        assert facts["url"] == address
        assert facts["digest"] in registry.manifests
        assert (facts["kind"], facts["step"]) == ("adapter", 7)
        event = [event for event in metrics.read_events(run_dir) if event["event"] == "push"][-1]
        assert (event["ok"], event["repo"], event["commit"]) == (True, address, facts["digest"])
        again = push(str(run_dir), address, environ=known)
        assert f"pushed to {address}, {facts['digest']}" in again.stdout

        registry.manifests.clear()
        registry.unknown.add("team/bot")
        registry.blobs.clear()
        for words, code, message in (
            ([address], errors.ENVIRONMENT, "has no repository team/bot"),
            ([address, "--public"], errors.USER, "a registry's own settings say who sees an image"),
            (["oci://bot"], errors.USER, "expected oci://registry/name:tag"),
            (["org/bot", "--modelpack"], errors.USER, "--modelpack is only for oci:// addresses"),
        ):
            ended = push(str(run_dir), *words, environ=known)
            assert ended.returncode == code, ended.stderr
            assert message in ended.stderr
            assert "Traceback" not in ended.stderr
        assert registry.manifests == {}


@pytest.mark.slow
def test_a_run_takes_a_pushed_image_for_its_base(
    run_dir: Path, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with registries.serving() as registry:
        address = f"oci://{registry.host}/team/base:1"
        pushed = push(str(run_dir), address, "--merge", "--json", environ=dict(os.environ))
        assert pushed.returncode == 0, pushed.stderr
        digest = json.loads(pushed.stdout)["digest"]
        config = toy.make_config(inputs, ONE_EPOCH, model=address)
        trained = toy.finished(tmp_path / "run", config)
        base = identity.read(trained)["model"]
        assert base.path.endswith(f"/team/base/{digest.replace(':', '-')}")
        weights = run_dir / "exports" / "step-000007-merged" / "model.safetensors"
        assert base.files["model.safetensors"].sha256 == files.sha256_file(weights)
