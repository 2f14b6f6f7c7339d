"""`kubetune chat`: talk to the result of a run, on the spot, alone, beside its base or beside another's."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetune import errors
from kubetune.base.humanize import shell_word, shown_on
from kubetune.cli.result.generate import add_sampling, is_classifier, sampling_of
from kubetune.data.reading.formats import IMAGE_TAG

if TYPE_CHECKING:
    from kubetune.result.inference.generate import LoadedModel, Prompt, Sampling

HELP = """\
/reset         forgets the conversation
/system TEXT   sets the system message, and forgets the conversation; without TEXT there is none
/image FILE    shows the model an image with what you say next
/history       shows the conversation
/exit, Ctrl-D  leaves; Ctrl-C interrupts an answer"""
NARROWEST_FOR_COLUMNS = 80


@dataclass(frozen=True)
class Beside:
    """A second model that answers too: its name, and how it is had for a turn."""

    name: str
    lent: Callable[[], AbstractContextManager[LoadedModel]]
    model: LoadedModel | None = None
    """Of a second run, whose images and template are its own; None for the base."""


@dataclass
class Conversation:
    """The conversation so far. `other`: of the model beside, made of its own answers.

    `images` are those shown so far, `pending` those that go with what is said next.
    """

    system: str | None
    tuned: list[dict[str, Any]] = field(default_factory=list)
    other: list[dict[str, Any]] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)
    told: set[str] = field(default_factory=set)
    """Lines said already of what the chat template leaves out."""

    def reset(self) -> None:
        """Forget all turns and images."""
        for what in (self.tuned, self.other, self.images, self.pending):
            what.clear()

    @property
    def seen(self) -> list[str]:
        """The images that the next prompt is about."""
        return [*self.images, *self.pending]

    def tagged(self, text: str) -> str:
        """The text with a tag for each image that goes with it, unless it has them itself."""
        return f"{IMAGE_TAG}\n" * (len(self.pending) - text.count(IMAGE_TAG)) + text

    def prompt(self, history: list[dict[str, Any]], text: str, is_chat: bool) -> Prompt:
        """A model that was taught plain text has no turns: each line stands alone."""
        if not is_chat and not self.seen:
            return text
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *history, {"role": "user", "content": text}]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory")
    parser.add_argument("--system", help="the system message of the conversation")
    second = parser.add_mutually_exclusive_group()
    second.add_argument(
        "--compare",
        action="store_true",
        help="let the model before fine-tuning answer too, side by side",
    )
    second.add_argument(
        "--beside", type=Path, metavar="RUN_DIR", help="let the result of a second run answer too"
    )
    parser.add_argument(
        "--image",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="an image to begin with; repeatable",
    )
    add_sampling(parser)


def run(args: argparse.Namespace) -> int:
    """Read, answer, repeat, until the input ends."""
    for run_dir in filter(None, (args.run_dir, args.beside)):
        if is_classifier(run_dir):
            raise errors.ConfigError(
                f"{run_dir} is a classifier; ask it with kubetune generate {shell_word(run_dir)} TEXT"
            )
    sampling = sampling_of(args)
    with suppress(ImportError):
        import readline  # noqa: F401 - importing it gives `input` arrow keys and a memory
    from kubetune.result.inference.generate import load_run

    loaded = load_run(args.run_dir, args.checkpoint, model=args.model, trust_code=args.trust_code)
    beside = Beside("base", loaded.as_base) if args.compare else None
    if args.beside:
        second = load_run(args.beside, "best")
        beside = Beside(str(args.beside), lambda: nullcontext(second), second)
    conversation = Conversation(args.system)
    for image in args.image:
        print(show_image(str(image), conversation, loaded, beside))
    print(HELP)
    while True:
        try:
            text = input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return errors.OK
        if text in ("/exit", "/quit"):
            return errors.OK
        if text.startswith("/image "):
            print(show_image(text.removeprefix("/image ").strip(), conversation, loaded, beside))
        elif text.startswith("/"):
            print(obey(text, conversation))
        elif text:
            converse(loaded, conversation, text, sampling, beside)


def obey(command: str, conversation: Conversation) -> str:
    """Do what a line that begins with a slash says; returns the answer to it."""
    name, _, rest = command.partition(" ")
    if name == "/reset":
        conversation.reset()
        return "forgotten"
    if name == "/system":
        conversation.reset()
        conversation.system = rest.strip() or None
        return f"system: {conversation.system}" if conversation.system else "no system message"
    if name == "/history":
        return (
            "\n".join(f"{turn['role']}: {turn['content']}" for turn in conversation.tuned)
            or "nothing was said yet"
        )
    return HELP


def show_image(
    file: str, conversation: Conversation, loaded: LoadedModel, beside: Beside | None = None
) -> str:
    """Keep an image for what is said next; returns what to tell of it."""
    for model in _runs(loaded, beside):
        if model.reader is None:
            return f"a run with `task: {model.config.task}`: its model sees no images"
    from kubetune.data.reading.images import UnusableImage, verify_image

    try:
        facts = verify_image(Path(file).expanduser())
    except UnusableImage as error:
        return str(error)
    conversation.pending.append(str(Path(file).expanduser()))
    return f"{facts.format}, {facts.width} × {facts.height}: goes with what you say next"


def converse(
    loaded: LoadedModel,
    conversation: Conversation,
    text: str,
    sampling: Sampling,
    beside: Beside | None = None,
) -> None:
    """One turn, which becomes part of the conversation once it is whole. Raises nothing that ends the chat."""
    text = conversation.tagged(text)
    ask = {"role": "user", "content": text}
    try:
        for model in _runs(loaded, beside):
            tell_what_is_left_out(model, conversation, text)
        if beside:
            other, tuned = answer_both(loaded, beside, conversation, text, sampling)
            conversation.other += [ask, {"role": "assistant", "content": other}]
        else:
            prompt = conversation.prompt(conversation.tuned, text, loaded.is_chat)
            tuned = stream(loaded, prompt, sampling, images=conversation.seen)
        conversation.tuned += [ask, {"role": "assistant", "content": tuned}]
        conversation.images += conversation.pending
    except KeyboardInterrupt:
        print("\n(interrupted; that turn is forgotten)")
    except (
        ValueError,
        errors.DataError,
    ) as error:  # the template refuses the conversation, or an image is gone
        print(f"(this cannot be asked: {error}; that turn is forgotten)")
    conversation.pending.clear()


def _runs(loaded: LoadedModel, beside: Beside | None) -> list[LoadedModel]:
    """Models with templates and readers of their own."""
    return [loaded, *([beside.model] if beside and beside.model else [])]


def tell_what_is_left_out(loaded: LoadedModel, conversation: Conversation, text: str) -> None:
    """Say, once, what of the conversation the chat template does not show to the model."""
    for what in loaded.left_out(conversation.prompt(conversation.tuned, text, loaded.is_chat)):
        if what not in conversation.told:
            conversation.told.add(what)
            print(shown_on(sys.stdout, f"(note: {what}, which the model does not see)"))


def stream(
    loaded: LoadedModel,
    prompt: Prompt,
    sampling: Sampling,
    label: str = "",
    *,
    images: Sequence[str] = (),
) -> str:
    """Answer on the terminal, as the words come."""
    from kubetune.result.inference.generate import stream_answer

    print(label, end="", flush=True)
    answer = stream_answer(
        loaded,
        prompt,
        sampling,
        lambda piece: print(shown_on(sys.stdout, piece), end="", flush=True),
        images,
    )
    print()
    return answer


def answer_both(
    loaded: LoadedModel, beside: Beside, conversation: Conversation, text: str, sampling: Sampling
) -> tuple[str, str]:
    """The other's answer and the run's: in two columns that fill as they come, where there is room for them."""
    from rich.console import Console

    console, images = Console(), conversation.seen
    is_chat = (beside.model or loaded).is_chat
    before = conversation.prompt(conversation.other, text, is_chat)
    after = conversation.prompt(conversation.tuned, text, loaded.is_chat)
    name = str(loaded.result.run_dir) if beside.model else "tuned"
    if not sys.stdout.isatty() or console.width < NARROWEST_FOR_COLUMNS:
        width = max(len(beside.name), len(name)) + 2
        with beside.lent() as other:
            first = stream(other, before, sampling, f"{beside.name}:".ljust(width), images=images)
        return first, stream(loaded, after, sampling, f"{name}:".ljust(width), images=images)
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    from kubetune.result.inference.generate import stream_answer

    columns: list[tuple[str, list[str]]] = [(beside.name, []), (name, [])]

    def table() -> Table:
        # The terminal writes ^C after it, which must not begin a line: what is drawn anew would not cover the old.
        drawn = Table(width=console.width - 3, show_edge=False)
        for head, _ in columns:
            drawn.add_column(Text(head), ratio=1)
        drawn.add_row(*(Text("".join(said)) for _, said in columns))
        return drawn

    with Live(table(), console=console, auto_refresh=False, vertical_overflow="visible") as live:

        def show(column: int, piece: str) -> None:
            columns[column][1].append(piece)
            live.update(table(), refresh=True)

        with beside.lent() as other:
            first = stream_answer(other, before, sampling, lambda piece: show(0, piece), images)
        last = stream_answer(loaded, after, sampling, lambda piece: show(1, piece), images)
        return first, last
