"""The verdict on how a run ended, from what ranks said and what was seen of them; and the place of a node in a run."""

from __future__ import annotations

import signal
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from kubetune import errors
from kubetune.reporting.cards import status
from kubetune.reporting.reading import RunRecord
from kubetune.rundir import metrics
from kubetune.rundir.exit_status import (
    Death,
    ExitStatus,
    clear_exit_statuses,
    judge,
    read_end,
    read_exit_status,
    read_rank_exit_statuses,
    write_exit_status,
    write_rank_exit_status,
)
from kubetune.rundir.status import launched_at, state_of
from kubetune.supervisor.place import Place, find_place

KILLED = -signal.SIGKILL
TERMINATED = -signal.SIGTERM


def statuses_of(**codes: int) -> dict[int, ExitStatus]:
    return {int(rank[1:]): ExitStatus(code, f"said {code}", 5) for rank, code in codes.items()}


@pytest.mark.parametrize(
    ("statuses", "deaths", "code", "reason"),
    [
        (statuses_of(r0=0, r1=0), [], 0, "said 0"),
        # A crash while the interpreter shuts down comes after all the work.
        (statuses_of(r0=0, r1=0), [Death(1, -signal.SIGSEGV, 0)], 0, "said 0"),
        (statuses_of(r0=0), [], 1, "rank 1 ended without saying how; its log is logs/rank-1.log"),
        (statuses_of(r0=145, r1=2), [Death(0, 145, 0), Death(1, 2, 0)], 2, "rank 1: said 2"),
        (statuses_of(r0=143, r1=3), [Death(0, 143, 0), Death(1, 3, 0)], 3, "rank 1: said 3"),
        (statuses_of(r0=4, r1=4), [Death(0, 4, 0), Death(1, 4, 0)], 4, "said 4"),
        # Lost its peer first, because the peer with the bug took longer to end.
        (statuses_of(r0=145, r1=1), [Death(0, 145, 0), Death(1, 1, 0)], 1, "rank 1: said 1"),
        # torchrun asks the others to stop once one has failed: their 143 is no cause.
        (statuses_of(r0=1, r1=143), [Death(0, 1, 0), Death(1, 143, 0)], 1, "rank 0: said 1"),
        (statuses_of(r0=1), [Death(0, 1, 0), Death(1, TERMINATED, 0)], 1, "rank 0: said 1"),
        ({}, [Death(0, -signal.SIGXCPU, 0)], 145, "rank 0 was killed by SIGXCPU (its CPU time is used up: "),
        (statuses_of(r0=145), [Death(0, 145, 0), Death(1, KILLED, 0)], 145, "rank 1 was killed by SIGKILL"),
        # The same, though the survivor did not understand what happened to it.
        (statuses_of(r0=1), [Death(0, 1, 0), Death(1, KILLED, 1)], 145, "rank 1 was killed by SIGKILL"),
        # Killed by torchrun, half a minute after the bug.
        (statuses_of(r0=1), [Death(0, 1, 0), Death(1, KILLED, 30)], 1, "rank 0: said 1"),
        (statuses_of(r0=143, r1=143), [Death(0, 143, 0), Death(1, 143, 0)], 143, "said 143"),
        ({}, [Death(0, TERMINATED, 0), Death(1, TERMINATED, 0)], 143, "stopped before the first step"),
        ({}, [Death(0, 145, 0), Death(1, 145, 0)], 145, "rank 0 ended with exit code 145"),
        ({}, [Death(0, 77, 0)], 1, "rank 0 ended with exit code 77"),
        ({}, [Death(0, 2, 0)], 2, "rank 0 ended with exit code 2"),
    ],
)  # fmt: skip
def test_the_cause_is_named(
    statuses: dict[int, ExitStatus], deaths: list[Death], code: int, reason: str
) -> None:
    verdict = judge(range(2), statuses, deaths)
    assert verdict.code == code
    assert reason in verdict.reason


def test_a_rank_that_stood_still_was_not_killed_by_chance() -> None:
    deaths = [Death(0, 145, 0), Death(1, KILLED, 0)]
    still = ExitStatus(145, "rank 1 stood still", 7)
    assert judge(range(2), statuses_of(r0=145), deaths, frozen={1: still}) == still
    assert judge(range(2), statuses_of(r0=4), deaths, frozen={1: still}).code == 4
    assert judge(range(2), {}, deaths, stopping="asked", frozen={1: still}) == ExitStatus(
        143, "asked", 7
    )


def test_a_report_from_another_node_tells_the_cause() -> None:
    verdict = judge(
        range(2),
        {**statuses_of(r0=145, r1=145), **statuses_of(r3=2)},
        [Death(0, 145, 0), Death(1, 145, 0)],
    )
    assert verdict == ExitStatus(2, "rank 3: said 2", 5)


@pytest.mark.parametrize(
    ("statuses", "deaths", "reason"),
    [
        (statuses_of(r0=143, r1=143), [Death(0, 143, 0), Death(1, 143, 0)], "said 143"),
        (statuses_of(r0=143), [Death(0, 143, 0), Death(1, KILLED, 0)], "said 143"),
        # What breaks while everybody leaves is not held against the run.
        (statuses_of(r0=145, r1=1), [Death(0, 145, 0), Death(1, 1, 0)], "asked"),
        ({}, [Death(0, KILLED, 0)], "asked"),
        ({}, [], "asked"),
    ],
)
def test_a_stop_that_was_asked_for_is_retryable(
    statuses: dict[int, ExitStatus], deaths: list[Death], reason: str
) -> None:
    verdict = judge(range(2), statuses, deaths, stopping="asked")
    assert (verdict.code, verdict.reason) == (143, reason)


def test_a_config_error_stays_one_while_stopping() -> None:
    assert judge([0], statuses_of(r0=2), [Death(0, 2, 0)], stopping="asked").code == errors.USER


@pytest.mark.parametrize(
    ("code", "error", "state"),
    [
        (0, None, "done"),
        (0, "Paused", "stopped"),
        (143, None, "stopped"),
        (5, "GateFailed", "failed"),
        (145, None, "failed"),
    ],
)
def test_lists_and_pages_call_an_end_by_one_word(code: int, error: str | None, state: str) -> None:
    ended = ExitStatus(code, "as it was meant to", 5, error)
    assert ended.state == state
    assert state_of(asdict(ended), []) == (state, "as it was meant to")
    assert status(cast(RunRecord, SimpleNamespace(exit_status=ended))) == (
        state,
        "as it was meant to",
    )


def test_a_run_that_has_not_ended_is_one_of_three_things() -> None:
    heard = {"silent_seconds": 2.0}
    silent = {"silent_seconds": 300.0}
    assert state_of(None, [silent, heard], metrics.now()) == ("running", "")
    assert state_of(None, [], metrics.now())[0] == "starting"
    assert state_of(None, [silent], None) == (
        "waiting",
        "nothing heard for 5 min: it was cut off, or cannot be seen from here",
    )
    assert state_of(None, [], "2026-01-01T00:00:00.000Z")[0] == "waiting", "long ago"
    waits_for = "node 0 has waited for node 1 for 40 s"
    assert state_of(None, [heard], metrics.now(), waits_for) == ("waiting", waits_for)
    events = [{"event": "launch", "time": "a"}, {"event": "start", "time": "b"}]
    assert launched_at(events) is None
    assert launched_at([*events, {"event": "launch", "time": "c"}]) == "c"


def test_a_push_later_does_not_move_the_end(tmp_path: Path) -> None:
    assert read_end(tmp_path) is None
    write_exit_status(tmp_path, ExitStatus(0, "done", 5))
    ended = read_end(tmp_path)
    metrics.record_event(tmp_path, "push")
    assert ended is not None
    assert read_end(tmp_path) == ended


def test_exit_statuses_are_read_back_and_cleared(tmp_path: Path) -> None:
    for rank in (0, 2, 10):
        write_rank_exit_status(tmp_path, rank, ExitStatus(0, "done", 3))
    write_exit_status(tmp_path, ExitStatus(0, "done", 3))
    assert list(read_rank_exit_statuses(tmp_path)) == [0, 2, 10]
    assert read_exit_status(tmp_path) == ExitStatus(0, "done", 3)
    clear_exit_statuses(tmp_path, [2, 3])
    assert list(read_rank_exit_statuses(tmp_path)) == [0, 10]
    clear_exit_statuses(tmp_path)
    assert read_rank_exit_statuses(tmp_path) == {}
    assert read_exit_status(tmp_path) is None


def test_one_node_needs_no_variables() -> None:
    assert find_place(1, 4, {"NODE_RANK": "x"}) == Place(1, 4)


@pytest.mark.parametrize(
    "environ",
    [
        {"NODE_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "29500"},
        {"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "head"},
        {
            "PET_NODE_RANK": "1",
            "NODE_RANK": "0",
            "PET_MASTER_ADDR": "head",
            "MASTER_ADDR": "x",
            "PET_NNODES": "2",
        },
        {"GROUP_RANK": "1", "MASTER_ADDR": "head", "PET_NNODES": "2:2"},
    ],
)
def test_the_place_is_found_in_the_variables_of_operators(environ: dict[str, str]) -> None:
    place = find_place(2, 4, environ)
    assert place == Place(2, 4, 1, "head", 29500)
    assert list(place.ranks) == [4, 5, 6, 7]


def test_every_variable_that_is_wrong_is_named() -> None:
    environ = {"NODE_RANK": "2", "MASTER_PORT": "99999", "PET_NNODES": "3"}
    with pytest.raises(errors.ConfigError) as caught:
        find_place(2, 1, environ)
    assert len(caught.value.problems) == 4
    for part in ("'2'; expected 0 to 1", "MASTER_ADDR", "'99999'", "PET_NNODES is '3'"):
        assert part in str(caught.value)
