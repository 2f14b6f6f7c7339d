"""Encode labelled texts: ids within the special tokens that the tokenizer puts around them, and targets."""

from __future__ import annotations

from collections.abc import Sequence

from kubetune.data.reading.examples import Example, Labelled
from kubetune.data.text.class_labels import Labels
from kubetune.data.text.encode import Encoded
from kubetune.data.text.tokenizer import Tokenizer


class LabelledEncoder:
    """Turns labelled texts and pairs of texts into rows, as any `RowEncoder`.

    text "Good"                       pair "Good", "Bad"
    ids       [CLS] Good [SEP]        [CLS] Good [SEP] Bad [SEP]
    segments  0     0    0            0     0    0     1   1
    """

    def __init__(self, tokenizer: Tokenizer, labels: Labels) -> None:
        self._tokenizer = tokenizer
        self._labels = labels

    def encode_batch(self, examples: Sequence[Example]) -> list[Encoded | str]:
        """Return rows of many examples; in place of one that is refused, the reason."""
        # Each example is refused until it turns out to be labelled.
        rows: list[Encoded | str] = [
            "has no label; expected a labelled text, as `task` is sequence_classification"
        ] * len(examples)

        # One call for all texts, which is much faster than a call for each.
        labelled = [(i, e) for i, e in enumerate(examples) if isinstance(e, Labelled)]
        texts = [_texts(example) for _, example in labelled]
        encodings = self._tokenizer.framing_backend.encode_batch(texts)
        for (i, example), encoding in zip(labelled, encodings, strict=True):
            try:
                target = self._labels.target(example.label)
            except ValueError as error:
                rows[i] = str(error)
                continue
            # No token is a label here: the target is.
            not_trained = [False] * len(encoding.ids)
            rows[i] = Encoded(
                encoding.ids,
                not_trained,
                target,
                encoding.type_ids,
            )

        return rows

    def cut(
        self,
        example: Example,
        encoded: Encoded,
        limit: int,
    ) -> Encoded:
        """Return the row with its texts shortened, the longer one first, still with the special tokens around them."""
        assert isinstance(example, Labelled)
        ids, segments, _ = frame(
            self._tokenizer,
            example.text,
            example.second,
            limit,
        )
        return Encoded(ids, [False] * len(ids), encoded.target, segments)


def most_tokens(max_length: int, tokenizer: Tokenizer) -> int:
    """Return the longest row: encoders know so many positions, and a longer row would end the run in its middle."""
    return min(max_length, tokenizer.max_length or max_length)


def frame(
    tokenizer: Tokenizer,
    text: str,
    second: str | None,
    limit: int,
) -> tuple[list[int], list[int], bool]:
    """Return ids and token types of a text or a pair, cut to `limit` tokens, and True if something was cut off.

    The special tokens around the texts count, and are never cut.
    """
    backend = tokenizer.framing_backend
    # Truncation is a setting of the tokenizer, which others use without it.
    backend.enable_truncation(limit, strategy="longest_first")
    try:
        encoding = backend.encode(text, second)
    finally:
        backend.no_truncation()

    return encoding.ids, encoding.type_ids, bool(encoding.overflowing)


def _texts(example: Labelled) -> str | tuple[str, str]:
    if example.second is None:
        return example.text
    return example.text, example.second
