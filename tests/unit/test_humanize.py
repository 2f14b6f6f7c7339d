"""Values as people read them: few digits, the right unit on both sides of each boundary, and no exponents."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from kubetune.base import humanize

MIB = 2**20
GIB = 2**30


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1,000 B"),
        (1023.6, "1 KiB"),
        (999.6 * MIB, "1,000 MiB"),
        (1023 * MIB, "1,023 MiB"),
        (1023.9 * MIB, "1 GiB"),
        (1.456 * GIB, "1.46 GiB"),
        (80 * GIB, "80 GiB"),
        (-3 * MIB, "-3 MiB"),
        (5 * 2**50, "5,120 TiB"),
    ],
)
def test_sizes_have_a_unit_that_leaves_few_digits(value: float | None, text: str) -> None:
    assert humanize.size(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0.8123, "0.81 s"),
        (9.96, "10 s"),
        (59.7, "1 min"),
        (125, "2 min 5 s"),
        (1800, "30 min"),
        (3599.6, "1 h"),
        (11_520, "3 h 12 min"),
        (3600 * 1234 + 59 * 60 + 31, "1,235 h"),
    ],
)
def test_times_are_told_in_two_units(seconds: float | None, text: str) -> None:
    assert humanize.duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (-1, "0s"),
        (99.9, "99s"),
        (100, "1m"),
        (5999, "99m"),
        (11_100, "3h05m"),
        (2 * 86_400, "2d00h"),
    ],
)
def test_times_in_columns_are_short(seconds: float | None, text: str) -> None:
    assert humanize.brief(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (1234, "1,234"), (1234.5, "1,234"), (0.06591, "0.06591"), (float("nan"), "nan")],
)
def test_numbers(value: Any, text: str) -> None:
    assert humanize.number(value) == text


def test_units_agree_with_their_counts() -> None:
    texts = [
        humanize.counted(*words)
        for words in ((1, "row"), (2_000, "row"), (1, "process"), (2, "process"))
    ]
    assert texts == ["1 row", "2,000 rows", "1 process", "2 processes"]


def test_what_a_terminal_would_obey_is_spelt_out() -> None:
    assert (
        humanize.visible("a\x1b[31mred\x9b0m\x7f\r\tb\nc") == "a\\x1b[31mred\\x9b0m\\x7f\\x0d\tb\nc"
    )
    assert humanize.visible("one\nline", keep="") == "one\\x0aline"
    assert humanize.visible("\u202eabc\u2066 \ud800 \u2028") == "\\u202eabc\\u2066 \\ud800 \\u2028"
    plain = "Grüße, 你好 🙂 e\u0301 \u200d \xa0"
    assert humanize.visible(plain) == plain


def test_a_column_without_a_name_is_named_too() -> None:
    assert humanize.unused_keys({"": 3, "id": 1}) == "keys not used: (no name) × 3, id × 1"


@pytest.mark.parametrize(
    ("moment", "text"),
    [
        (None, "–"),
        ("2026-11-28T08:59:50.000Z", "just now"),
        ("2026-11-28T08:57:00.000Z", "3 min ago"),
        ("2026-11-28T03:30:00.000Z", "5 h ago"),
        ("2026-11-02T09:00:00.000Z", "2 Nov"),
        ("2025-12-31T09:00:00.000Z", "2025-12-31"),
    ],
)
def test_lists_say_how_long_ago(moment: str | None, text: str) -> None:
    assert humanize.ago(moment, datetime(2026, 11, 28, 9, tzinfo=UTC)) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (4.44, "4.4 s"),
        (42.3, "42 s"),
        (64, "1 min"),
        (3188, "53 min"),
        (4300, "1 h 12 min"),
    ],
)
def test_estimates_say_no_seconds_beside_minutes(seconds: float | None, text: str) -> None:
    assert humanize.estimate(seconds) == text
