"""From labelled texts to ids and targets, framed by the special tokens that the tokenizer puts around them."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Encoding

from kubetune.config.schema import Config
from kubetune.data.reading.formats import Example, Labelled
from kubetune.data.text.encode import Encoded
from kubetune.data.text.labels import Labels
from kubetune.data.text.tokenizer import Tokenizer


class LabelledEncoder:
    """Labelled texts and pairs of texts to rows, with the same interface as `encode.Encoder`."""

    def __init__(self, tokenizer: Tokenizer, labels: Labels) -> None:
        self._tokenizer = tokenizer
        self._labels = labels

    def encode_batch(self, examples: Sequence[Example]) -> list[Encoded | str]:
        """Rows of many examples; in the place of one that is refused stands why."""
        rows: list[Encoded | str] = [
            "has no label; expected a labelled text, as `task` is sequence_classification"
        ] * len(examples)
        good = [(i, example) for i, example in enumerate(examples) if isinstance(example, Labelled)]
        encodings = self._tokenizer.framing_backend.encode_batch(
            [_texts(example) for _, example in good]
        )
        for (i, example), encoding in zip(good, encodings, strict=True):
            try:
                rows[i] = _row(encoding, self._labels.target(example.label))
            except ValueError as error:
                rows[i] = str(error)
        return rows

    def cut(self, example: Example, encoded: Encoded, limit: int) -> Encoded:
        """The row with its texts, the longer one first, shortened so that special tokens still frame them."""
        assert isinstance(example, Labelled)
        ids, segments, _ = frame(self._tokenizer, example.text, example.second, limit)
        return Encoded(ids, [False] * len(ids), encoded.target, segments)


def framed_ids(tokenizer: Tokenizer, examples: Sequence[Labelled]) -> list[list[int]]:
    """Ids of each text, or pair, with the special ones that frame it."""
    return [
        encoding.ids
        for encoding in tokenizer.framing_backend.encode_batch([_texts(e) for e in examples])
    ]


def within_positions(config: Config, tokenizer: Tokenizer) -> Config:
    """Encoders know so many positions and no more; a longer row would end the run in its middle."""
    limit = min(config.data.max_length, tokenizer.max_length or config.data.max_length)
    return config.model_copy(update={"data": config.data.model_copy(update={"max_length": limit})})


def frame(
    tokenizer: Tokenizer, text: str, second: str | None, limit: int
) -> tuple[list[int], list[int], bool]:
    """Ids and token types of a text, or a pair, shortened to `limit` tokens between the special ones that frame it.

    The last is true for one that had more.
    """
    backend = tokenizer.framing_backend
    backend.enable_truncation(limit, strategy="longest_first")
    try:
        encoding = backend.encode(text, second)
    finally:
        backend.no_truncation()
    return encoding.ids, encoding.type_ids, bool(encoding.overflowing)


def _texts(example: Labelled) -> str | tuple[str, str]:
    return example.text if example.second is None else (example.text, example.second)


def _row(encoding: Encoding, target: tuple[float, ...]) -> Encoded:
    return Encoded(encoding.ids, [False] * len(encoding.ids), target, encoding.type_ids)
