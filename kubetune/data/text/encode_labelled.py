"""From labelled texts to ids and targets, framed by the special tokens that the tokenizer puts around them."""

from __future__ import annotations

from collections.abc import Sequence

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
        """Return rows of many examples; in place of one that is refused stands why."""
        labelled = {i: e for i, e in enumerate(examples) if isinstance(e, Labelled)}
        encodings = self._tokenizer.framing_backend.encode_batch(
            [_texts(example) for example in labelled.values()]
        )
        rows: list[Encoded | str] = [
            "has no label; expected a labelled text, as `task` is sequence_classification"
        ] * len(examples)
        for (i, example), encoding in zip(labelled.items(), encodings, strict=True):
            try:
                target = self._labels.target(example.label)
            except ValueError as error:
                rows[i] = str(error)
                continue
            rows[i] = Encoded(encoding.ids, [False] * len(encoding.ids), target, encoding.type_ids)
        return rows

    def cut(self, example: Example, encoded: Encoded, limit: int) -> Encoded:
        """Return the row with its texts, the longer one first, shortened so that special tokens still frame them."""
        assert isinstance(example, Labelled)
        ids, segments, _ = frame(self._tokenizer, example.text, example.second, limit)
        return Encoded(ids, [False] * len(ids), encoded.target, segments)


def framed_ids(tokenizer: Tokenizer, examples: Sequence[Labelled]) -> list[list[int]]:
    """Return the ids of each text, or pair, with the special ones that frame it."""
    texts = [_texts(example) for example in examples]
    return [encoding.ids for encoding in tokenizer.framing_backend.encode_batch(texts)]


def most_tokens(max_length: int, tokenizer: Tokenizer) -> int:
    """Return the longest row: encoders know so many positions, and a longer row would end the run in its middle."""
    return min(max_length, tokenizer.max_length or max_length)


def frame(
    tokenizer: Tokenizer, text: str, second: str | None, limit: int
) -> tuple[list[int], list[int], bool]:
    """Return ids and token types of a text, or a pair, shortened to `limit` tokens with the special ones.

    The last is True for one that had more.
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
