"""The reward process: `python -m kubetune.scoring.rewards.worker READ WRITE`, begun by `reward_process` and killed by it.

Reads requests and answers them until the pipe ends. The main thread runs the functions, since some (math_verify's) set
alarms. A message is 8 bytes of length and then: of the rank's, a pickle; of this process's, JSON, since a rank must not
unpickle what code of others has written.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kubetune.base import processes
from kubetune.config.schema.rewards import RewardConfig
from kubetune.scoring.rewards import built_in, functions, isolation
from kubetune.scoring.rewards.request import Judgement, Request

Judge = Callable[[Request, str | None], Judgement]

_MOST_CHARACTERS = 2000


def main() -> None:
    """Load the functions, say whether that went well, then judge until the pipe ends."""
    read_fd = int(sys.argv[1])
    write_fd = int(sys.argv[2])
    # Ctrl-C is for the rank, which kills this process when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    requests = os.fdopen(read_fd, "rb")
    replies = os.fdopen(write_fd, "wb")
    content = _message(requests)
    if not content:
        return  # the rank ended before it asked for anything
    memory_bytes = pickle.loads(content)
    is_separate = isolation.separate()
    if is_separate:
        child = os.fork()
        if child:
            # Process 1 of its own list does the work; this one only watches, and both are killed together.
            os._exit(isolation.watch(child))
        _end_with_rank(read_fd)

    # After the fork, and before anything of the user's is run.
    isolation.limit(memory_bytes)
    refused = isolation.confine(os.getcwd(), is_separate=is_separate)
    # Said before any code of the user's is loaded, which could say otherwise.
    _reply(replies, {"is_separate": is_separate, "refused": refused})
    content = _message(requests)
    if not content:
        return  # the rank does not go on with these bounds

    # All that cannot be loaded is named at once.
    rewards = pickle.loads(content)
    judges: dict[int, Judge] = {}  # by the number of the reward
    problems = []
    for number, reward in enumerate(rewards):
        # Models are asked by the rank itself.
        if reward.is_model:
            continue
        try:
            judges[number] = _judge_of(reward)
        except (Exception, SystemExit) as error:
            problems.append(f"{reward.title}: {_trace(error, reward.file)}")

    _reply(replies, {"problems": problems})

    while content := _message(requests):
        number, request = pickle.loads(content)
        _reply(
            replies,
            _judged(
                judges[number],
                rewards[number],
                request,
                request.references[number],
            ),
        )


def _judge_of(reward: RewardConfig) -> Judge:
    """Return what judges answers by one reward of the config."""
    if not reward.is_code:
        of_built_in = built_in.reward_of(reward)
        return lambda request, reference: Judgement(of_built_in(request, reference))
    assert reward.file is not None
    assert reward.function is not None
    function = functions.load(Path(reward.file), reward.function)
    return lambda request, reference: functions.judge(function, request, reference)


def _judged(
    judge: Judge,
    reward: RewardConfig,
    request: Request,
    reference: str | None,
) -> dict[str, Any]:
    try:
        judgement = judge(request, reference)
    except (Exception, SystemExit) as error:
        nothing: list[float | None] = [None] * len(request.texts)
        judgement = Judgement(nothing, _trace(error, reward.file))

    return {
        "rewards": judgement.rewards,
        "error": judgement.error,
        "metrics": judgement.metrics,
    }


def _trace(error: BaseException, path: str | None) -> str:
    """Return an error with the traceback from the user's file on, cut short."""
    # Frames of ours would say nothing to the author of the function.
    frames = traceback.extract_tb(error.__traceback__)
    frames_of_file = [frame for frame in frames if path is not None and frame.filename == path]
    lines = [*traceback.format_list(frames_of_file), *traceback.format_exception_only(error)]
    return "".join(lines).rstrip()[-_MOST_CHARACTERS:]


def _end_with_rank(read_fd: int) -> None:
    """Let the kernel end this process with its parent, and end it here if the rank has ended already."""
    processes.die_with_parent()
    # A parent that died before that call sends no signal any more, and its id says nothing in a list of processes of
    # our own. But the pipe from the rank has hung up, as both die together.
    poll = select.poll()
    poll.register(read_fd, select.POLLIN)
    if any(event & select.POLLHUP for _, event in poll.poll(0)):
        os._exit(1)


def _message(file: Any) -> bytes:
    """Return the next message, empty at the end of the pipe."""
    head = file.read(8)
    if len(head) < 8:
        return b""
    content: bytes = file.read(int.from_bytes(head, "big"))
    return content


def _reply(file: Any, values: dict[str, Any]) -> None:
    content = json.dumps(values).encode()
    file.write(len(content).to_bytes(8, "big") + content)
    file.flush()


if __name__ == "__main__":
    main()
