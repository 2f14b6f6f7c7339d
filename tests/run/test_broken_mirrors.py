"""Object stores that refuse, break off, stay silent or are no store: the process that copies ends in time and reports it."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from kubetune import errors
from kubetune.base import processes
from kubetune.rundir import checkpoints
from kubetune.rundir.mirror import copier, store
from kubetune.rundir.mirror.fetching import FETCHING
from kubetune.rundir.mirror.sync import Mirror
from tests import s3, toy
from tests.broken_store import DRIP, WAYS, serving
from tests.ranks import started, wait_all
from tests.s3 import Store

SECONDS = 2.0
# Before its first request a library reads files for a second of processor time, which a busy machine makes many of.
ANSWER_SECONDS = 10.0
WEIGHTS = Path("checkpoints/step-000003/model.safetensors")

Ask = Callable[[str, Path, str, str], None]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return a run with a checkpoint, as far as a copy looks at it."""
    made = tmp_path / "run"
    (made / "logs").mkdir(parents=True)
    (made / "resolved.json").write_text(json.dumps({"training": {"save_total_limit": 3}}))
    (made / "metrics.jsonl").write_text('{"step": 1}\n')
    (made / "logs" / "rank-0.log").write_text("said\n")
    weights = os.urandom(1000)
    checkpoints.commit(
        made, checkpoints.State(step=3), lambda to: (to / WEIGHTS.name).write_bytes(weights)
    )
    checkpoints.link(made, "last", 3)
    return made


@pytest.fixture(scope="module")
def bucket() -> Iterator[Store]:
    """Yield a store in which nothing is wrong."""
    with s3.serving() as server:
        yield server


def ways(quick: str) -> list[Any]:
    return [pytest.param(way, marks=() if way == quick else pytest.mark.slow) for way in WAYS]


def send_the_rest(run_dir: str, address: str, log: str) -> None:
    """Do what the copy's process does when a run has ended: its standard input is empty here."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    copier.FINISH_SECONDS = copier.SECONDS_IF_NEVER_REACHED = SECONDS
    store.ANSWER_SECONDS = ANSWER_SECONDS
    processes.leave(copier.main(["follow", run_dir, address]))


@pytest.mark.parametrize("way", ways("500"))
def test_a_store_that_fails_is_reported_in_time(run_dir: Path, way: str) -> None:
    address = f"s3://{s3.BUCKET}/{way}"
    log = run_dir.with_suffix(".stderr")
    with serving(way=way) as server:
        environ = {**Store(port=0).environ, "AWS_ENDPOINT_URL": server.url}
        with started(send_the_rest, 1, str(run_dir), address, str(log), environ=environ) as ranks:
            assert wait_all(ranks) == [
                errors.ENVIRONMENT
            ]  # within two minutes, on however crowded a machine
        assert server.asked > 0
    output = log.read_text()
    assert "Traceback" not in output
    assert (
        sum(line.startswith("kubetune: ") and address in line for line in output.splitlines()) == 1
    ), output


@pytest.fixture
def ask(bucket: Store, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Send or restore a run, asking the store at an URL, and try again for no longer than SECONDS."""
    monkeypatch.setattr(copier, "FINISH_SECONDS", SECONDS)
    monkeypatch.setattr(copier, "RESTORE_SECONDS", SECONDS)
    monkeypatch.setattr(copier, "SECONDS_IF_NEVER_REACHED", SECONDS)
    # For those that are silent or drip; on a crowded machine a good answer may take long too.
    monkeypatch.setattr(store, "ANSWER_SECONDS", 3 * ANSWER_SECONDS)
    stop = threading.Event()
    stop.set()

    def ask(verb: str, run_dir: Path, address: str, url: str) -> None:
        with monkeypatch.context() as change:
            change.setenv("AWS_ENDPOINT_URL", url)
            mirror = Mirror(run_dir, address)
            copier.restore(mirror) if verb == "restore" else copier.follow(mirror, stop)

    return ask


@pytest.mark.parametrize("way", ways("garbage"))
def test_a_store_that_fails_while_a_checkpoint_is_sent_never_seems_to_hold_it(
    ask: Ask, bucket: Store, run_dir: Path, way: str
) -> None:
    address = f"s3://{s3.BUCKET}/sent-{way}"
    with serving(bucket.url, way, until=str(WEIGHTS)) as server:
        # A login page as the answer to the first question, for the copy's owner, is reported as damage of that file.
        with pytest.raises(
            errors.EnvironmentFault,
            match=f"{address}( lacks the end of the run: |/mirror.json is dam)",
        ):
            ask("follow", run_dir, address, server.url)
        assert server.has_broken
    mirror = Mirror(run_dir, address)
    assert set(mirror.stored.files()) >= {"metrics.jsonl", "logs/rank-0.log"}
    assert mirror.stored.steps() == []
    ask("follow", run_dir, address, bucket.url)
    assert mirror.stored.steps() == [3]


@pytest.mark.parametrize("way", [*ways("reset"), pytest.param(DRIP, marks=pytest.mark.slow)])
def test_a_store_that_fails_while_a_run_is_fetched_leaves_it_to_be_fetched(
    ask: Ask, bucket: Store, run_dir: Path, tmp_path: Path, way: str
) -> None:
    """Neither half a checkpoint is there afterwards, nor a run that seems to have begun and would start over."""
    address = f"s3://{s3.BUCKET}/fetched-{way}"
    empty = tmp_path / "empty"
    Mirror(run_dir, address).send()
    with serving(bucket.url, way, until=str(WEIGHTS)) as server:
        # Asked again, it reads a login page in place of the copy's owner.
        with pytest.raises(
            errors.EnvironmentFault, match=f"{address}( cannot be read: |/mirror.json is dam)"
        ) as fault:
            ask("restore", empty, address, server.url)
        assert server.has_broken
    assert way != DRIP or f"no whole answer about {address[5:]}/{WEIGHTS} in 30 s" in str(
        fault.value
    )
    assert (empty / "metrics.jsonl").is_file()
    assert checkpoints.steps(empty) == []
    with pytest.raises(errors.EnvironmentFault, match="cannot be read"):
        ask("restore", empty, address, "http://127.0.0.1:1")
    ask("restore", empty, address, bucket.url)
    assert toy.digests(empty) == toy.digests(run_dir)


def test_a_copy_that_is_gone_after_a_fetch_that_was_cut_off_starts_nothing_over(
    ask: Ask, bucket: Store, run_dir: Path, tmp_path: Path
) -> None:
    address = f"s3://{s3.BUCKET}/gone"
    half = tmp_path / "half"
    shutil.copytree(run_dir, half)
    (half / FETCHING).touch()
    with pytest.raises(errors.EnvironmentFault, match=r"cut off before; .*half holds a part of it"):
        ask("restore", half, address, bucket.url)
    assert (half / FETCHING).exists()


def test_a_store_without_a_whole_checkpoint_starts_nothing_over(
    bucket: Store, run_dir: Path, tmp_path: Path
) -> None:
    address = f"s3://{s3.BUCKET}/damaged"
    Mirror(run_dir, address).send()
    fsspec.filesystem("s3", skip_instance_cache=True).pipe_file(
        f"{s3.BUCKET}/damaged/{WEIGHTS}", b"x" * 1000
    )
    with pytest.raises(
        errors.ConfigError, match=r"damaged: no checkpoint is whole, of 1\. Put one back there"
    ):
        copier.restore(Mirror(tmp_path / "empty", address))
