"""The process of one model that is talked to on the page: requests come as lines of JSON, and so do the answers.

    python -m kubetune.ui.chat_child RUN_DIR CHECKPOINT

It ends with its input or with the server. SIGINT ends an answer, not the process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from kubetune.base import files, logs, processes
from kubetune.errors import KubetuneError

if TYPE_CHECKING:
    from kubetune.result.inference.generate import LoadedModel

Tell = Callable[..., None]


def main(argv: Sequence[str]) -> int:
    """Load the model, say so, and answer until the input ends."""
    processes.die_with_parent(signal.SIGTERM)
    logs.scrub_tracebacks()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer

    def tell(**facts: Any) -> None:
        out.write(logs.scrub(json.dumps(facts)) + "\n")
        out.flush()

    run_dir, checkpoint = argv
    try:
        from kubetune.result.inference.generate import load_run

        loaded = load_run(run_dir, checkpoint)
    except Exception as error:
        if (told := files.known(error)) is None:
            raise
        tell(error=str(told))
        return told.exit_code
    tell(ready=True, chats=loaded.is_chat, checkpoint=loaded.result.checkpoint.resolve().name)
    for line in sys.stdin:
        _answer(loaded, json.loads(line), tell)
    return 0


def _answer(loaded: LoadedModel, asked: Mapping[str, Any], tell: Tell) -> None:
    """One answer, piece by piece; then its end, and why there is no more of it where something went wrong."""
    from kubetune.result.inference.generate import Sampling, stream_answer

    messages = asked["messages"]
    prompt = messages if loaded.is_chat else messages[-1]["content"]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        left_out = loaded.left_out(prompt)
        with loaded.as_base() if asked["base"] else nullcontext(loaded) as model:
            stream_answer(
                model, prompt, Sampling(**asked["sampling"]), lambda piece: tell(piece=piece)
            )
        tell(end=True, left_out=left_out)
    except KeyboardInterrupt:
        tell(end=True, stopped=True)
    except (
        ValueError,
        KubetuneError,
    ) as error:  # the template refuses the conversation, or memory lacks room
        tell(end=True, error=str(error))
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    processes.leave(main(sys.argv[1:]))
