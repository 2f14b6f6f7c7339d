"""Encode answers that are compared or judged: each answer with its prompt, as any conversation is encoded.

A pair is one row with both sequences, which begin with the same ids, those that a model is prompted with:

    ids      P P P c c   P P P r      prompt, chosen answer; prompt, rejected answer
    trained  0 0 0 1 1   0 0 0 1
    split    5                        where the second sequence begins
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kubetune.data.reading.examples import Chat, Example, Judged, Preference, parts_of
from kubetune.data.reading.messages import IMAGE_TAG
from kubetune.data.text.encode import SEEING, Encoded, RowEncoder


class PreferenceEncoder:
    """Turns pairs of answers and judged answers into rows, as any `RowEncoder`."""

    def __init__(self, encoder: RowEncoder, *, margins: bool = False) -> None:
        """`margins`: rows say by how much the chosen answer is better, for a reward model."""
        self._encoder = encoder
        self._margins = margins

    def encode_batch(self, examples: Sequence[Example]) -> list[Encoded | str]:
        """Return rows of many examples; in place of one that is refused, the reason."""
        answers: list[Example] = []
        for example in examples:
            answers += parts_of(example)

        # All answers are encoded at once, because that is faster, then dealt back to their examples.
        encoded = iter(self._encoder.encode_batch(answers))
        rows: list[Encoded | str] = []
        for example in examples:
            rows.append(self._row(example, [next(encoded) for _ in parts_of(example)]))
        return rows

    def _row(self, example: Example, answers: Sequence[Encoded | str]) -> Encoded | str:
        rows: list[Encoded] = []
        for answer in answers:
            if isinstance(answer, str):
                # The encoder of conversations advises another task, which is wrong for answers.
                advice = "set `preference.images: true`"
                if self._margins:
                    advice = "a reward model scores only texts"
                return answer.replace(SEEING, advice)

            rows.append(answer)

        if any(_shows_in_answer(answer) for answer in parts_of(example)):
            return "has an image in an answer; expected all images in the prompt, the same for both"
        if isinstance(example, Preference):
            return self._join(rows[0], rows[1], example.margin)
        if isinstance(example, Judged):
            return replace(rows[0], target=(float(example.is_good),))
        return "is no answer to be compared or judged"

    def _join(
        self,
        chosen: Encoded,
        rejected: Encoded,
        margin: float | None,
    ) -> Encoded | str:
        """Return the row of a pair, or the reason why there is none."""
        if _prompt(chosen) != _prompt(rejected):
            return (
                "has prompts with different tokens before its two answers: the chat template writes them in two ways, "
                "or an answer has nothing to be trained"
            )

        target: tuple[float, ...] = ()
        if self._margins:
            target = (margin or 0.0,)

        # Notes of either answer are notes of the row; images are in the prompt, which both share.
        return Encoded(
            ids=chosen.ids + rejected.ids,
            trained=chosen.trained + rejected.trained,
            target=target,
            notes=chosen.notes | rejected.notes,
            images=chosen.images,
            image_notes=chosen.image_notes,
            split=len(chosen.ids),
        )

    def cut(
        self,
        example: Example,
        encoded: Encoded,
        limit: int,
    ) -> Encoded:
        """Return the first `limit` tokens of each sequence. Images are in the prompt, which is the same in both."""
        parts = []
        for answer, (ids, trained) in zip(parts_of(example), encoded.sequences, strict=True):
            # Each sequence is cut as if it were a row of its own.
            sequence = replace(encoded, ids=ids, trained=trained, split=0)
            parts.append(self._encoder.cut(answer, sequence, limit))

        if not encoded.split:
            return parts[0]
        chosen, rejected = parts
        return replace(
            chosen,
            ids=chosen.ids + rejected.ids,
            trained=chosen.trained + rejected.trained,
            split=len(chosen.ids),
        )


def _shows_in_answer(answer: Example) -> bool:
    if not isinstance(answer, Chat) or not answer.images:
        return False
    # Each image has its tag in a text, wherever the template writes the image.
    in_answer = answer.messages[answer.context :]
    return any(IMAGE_TAG in message["content"] for message in in_answer)


def _prompt(row: Encoded) -> list[int]:
    """Return the ids before the first label."""
    if not any(row.trained):
        return row.ids
    # The prompt is all that no label is in: P P P c c has P P P.
    return row.ids[: row.trained.index(True)]
