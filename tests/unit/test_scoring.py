"""Measures of answers and their certainty, against published examples, sacrebleu, rouge-score and SciPy."""

from __future__ import annotations

import json
import math
import time
import unicodedata
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from kubetune import errors, extras
from kubetune.config.gate import Condition
from kubetune.config.schema.evaluation import (
    METRICS,
    EvaluationConfig,
    GenerateConfig,
    OwnMetricsConfig,
    packages_of,
)
from kubetune.data.text.answer_targets import without_thoughts
from kubetune.data.text.numbers import read_number
from kubetune.data.text.words import folded
from kubetune.rundir import metrics as run_files
from kubetune.scoring import metrics, own_functions, statistics, verdict
from kubetune.scoring.comparison import Answered, compare_answers, turned
from kubetune.scoring.verdict import is_met


def measure(name: str, answer: str, reference: str, **settings: object) -> float:
    return metrics.measures_of(GenerateConfig.model_validate({"metric": [name], **settings}))[name](
        answer, reference
    )


@pytest.mark.parametrize(
    ("name", "answer", "reference", "score"),
    [
        ("exact_match", " The  Answer. ", "the answer", 1),
        ("exact_match", "the answers", "the answer", 0),
        ("exact_match", "\uff21\uff22", "ab", 1),  # letters of full width
        ("exact_match", "10\u2075", "105", 0),  # a power
        ("exact_match", "2\u00bd", "21/2", 0),
        ("exact_match", "\u5317\u4eac\u3002", "\u5317\u4eac", 1),  # a Chinese full stop
        ("contains", "It is Paris, of course", "paris", 1),
        ("contains", "Par is", "paris", 0),
        ("numeric", "so 3 + 4 = 1,234.50", "1234.5", 1),
        ("numeric", "7 apples, or 8", "7", 0),
        ("numeric", "none", "7", 0),
        ("numeric", "-.5", "-0.5", 1),
        ("numeric", "\u22125", "5", 0),  # the minus sign
        ("numeric", "\u22125", "-5", 1),
        ("numeric", "10-12", "12", 0),  # a range
        ("numeric", "10-12", "-12", 0),
        ("numeric", "2024-05-06", "6", 0),  # a date
        ("numeric", "3 - 4 = -1", "-1", 1),
        ("numeric", "1e-5", "0.00001", 1),
        ("json_valid", '```json\n{"a": [1]}\n```', "", 1),
        ("json_valid", '<think>\n\n</think>\n\n{"a": [1]}', "", 1),
        ("json_valid", '<think>is it {"a": [1]}', "", 0),
        ("json_valid", '{"a": NaN}', "", 0),
        ("json_valid", '{"a": 1} and more', "", 0),
        ("json_equal", '{"a": 1, "b": 2}', '{"b": 2.0, "a": 3}', 0.5),
        ("json_equal", '{"a": true}', '{"a": 1}', 0),
        ("json_equal", '{"a": {"x": [1, true]}, "c": 0}', '{"a": {"x": [1, true]}}', 0.5),
        ("json_equal", '<think>{"a": 2}</think>{"a": 1}', '<think>\n</think>\n{"a": 1}', 1),
        ("json_equal", "{}", "{}", 1),
        ("json_equal", "[{}]", "[1]", 0),
        ("json_equal", "[[1]]", "[[1, 2]]", 0),
        ("json_equal", "[" * 500 + "]" * 500, "[" * 500 + "]" * 500, 1),
        ("json_equal", "no", "{}", 0),
    ],
)
def test_measures_of_one_answer(name: str, answer: str, reference: str, score: float) -> None:
    assert measure(name, answer, reference) == score


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("20240115", "20240131"),
        ("1,234,567", "1,234,568"),
        ("12345678", "12345670"),
        ("9783161484100", "9783161484101"),
        ("0.3333333", "0.3333334"),
        ("9" * 5000, "9" * 4999 + "8"),
        ("3/10", "7/10"),
        ("3 / 10", "7 / 10"),
        ("14:30", "09:30"),
        ("9:30 am", "9:30 p.m."),
        ("1.234,50 €", "9.876,50 €"),
        ("3,14", "2,14"),
        (r"\frac{1}{2}", r"\frac{3}{2}"),
        (r"\boxed{\frac{x}{2}}", r"\boxed{\frac{y}{2}}"),
        (r"\sqrt{3}", "3"),
        ("5:4", "3:4"),
        ("5 : 4", "3 : 4"),
        ("2024-01-15", "2023-11-15"),
        ("5 - 10", "7 - 10"),
        ("(1,4)", "(3,4)"),
        ("1 000", "2 000"),
        ("10⁵", "10³"),
        ("3 × 10^5", "4 × 10^5"),
        ("2 1/2", "3 1/2"),
        ("v1.2.3", "v9.2.3"),
        ("H2O", "CO2"),
        ("72 cm^2", "70 cm^2"),
    ],
)
def test_numbers_that_differ_are_not_equal(one: str, other: str) -> None:
    for answer, reference in ((one, other), (other, one)):
        assert measure("numeric", answer, reference) == 0
        assert measure("numeric", f"It is {answer}.", answer) == 1


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("The sum is 1,250.", "1250"),
        ("That costs $5", "5"),
        ("-$5", "-5"),
        ("USD500", "500"),
        ("50%", "50"),
        ("1e3", "1000"),
        ("72 km, or **72km**", "72"),
        ("21st", "21"),
        (r"72\text{ cm}^2", "72"),
        ("9.8 m/s^2", "9.80"),
        (r"so \boxed{\dfrac{3}{10}}", "3/10"),
        ("6/20", "0.3"),
        (r"-2\frac{1}{2}", "-2.5"),
        ("2½", "5/2"),
        ("3 × 10⁻⁵", "0.00003"),
        ("1 234 567.50", "1234567.5"),
        ("1'000", "1000"),
        (r"1{,}250\%", "1250"),
        ("1,00,000", "100000"),  # in India
        ("共有72个苹果。", "72"),
        ("١٢٫٥", "12.5"),
        ("<answer>72</answer>", "#### 72"),
        ("48/2 = <<48/2=24>>24", "24"),
        ("3+4=7", "7"),
        ("72\n\nI hope this helps!", "72"),
    ],
)
def test_ways_to_write_a_number_are_equal(answer: str, reference: str) -> None:
    assert measure("numeric", answer, reference) == 1
    assert measure("numeric", reference, answer) == 1


@pytest.mark.parametrize(
    ("reference", "value", "is_whole"),
    [
        ("3/10", Fraction(3, 10), True),
        ("14:30", "14:30", True),
        ("She has 3 and gets 4.\n#### 7", Fraction(7), True),
        ("She has 3 and gets 4 more of them, which makes 7", Fraction(7), True),
        ("x=4, y=5", Fraction(5), False),
        ("x=4,y=5", Fraction(5), False),
        ("between 3 and 10", Fraction(10), False),
        ("3小时20分", Fraction(20), False),
        ("1/0", "1/0", True),
        ("1e9999", "1e9999", True),
    ],
)
def test_a_reference_says_whether_all_of_it_is_read(
    reference: str, value: Fraction | str, is_whole: bool
) -> None:
    assert read_number(reference) == (value, is_whole)
    assert read_number("no number") is None


@pytest.mark.parametrize(
    "text", ["a" * 20_000 + "!5", "1 " * 20_000, "<" * 20_000 + "5", r"\frac{" * 5_000 + "5"]
)
def test_a_long_answer_is_read_at_once(text: str) -> None:
    begun = time.process_time()
    read_number(text)
    assert time.process_time() - begun < 2


@pytest.mark.parametrize(
    ("answer", "rest"),
    [
        ("<think>\n\n</think>\n\nParis", "Paris"),
        ("\n<think>Rome? No.</think> Paris", "Paris"),
        ("Rome? No.\n</think>\n\nParis", "Paris"),  # the prompt ends with `<think>`
        ("<think>Rome? Or Paris", ""),  # cut off
        ("Write <think>…</think>", "Write <think>…</think>"),
        ("Paris", "Paris"),
    ],
)
def test_thoughts_before_an_answer_are_no_part_of_it(answer: str, rest: str) -> None:
    assert without_thoughts(answer) == rest


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("exact_match", {}),
        ("contains", {}),
        ("numeric", {}),
        ("regex", {"pattern": r"(\d+)"}),
        ("label", {"labels": ["7", "8"]}),
        ("json_equal", {}),
        ("rouge_l", {}),
        ("bleu", {}),
        ("chrf", {}),
    ],
)
def test_no_measure_sees_thoughts(name: str, settings: dict[str, object]) -> None:
    for package in packages_of([name]):
        pytest.importorskip(package)
    reference = "<think>\n\n</think>\n\n7"
    right = measure(name, "<think>8 … no, 9 apples</think>\n\n7", reference, **settings)
    assert right == measure(name, "7", "7", **settings)
    # The right answer stands in the thoughts alone.
    assert measure(name, "<think>7</think>\n\n8", reference, **settings) < right
    thought = ["<think>8</think> the cat sat there"]
    assert metrics.of_all(name, [1.0], thought, thought) == metrics.of_all(
        name, [1.0], ["the cat sat there"], ["the cat sat there"]
    )


def test_a_pattern_compares_what_it_finds() -> None:
    wanted = {"pattern": r"#### (-?\d+)"}
    assert measure("regex", "first 3, #### 12", "#### 12", **wanted) == 1
    assert measure("regex", "12", "#### 12", **wanted) == 0
    assert measure("regex", "so #### 12", "12", **wanted) == 1


def test_the_first_label_in_an_answer_is_what_it_says() -> None:
    labels = {"labels": ["good", "not good"]}
    assert measure("label", "This is not good.", "not good", **labels) == 1
    assert measure("label", "This is not good.", "good", **labels) == 0
    assert measure("label", "goodness", "good", **labels) == 0


@pytest.mark.parametrize(
    ("labels", "answer", "reference"),
    [
        (["正面", "负面"], "我认为这是负面的。", "负面"),
        (["不好", "好"], "我觉得不好", "不好"),
        (["positive", "negative"], "答案是positive。", "positive"),
    ],
)
def test_a_label_is_found_between_words_without_spaces(
    labels: list[str], answer: str, reference: str
) -> None:
    assert measure("label", answer, reference, labels=labels) == 1


def test_bleu_and_chrf_are_those_of_the_corpus_and_rouge_is_its_package() -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    answers = ["the cat sat on the mat today", "a dog barks at the moon"]
    references = ["the cat sat on the red mat", "the dog barks at the moon tonight"]
    assert (
        metrics.of_all("bleu", [0, 0], answers, references)
        == sacrebleu.corpus_bleu(answers, [references]).score
    )
    assert (
        metrics.of_all("chrf", [0, 0], answers, references)
        == sacrebleu.corpus_chrf(answers, [references]).score
    )
    assert metrics.of_all("exact_match", [1, 0], answers, references) == 0.5
    assert (
        measure("rouge_l", answers[0], references[0])
        == scorer.score(references[0], answers[0])["rougeL"].fmeasure
    )
    assert (
        measure("chrf", answers[0], references[0])
        == sacrebleu.sentence_chrf(answers[0], [references[0]]).score
    )


ENGLISH = [
    "The quick brown fox isn't here, is it? It's 3.5 km away; e-mail foo_bar@example.org.",
    "The brown fox isn’t there \u2014 it's 3 km away… see https://example.org/a_b?c=1#d",
    "def f(x): return x**2 + 1  # the square of X, plus one",
    "A $1,250 bill, 50% off: “really” cheap™",
    "",
    "?!",
]


@pytest.mark.parametrize("answer", ENGLISH)
@pytest.mark.parametrize("reference", ENGLISH)
def test_rouge_of_english_is_that_of_its_package(answer: str, reference: str) -> None:
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    theirs = scorer.score(reference, answer)["rougeL"].fmeasure
    assert measure("rouge_l", answer, reference) == theirs


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        ("Мама мыла раму", "Мама мыла раму", 1),
        ("Мама мыла раму 5", "Совсем другой ответ 5", 1 / 4),
        ("القط على السجادة", "القط على السجادة", 1),
        ("हिन्दी में लिखा", "हिन्दी में बोला", 2 / 3),  # vowels are marks, and no ends of words
        ("今天天气很好", "今天天气不好", 5 / 6),
        ("naïve café", "naïve cafe\u0301", 1),
    ],
)
def test_rouge_knows_the_words_of_all_scripts(answer: str, reference: str, score: float) -> None:
    pytest.importorskip("rouge_score")
    assert measure("rouge_l", answer, reference) == pytest.approx(score)


def test_folding_is_nfkc_but_for_what_is_raised_or_lowered() -> None:
    kept = []
    for code in (*range(0x80, 0xD800), *range(0xE000, 0x30000)):
        if folded(chr(code)) != unicodedata.normalize("NFKC", chr(code)):
            kept.append(chr(code))
    assert {*"²⁵₂½①™ª"} <= {*kept}
    assert not {*"ＡﬁⅣ\u00a0"} & {*kept}
    joined = "e\u0301 \u1100\u1161 ﬁ\u0323\u0307"
    assert folded(joined) == unicodedata.normalize("NFKC", joined)


@pytest.mark.parametrize("name", [name for name in METRICS if METRICS[name].is_of_all_rows])
def test_intervals_of_whole_corpora_hold_their_value(name: str) -> None:
    pytest.importorskip("sacrebleu")
    # Short answers have no 4-grams: single sentences are scored otherwise than the corpus.
    answers = ["yes", "a red cat sat there", "no"] * 9
    references = ["yes", "the red cat sat there", "or not"] * 9
    low, high = metrics.bounds(name, [100.0, 50.0, 0.0] * 9, answers, references)
    assert 0 <= low <= metrics.of_all(name, [], answers, references) <= high <= 100
    assert high - low < 40
    assert metrics.bounds("contains", [0.0, 1.0], [], []) == statistics.interval([0.0, 1.0])


def test_a_missing_package_is_named_with_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(
        errors.ConfigError, match=r"rouge_score and sacrebleu.*kubetune\[evaluation\]"
    ):
        metrics.measures_of(GenerateConfig(metric=("bleu", "rouge_l", "exact_match")))


@pytest.mark.parametrize(("right", "rows"), [(0, 7), (3, 7), (40, 40), (81, 100)])
def test_intervals_of_shares_are_wilsons(right: int, rows: int) -> None:
    scipy = pytest.importorskip("scipy.stats")
    theirs = scipy.binomtest(right, rows).proportion_ci(0.95, method="wilson")
    assert statistics.interval([1.0] * right + [0.0] * (rows - right)) == pytest.approx(
        tuple(theirs), abs=1e-9
    )


def test_intervals_of_means_are_those_of_the_bootstrap() -> None:
    scipy = pytest.importorskip("scipy.stats")
    scores = np.random.default_rng(1).beta(2, 3, 200)
    theirs = scipy.bootstrap(
        (scores,), np.mean, method="percentile", n_resamples=4000, rng=2
    ).confidence_interval
    assert statistics.interval(list(scores)) == pytest.approx(tuple(theirs), abs=0.01)
    assert all(map(math.isnan, statistics.interval([])))


def test_bounds_are_whole_where_no_row_or_every_row_is_right() -> None:
    for rows in (1, 40, 100, 333):
        assert statistics.interval([0.0] * rows)[0] == 0
        assert statistics.interval([1.0] * rows)[1] == 1


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 0), (9, 2), (30, 41), (700, 640)])
def test_two_models_that_are_right_or_wrong_are_compared_by_mcnemar(gained: int, lost: int) -> None:
    scipy = pytest.importorskip("scipy.stats")
    before = [0.0] * gained + [1.0] * lost + [1.0] * 5
    after = [1.0] * gained + [0.0] * lost + [1.0] * 5
    comparison = statistics.compare(before, after)
    theirs = scipy.binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    assert (comparison.gained, comparison.lost) == (gained, lost)
    assert comparison.p_value == pytest.approx(theirs)


def test_two_models_with_other_scores_are_compared_by_flipped_signs() -> None:
    scipy = pytest.importorskip("scipy.stats")
    draw = np.random.default_rng(3)
    before = draw.normal(0.4, 0.2, 40)
    after = draw.normal(0.47, 0.2, 40)
    theirs = scipy.permutation_test(
        (before, after),
        lambda x, y: float(np.mean(y - x)),
        permutation_type="samples",
        n_resamples=20_000,
        rng=4,
    )
    assert statistics.compare(list(before), list(after)).p_value == pytest.approx(
        theirs.pvalue, abs=0.015
    )
    with pytest.raises(ValueError, match="the same rows"):
        statistics.compare([1.0], [1.0, 0.0])


@pytest.mark.parametrize(
    ("text", "value", "base", "holds"),
    [
        (">= 0.9", 0.9, None, True),
        ("> 0.9", 0.9, None, False),
        ("<= +2%", 2.04, 2.0, True),
        ("<= +2%", 2.05, 2.0, False),
        (">= +0.05", 0.16, 0.1, True),
        (">= -10%", 0.89, 1.0, False),
        ("< 1e-3", math.nan, None, False),
    ],
)
def test_conditions_of_a_gate(text: str, value: float, base: float | None, holds: bool) -> None:
    assert is_met(Condition.parse(text), value, base) is holds


@pytest.mark.parametrize("text", ["0.9", ">= 2%", "~ 3", ">=", ">= nan", ""])
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a comparison"):
        Condition.parse(text)


OWN = """\
from __future__ import annotations
from dataclasses import dataclass
import beside

@dataclass
class Answer:
    text: str

def good(prompt, answer, reference, record):
    return beside.VALUE * (answer == record["completion"])

def late(prompt, answer, reference, record):
    import later
    return later.VALUE

def leaves(prompt, answer, reference, record):
    raise SystemExit(0)

def raises(prompt, answer, reference, record):
    return record["nothing"]

def no_number(prompt, answer, reference, record):
    return "high"

def few(prompt, answer):
    return 1
"""


@pytest.fixture
def own_file(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("VALUE = 2\n")
    (tmp_path / "later.py").write_text("VALUE = 3\n")
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def test_functions_of_the_users_are_called_and_may_import_what_lies_beside_them(
    own_file: Path,
) -> None:
    functions = own_functions.load(OwnMetricsConfig(file=str(own_file), functions=("good", "late")))
    assert functions["good"]("", "yes", "", {"completion": "yes"}) == 2.0
    assert functions["late"]("", "yes", "", {}) == 3.0


def test_functions_that_fail_say_where_and_for_which_answer(own_file: Path) -> None:
    functions = own_functions.load(
        OwnMetricsConfig(file=str(own_file), functions=("raises", "no_number", "leaves"))
    )
    with pytest.raises(
        errors.ConfigError,
        match=r'raises raised KeyError for the answer \'yes\'[^$]*own.py", line 20',
    ):
        functions["raises"]("", "yes", "", {})
    with pytest.raises(
        errors.ConfigError, match=r"no_number returned 'high'.*expected a finite number"
    ):
        functions["no_number"]("", "yes", "", {})
    with pytest.raises(errors.ConfigError, match=r"leaves raised SystemExit for the answer 'yes'"):
        functions["leaves"]("", "yes", "", {})


@pytest.mark.parametrize(
    ("text", "function", "message"),
    [
        (
            OWN,
            "few",
            r"few: too many positional arguments; expected few\(prompt, answer, reference, record\)",
        ),
        (
            OWN,
            "missing",
            "has no function missing; it has good, late, leaves, raises, no_number, few",
        ),
        ("def broken(:\n", "broken", "cannot be run:[^$]*SyntaxError"),
        ("1 / 0\n", "x", "cannot be run:[^$]*line 1[^$]*ZeroDivisionError"),
        ("raise SystemExit(0)\n", "x", "cannot be run:[^$]*SystemExit"),
        (None, "x", "is no file"),
    ],
)
def test_files_that_cannot_be_used_are_refused(
    own_file: Path, text: str | None, function: str, message: str
) -> None:
    own_file.unlink()
    if text is not None:
        own_file.write_text(text)
    with pytest.raises(errors.ConfigError, match=message):
        own_functions.load(OwnMetricsConfig(file=str(own_file), functions=(function,)))


def test_token_f1_counts_common_words_as_squad_does() -> None:
    assert metrics.token_f1("the cat sat", "a cat sat down") == pytest.approx(2 * 2 / 7)
    assert metrics.token_f1("Cat cat.", "cat") == pytest.approx(2 * 1 / 3)
    assert metrics.token_f1("", "cat") == 0.0
    assert metrics.token_f1("", "") == 1.0
    # Of scripts without spaces characters are counted, as for CMRC 2018.
    assert metrics.token_f1("今天天气很好", "今天天气不好") == pytest.approx(5 / 6)
    assert metrics.token_f1("用 kubectl 查看", "用kubectl查看日志") == pytest.approx(
        2 * 4 / (4 + 6)
    )


def test_a_verdict_compares_no_sums_of_different_rewards(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = {"eval_reward": 1.13, "eval_reward/graded": 0.76, "eval_reward/exact_match": 0.37}
    base = {"metrics": {**before, "eval_loss": 0.5}}
    (tmp_path / run_files.BASE).write_text(json.dumps(base))
    after = {"eval_reward": 0.75, "eval_reward/exact_match": 0.75, "eval_loss": 0.4}
    (tmp_path / run_files.METRICS).write_text(json.dumps({"step": 7, "epoch": 1.0, **after}) + "\n")
    caplog.set_level("INFO", "kubetune")
    verdict.conclude(EvaluationConfig(), tmp_path, 7)
    assert "one of them judged no answer, so they are not compared" in caplog.text
    assert "reward 1.13" not in caplog.text
    assert "loss 0.5 → 0.4" in caplog.text
    assert run_files.read_verdict(tmp_path, 7)["best"]["eval_reward"] is None


def test_answers_to_the_same_question_are_each_in_one_pair() -> None:
    def answered(row: int, score: float) -> Answered:
        return Answered(row, "Which?", "a", f"row {row}", {"exact_match": score})

    # Three records that differ in their images alone.
    same = [answered(row, score) for row, score in ((1, 1.0), (2, 0.0), (3, 1.0))]
    (measured,) = compare_answers(same, same)
    assert (measured.rows, measured.before, measured.after) == (3, 2 / 3, 2 / 3)
    assert (measured.paired.gained, measured.paired.lost) == (0, 0)
    assert turned(same, same, "exact_match", 5) == {"gained": [], "lost": []}
    # Where the time ran out, the rows that both were asked are compared.
    (measured,) = compare_answers(same, same[1:])
    assert (measured.rows, measured.before, measured.after) == (2, 0.5, 0.5)
    # Of other evaluation data the rows are others.
    moved = [answered(row + 7, score) for row, score in ((1, 1.0), (2, 0.0), (3, 1.0))]
    (measured,) = compare_answers(same, moved)
    assert (measured.rows, measured.paired.gained, measured.paired.lost) == (3, 0, 0)
