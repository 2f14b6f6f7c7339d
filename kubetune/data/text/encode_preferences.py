"""From answers to be compared, or judged, to rows: each answer is encoded with its prompt as any conversation is.

Both sequences of a pair begin with the same ids, those that a model is prompted with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kubetune.data.reading.formats import IMAGE_TAG, Chat, Example, Judged, Pair, Preference
from kubetune.data.text.encode import SEEING, Encoded, Encoder

if TYPE_CHECKING:
    from kubetune.data.vision.encode import VisionEncoder


class PreferenceEncoder:
    """Pairs of answers and judged answers to rows, with the same interface as `encode.Encoder`.

    `margins`: rows tell by how much the chosen answer is better.
    """

    def __init__(self, encoder: Encoder | VisionEncoder, *, margins: bool = False) -> None:
        self._encoder, self._margins = encoder, margins

    def encode_batch(self, examples: Sequence[Example]) -> list[Encoded | str]:
        """Rows of many examples; in the place of one that is refused stands why."""
        encoded = iter(
            self._encoder.encode_batch(
                [answer for example in examples for answer in _answers(example)]
            )
        )
        rows: list[Encoded | str] = []
        for example in examples:
            found = [next(encoded) for _ in _answers(example)]
            refused = next((row for row in found if isinstance(row, str)), None)
            if refused is not None:
                seeing = (
                    "a reward model scores texts alone"
                    if self._margins
                    else "set `preference.images: true`"
                )
                rows.append(refused.replace(SEEING, seeing))
                continue
            if any(_shows_in_answer(answer) for answer in _answers(example)):
                rows.append(
                    "has an image in an answer; expected all of them in the prompt, the same for both"
                )
                continue
            answers = [row for row in found if isinstance(row, Encoded)]
            if isinstance(example, Preference):
                rows.append(self._join(answers[0], answers[1], example.margin))
            elif isinstance(example, Judged):
                rows.append(replace(answers[0], target=(float(example.is_good),)))
            else:
                rows.append("is no answer to be compared or judged")
        return rows

    def _join(self, chosen: Encoded, rejected: Encoded, margin: float | None) -> Encoded | str:
        if _prompt(chosen) != _prompt(rejected):
            return (
                "has prompts of other tokens before its two answers: the chat template writes them in another way, or "
                "an answer that has nothing to be trained"
            )
        return Encoded(
            [*chosen.ids, *rejected.ids],
            [*chosen.trained, *rejected.trained],
            ((margin or 0.0),) if self._margins else (),
            drops_reasoning=chosen.drops_reasoning or rejected.drops_reasoning,
            unlike_prompt=chosen.unlike_prompt or rejected.unlike_prompt,
            rewrites_answer=chosen.rewrites_answer or rejected.rewrites_answer,
            images=chosen.images,
            image_notes=chosen.image_notes,
            split=len(chosen.ids),
        )

    def cut(self, example: Example, encoded: Encoded, limit: int) -> Encoded:
        """The first `limit` tokens of each sequence. Images stand in the prompt, which is the same in both."""
        parts = [
            self._encoder.cut(answer, replace(encoded, ids=ids, trained=trained, split=0), limit)
            for answer, (ids, trained) in zip(_answers(example), encoded.sequences, strict=True)
        ]
        ids = [id for part in parts for id in part.ids]
        trained = [is_label for part in parts for is_label in part.trained]
        return replace(
            parts[0], ids=ids, trained=trained, split=len(parts[0].ids) if encoded.split else 0
        )


def _answers(example: Example) -> tuple[Chat | Pair, ...]:
    match example:
        case Preference():
            return (example.chosen, example.rejected)
        case Judged():
            return (example.answer,)
    return ()


def _shows_in_answer(answer: Chat | Pair) -> bool:
    if not isinstance(answer, Chat) or not answer.images:
        return False
    return any(IMAGE_TAG in message["content"] for message in answer.messages[answer.context :])


def _prompt(row: Encoded) -> list[int]:
    """The ids before the first label."""
    return row.ids[: row.trained.index(True)] if any(row.trained) else row.ids
