"""The process of one model of the chat page. It reads questions and writes answers, as lines of JSON.

    python -m kubetune.ui.chat.chat_child RUN_DIR CHECKPOINT

    ← {"ready": true, "chats": true, "checkpoint": "step-000120"}
    → {"messages": [{"role": "user", "content": "Hi"}], "base": false, "sampling": {…}}
    ← {"piece": "Hel"}
    ← {"piece": "lo."}
    ← {"end": true, "left_out": []}

A classifier answers with its classes, as {"verdict": {"predicted": …, "probabilities": {…}}}, and a reward model with
the reward of an answer, as {"verdict": {"reward": …}}; both load at each question.
It ends with its input or with the server. SIGINT ends an answer, not the process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetune.base import faults, logs, processes
from kubetune.config.resolved import read_config
from kubetune.errors import ConfigError, KubetuneError

if TYPE_CHECKING:
    from kubetune.result.inference.answering import LoadedModel
    from kubetune.result.inference.result import Result

# Writes a line of JSON with these facts.
Send = Callable[..., None]


def main(argv: Sequence[str]) -> int:
    """Load the model, report that, and answer until the input ends."""
    processes.die_with_parent(signal.SIGTERM)
    logs.scrub_tracebacks()
    # Only while an answer is generated does SIGINT mean something.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes to stderr, not among the answers

    def send(**facts: Any) -> None:
        out.write(logs.scrub(json.dumps(facts)) + "\n")
        out.flush()

    run_dir, checkpoint = argv
    answer: Callable[[Any, Mapping[str, Any], Send], None] = _answer
    # A bug is raised, for the terminal. Errors that the user can fix go to the page.
    try:
        config = read_config(Path(run_dir))
        if config.classifies:
            from kubetune.result.inference.result import open_result

            result = open_result(Path(run_dir), checkpoint)
            loaded: Any = result
            answer = _judge
        else:
            from kubetune.result.inference.answering import load_run

            loaded = load_run(run_dir, checkpoint)
            result = loaded.result
    except Exception as error:
        known_error = faults.known(error)
        if known_error is None:
            raise
        send(error=str(known_error))
        return known_error.exit_code

    # A judge has no turns to keep.
    chats = answer is _judge or loaded.is_chat
    send(ready=True, chats=chats, checkpoint=result.checkpoint.resolve().name)
    for line in sys.stdin:
        answer(loaded, json.loads(line), send)
    return 0


def _judge(result: Result, question: Mapping[str, Any], send: Send) -> None:
    """Send the verdict on a text: its class and all probabilities, or the reward of an answer to its prompt."""
    from kubetune.library.results import classify

    text = question["messages"][-1]["content"]
    asked: Any = text
    if result.trained.task == "reward_model":
        asked = tuple(part.strip() for part in text.split("\n\n", 1))
    try:
        if asked != text and len(asked) < 2:
            raise ConfigError("type the prompt, an empty line, and the answer to it")
        (verdict,) = classify(result.run_dir, [asked], checkpoint=result.checkpoint.resolve().name)
        send(verdict=verdict)
        send(end=True, left_out=[])
    except (ValueError, KubetuneError) as error:
        send(end=True, error=str(error))


def _answer(
    loaded: LoadedModel,
    question: Mapping[str, Any],
    send: Send,
) -> None:
    """Send an answer piece by piece, then its end, with an error if there is one."""
    from kubetune.result.inference.answering import Sampling, stream_answer

    # A model without a chat template continues the text that was typed last.
    messages = question["messages"]
    prompt = messages if loaded.is_chat else messages[-1]["content"]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        left_out = loaded.left_out(prompt)
        sampling = Sampling(**question["sampling"])
        speaker: AbstractContextManager[LoadedModel] = nullcontext(loaded)
        if question["base"]:
            speaker = loaded.as_base()
        with speaker as model:
            stream_answer(
                model,
                prompt,
                sampling,
                lambda piece: send(piece=piece),
            )
        send(end=True, left_out=left_out)
    except KeyboardInterrupt:
        send(end=True, stopped=True)
    except (ValueError, KubetuneError) as error:
        # The template refuses the conversation, or there is not enough memory.
        send(end=True, error=str(error))
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    processes.leave(main(sys.argv[1:]))
