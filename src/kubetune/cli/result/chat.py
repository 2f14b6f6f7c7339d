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
from kubetune.base.humanize import shell_word, shown_on, visible
from kubetune.cli.busy import busy
from kubetune.cli.result.generate import add_sampling, is_classifier, sampling_of
from kubetune.data.reading.messages import IMAGE_TAG

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kubetune.result.inference.answering import LoadedModel, Prompt, Sampling

HELP = """\
/reset         forgets the conversation
/system TEXT   sets the system message, and forgets the conversation; without TEXT there is none
/image FILE    shows the model an image with your next message
/history       shows the conversation
/exit, Ctrl-D  leaves; Ctrl-C interrupts an answer"""
# On a narrower terminal the answers lie below each other.
NARROWEST_FOR_COLUMNS = 80


@dataclass(frozen=True)
class SecondModel:
    """A model that answers beside the run's: its base, or the result of another run."""

    name: str
    active: Callable[[], AbstractContextManager[LoadedModel]]  # makes it answer, within a block
    # For another run, which has its own template and reader of images; None for the base.
    loaded: LoadedModel | None = None


@dataclass
class Conversation:
    """The conversation so far."""

    system: str | None
    tuned: list[dict[str, Any]] = field(default_factory=list)  # turns with the result of the run
    other: list[dict[str, Any]] = field(default_factory=list)  # the same with the second model
    images: list[str] = field(default_factory=list)  # shown so far
    pending: list[str] = field(default_factory=list)  # images that go with the next question
    noted: set[str] = field(default_factory=set)  # parts of which a note was printed: left out

    def reset(self) -> None:
        """Forget all turns and images."""
        self.tuned.clear()
        self.other.clear()
        self.images.clear()
        self.pending.clear()

    @property
    def seen(self) -> list[str]:
        """The images that the next prompt is about."""
        return [*self.images, *self.pending]

    def tagged(self, text: str) -> str:
        """Return the text with a tag for each pending image, unless it holds them already."""
        missing = len(self.pending) - text.count(IMAGE_TAG)
        return f"{IMAGE_TAG}\n" * missing + text

    def prompt(self, history: list[dict[str, Any]], text: str, is_chat: bool) -> Prompt:
        """Return the next prompt. A model trained on plain text has no turns: it gets only the text."""
        if not is_chat and not self.seen:
            return text
        messages = [*history, {"role": "user", "content": text}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        return messages


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
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
    # Refuse what cannot be talked to before seconds are spent on loading it.
    for run_dir in filter(None, (args.run_dir, args.beside)):
        if is_classifier(run_dir):
            raise errors.ConfigError(
                f"{run_dir} is a classifier; ask it with kubetune generate {shell_word(run_dir)} TEXT"
            )
    from kubetune.result.inference.requirements import require_result

    require_result(args.run_dir, args.checkpoint, args.model)
    if args.beside:
        require_result(args.beside)
    sampling = sampling_of(args)
    with suppress(ImportError):
        # Just the import gives `input` arrow keys and a history.
        import readline  # noqa: F401
    with busy(f"loading the model of {visible(str(args.run_dir))}") as work:
        from kubetune.result.inference.answering import load_run

        # The base is the same model with its adapters off; another run is loaded beside it.
        loaded = load_run(
            args.run_dir, args.checkpoint, model=args.model, trust_code=args.trust_code
        )
        beside = None
        if args.compare:
            beside = SecondModel("base", loaded.as_base)
        if args.beside:
            work.count(f"loading the model of {visible(str(args.beside))}", None, 0)
            second = load_run(args.beside, "best")
            beside = SecondModel(str(args.beside), lambda: nullcontext(second), second)

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
    """Carry out a line that begins with a slash. Return what to print."""
    name, _, rest = command.partition(" ")
    if name == "/reset":
        conversation.reset()
        return "forgotten"
    if name == "/system":
        conversation.reset()
        conversation.system = rest.strip() or None
        if conversation.system is None:
            return "no system message"
        return f"system: {conversation.system}"
    if name == "/history":
        lines = [f"{turn['role']}: {turn['content']}" for turn in conversation.tuned]
        return "\n".join(lines) or "nothing was said yet"
    return HELP


def show_image(
    file: str, conversation: Conversation, loaded: LoadedModel, beside: SecondModel | None = None
) -> str:
    """Keep an image for the next question. Return what to print about it."""
    for model in _runs(loaded, beside):
        if model.reader is None:
            return f"a run with `task: {model.result.trained.task}`: its model sees no images"
    from kubetune.data.reading.images import UnusableImage, verify_image

    try:
        facts = verify_image(Path(file).expanduser())
    except UnusableImage as error:
        return str(error)
    conversation.pending.append(str(Path(file).expanduser()))
    return f"{facts.format}, {facts.width} × {facts.height}: goes with your next message"


def converse(
    loaded: LoadedModel,
    conversation: Conversation,
    text: str,
    sampling: Sampling,
    beside: SecondModel | None = None,
) -> None:
    """Ask and answer. The turn becomes part of the conversation once it is complete. No error ends the chat."""
    # The turn is kept only at the end, so that an interrupted one leaves nothing behind.
    text = conversation.tagged(text)
    question = {"role": "user", "content": text}
    try:
        for model in _runs(loaded, beside):
            tell_what_is_left_out(model, conversation, text)
        if beside:
            other, tuned = answer_both(loaded, beside, conversation, text, sampling)
            conversation.other += [question, {"role": "assistant", "content": other}]
        else:
            prompt = conversation.prompt(conversation.tuned, text, loaded.is_chat)
            tuned = stream(loaded, prompt, sampling, images=conversation.seen)
        conversation.tuned += [question, {"role": "assistant", "content": tuned}]
        conversation.images += conversation.pending
    except KeyboardInterrupt:
        print("\n(interrupted; that turn is forgotten)")
    except (ValueError, errors.DataError) as error:
        # The template refuses the conversation, or an image was removed.
        print(f"(this cannot be asked: {error}; that turn is forgotten)")
    conversation.pending.clear()


def _runs(loaded: LoadedModel, beside: SecondModel | None) -> list[LoadedModel]:
    """Return the models that have their own template and reader of images."""
    models = [loaded]
    if beside and beside.loaded:
        models.append(beside.loaded)
    return models


def tell_what_is_left_out(loaded: LoadedModel, conversation: Conversation, text: str) -> None:
    """Print, once, which parts of the conversation the chat template does not show to the model."""
    prompt = conversation.prompt(conversation.tuned, text, loaded.is_chat)
    for part in loaded.left_out(prompt):
        if part not in conversation.noted:
            conversation.noted.add(part)
            print(shown_on(sys.stdout, f"(note: {part}, which the model does not see)"))


def stream(
    loaded: LoadedModel,
    prompt: Prompt,
    sampling: Sampling,
    label: str = "",
    *,
    images: Sequence[str] = (),
) -> str:
    """Print an answer word by word, and return it."""
    from kubetune.result.inference.answering import stream_answer

    def show(piece: str) -> None:
        print(shown_on(sys.stdout, piece), end="", flush=True)

    print(label, end="", flush=True)
    answer = stream_answer(loaded, prompt, sampling, show, images)
    print()
    return answer


def answer_both(
    loaded: LoadedModel,
    beside: SecondModel,
    conversation: Conversation,
    text: str,
    sampling: Sampling,
) -> tuple[str, str]:
    """Print and return the second model's answer and the run's: in two columns if there is room for them."""
    from rich.console import Console

    # The two models have had different answers, so their prompts differ after the first turn.
    console = Console()
    images = conversation.seen
    second_is_chat = (beside.loaded or loaded).is_chat
    second_prompt = conversation.prompt(conversation.other, text, second_is_chat)
    prompt = conversation.prompt(conversation.tuned, text, loaded.is_chat)
    name = "tuned"
    if beside.loaded:
        name = str(loaded.result.run_dir)

    # One below the other.
    if not sys.stdout.isatty() or console.width < NARROWEST_FOR_COLUMNS:
        width = max(len(beside.name), len(name)) + 2
        label = f"{beside.name}:".ljust(width)
        with beside.active() as second:
            second_answer = stream(second, second_prompt, sampling, label, images=images)
        label = f"{name}:".ljust(width)
        return second_answer, stream(loaded, prompt, sampling, label, images=images)

    from kubetune.result.inference.answering import stream_answer

    columns = Columns(console, (beside.name, name))
    with columns.live:
        with beside.active() as second:
            second_answer = stream_answer(
                second, second_prompt, sampling, columns.writer(0), images
            )
        answer = stream_answer(loaded, prompt, sampling, columns.writer(1), images)
    return second_answer, answer


class Columns:
    """Answers in columns of the terminal, which fill as the words come."""

    def __init__(self, console: Console, names: Sequence[str]) -> None:
        from rich.live import Live

        # Drawn when a word comes, and not by the clock.
        self._names = names
        self._texts = [""] * len(names)
        # The terminal writes ^C after a full line, and what is drawn again would not cover that.
        self._width = console.width - 3
        self.live = Live(
            self._table(), console=console, auto_refresh=False, vertical_overflow="visible"
        )

    def writer(self, column: int) -> Callable[[str], None]:
        """Return the function that appends to a column."""

        def write(piece: str) -> None:
            self._texts[column] += piece
            self.live.update(self._table(), refresh=True)

        return write

    def _table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(width=self._width, show_edge=False)
        for name in self._names:
            table.add_column(Text(name), ratio=1)
        table.add_row(*(Text(text) for text in self._texts))
        return table
