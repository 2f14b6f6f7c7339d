"""From conversations with images to ids: each image becomes as many tokens as the vision tower makes features of it.

What is a label is decided as for any conversation (encode.py); a token of an image never is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from kubetune.data.encode import Encoded, Encoder
from kubetune.data.formats import IMAGE_TAG, Chat, Example
from kubetune.data.image_processor import ImageProcessor, ImageRef


class VisionEncoder:
    """Conversations to rows, with the same interface as `encode.Encoder`. Paths of images must be absolute."""

    def __init__(self, encoder: Encoder, processor: ImageProcessor) -> None:
        self._encoder = encoder
        self._processor = processor
        self._placeholder = processor.placeholder
        self._measure = lru_cache(maxsize=4096)(processor.measure)  # neighbouring records often share an image

    def encode_batch(self, examples: Sequence[Example]) -> list[Encoded | str]:
        """Rows of many examples; in the place of one that is refused stands why."""
        rows: list[Encoded | str] = []
        for example, row in zip(
            examples, self._encoder.encode_batch([self._as_text(e) for e in examples]), strict=True
        ):
            try:
                rows.append(row if isinstance(row, str) else self._expand(example, row))
            except ValueError as error:
                rows.append(str(error))
        return rows

    def encode_prompt(self, chat: Chat) -> Encoded:
        """What a model is given to answer a conversation; of its ids none is a label.

        Raises ValueError when the chat template refuses the conversation, or an image cannot be used.
        """
        text = self._as_text(chat)
        assert isinstance(text, Chat)
        ids = self._encoder.tokenizer.encode_prompt(text.messages, text.tools)
        return self._expand(chat, Encoded(ids, [False] * len(ids)))

    def cut(self, example: Example, encoded: Encoded, limit: int) -> Encoded:
        """The first `limit` tokens of a row; an image that would be cut through is left out with all after it."""
        token, start = self._placeholder.token, self._placeholder.start
        if encoded.ids[limit] == token:
            while limit and encoded.ids[limit - 1] in (token, start):
                limit -= 1
        short = self._encoder.cut(example, encoded, limit)
        return replace(short, images=encoded.images[: _count_runs(short.ids, token)])

    def _as_text(self, example: Example) -> Example:
        if not isinstance(example, Chat) or not example.images:
            return example
        messages = ({**m, "content": m["content"].replace(IMAGE_TAG, self._placeholder.text)} for m in example.messages)
        return replace(example, messages=tuple(messages), images=())

    def _expand(self, example: Example, row: Encoded) -> Encoded:
        """The row with the token of each image repeated. Raises ValueError where an image cannot be used."""
        token = self._placeholder.token
        images = example.images if isinstance(example, Chat) else ()
        found = row.ids.count(token)
        if found != len(images):
            raise ValueError(
                f"has {len(images)} images, but its text makes {found} of the tokens that stand for them: it holds "
                f"{self._placeholder.text!r} itself, or the chat template leaves images out"
            )
        if not images:
            return row
        ids: list[int] = []
        trained: list[bool] = []
        refs = []
        remaining = iter(images)
        for id, is_label in zip(row.ids, row.trained, strict=True):
            if id != token:
                ids.append(id)
                trained.append(is_label)
                continue
            path = next(remaining)
            number, crc = self._measure(Path(path))
            ids += [token] * number
            trained += [False] * number
            refs.append(ImageRef(path, crc))
        return replace(row, ids=ids, trained=trained, images=tuple(refs))


def _count_runs(ids: Sequence[int], token: int) -> int:
    return sum(id == token and (not i or ids[i - 1] != token) for i, id in enumerate(ids))
