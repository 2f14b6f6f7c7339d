"""The verdict of a column of yes and no by its name: yes means a good or a bad answer. How to turn it round."""

from __future__ import annotations

import json
from typing import Final

from kubetune.data.column_names import BAD_WORDS, words_of_name
from kubetune.data.record_programs import each_record

# Words by which a column of yes and no calls an answer bad, in each form: `is_toxic`, `toxicity`, `hallucinated`.
_BAD: Final = BAD_WORDS | frozenset((
    "abusive", "banned", "biased", "blocked", "broken", "buggy", "corrupt", "corrupted", "dangerous", "deleted",
    "disliked", "downvoted", "error", "fail", "failed", "failure", "false", "flag", "flagged", "gibberish",
    "hallucinate", "hallucinated", "hallucinating", "hallucination", "harmful", "hate", "hateful", "inaccurate",
    "inappropriate", "incoherent", "incomplete", "insult", "insulting", "invalid", "irrelevant", "misleading", "mistake",
    "mistaken", "nonsense", "nsfw", "obscene", "offensive", "poor", "problematic", "profane", "profanity", "refusal",
    "refused", "removed", "spam", "threat", "toxic", "toxicity", "truncated", "unacceptable", "undesirable",
    "unfaithful", "ungrounded", "unhelpful", "unsafe", "unusable", "unwanted", "violation", "vulgar", "worst",
))  # fmt: skip
# Words that turn the others round, such as `not_helpful` and `non_toxic`, and those that turn only these: `error_free`.
_NOT: Final = frozenset(("isnt", "never", "non", "not"))
_WITHOUT: Final = frozenset(("free", "no", "without"))


def says_bad(name: str) -> bool:
    """True if a column of yes and no is called so that yes says of an answer that it is bad.

    is_bad, flagged, not_helpful  →  True
    is_good, non_toxic, no_errors  →  False
    """
    words = words_of_name(name)
    is_bad = not _BAD.isdisjoint(words)
    turns = sum(word in _NOT or (is_bad and word in _WITHOUT) for word in words)
    return is_bad != (turns % 2 == 1)


def turned(name: str, path: str) -> str:
    """Return what writes a verdict `label` that is true for good answers, from a column that is true for bad ones."""
    key = json.dumps(name)
    # Tables have it as a text. Without a verdict there is none.
    value = (
        f'{{"false": True, "0": True, "true": False, "1": False}}.get(str(r.get({key})).lower())'
    )
    if not path.endswith(".jsonl"):
        return f'write `r["label"] = {value}` for each record r in Python'
    command = each_record(path, f'"label": {value}', "judged")
    return f"make one, then give {command.made}: `{command.words}`"
