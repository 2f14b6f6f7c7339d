"""From conversations with images to ids: each image becomes as many tokens as the vision tower makes features of it.

What is a label is decided as for any conversation (encode.py); a token of an image never is one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from kubetune.data.reading.formats import IMAGE_TAG, Chat, Example, Pair
from kubetune.data.text.encode import Encoded, Encoder
from kubetune.data.text.turns.marks import IMAGE_MARK
from kubetune.data.text.turns.writer import IMAGE_TEXTS
from kubetune.data.vision.image_processor import ImageProcessor, ImageRef, Seen

_BESIDE = re.compile(rf"\n?{re.escape(IMAGE_TAG)}\n?")
"""An image with the line breaks between it and its question."""


class VisionEncoder:
    """Conversations to rows, with the same interface as `encode.Encoder`. Paths of images must be absolute."""

    def __init__(self, encoder: Encoder, processor: ImageProcessor) -> None:
        self._processor = processor
        self._reads_prefixes = processor.reads_prefixes
        self._encoder = encoder.without_prefix() if self._reads_prefixes else encoder
        self._placeholder = processor.placeholder
        self._see_paths = lru_cache(maxsize=4096)(
            processor.see
        )  # neighbouring records often share an image

    def encode_batch(self, examples: Sequence[Example]) -> list[Encoded | str]:
        """Rows of many examples; in the place of one that is refused stands why."""
        rows: list[Encoded | str] = [""] * len(examples)
        texts: dict[int, Example] = {}
        for number, example in enumerate(examples):
            try:
                texts[number] = self._as_text(example)
            except ValueError as error:
                rows[number] = str(error)
        for number, row in zip(
            texts, self._encoder.encode_batch(list(texts.values())), strict=True
        ):
            try:
                rows[number] = row if isinstance(row, str) else self._expand(examples[number], row)
            except ValueError as error:
                rows[number] = str(error)
        return rows

    def encode_prompt(self, chat: Chat) -> Encoded:
        """The input from which a model answers a conversation; of its ids none is a label.

        Raises ValueError when the chat template refuses the conversation, or an image cannot be used.
        """
        tokenizer = self._encoder.tokenizer
        if self._reads_prefixes:
            ids = tokenizer.encode_text(self._as_question(chat), special=False)
        else:
            text = self._as_text(chat)
            assert isinstance(text, Chat)
            ids = tokenizer.encode_prompt(text.messages, text.tools)
        return self._expand(chat, Encoded(ids, [False] * len(ids)))

    def cut(self, example: Example, encoded: Encoded, limit: int) -> Encoded:
        """The first `limit` tokens of a row; an image that would be cut through is left out with all after it."""
        start = self._placeholder.start
        places = [place for place, id in enumerate(encoded.ids) if id == self._placeholder.token]
        seen, end = self._see([image.path for image in encoded.images]), 0
        for number, image in enumerate(seen):
            begin, end = end, end + sum(image.runs)
            if places[end - 1] >= limit:
                if self._see([image.path for image in encoded.images[:number]]) != seen[:number]:
                    number = begin = 0  # those before it would look otherwise without it
                limit = min(limit, places[begin])
                while limit and encoded.ids[limit - 1] == start:
                    limit -= 1
                return replace(
                    self._encoder.cut(example, encoded, limit), images=encoded.images[:number]
                )
        return self._encoder.cut(example, encoded, limit)

    def _see(self, paths: Sequence[str]) -> list[Seen]:
        """The images of a row, made ready. Raises ValueError where one cannot be used."""
        return self._see_paths(tuple(map(Path, paths)))

    def _as_text(self, example: Example) -> Example:
        """The conversation with what stands for each image in its texts. Raises ValueError for one that is no good."""
        if self._reads_prefixes:
            return self._as_pair(example)
        if not isinstance(example, Chat) or not example.images:
            return example
        if self._processor.is_grid:
            put = self._placeholder.text
            messages = [
                {**m, "content": m["content"].replace(IMAGE_TAG, put)} for m in example.messages
            ]
            return replace(example, messages=tuple(messages), images=())
        remaining, written = iter(self._see(example.images)), self._processor.whole.written
        messages = [
            {
                **m,
                "content": m["content"].replace(IMAGE_TAG, IMAGE_MARK),
                IMAGE_TEXTS: [
                    (written, next(remaining).text) for _ in range(m["content"].count(IMAGE_TAG))
                ],
            }
            for m in example.messages
        ]
        return replace(example, messages=tuple(messages), images=())

    def _as_pair(self, example: Example) -> Pair:
        """A question and its answer, for a model that reads questions in both directions."""
        if not isinstance(example, Chat) or [m["role"] for m in example.messages] != [
            "user",
            "assistant",
        ]:
            raise ValueError(
                "is not one question with its answer: this model reads all before the answer in both directions, so "
                "that it can learn no more than one; make a record of each answer"
            )
        if self._encoder.trains_all:
            raise ValueError(
                "`data.train_on` is all, but this model sees its whole question when it reads its first word"
            )
        return Pair(self._as_question(example, 1), str(example.messages[1]["content"]))

    def _as_question(self, chat: Chat, answers: int = 0) -> str:
        """A question with its images as the model's processor lays it out."""
        if [m["role"] for m in chat.messages[: len(chat.messages) - answers]] != ["user"]:
            raise ValueError("is a conversation, and this model answers one question")
        if not chat.images:
            raise ValueError("has no image, and this model's processor wants one in each question")
        written = self._processor.whole.written
        question = _BESIDE.sub(IMAGE_TAG, chat.messages[0]["content"]).replace(IMAGE_TAG, written)
        pieces = self._processor.whole.lay_out(question, len(chat.images)).split(written)
        seen = self._see(chat.images)
        if len(pieces) != len(seen) + 1:
            raise ValueError(
                f"has {len(seen)} images and {len(pieces) - 1} of {written!r}: its text holds that itself"
            )
        return pieces[0] + "".join(
            f"{image.text}{piece}" for image, piece in zip(seen, pieces[1:], strict=True)
        )

    def _expand(self, example: Example, row: Encoded) -> Encoded:
        """The row with the token of each image repeated. Raises ValueError where an image cannot be used."""
        token = self._placeholder.token
        images = example.images if isinstance(example, Chat) else ()
        found = row.ids.count(token)
        seen = self._see(images)
        if found != sum(len(image.runs) for image in seen):
            raise ValueError(
                f"has {len(images)} images, but its text makes {found} of the tokens that stand for them: it holds "
                f"{self._placeholder.text!r} itself, or the chat template leaves images out"
            )
        if not images:
            return row
        ids: list[int] = []
        trained: list[bool] = []
        runs = iter([run for image in seen for run in image.runs])
        for id, is_label in zip(row.ids, row.trained, strict=True):
            number = next(runs) if id == token else 1
            ids += [id] * number
            trained += [is_label and id != token] * number
        refs = tuple(ImageRef(path, image.crc) for path, image in zip(images, seen, strict=True))
        notes = tuple(note for image in seen for note in image.notes)
        return replace(row, ids=ids, trained=trained, images=refs, image_notes=notes)
