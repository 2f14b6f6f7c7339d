"""`kubetune chat`: talk to the result of a run, on the spot."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetune import errors
from kubetune.cli.generate import add_sampling, sampling_of

if TYPE_CHECKING:
    from kubetune.generate import Sampling, Speaker

HELP = "/reset forgets the conversation · /exit or Ctrl-D leaves"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--system", help="the system message of the conversation")
    parser.add_argument("--compare", action="store_true", help="let the model before fine-tuning answer too")
    add_sampling(parser)


def run(args: argparse.Namespace) -> int:
    """Read, answer, repeat, until the input ends."""
    sampling = sampling_of(args)
    from kubetune.generate import load_run

    speaker = load_run(args.run_dir, args.checkpoint)
    print(HELP)
    history: list[dict[str, Any]] = []
    while True:
        try:
            text = input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return errors.OK
        if text in ("/exit", "/quit"):
            return errors.OK
        if text == "/reset":
            history.clear()
            print("forgotten")
        elif text:
            converse(speaker, history, text, args, sampling)


def converse(
    speaker: Speaker, history: list[dict[str, Any]], text: str, args: argparse.Namespace, sampling: Sampling
) -> None:
    """One turn: the base's answer where asked for, then the tuned one, which becomes part of the conversation."""
    from kubetune.generate import Prompt, stream_answer

    def show(piece: str) -> None:
        print(piece, end="", flush=True)

    history.append({"role": "user", "content": text})
    system = [{"role": "system", "content": args.system}] if args.system else []
    # A model that was taught plain text has no turns: each line stands alone.
    prompt: Prompt = [*system, *history] if speaker.is_chat else text
    try:
        if args.compare:
            print("base:  ", end="")
            with speaker.as_base() as base:
                stream_answer(base, prompt, sampling, show)
            print("\ntuned: ", end="")
        answer = stream_answer(speaker, prompt, sampling, show)
        print()
    except KeyboardInterrupt:
        history.pop()
        print("\n(interrupted; that turn is forgotten)")
        return
    history.append({"role": "assistant", "content": answer})
