"""Labels that are hardly the name of a class are known by what the others are, and plain names are left alone."""

from __future__ import annotations

import pytest

from kubetune.data.text.odd_labels import (
    joined_labels,
    marks_among_numbers,
    spelt_numbers,
    unlabelled_marks,
    unlabelled_words,
)


@pytest.mark.parametrize(
    ("names", "marks", "words"),
    [
        (["entailment", "neutral", "-"], ["-"], []),
        (["yes", "no", "?"], ["?"], []),
        (["a", "b", "…"], ["…"], []),
        (["a", "b", "NULL"], ["NULL"], []),
        (["a", "b", "<NA>"], ["<NA>"], []),
        (["a", "b", "(no label)"], ["(no label)"], []),
        (["+", "-"], [], []),
        (["+", "-", "neutral"], [], []),
        (["favor", "against", "NONE"], [], ["NONE"]),
        (["male", "female", "unknown"], [], ["unknown"]),
        (["NA", "EU"], [], ["NA"]),
        (["none of the above", "unknown_sender", "nano", "other"], [], []),
        (["c", "c++", "f-sharp"], [], []),
    ],
)
def test_marks_of_no_label(names: list[str], marks: list[str], words: list[str]) -> None:
    assert unlabelled_marks(names) == marks
    assert unlabelled_words(names) == words


@pytest.mark.parametrize(
    ("names", "joined"),
    [
        (["joy", "fear", "anger", "fear|joy"], ["fear|joy"]),
        (["joy", "fear", "fear; joy"], ["fear; joy"]),
        (["a", "b", "c", "a,b,c"], ["a,b,c"]),
        (["fear/joy", "joy/fear"], ["fear/joy", "joy/fear"]),
        (["Action|Comedy", "Comedy|Drama", "Drama|Action"], ["Action|Comedy", "Comedy|Drama", "Drama|Action"]),
        (["0", "2", "0,2"], ["0,2"]),
        (["news/sport", "news/politics", "blog/sport"], []),
        (["Arts & Crafts", "Food & Drink", "Health"], []),
        (["yes", "no", "yes, but"], []),
        (["c", "c++", "c/c++ mixed"], []),
        (["New York, USA", "Paris, France"], []),
        (["a", "b", "a|", "|b", "a|a"], []),
    ],
)  # fmt: skip
def test_several_classes_in_one_text(names: list[str], joined: list[str]) -> None:
    assert list(joined_labels(names)) == joined


@pytest.mark.parametrize(
    ("numbers", "marks"),
    [
        (["0.5", "3.75", "-999"], ["-999"]),
        (["1", "5", "2.5", "99"], ["99"]),
        (["1", "5", "2.5", "-9"], ["-9"]),
        (["0.2", "0.4", "-1"], ["-1"]),
        (["-1", "0", "0.9"], []),
        (["17.5", "95", "99"], []),
        (["0.5", "3.75", "-500"], []),
        (["100", "2500.5", "999"], []),
        (["-999"], []),
    ],
)
def test_numbers_that_mark_a_missing_one(numbers: list[str], marks: list[str]) -> None:
    assert marks_among_numbers(dict.fromkeys(numbers, 2)) == dict.fromkeys(marks, 2)


@pytest.mark.parametrize("form", ["{}%", "${}.50", "{},5", "€ {}", "1,{:03}"])
def test_numbers_in_another_spelling(form: str) -> None:
    names = [form.format(number) for number in range(30)]
    assert spelt_numbers(names) == names
    few = names[:10]
    expected = few if form in ("${}.50", "{},5") else []
    assert spelt_numbers(few) == expected, "few are grades or ranges, unless they have fractions"


@pytest.mark.parametrize("form", ["v{}", "{}-10", "{} km", "level {}", "{}", "{}.5", "01{}"])
def test_names_with_numbers_are_names(form: str) -> None:
    assert spelt_numbers([form.format(number) for number in range(30)]) == []
