"""Checkpoints as folders: whole or not found, set aside when damaged, never the last good one deleted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kubetune import errors
from kubetune.base import humanize
from kubetune.rundir import checkpoints
from kubetune.rundir.checkpoints import State, folder_of

FILES = {
    "adapter_model.safetensors": b"weights" * 40,
    "config.json": b"{}\n",
    "nested/optimizer.bin": b"state" * 9,
}


def write(folder: Path) -> None:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def commit(run_dir: Path, *steps: int) -> None:
    for step in steps:
        checkpoints.commit(run_dir, State(step=step), write)


def flip_bits(path: Path) -> None:
    """Flip one bit, in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncate": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "zero": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "flip": flip_bits,
    "delete": Path.unlink,
    "grow": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
}
EVERY_FILE = [*FILES, checkpoints.STATE, checkpoints.MANIFEST]


def names(run_dir: Path) -> set[str]:
    return set(os.listdir(run_dir / "checkpoints"))


def test_a_run_directory_that_was_deleted_is_not_made_anew(tmp_path: Path) -> None:
    with pytest.raises(errors.EnvironmentFault, match="No such file or directory"):
        commit(tmp_path / "run", 3)
    assert not (tmp_path / "run").exists()


def test_what_was_committed_is_found_and_holds_its_state(tmp_path: Path) -> None:
    assert checkpoints.find(tmp_path) is None
    state = State(
        step=3, tokens=70, best_step=2, best_value=0.5, data_fingerprint="f", global_batch_size=8
    )
    assert (
        checkpoints.commit(tmp_path, state, write)
        == checkpoints.find(tmp_path)
        == folder_of(tmp_path, 3)
    )
    assert checkpoints.load_state(folder_of(tmp_path, 3)) == state
    assert names(tmp_path) == {"step-000003"}


def test_who_asks_for_a_checkpoint_that_is_none_is_told_those_that_are(tmp_path: Path) -> None:
    commit(tmp_path, 10, 20)
    (tmp_path / "checkpoints" / "best").symlink_to("step-000010")
    (tmp_path / "checkpoints" / "last").symlink_to("step-000030")
    with pytest.raises(
        errors.ConfigError, match=r"no checkpoint 'last'; there are: best, step 10, step 20$"
    ):
        checkpoints.choose(tmp_path, "last")
    with pytest.raises(errors.ConfigError, match="has no checkpoint, so there is no result"):
        checkpoints.choose(tmp_path / "other")


@pytest.mark.parametrize("name", EVERY_FILE)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_set_aside_and_the_one_before_is_used(
    tmp_path: Path, name: str, damage: str
) -> None:
    commit(tmp_path, 10, 20)
    DAMAGES[damage](folder_of(tmp_path, 20) / name)
    assert checkpoints.find(tmp_path) == folder_of(tmp_path, 10)
    assert names(tmp_path) == {"step-000010", "damaged-step-000020-1"}
    commit(tmp_path, 20)
    assert checkpoints.find(tmp_path) == folder_of(tmp_path, 20)


@pytest.mark.parametrize(
    "bit", [0, *(pytest.param(bit, marks=pytest.mark.slow) for bit in range(1, 8))]
)
def test_no_bit_of_the_manifest_can_change_unseen(tmp_path: Path, bit: int) -> None:
    commit(tmp_path, 1)
    path = folder_of(tmp_path, 1) / checkpoints.MANIFEST
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(
            content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]
        )
        assert checkpoints.verify(path.parent), f"bit {bit} of byte {place}"


@pytest.mark.parametrize(
    "text", ["[]", "null", '{"files": []}', '{"version": 1, "files": {"a": 3}}', "\udcff"]
)
def test_a_manifest_of_another_kind_is_no_manifest(tmp_path: Path, text: str) -> None:
    commit(tmp_path, 1)
    (folder_of(tmp_path, 1) / checkpoints.MANIFEST).write_text(text, errors="surrogateescape")
    assert (
        checkpoints.verify(folder_of(tmp_path, 1))
        == "has a manifest that kubetune has not written so"
    )


def test_a_foreign_file_is_damage(tmp_path: Path) -> None:
    commit(tmp_path, 1)
    (folder_of(tmp_path, 1) / "extra.bin").touch()
    assert (
        checkpoints.verify(folder_of(tmp_path, 1))
        == "holds extra.bin, which its manifest does not name"
    )


def test_when_all_are_damaged_each_start_says_so_and_changes_nothing(tmp_path: Path) -> None:
    commit(tmp_path, 10, 20)
    for step in (10, 20):
        (folder_of(tmp_path, step) / "config.json").unlink()
    for _ in range(2):
        with pytest.raises(
            errors.ConfigError,
            match=r"step-000020 lacks config.json; step-000010 lacks config.json",
        ):
            checkpoints.find(tmp_path)
    assert names(tmp_path) == {"step-000010", "step-000020"}


def test_a_second_damaged_checkpoint_of_a_step_does_not_replace_the_first(tmp_path: Path) -> None:
    commit(tmp_path, 1)
    for number in (1, 2):
        commit(tmp_path, 2)
        (folder_of(tmp_path, 2) / "config.json").unlink()
        checkpoints.find(tmp_path)
        assert (tmp_path / "checkpoints" / f"damaged-step-000002-{number}").is_dir()


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    commit(tmp_path, 1)

    def fail(folder: Path) -> None:
        write(folder)
        raise OSError(28, "No space left on device", str(folder / "config.json"))

    with pytest.raises(
        errors.EnvironmentFault, match=r"No space left on device \([\d,]+ bytes free\)"
    ):
        checkpoints.commit(tmp_path, State(step=2), fail)
    assert names(tmp_path) == {"step-000001"}


def test_links_point_at_steps_and_move(tmp_path: Path) -> None:
    commit(tmp_path, 1, 2)
    for step in (1, 2):
        checkpoints.link(tmp_path, "last", step)
        assert checkpoints.choose(tmp_path, "best") == folder_of(tmp_path, step)
    assert os.readlink(tmp_path / "checkpoints" / "last") == "step-000002"
    assert checkpoints.choose(tmp_path, "1") == folder_of(tmp_path, 1)
    with pytest.raises(errors.ConfigError, match="there are: last, step 1, step 2"):
        checkpoints.choose(tmp_path, "7")


def test_leftovers_of_killed_processes_are_removed(tmp_path: Path) -> None:
    commit(tmp_path, 1)
    root = tmp_path / "checkpoints"
    (root / ".step-000002.0123456789ab.tmp").mkdir()
    (root / ".last.0123456789ab.tmp").symlink_to("step-000002")
    checkpoints.clean(tmp_path)
    assert names(tmp_path) == {"step-000001"}


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    events=st.lists(
        st.sampled_from(["save", "save best", "damage newest", "damage oldest", "restart"]),
        max_size=12,
    ),
    keep=st.integers(1, 3),
)
def test_retention_keeps_the_newest_good_ones_and_the_best(
    tmp_path: Path, events: list[str], keep: int
) -> None:
    """Against a model: whatever happens to folders, what should be there is there and the newest good one is found."""
    run_dir = tmp_path / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir()
    step = 0
    best = 0
    good = set[int]()
    for event in events:
        if event.startswith("save"):
            step += 1
            best = step if event == "save best" else best
            commit(run_dir, step)
            checkpoints.prune(run_dir, keep, {best})
            good = {*sorted({*good, step})[-keep:], *({best} & {*good, step})}
        elif event.startswith("damage") and len(good) > 1:
            victim = max(good) if event == "damage newest" else min(good)
            (folder_of(run_dir, victim) / "config.json").unlink()
            good.remove(victim)
        elif event == "restart":
            saved = checkpoints.find(run_dir)
            assert saved == (folder_of(run_dir, max(good)) if good else None)
            step = max(good, default=0)
        assert {
            n
            for n in checkpoints.steps(run_dir)
            if checkpoints.verify(folder_of(run_dir, n)) is None
        } == good
        assert len(checkpoints.steps(run_dir)) <= keep + 1 + sum(
            event.startswith("damage") for event in events
        )


def test_a_checkpoint_that_is_named_for_another_step_is_set_aside(tmp_path: Path) -> None:
    commit(tmp_path, 10, 20)
    folder_of(tmp_path, 20).rename(folder_of(tmp_path, 999_999))
    assert (
        checkpoints.verify(folder_of(tmp_path, 999_999))
        == "is of step 20, not of the one in its name"
    )
    assert checkpoints.newest_step(tmp_path) == 10
    checkpoints.prune(tmp_path, 1, set())
    assert checkpoints.find(tmp_path) == folder_of(tmp_path, 10)
    assert names(tmp_path) == {"step-000010", "damaged-step-999999-1"}


def test_a_state_of_another_version_is_refused(tmp_path: Path) -> None:
    commit(tmp_path, 1)
    path = folder_of(tmp_path, 1) / checkpoints.STATE
    path.write_text(path.read_text().replace('"samples"', '"momentum"'))
    with pytest.raises(
        errors.ConfigError, match="has momentum, which this version of kubetune does not know"
    ):
        checkpoints.load_state(path.parent)


@pytest.mark.parametrize(
    ("seconds", "messages"),
    [(4e-5, ""), (0.19, "; training paused 0.19 s"), (83, "; training paused 1 min 23 s")],
)
def test_a_save_tells_of_a_pause_that_anybody_feels(seconds: float, messages: str) -> None:
    assert humanize.pause(seconds) == messages
