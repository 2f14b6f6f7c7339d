"""From conversations with images to ids: each image becomes as many tokens as the vision tower makes features of it.

What is a label is decided as for any conversation (encode.py); a token of an image never is one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from kubetune.data.reading.examples import Chat, Example, Pair
from kubetune.data.reading.images import ImageRef
from kubetune.data.reading.messages import IMAGE_TAG
from kubetune.data.reading.strict_json import JsonObject
from kubetune.data.text.encode import Encoded, Encoder
from kubetune.data.text.row_notes import RowNote
from kubetune.data.text.turns.marks import IMAGE_MARK
from kubetune.data.text.turns.writer import IMAGE_TEXTS
from kubetune.data.vision.image_processor import ImageProcessor, Seen

# An image with the line breaks between it and its question.
_BESIDE = re.compile(rf"\n?{re.escape(IMAGE_TAG)}\n?")


class VisionEncoder:
    """Conversations to rows, as any `RowEncoder`. Paths of images must be absolute."""

    def __init__(self, encoder: Encoder, processor: ImageProcessor) -> None:
        self._processor = processor
        self._reads_prefixes = processor.reads_prefixes
        # Where the processor lays out the question, it writes BOS itself.
        self._encoder = encoder.without_prefix() if self._reads_prefixes else encoder
        self._placeholder = processor.placeholder
        # Neighbouring records often share an image, and have to be looked at once.
        self._see_paths = lru_cache(maxsize=4096)(processor.see)

    def encode_batch(self, examples: Sequence[Example]) -> list[Encoded | str]:
        """Return the rows of many examples; the reason in place of a refused one."""
        rows: list[Encoded | str] = [""] * len(examples)
        texts: dict[int, Example] = {}
        for number, example in enumerate(examples):
            try:
                texts[number] = self._as_text(example)
            except ValueError as error:
                rows[number] = str(error)

        # One call for all texts: the tokenizer works on them in parallel.
        encoded = self._encoder.encode_batch(list(texts.values()))
        for number, row in zip(texts, encoded, strict=True):
            if isinstance(row, str):
                rows[number] = row
                continue
            try:
                rows[number] = self._expand(examples[number], row)
            except ValueError as error:
                rows[number] = str(error)

        return rows

    def encode_prompt(self, chat: Chat) -> Encoded:
        """Return the input from which a model answers a conversation; of its ids none is a label.

        Raise ValueError when the chat template refuses the conversation, or an image cannot be used.
        """
        tokenizer = self._encoder.tokenizer
        if self._reads_prefixes:
            ids = tokenizer.encode_text(self._as_question(chat), special=False)
        else:
            text = self._as_text(chat)
            assert isinstance(text, Chat)
            ids = tokenizer.encode_prompt(text.messages, text.tools)

        return self._expand(chat, Encoded(ids, [False] * len(ids)))

    def cut(
        self,
        example: Example,
        encoded: Encoded,
        limit: int,
    ) -> Encoded:
        """Return the first `limit` tokens of a row; an image that would be cut is left out with all after it."""
        token = self._placeholder.token
        paths = [image.path for image in encoded.images]
        seen = self._see(paths)

        # The tokens of all images, by their places in the row; the tokens of an image begin at `begin` in this list.
        places = [place for place, id in enumerate(encoded.ids) if id == token]
        begin = 0
        for number, image in enumerate(seen):
            end = begin + sum(image.runs)
            if places[end - 1] < limit:
                begin = end
                continue

            # This image would be cut. Some models lay out several images of a row otherwise than fewer; where they do,
            # no image can stay.
            whole = number
            if self._see(paths[:number]) != seen[:number]:
                whole = 0
                begin = 0
            limit = min(limit, places[begin])
            while limit and encoded.ids[limit - 1] == self._placeholder.start:
                limit -= 1
            cut = self._encoder.cut(example, encoded, limit)
            return replace(cut, images=encoded.images[:whole])

        return self._encoder.cut(example, encoded, limit)

    def _see(self, paths: Sequence[str]) -> list[Seen]:
        """Return the images of a row, made ready. Raise ValueError if one cannot be used."""
        return self._see_paths(tuple(map(Path, paths)))

    def _as_text(self, example: Example) -> Example:
        """Return the conversation with placeholders for its images. Raise ValueError for one that is no good."""
        if self._reads_prefixes:
            return self._as_pair(example)
        if not isinstance(example, Chat) or not example.images:
            return example
        if self._processor.is_grid:
            messages = _with_placeholders(example, self._placeholder.text)
        else:
            messages = self._with_laid_out_images(example)
        return replace(example, messages=tuple(messages), images=())

    def _with_laid_out_images(self, chat: Chat) -> list[JsonObject]:
        """Return the messages with a mark for each image, and what the template has to write for these marks."""
        # The template of such a model may lay images out itself, each according to its size.
        written = self._processor.whole.written
        messages = []
        seen = self._see(chat.images)
        begin = 0  # the first image of a message
        for message in chat.messages:
            end = begin + message["content"].count(IMAGE_TAG)
            texts = [(written, image.text) for image in seen[begin:end]]
            begin = end
            content = message["content"].replace(IMAGE_TAG, IMAGE_MARK)
            messages.append({**message, "content": content, IMAGE_TEXTS: texts})

        return messages

    def _as_pair(self, example: Example) -> Pair:
        """Return a question and its answer, for a model that reads questions in both directions."""
        if not isinstance(example, Chat) or _roles(example) != ["user", "assistant"]:
            raise ValueError(
                "is not one question with its answer: this model reads all before the answer in both directions, so "
                "it can learn only one; make a record of each answer"
            )

        if self._encoder.trains_all:
            raise ValueError(
                "`data.train_on` is all, but this model sees its whole question when it reads its first word"
            )

        question = replace(example, messages=example.messages[:1])
        return Pair(self._as_question(question), str(example.messages[1]["content"]))

    def _as_question(self, chat: Chat) -> str:
        """Return a question with its images as the model's processor lays it out."""
        if _roles(chat) != ["user"]:
            raise ValueError("is a conversation, and this model answers one question")
        if not chat.images:
            raise ValueError("has no image, and this model's processor wants one in each question")

        # The processor puts all images where it wants them; then each gets as many tokens as it needs.
        written = self._processor.whole.written
        question = _BESIDE.sub(IMAGE_TAG, chat.messages[0]["content"]).replace(IMAGE_TAG, written)
        pieces = self._processor.whole.lay_out(question, len(chat.images)).split(written)
        seen = self._see(chat.images)
        if len(pieces) != len(seen) + 1:
            raise ValueError(
                f"has {len(seen)} images and {len(pieces) - 1} of {written!r}: its text holds that itself"
            )

        text = pieces[0]
        for image, piece in zip(seen, pieces[1:], strict=True):
            text += image.text + piece
        return text

    def _expand(self, example: Example, row: Encoded) -> Encoded:
        """Return the row with the token of each image repeated. Raise ValueError if an image cannot be used.

        Example: a row with an image of four tokens; `x` is a label.

            ids         user <image> What ? assistant Red <end>
            trained                                   x   x
            becomes     user <image> <image> <image> <image> What ? assistant Red <end>
        """
        token = self._placeholder.token
        images = example.images if isinstance(example, Chat) else ()
        runs: list[int] = []
        refs: list[ImageRef] = []
        notes: list[RowNote] = []
        for path, image in zip(images, self._see(images), strict=True):
            # An image may be several runs of its token, such as rows of a grid.
            runs += image.runs
            refs.append(ImageRef(path, image.crc))
            notes += image.notes

        # One token for each run: text that holds the token itself, or a template that leaves images out, changes that.
        placeholders = row.ids.count(token)
        if placeholders != len(runs):
            raise ValueError(
                f"has {len(images)} images, but its text makes {placeholders} of the tokens that stand for them: it "
                f"holds {self._placeholder.text!r} itself, or the chat template leaves images out"
            )

        if not images:
            return row

        ids, trained = _repeated(row, token, runs)
        return replace(
            row,
            ids=ids,
            trained=trained,
            images=tuple(refs),
            image_notes=tuple(notes),
        )


def _roles(chat: Chat) -> list[str]:
    return [message["role"] for message in chat.messages]


def _with_placeholders(chat: Chat, placeholder: str) -> list[JsonObject]:
    """Return the messages with the same few tokens for each image, one of which `_repeated` repeats."""
    messages = []
    for message in chat.messages:
        content = message["content"].replace(IMAGE_TAG, placeholder)
        messages.append({**message, "content": content})
    return messages


def _repeated(row: Encoded, token: int, runs: Iterable[int]) -> tuple[list[int], list[bool]]:
    """Return the ids of a row, and which are labels, with each `token` as often as its run is long."""
    ids: list[int] = []
    trained: list[bool] = []
    lengths = iter(runs)
    for id, is_label in zip(row.ids, row.trained, strict=True):
        if id == token:
            length = next(lengths)
            ids += [id] * length
            trained += [False] * length
        else:
            ids.append(id)
            trained.append(is_label)
    return ids, trained
