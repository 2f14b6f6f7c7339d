"""From records of `task: grpo` to rows: the ids that the model is asked with, and those of the right answer after them.

A row without a right answer ends with the token that ends an answer, so that it has a label like any other:

    ids        <user> 2 + 2 ? <assistant>   4 <end>
    trained    0      0 0 0 0 0             1 1
"""

from __future__ import annotations

from collections.abc import Sequence

from kubetune.data.reading.examples import Chat, Example, Pair
from kubetune.data.reading.prompts import NO_ANSWER
from kubetune.data.text.encode import SEEING, Encoded
from kubetune.data.text.tokenizer import Tokenizer


class PromptEncoder:
    """Prompts to rows, as any `RowEncoder`."""

    def __init__(self, tokenizer: Tokenizer, *, add_special_tokens: bool = True) -> None:
        """`add_special_tokens`: of plain texts, which no template begins."""
        self._tokenizer = tokenizer
        self._special = add_special_tokens

    def encode_batch(self, examples: Sequence[Example]) -> list[Encoded | str]:
        """Return the rows of many examples; the reason in place of a refused one."""
        # One by one: prompts are short, and rendering is not what takes time here.
        rows: list[Encoded | str] = []
        for example in examples:
            try:
                rows.append(self._row(example))
            except ValueError as error:
                rows.append(str(error))
        return rows

    def cut(
        self,
        _: Example,
        encoded: Encoded,
        limit: int,
    ) -> Encoded:
        """Raise AssertionError: the config refuses to cut prompts."""
        raise AssertionError("prompts are asked whole")

    def _row(self, example: Example) -> Encoded:
        if isinstance(example, Chat):
            if example.images:
                raise ValueError(f"has images, which a language model cannot see; {SEEING}")

            # The prompt is what a model would be asked with at inference.
            *before, last = example.messages
            if last["role"] != "assistant" or not before:
                raise ValueError(
                    "has no question that could be answered; expected a message of the user"
                )
            prompt = self._tokenizer.encode_prompt(before, example.tools)
            answer = last["content"]
        elif isinstance(example, Pair):
            prompt = self._tokenizer.encode_text(example.prompt, special=self._special)
            answer = example.completion
        else:
            raise ValueError("is a text without a question; expected `prompt`, or `messages`")

        if not prompt:
            raise ValueError("has an empty prompt; expected at least one token")

        # No row is without a label: the token that ends an answer is one, if there is nothing else.
        after: list[int] = []
        if answer != NO_ANSWER:
            after = self._tokenizer.encode_text(answer, special=False)
        after.append(self._tokenizer.eos_id)
        return Encoded([*prompt, *after], [False] * len(prompt) + [True] * len(after))
