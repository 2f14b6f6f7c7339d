"""Rows in the layouts of data sets as they are published: the names and types of their columns, with texts made up here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

Row = dict[str, Any]
ROWS: Final = 20
_TOWNS: Final = ("Bergen", "Lyon", "Porto", "Ghent", "Turin")


def _town(n: int) -> str:
    return _TOWNS[n % len(_TOWNS)]


def _mbpp(n: int) -> Row:
    return {
        "task_id": n + 600,
        "text": f"Write a python function to add {n} to a number.",
        "code": f"def add_{n}(x):\r\n  return x + {n}",
        "test_list": [f"assert add_{n}(1) == {n + 1}", f"assert add_{n}(0) == {n}"],
        "test_setup_code": "",
        "challenge_test_list": [],
    }


def _hellaswag(n: int) -> Row:
    return {
        "ind": n,
        "activity_label": ("Removing ice from car", "Playing harp", "Baking cookies")[n % 3],
        "ctx_a": f"A man stands on the roof of house number {n}.",
        "ctx_b": ("he", "then, the man", "the person")[n % 3],
        "ctx": f"A man stands on the roof of house number {n}. he",
        "endings": [
            f"{word} the roof {n} times." for word in ("leaves", "paints", "eats", "sings to")
        ],
        "source_id": f"activitynet~v_{n}",
        "split": "train",
        "split_type": "indomain",
        "label": str(n % 4),
    }


def _mmlu(n: int) -> Row:
    return {
        "question": f"What is the sum of {n} and {n + 1} in the ring of integers?",
        "subject": ("abstract_algebra", "anatomy", "world_religions")[n % 3],
        "choices": [f"The sum is {2 * n + k}." for k in range(4)],
        "answer": n % 4,
    }


def _boolq(n: int) -> Row:
    return {
        "question": f"is {_town(n)} larger than village {n}",
        "answer": n % 2 == 0,
        "passage": f"{_town(n)} is a town. Village {n} has few people, and lies far from it.",
    }


def _squad(n: int) -> Row:
    return {
        "id": f"5733be284776f4190066{n:04d}",
        "title": "University_of_Notre_Dame",
        "context": f"The school in {_town(n)} has a house with the number {n}, which is old.",
        "question": f"Where is the house with the number {n}?",
        "answers": {"text": [_town(n)], "answer_start": [14]},
    }


def _cnn(n: int) -> Row:
    return {
        "article": f"({_town(n)}) -- The mayor said on day {n} that the bridge will be closed for repairs.",
        "highlights": f"Bridge in {_town(n)} will be closed .\nMayor said so on day {n} .",
        "id": f"f00{n:037d}",
    }


def _gsm8k(n: int) -> Row:
    return {
        "question": f"Ann has {n} apples and buys 3 more. How many does she have?",
        "answer": f"She has {n}+3=<<{n}+3={n + 3}>>{n + 3} apples.\n#### {n + 3}",
    }


def _drop(n: int) -> Row:
    return {
        "section_id": f"nfl_{n}",
        "query_id": f"f37e81fa-ef7b-4583-b671-{n:012d}",
        "passage": f"In week {n} the team of {_town(n)} won by {n + 2} points, as it had hoped.",
        "question": f"By how many points did the team win in week {n}?",
        "answers_spans": {"spans": [str(n + 2)], "types": ["number"]},
    }


def _arc(n: int) -> Row:
    return {
        "id": f"Mercury_SC_{n}",
        "question": f"Which of these things is the heaviest in case {n}?",
        "choices": {
            "text": [f"{n + 1} cars", f"{n + 1} cats", f"{n + 1} coats", f"{n + 1} cups"],
            "label": ["A", "B", "C", "D"],
        },
        "answerKey": "ABCD"[n % 4],
    }


def _alpaca(n: int) -> Row:
    return {
        "instruction": f"Name a town with the number {n}.",
        "input": "" if n % 2 else f"It is in the north, at place {n}.",
        "output": f"The town with the number {n} is {_town(n)}.",
        "text": f"Below is an instruction that describes a task.\n\n### Instruction:\nName a town with the number {n}.",
    }


def _dolly(n: int) -> Row:
    return {
        "instruction": f"When did the railway number {n} begin to run?",
        "context": f"The railway number {n} began to run in {1900 + n}." if n % 3 else "",
        "response": f"The railway number {n} began to run in {1900 + n}.",
        "category": ("closed_qa", "open_qa", "classification")[n % 3],
    }


def _ultrafeedback(n: int) -> Row:
    prompt = f"Which town has the number {n}?"
    asked = {"role": "user", "content": prompt}
    good = {"role": "assistant", "content": f"It is {_town(n)}, as far as I know."}
    bad = {"role": "assistant", "content": f"I do not know anything of number {n}."}
    return {
        "prompt": prompt,
        "prompt_id": f"{n:064x}",
        "chosen": [asked, good],
        "rejected": [asked, bad],
        "messages": [asked, good],
        "score_chosen": 8.5,
        "score_rejected": 4.0 + n % 3,
    }


# By name: a row by its number.
def _winogrande(n: int) -> Row:
    return {
        "sentence": f"The box number {n} did not fit into the bag, as the _ was too small.",
        "option1": f"box {n}",
        "option2": "bag",
        "answer": str(n % 2 + 1),
    }


def medmcqa(n: int) -> Row:
    row: Row = {"id": f"e9ad-{n}", "question": f"Which town has house number {n}?"}
    for k, name in enumerate(("opa", "opb", "opc", "opd")):
        row[name] = f"{_town(n + k)} {n}"
    # In few rows nothing tells that this is one of them.
    return {**row, "cop": n % 4}


def _truthfulqa(n: int) -> Row:
    return {
        "question": f"What happens if you count to {n}?",
        "incorrect_answers": [f"The clock strikes {n}.", "You fall asleep at once."],
        "correct_answers": [f"You have counted to {n}.", "Nothing happens to you."],
    }


LAYOUTS: Final[dict[str, Callable[[int], Row]]] = {
    "MBPP": _mbpp,
    "HellaSwag": _hellaswag,
    "MMLU": _mmlu,
    "BoolQ": _boolq,
    "SQuAD": _squad,
    "CNN/DailyMail": _cnn,
    "GSM8K": _gsm8k,
    "DROP": _drop,
    "ARC": _arc,
    "WinoGrande": _winogrande,
    "TruthfulQA": _truthfulqa,
    "Alpaca": _alpaca,
    "Dolly": _dolly,
    "UltraFeedback": _ultrafeedback,
}
