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
from kubetune.config.schema import Config
from kubetune.data.reading.fields import text_of
from kubetune.data.reading.formats import Chat, convert
from kubetune.data.reading.problems import Problems
from kubetune.data.text.encode import Encoder
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.data.vision.encode import VisionEncoder
from kubetune.data.vision.image_processor import ImageRef
from kubetune.models import loading
from kubetune.result.inference.result import Result, default_device, open_result
from kubetune.scoring.generation import generate, greedy, until_end

Prompt = str | Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Sampling:
    """Choice of tokens: greedily at temperature 0, else from the `top_p` likeliest share."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def settings(self) -> dict[str, Any]:
        """Arguments of transformers' `generate`."""
        if self.temperature == 0.0:
            return greedy(self.max_new_tokens)
        return {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": True,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0,
        }


WINDOW = 256
"""Prompts among which those of equal length go together; what comes after waits."""


class EncodedPrompt(NamedTuple):
    """A prompt as a model takes it; its `images`, where they lie or their bytes, are read when it is its turn."""

    ids: list[int]
    images: tuple[ImageRef | bytes, ...] = ()


@dataclass(frozen=True)
class LoadedModel:
    """A model that answers. `is_chat`: it was taught conversations. `result` is what it was loaded from.

    `reader` reads images for a model with a vision tower.
    """

    model: Any
    tokenizer: Tokenizer
    is_chat: bool
    result: Result
    reader: PictureReader | None = None

    @property
    def config(self) -> Config:
        """The config of its run, with the base as it is found here."""
        return self.result.config

    @contextmanager
    def as_base(self) -> Iterator[LoadedModel]:
        """The model before fine-tuning: the same one with its adapters off, else loaded beside it, once.

        Raises EnvironmentFault where the memory does not hold both.
        """
        with self.result.as_base(self.model) as base:
            yield self if base is self.model else replace(self, model=base)

    @property
    def answers_once(self) -> bool:
        """It answers one question about images, and knows no conversations: PaliGemma."""
        return self.reader is not None and self.reader.processor.reads_prefixes

    def encode(
        self, prompt: Prompt, images: Sequence[str] = (), tools: Sequence[Any] = ()
    ) -> EncodedPrompt:
        """Ids of a prompt; plain text becomes the user's turn where the model was taught conversations.

        `images` go where the prompt has `<image>`, or before it. Raises ValueError for what cannot be asked.
        """
        if isinstance(prompt, str):
            if not self.is_chat and not images and not self.answers_once:
                return EncodedPrompt(
                    self.tokenizer.encode_prompt(text_of(prompt, "it", may_be_empty=True))
                )
            prompt = [{"role": "user", "content": prompt}]
        seen = {"images": [os.path.abspath(image) for image in images]} if images else {}
        chat = convert({"messages": list(prompt), "tools": list(tools), **seen})
        assert isinstance(chat, Chat)
        if chat.images and not images:
            raise ValueError(
                "has images in the parts of its messages; name them in `images`, in their order"
            )
        if not images and not self.answers_once:
            return EncodedPrompt(self.tokenizer.encode_prompt(chat.messages, chat.tools))
        if self.reader is None:
            raise ValueError(
                f"has images, which need a model that sees; this run has `task: {self.config.task}`"
            )
        row = VisionEncoder(Encoder(self.tokenizer), self.reader.processor).encode_prompt(chat)
        return EncodedPrompt(row.ids, row.images)

    def left_out(self, prompt: Prompt, tools: Sequence[Any] = ()) -> list[str]:
        """Parts of a prompt that the chat template does not show to the model, in words.

        Raises ValueError for what cannot be asked.
        """
        if self.answers_once or (isinstance(prompt, str) and not self.is_chat):
            return []
        messages = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        )
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
    """Load the result of a run, ready to answer. `model`: its base, where that lies elsewhere here.

    Raises ConfigError where the base, or its tokenizer, is another than the run was trained with.
    """
    return load_result(open_result(run_dir, which, model, trust_code))


def load_result(result: Result) -> LoadedModel:
    """Load an open result, ready to answer."""
    with result.checked():
        tokenizer = result.tokenizer
        processor = result.image_processor
        model = loading.load_trained(
            result.auto_class, result.spec, result.checkpoint, default_device()
        ).eval()
    # Where nobody knows what it was taught, a model that can chat is taken for one that was taught to.
    is_chat = tokenizer.chat is not None and result.facts.is_chat is not False
    return LoadedModel(
        model, tokenizer, is_chat, result, PictureReader(processor) if processor else None
    )


def answer(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    images: Sequence[Sequence[str]] | None = None,
    batch_size: int = 32,
) -> list[str]:
    """One answer for each prompt, in order. `images`: paths of those that each prompt is about.

    Raises DataError naming each prompt that cannot be asked; nothing is answered then.
    """
    problems, encoded = Problems(), []
    for number, (prompt, paths) in enumerate(
        zip(prompts, images or [()] * len(prompts), strict=True), 1
    ):
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
    """One answer for each prompt, in order, each as soon as it is known.

    Prompts of equal length go together, so nothing is padded; one with images goes alone.
    """
    for start in range(0, len(prompts), WINDOW):
        torch.manual_seed(sampling.seed + start)
        yield from _in_order(loaded, prompts[start : start + WINDOW], sampling, batch_size)


def _in_order(
    loaded: LoadedModel, prompts: Sequence[EncodedPrompt], sampling: Sampling, batch_size: int
) -> Iterator[str]:
    by_length: dict[tuple[int, int], list[int]] = {}
    for index, (ids, images) in enumerate(prompts):
        by_length.setdefault((len(ids), index if images else -1), []).append(index)
    known: dict[int, str] = {}
    next_index = 0
    for group in by_length.values():
        for start in range(0, len(group), batch_size):
            part = group[start : start + batch_size]
            new = _generate(loaded, [prompts[i] for i in part], sampling)
            known |= {
                index: loaded.tokenizer.decode(ids) for index, ids in zip(part, new, strict=True)
            }
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
    """Answer one prompt, handing each new piece of text to `show`; returns the whole answer."""
    torch.manual_seed(sampling.seed)
    printer = _Printer(loaded.tokenizer, show)
    [ids] = _generate(loaded, [loaded.encode(prompt, images)], sampling, printer)
    printer.flush(final=True)
    return loaded.tokenizer.decode(ids)


@torch.inference_mode()
def _generate(
    loaded: LoadedModel,
    prompts: list[EncodedPrompt],
    sampling: Sampling,
    streamer: BaseStreamer | None = None,
) -> list[list[int]]:
    """New ids for prompts of one length, or a single one with images, without what follows the first end token."""
    ids, images = [prompt.ids for prompt in prompts], [prompt.images for prompt in prompts]
    return generate(
        loaded.model,
        loaded.tokenizer,
        ids,
        sampling.settings(),
        loaded.reader,
        images,
        streamer=streamer,
    )


class _Printer(BaseStreamer):  # type: ignore[misc]
    """Turns token ids into text as they come; holds back what may still be half a character."""

    def __init__(self, tokenizer: Tokenizer, show: Callable[[str], None]) -> None:
        self._tokenizer, self._show = tokenizer, show
        self._ids: list[int] = []
        self._shown = ""
        self._prompt_seen = False

    def put(self, value: Any) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self._ids += value.flatten().tolist()
        self.flush()

    def end(self) -> None:
        self.flush(final=True)

    def flush(self, *, final: bool = False) -> None:
        """Show what is new and complete."""
        text = self._tokenizer.decode(until_end(self._ids, self._tokenizer.eos_ids))
        if final or not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self._show(text[len(self._shown) :])
            self._shown = text
