"""Answers of a trained model: what `kubetune generate`, `kubetune chat` and the demo share.

Prompts become ids by the very function that made them in training, so that a model is asked the way it was taught.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from transformers.generation.streamers import BaseStreamer

from kubetune.base.files import StrPath
from kubetune.batching.image_batches import PictureReader
from kubetune.data.reading.examples import Chat
from kubetune.data.reading.fields import text_of
from kubetune.data.reading.formats import convert
from kubetune.data.reading.images import ImageRef
from kubetune.data.reading.record_problems import Problems
from kubetune.data.text.encode import Encoder
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.data.vision.encode_images import VisionEncoder
from kubetune.models import loading
from kubetune.result.inference.result import Result, default_device, open_result
from kubetune.scoring.generation import generate, greedy, until_end

# A text, or the messages of a conversation.
Prompt = str | Sequence[dict[str, Any]]

# Prompts among which those of equal length go together; what comes after waits.
WINDOW = 256


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: greedily at temperature 0, else from the `top_p` likeliest share."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def settings(self) -> dict[str, Any]:
        """Return the arguments of transformers' `generate`."""
        # Nothing is drawn, so the other settings mean nothing.
        if self.temperature == 0.0:
            return greedy(self.max_new_tokens)
        return {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": True,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0,
        }


class EncodedPrompt(NamedTuple):
    """A prompt as a model takes it."""

    ids: list[int]
    # Where they lie, or their bytes. They are read when it is their turn.
    images: tuple[ImageRef | bytes, ...] = ()


@dataclass(frozen=True)
class LoadedModel:
    """A model that answers."""

    model: Any
    tokenizer: Tokenizer
    is_chat: bool  # it was taught conversations
    result: Result  # what it was loaded from
    reader: PictureReader | None = None  # of images, for a model with a vision tower

    @contextmanager
    def as_base(self) -> Iterator[LoadedModel]:
        """Yield the model before fine-tuning: the same one with its adapters off, else loaded beside it, once.

        Raise EnvironmentFault if the memory does not hold both.
        """
        with self.result.as_base(self.model) as base:
            yield replace(self, model=base)

    @property
    def answers_once(self) -> bool:
        """True for a model that answers one question about images, without conversations: PaliGemma."""
        return self.reader is not None and self.reader.processor.reads_prefixes

    def encode(
        self,
        prompt: Prompt,
        images: Sequence[str] = (),
        tools: Sequence[Any] = (),
    ) -> EncodedPrompt:
        """Return the ids of a prompt. Plain text becomes the user's turn if the model was taught conversations.

        `images` go where the prompt has `<image>`, or before it. Raise ValueError for what cannot be asked.
        """
        if isinstance(prompt, str):
            if not self.is_chat and not images and not self.answers_once:
                text = text_of(prompt, "it", may_be_empty=True)
                return EncodedPrompt(self.tokenizer.encode_prompt(text))
            prompt = [{"role": "user", "content": prompt}]

        # A record as those of the training data, and read by the same code.
        record = {"messages": list(prompt), "tools": list(tools)}
        if images:
            record["images"] = [os.path.abspath(image) for image in images]
        chat = convert(record)
        assert isinstance(chat, Chat)
        if chat.images and not images:
            raise ValueError(
                "has images in the parts of its messages; name them in `images`, in their order"
            )
        if not images and not self.answers_once:
            return EncodedPrompt(self.tokenizer.encode_prompt(chat.messages, chat.tools))
        if self.reader is None:
            raise ValueError(
                f"has images, which need a model that sees; this run has `task: {self.result.trained.task}`"
            )

        # Each image stands for as many tokens as the processor makes of its size.
        row = VisionEncoder(Encoder(self.tokenizer), self.reader.processor).encode_prompt(chat)
        return EncodedPrompt(row.ids, row.images)

    def left_out(self, prompt: Prompt, tools: Sequence[Any] = ()) -> list[str]:
        """Return the parts of a prompt that the chat template does not show to the model, in words.

        Raise ValueError for what cannot be asked.
        """
        # Without a template, the model sees all.
        if self.answers_once or (isinstance(prompt, str) and not self.is_chat):
            return []
        messages = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, str):
            messages = list(prompt)
        chat = convert({"messages": messages, "tools": list(tools)})
        assert isinstance(chat, Chat)
        return self.tokenizer.require_chat().left_out(chat.messages, chat.tools)


def load_run(
    run_dir: StrPath,
    which: str = "best",
    *,
    model: str | None = None,
    trust_code: str | None = None,
) -> LoadedModel:
    """Load the result of a run, ready to answer. `model`: its base, if that lies elsewhere here.

    Raise ConfigError if the base, or its tokenizer, is another than the run was trained with.
    """
    return load_result(open_result(run_dir, which, model, trust_code))


def load_result(result: Result) -> LoadedModel:
    """Load an open result, ready to answer."""
    with result.checked():
        tokenizer = result.tokenizer
        processor = result.image_processor
        model = loading.load_trained(
            result.auto_class,
            result.spec,
            result.checkpoint,
            default_device(),
        ).eval()

    # Where nobody knows what it was taught, a model that can chat is taken for one that was taught to.
    is_chat = tokenizer.chat is not None and result.facts.is_chat is not False
    reader = None
    if processor is not None:
        reader = PictureReader(processor)
    return LoadedModel(model, tokenizer, is_chat, result, reader)


def answer(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    images: Sequence[Sequence[str]] | None = None,
    batch_size: int = 32,
) -> list[str]:
    """Return one answer for each prompt, in order. `images`: for each prompt, the paths of its images.

    Raise DataError naming each prompt that cannot be asked; nothing is answered then.
    """
    if images is None:
        images = [()] * len(prompts)
    # All prompts are checked before the first is answered.
    problems = Problems()
    encoded = []
    for number, (prompt, paths) in enumerate(zip(prompts, images, strict=True), 1):
        try:
            encoded.append(loaded.encode(prompt, paths))
        except ValueError as error:
            problems.add(f"prompt:{number}", str(error))

    problems.raise_if_any()
    return list(answers(loaded, encoded, sampling, batch_size=batch_size))


def answers(
    loaded: LoadedModel,
    prompts: Sequence[EncodedPrompt],
    sampling: Sampling,
    *,
    batch_size: int = 32,
) -> Iterator[str]:
    """Yield one answer for each prompt, in order, each as soon as it is known.

    Prompts of equal length go together, so nothing is padded; one with images goes alone.
    """
    # A seed for each window, so that its answers do not depend on how many came before them.
    for start in range(0, len(prompts), WINDOW):
        torch.manual_seed(sampling.seed + start)
        yield from _in_order(
            loaded,
            prompts[start : start + WINDOW],
            sampling,
            batch_size,
        )


def _in_order(
    loaded: LoadedModel,
    prompts: Sequence[EncodedPrompt],
    sampling: Sampling,
    batch_size: int,
) -> Iterator[str]:
    """Yield the answers of one window. An answer waits for those of the prompts before it.

    lengths     5 7 5 9    groups [0 2] [1] [3]
    answered    0 2 1 3    yielded: 0, then 1 and 2, then 3
    """
    # By length, and for a prompt with images by its index.
    groups: dict[tuple[int, int], list[int]] = {}
    for index, (ids, images) in enumerate(prompts):
        key = (len(ids), index if images else -1)
        groups.setdefault(key, []).append(index)

    known: dict[int, str] = {}
    next_index = 0
    for group in groups.values():
        for start in range(0, len(group), batch_size):
            part = group[start : start + batch_size]
            new = _generate(loaded, [prompts[index] for index in part], sampling)
            for index, ids in zip(part, new, strict=True):
                known[index] = loaded.tokenizer.decode(ids)
            # Whatever comes next in order is shown at once.
            while next_index in known:
                yield known.pop(next_index)
                next_index += 1


def stream_answer(
    loaded: LoadedModel,
    prompt: Prompt,
    sampling: Sampling,
    show: Callable[[str], None],
    images: Sequence[str] = (),
) -> str:
    """Answer one prompt, passing each new piece of text to `show`. Return the whole answer."""
    # As in `answers`, so that a lone prompt gets the same answer streamed or not.
    torch.manual_seed(sampling.seed)
    printer = _Printer(loaded.tokenizer, show)
    [ids] = _generate(
        loaded,
        [loaded.encode(prompt, images)],
        sampling,
        printer,
    )
    printer.flush(final=True)
    return loaded.tokenizer.decode(ids)


@torch.inference_mode()
def _generate(
    loaded: LoadedModel,
    prompts: list[EncodedPrompt],
    sampling: Sampling,
    streamer: BaseStreamer | None = None,
) -> list[list[int]]:
    """Return the new ids of each prompt, up to the first end token.

    The prompts have one length, or are a single one with images.
    """
    return generate(
        loaded.model,
        loaded.tokenizer,
        [prompt.ids for prompt in prompts],
        sampling.settings(),
        loaded.reader,
        [prompt.images for prompt in prompts],
        streamer=streamer,
    )


class _Printer(BaseStreamer):  # type: ignore[misc]
    """Turns token ids into text as they come. A token that may be half a character is held back."""

    def __init__(self, tokenizer: Tokenizer, show: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._show = show
        self._ids: list[int] = []  # all of the answer so far
        self._shown = ""
        self._has_prompt = False

    def put(self, value: Any) -> None:
        # transformers puts the prompt first.
        if not self._has_prompt:
            self._has_prompt = True
            return
        self._ids += value.flatten().tolist()
        self.flush()

    def end(self) -> None:
        self.flush(final=True)

    def flush(self, *, final: bool = False) -> None:
        """Show what is new and complete."""
        # All is decoded each time, since the text of a token depends on those before it.
        text = self._tokenizer.decode(until_end(self._ids, self._tokenizer.eos_ids))
        # Half a character is decoded as this sign; the next token may complete it.
        if final or not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self._show(text[len(self._shown) :])
            self._shown = text
