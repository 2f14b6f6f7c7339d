"""The meaning of columns by their names: a question, an answer, a text that questions are about, thoughts, an id."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

# Names of what somebody asks, and of the answers.
QUESTIONS: Final = ("question", "query", "instruction", "problem")
ANSWERS: Final = ("answer", "response", "completion", "output", "solution")
# Names of the right answer to a prompt, in the order in which they are believed.
RIGHT_ANSWERS: Final = (
    "solution", "ground_truth", "target", "answer", "reference_answer", "expected_answer", "final_answer",
)  # fmt: skip
# Names that only the right answer has, whoever else has answered.
TRUTHS: Final = (
    "ground_truth", "target", "reference_answer", "expected_answer", "final_answer", "correct_answer", "gold_answer",
    "gold", "golden_answer", "right_answer", "true_answer", "gold_response", "reference_response", "expected_response",
    "correct_response",
)  # fmt: skip
# Names of a text that is written for another one. A `target` may be a class too.
OUTPUTS: Final = (*ANSWERS, "reply", "summary", "highlights", "tldr", "translation")
# Names of an answer that follows its prompt.
COMPLETIONS: Final = ("completion", "output", "response", "answer")
PROMPTS: Final = (*QUESTIONS, "prompt", "input")
TALKS: Final = ("messages", "conversations", "conversation")
# Names of the thoughts before an answer, in a message or in a field of their own.
REASONING: Final = ("reasoning_content", "thinking", "reasoning")

# Last words of names of texts that a question is about, as data sets for reading, retrieval, SQL and dialogue have them.
_SUBJECTS: Final = frozenset((
    "context", "passage", "document", "doc", "article", "paragraph", "story", "excerpt", "knowledge", "background",
    "evidence", "transcript", "schema", "table", "abstract", "dialogue", "dialog", "snippet", "chunk", "scenario",
    "body", "choice", "option", "premise",
))  # fmt: skip
_SUBJECT_NAMES: Final = frozenset((
    "source_text", "reference_text", "input_text", "support", "supporting_text", "search_result", "retrieved",
    "knowledge_base", "content",
))  # fmt: skip
# Last words of names of questions.
_ASKED: Final = frozenset((*QUESTIONS, "prompt", "request", "inquiry", "q"))
_THOUGHTS: Final = frozenset(
    ("reasoning", "thinking", "thought", "cot", "rationale", "scratchpad", "think")
)
# Words of names of columns that part records for training and evaluation.
_SPLITS: Final = frozenset(("split", "subset", "fold", "partition"))
# Words of names that say where a record is from, when, or how large it is.
_METADATA: Final = frozenset((
    "id", "uuid", "guid", "index", "idx", "row", "url", "uri", "link", "path", "file", "filename", "source", "origin",
    "dataset", "config", "date", "time", "timestamp", "created", "updated", "year", "version",
    "license", "lang", "language", "locale", "model", "engine", "provider", "token", "length", "len", "count", "num",
    "seed", "hash", "md5", "sha", "sha256", "user", "author", "annotator", "worker", "batch", "shard", "repo",
    "repository", "domain", *_SPLITS,
))  # fmt: skip
# Words of names of columns that say where the text of a record is from, and nothing else: `source_document`, `doc_id`.
_ORIGINS: Final = frozenset((
    "source", "origin", "file", "filename", "filepath", "path", "url", "uri", "link", "href", "location", "metadata", "meta",
    "info", "provenance", "id", "dataset", "reference", "citation",
))  # fmt: skip
_OF_ORIGINS: Final = frozenset((
    *_ORIGINS, "doc", "document", "page", "name", "original", "raw", "local", "text", "data", "ref",
))  # fmt: skip
# Words of a value from which on it is a text: a `source` may be a newspaper with its date, a `source_name` only a name.
_MOST_WORDS: Final = 8
_MOST_WORDS_ABOUT: Final = 4
# Words of names of a text in another form, as it was before somebody cleaned it.
_FORMS: Final = frozenset(("raw", "html", "xml", "markup", "markdown", "rtf"))
# Words of names of texts that are written with an answer or about it, and that no question is about.
_BESIDE_ANSWERS: Final = frozenset((
    *ANSWERS, "reply", "step", "analysis", "explanation", "feedback", "critique", "test", "assert", "generation",
    "generated", "prediction",
))  # fmt: skip
# Names of numbers by which other tools let a row count more or less.
_WEIGHTS: Final = frozenset(("weight", "loss_weight", "loss_scale", "sample_weight"))
# Words that call an answer bad in any name. Three kinds of names add words of their own, which mean less elsewhere:
#
#     a column with a text   `non_preferred` and `unsafe_response` are such answers; `toxic` may be a text to classify
#     a column of yes/no     `is_toxic` and `flagged` too (verdict_names)
#     a file or a folder     `downvoted` too, and `neg` next to `pos`; `toxic` may be a class (findings/named_groups)
BAD_WORDS: Final = frozenset(("rejected", "loser", "worse", "bad", "wrong", "incorrect"))
_BAD: Final = BAD_WORDS | {"dispreferred", "negative", "non", "unsafe"}


# Names are asked of every record, and a file has few.
@lru_cache(maxsize=4096)
def words_of_name(name: str) -> tuple[str, ...]:
    """Return the words of a column's name, in lower case and without the s of a plural: `retrievedDocs` is retrieved doc."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    words = re.findall(r"[^\W_]+", spaced.lower())
    return tuple(re.sub(r"(?<=\w[^si\W])s$", "", word) for word in words)


def names_subject(name: str) -> bool:
    """True if a column is called like a text that a question is about."""
    words = words_of_name(name)
    return "_".join(words) in _SUBJECT_NAMES or bool(words and words[-1] in _SUBJECTS)


def names_thought(name: str) -> bool:
    """True if a column is called like the thoughts before an answer."""
    # `Complex_CoT` has a capital within a word. Other chains are of hotels, or of supply.
    if name.lower() == "chain":
        return True
    return not _THOUGHTS.isdisjoint((*words_of_name(name), *words_of_name(name.lower())))


def names_question(name: str) -> bool:
    """True if a column is called like what somebody asks: `user_question`, `queryText`, `q`."""
    words = words_of_name(name)
    if len(words) > 1 and words[-1] == "text":
        words = words[:-1]
    # A `system_prompt` asks nothing.
    is_aside = names_bad_answer(name) or not {"system", "sys"}.isdisjoint(words)
    return bool(words) and words[-1] in _ASKED and not is_aside


def names_answer(name: str) -> bool:
    """True if a column is called like an answer, its steps, or what somebody says of it: `response_a`, `explanation`."""
    words = words_of_name(re.sub(r"\d", "", name))
    return names_truth(name) or (not _BESIDE_ANSWERS.isdisjoint(words) and not names_subject(name))


def names_truth(name: str) -> bool:
    """True if a column is called like the right answer, whoever else has answered: `ground_truth`, `Gold Answer`."""
    return "_".join(words_of_name(name)) in TRUTHS


def names_test(name: str) -> bool:
    """True if a column is called like tests that answers are to pass: `test_list`, `unit_tests`, `test_cases`."""
    return not {"test", "assert"}.isdisjoint(words_of_name(name))


def names_metadata(name: str, words: float = 0) -> bool:
    """True if a column is called like an id, a date, a split, a language or a size, and holds no sentences.

    `words`: of a value, on average; without them the name decides. The code in a `source_code` is a text.
    """
    of_name = words_of_name(name)
    if _METADATA.isdisjoint(of_name):
        return False
    most = _MOST_WORDS if of_name[-1] in _METADATA else _MOST_WORDS_ABOUT
    return words < most


def names_origin(name: str) -> bool:
    """True if a column is called like the place that a record is from, and like nothing that is there: `source_file`."""
    words = words_of_name(name)
    return not _ORIGINS.isdisjoint(words) and _OF_ORIGINS.issuperset(words)


def names_weight(name: str) -> bool:
    """True if a column is called like the weight of a row: `sample_weight`."""
    return "_".join(words_of_name(name)) in _WEIGHTS


def names_split(name: str) -> bool:
    """True if a column is called like a split of the records: `split`, `cv_fold`."""
    return not _SPLITS.isdisjoint(words_of_name(name))


def names_form(name: str) -> bool:
    """True if a column is called like another form of the text beside it: `raw_html`, `text_markdown`."""
    return not _FORMS.isdisjoint(words_of_name(name))


def names_bad_answer(name: str) -> bool:
    """True if a column is called like an answer that is not to be learned."""
    return not _BAD.isdisjoint(words_of_name(name))
