"""The names of what is noted about a record and its row: the fields of `prepared/tally.Tally` that count it."""

from __future__ import annotations

from typing import Literal

RowNote = Literal[
    # What became of the record.
    "overlong",
    "truncated",
    "split",
    "no_label",
    "unusable",
    # The chat template and its row.
    "reasoning_dropped",
    "unlike_prompt",
    "text_moved",
    "rewrites_answer",
    "begins_inside_token",
    "first_not_trained",
    "open_answers",
    "special_texts",
    "bos_twice",
    "plain_prompts",
    # What its author hardly meant.
    "answers_in_a_row",
    "thoughts_twice",
    "results_wrapped",
    "calls_not_offered",
    "answers_missing",
    "scored_otherwise",
    # Its images.
    "images_above_budget",
    "images_animated",
    "images_deep",
]
