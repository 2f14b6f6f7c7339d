"""The base of a run: another one is refused wherever weights would meet; the same one is known anywhere, and soon."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kubetune import errors
from kubetune.cli import main
from kubetune.config.schema import Config
from kubetune.data.prepared import identity
from kubetune.data.prepared.identity import Check
from kubetune.data.text.tokenizer import cache_folder
from kubetune.rundir import metrics
from tests import toy

GIB = 2**30


def check_of(config: Config, run_dir: Path) -> Check:
    return Check(config.model, cache_folder(config.data.cache), run_dir)


@pytest.fixture(scope="module")
def stopped(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a LoRA run that was stopped at step 7 of 14."""
    run_dir = toy.make_run(tmp_path_factory.mktemp("stopped") / "run", toy.make_config(inputs))
    assert toy.train(run_dir, 1, {"KUBETUNE_FAULT": "signal 15:step:7"}) == [errors.PREEMPTED]
    return run_dir


@pytest.fixture(scope="module")
def done(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.finished(tmp_path_factory.mktemp("done") / "run", toy.make_config(inputs))


@pytest.fixture
def run_dir(stopped: Path, tmp_path: Path) -> Path:
    return shutil.copytree(stopped, tmp_path / "run", symlinks=True)


@pytest.fixture
def other_base(inputs: Path, tmp_path: Path) -> Path:
    """Return the same model with one weight that was trained on."""
    folder = shutil.copytree(inputs / "model", tmp_path / "other")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class _Swap:
    """Within, a file holds something else; afterwards its old content, at a new time."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path, self._content = path, content

    def __enter__(self) -> None:
        self._before = self._path.read_bytes()
        self._path.write_bytes(self._content)

    def __exit__(self, *error: object) -> None:
        self._path.write_bytes(self._before)


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resume_with_another_base_is_refused_and_with_the_old_one_exact(
    inputs: Path, run_dir: Path, other_base: Path, tmp_path: Path, done: Path, world_size: int
) -> None:
    other = (other_base / "model.safetensors").read_bytes()
    before = (run_dir / "metrics.jsonl").read_bytes()
    with _Swap(inputs / "model" / "model.safetensors", other):
        assert toy.train(run_dir, world_size) == [errors.USER] * world_size
    log = toy.log_of(run_dir)
    assert (
        f"was trained with the model {inputs / 'model'}, but the run's config names {inputs / 'model'}"
        in log
    )
    known = identity.read(run_dir)["model"].files["model.safetensors"]
    now = identity.Content(identity.files.sha256_file(other_base / "model.safetensors"), len(other))
    assert f"model.safetensors was {known}, now is {now}" in log
    assert (run_dir / "metrics.jsonl").read_bytes() == before
    assert toy.train(run_dir, world_size) == [0] * world_size
    if world_size == 1:
        assert toy.digests(run_dir) == toy.digests(done)


@settings(max_examples=10)
@given(
    st.sampled_from(
        ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    ),
    st.sampled_from(["a bit", "shorter", "longer", "gone"]),
    st.floats(0, 1, exclude_max=True),
)
def test_any_change_of_a_file_of_the_base_is_refused(
    inputs: Path, stopped: Path, name: str, change: str, place: float
) -> None:
    """By its name where the file can still be read, else as what cannot."""
    path = inputs / "model" / name
    config = toy.make_config(inputs)
    content = path.read_bytes()
    at = int(place * len(content))
    flipped = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
    changed = {"a bit": flipped, "shorter": content[:at], "longer": content + b" ", "gone": b""}[
        change
    ]
    with _Swap(path, changed):
        if change == "gone":
            path.unlink()
        with pytest.raises(errors.KubetuneError, match=name if change == "longer" else None):
            check_of(config, stopped).require_same()
    check_of(config, stopped).require_same()


def test_another_tokenizer_is_refused_by_name(inputs: Path, run_dir: Path) -> None:
    facts = json.loads((inputs / "model" / "tokenizer_config.json").read_text())
    changed = json.dumps({**facts, "chat_template": "{{ messages[0].content }}"}).encode()
    with _Swap(inputs / "model" / "tokenizer_config.json", changed):
        assert toy.train(run_dir) == [errors.USER]
    assert f"was trained with the tokenizer {inputs / 'model'}" in toy.log_of(run_dir)
    assert "tokenizer_config.json was" in toy.log_of(run_dir)


def test_a_run_from_before_there_was_an_identity_goes_on_and_says_so(run_dir: Path) -> None:
    (run_dir / "identity.json").unlink()
    assert toy.train(run_dir) == [0]
    assert (
        "has no identity.json, so whether its base is still the same cannot be checked"
        in toy.log_of(run_dir)
    )
    assert identity.read(run_dir)["model"].files["model.safetensors"].bytes


@pytest.mark.slow
def test_a_start_that_trained_nothing_binds_to_no_base(
    inputs: Path, other_base: Path, tmp_path: Path
) -> None:
    run_dir = toy.make_run(tmp_path / "run", toy.make_config(inputs))
    assert toy.train(run_dir, 1, {"KUBETUNE_FAULT": "signal 9:step:1"}) == [-9]
    with _Swap(
        inputs / "model" / "model.safetensors", (other_base / "model.safetensors").read_bytes()
    ):
        assert toy.train(run_dir) == [0]


VERBS = {
    "generate": ["generate", "RUN", "the quick", "--max-new-tokens", "2"],
    "evaluate": ["evaluate", "RUN"],
    "export": ["export", "RUN", "--output", "OUT"],
}


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_that_load_the_base_refuse_another(
    inputs: Path,
    done: Path,
    other_base: Path,
    tmp_path: Path,
    verb: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        {"RUN": str(done), "OUT": str(tmp_path / "out")}.get(word, word) for word in VERBS[verb]
    ]
    with _Swap(
        inputs / "model" / "model.safetensors", (other_base / "model.safetensors").read_bytes()
    ):
        assert main(words) == errors.USER
    assert (
        f"was trained with the model {inputs / 'model'}, but its config names"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()
    assert main([*words, "--model", str(other_base)]) == errors.USER
    assert (
        f"but --model {other_base} names {other_base}, which is another" in capsys.readouterr().err
    )


def test_a_base_of_other_shapes_is_refused_as_another(
    inputs: Path, done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    wider = shutil.copytree(inputs / "model", tmp_path / "wider")
    config = AutoConfig.from_pretrained(wider)
    config.intermediate_size *= 2
    AutoModelForCausalLM.from_config(config).save_pretrained(wider)
    assert main(["generate", str(done), "the quick", "--model", str(wider)]) == errors.USER
    assert f"but --model {wider} names {wider}, which is another" in capsys.readouterr().err


@pytest.fixture
def from_elsewhere(inputs: Path, done: Path, tmp_path: Path) -> Path:
    """Return a run whose base lay in a place that this machine does not have."""
    run_dir = shutil.copytree(done, tmp_path / "fetched", symlinks=True)
    for name in ("resolved.json", "identity.json"):
        path = run_dir / name
        path.write_text(path.read_text().replace(str(inputs / "model"), "/models/on-a-volume"))
    return run_dir


@pytest.mark.parametrize("verb", VERBS)
def test_a_run_from_elsewhere_is_used_with_the_base_that_is_here(
    inputs: Path,
    done: Path,
    from_elsewhere: Path,
    tmp_path: Path,
    verb: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = shutil.copytree(inputs / "model", tmp_path / "here")
    asked = [
        {"RUN": str(from_elsewhere), "OUT": str(tmp_path / "out")}.get(word, word)
        for word in VERBS[verb]
    ]
    assert main(asked) == errors.USER
    stderr = capsys.readouterr().err
    assert "/models/on-a-volume, a folder that is not on this machine" in stderr
    assert "--model PATH|ID" in stderr
    assert main([*asked, "--model", str(here)]) == errors.OK
    stdout = capsys.readouterr().out
    assert (
        main(
            [
                {"RUN": str(done), "OUT": str(tmp_path / "out2")}.get(word, word)
                for word in VERBS[verb]
            ]
        )
        == 0
    )
    if verb == "export":
        exported = [
            json.loads((tmp_path / name / "adapter_config.json").read_text())
            for name in ("out", "out2")
        ]
        assert [facts["base_model_name_or_path"] for facts in exported] == [
            str(here),
            str(inputs / "model"),
        ]
    else:
        assert capsys.readouterr().out == stdout


def test_a_model_trained_whole_needs_its_base_only_beside_it(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(inputs / "model", tmp_path / "model")
    config = toy.make_config(inputs, {"num_train_epochs": 1}, lora=None, model=str(model))
    run_dir = toy.finished(tmp_path / "run", config)
    words = ["generate", str(run_dir), "the quick", "--max-new-tokens", "2"]
    assert main(words) == errors.OK
    answer = capsys.readouterr().out
    model.rename(tmp_path / "moved")
    assert main(words) == errors.OK
    assert capsys.readouterr().out == answer
    assert main([*words, "--compare"]) == errors.USER
    assert "--model PATH|ID" in capsys.readouterr().err
    assert main([*words, "--compare", "--model", str(tmp_path / "moved")]) == errors.OK


def commit_to(repo: Path, commit: str, folder: Path) -> None:
    """Make a folder the newest commit of a repository in a cache of the hub, as its library lays it out."""
    (repo / "blobs").mkdir(parents=True, exist_ok=True)
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        blob = repo / "blobs" / identity.files.sha256_file(path)
        shutil.copyfile(path, blob)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    (repo / "refs").mkdir(exist_ok=True)
    (repo / "refs" / "main").write_text(commit)


def test_a_branch_of_the_hub_that_moves_is_one_commit_for_a_run(
    inputs: Path, other_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repo = tmp_path / "hub" / "models--org--base"
    first = "1" * 40
    second = "2" * 40
    commit_to(repo, first, inputs / "model")
    config = toy.make_config(inputs, model="org/base")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    model = identity.pinned(config.model, run_dir)
    assert model.revision == first
    start = config.model_copy(update={"model": model})
    check_of(start, run_dir).record()
    commit_to(repo, second, other_base)
    assert identity.pinned(config.model, tmp_path).revision == second
    model = identity.pinned(config.model, run_dir)
    assert model.revision == first
    again = config.model_copy(update={"model": model})
    check_of(again, run_dir).require_same()
    moved = config.model_copy(
        update={"model": config.model.model_copy(update={"revision": second})}
    )
    with pytest.raises(
        errors.ConfigError, match=r"at commit 1{12}, but .* names org/base at commit 2{12}"
    ):
        check_of(moved, run_dir).require_same()
    # The checksums of the hub's cache tell a folder that holds the same.
    at_home = config.model_copy(
        update={"model": config.model.model_copy(update={"path": str(inputs / "model")})}
    )
    check_of(at_home, run_dir).require_same()


def base_of(folder: Path, inputs: Path, size: int) -> Config:
    """Return a config whose model has weights of `size` bytes in four shards, which take no room on the disk."""
    shutil.copytree(inputs / "model", folder)
    (folder / "model.safetensors").unlink()
    names = [f"model-{number}-of-4.safetensors" for number in range(1, 5)]
    index = {"weight_map": dict(zip("abcd", names, strict=True))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in names:
        with (folder / name).open("wb") as file:
            file.truncate(size // 4)
    return toy.make_config(inputs, model=str(folder), data={"cache": str(folder.parent / "cache")})


@pytest.mark.parametrize(
    "size", [8 << 20, pytest.param(16 * GIB, marks=pytest.mark.slow)], ids=["8 MB", "16 GB"]
)
def test_what_has_not_changed_is_not_read_again(inputs: Path, tmp_path: Path, size: int) -> None:
    config = base_of(tmp_path / "base", inputs, size)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    first = check_of(config, run_dir)
    first.record()
    assert first.bytes_read >= size
    for cache_is_there in (True, False):
        if not cache_is_there:
            shutil.rmtree(tmp_path / "cache")
        again = check_of(config, run_dir)
        again.require_same()
        again.record()
        assert again.bytes_read == 0
    # Somewhere else the same folder is known by its cache.
    os.utime(tmp_path / "base" / "model-2-of-4.safetensors")
    touched = check_of(config, run_dir)
    touched.require_same()
    assert touched.bytes_read == size // 4


@pytest.mark.slow
def test_only_one_rank_reads_the_base(inputs: Path, tmp_path: Path) -> None:
    run_dir = toy.finished(
        tmp_path / "run", toy.make_config(inputs, data={"cache": str(tmp_path / "cache")}), 2
    )
    assert (run_dir / "identity.json").is_file()
    assert "read for its checksums" in toy.log_of(run_dir)
    assert "read for its checksums" not in toy.log_of(run_dir, 1)
    assert metrics.read_events(run_dir)


def test_an_edit_that_sets_the_time_back_is_seen(inputs: Path, tmp_path: Path) -> None:
    config = base_of(tmp_path / "base", inputs, 8 << 20)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    check_of(config, run_dir).record()
    shard = tmp_path / "base" / "model-3-of-4.safetensors"
    before = shard.stat()
    with shard.open("r+b") as file:
        file.seek(1 << 20)
        file.write(b"\1")
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (shard.stat().st_size, shard.stat().st_ino) == (before.st_size, before.st_ino)
    with pytest.raises(
        errors.ConfigError,
        match=r"model-3-of-4.safetensors was 2,097,152 bytes of sha256 \w+, now is",
    ):
        check_of(config, run_dir).require_same()
