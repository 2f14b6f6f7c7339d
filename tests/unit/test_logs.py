"""Log lines: families, levels, which rank writes where, and that no secret survives in any of them."""

from __future__ import annotations

import base64
import json
import logging
import os
import subprocess
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubetune.base import logs

TOKEN = "hf_c4n4ry/with+odd chars=="


@pytest.fixture(scope="module")
def configured_before() -> None:
    logs.configure("DEBUG")


@pytest.mark.usefixtures("configured_before")
def test_no_test_sees_what_was_configured_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    logs.STEP.info("load")
    logging.getLogger("alibrary").info("chatter")
    assert capsys.readouterr().out == ""
    assert sys.excepthook is sys.__excepthook__
    assert logging.getLogRecordFactory() is logging.LogRecord


def rank_file(run_dir: Path, rank: int = 0) -> str:
    return (run_dir / "logs" / f"rank-{rank}.log").read_text()


def test_a_line_has_time_family_and_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure("INFO", tmp_path)
    logs.TRAIN.info("step %d/%d loss %.4f", 12, 300, 1.93)
    line = capsys.readouterr().out
    assert line == rank_file(tmp_path)
    assert line[4:5] + line[10:11] + line[13:14] == "- :"
    assert line[20:] == "[TRAIN] step 12/300 loss 1.9300\n"


def test_debug_families_need_level_debug(tmp_path: Path) -> None:
    logs.configure("INFO", tmp_path)
    logs.COLLATE.debug("shapes")
    logs.configure("DEBUG", tmp_path)
    logs.BATCH.debug("loss")
    assert "[COLLATE]" not in rank_file(tmp_path)
    assert "[BATCH] loss" in rank_file(tmp_path)


def test_console_shows_rank_0_and_the_errors_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure("INFO", tmp_path, rank=3)
    logs.DATA.info("rows")
    logs.DATA.error("no rows")
    out = capsys.readouterr().out
    assert out.startswith("[rank 3] ")
    assert out.endswith("[DATA] ERROR: no rows\n")
    assert "[DATA] rows" in rank_file(tmp_path, 3)


def test_a_line_that_nobody_reads_is_in_the_file_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)  # as after `kubetune train | head`
    with open(writing, "w", buffering=1) as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        logs.configure("INFO", tmp_path)
        logs.STEP.info("said")
        with suppress(BrokenPipeError):
            gone.close()
    assert "[STEP] said" in rank_file(tmp_path)
    assert capsys.readouterr().err == ""


def test_configuring_again_does_not_double_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure("INFO", tmp_path)
    logs.configure("INFO", tmp_path)
    logs.STEP.info("once")
    assert capsys.readouterr().out.count("once") == 1
    assert rank_file(tmp_path).count("once") == 1


def test_libraries_speak_from_warning_up(tmp_path: Path) -> None:
    logs.configure("DEBUG", tmp_path)
    logging.getLogger("alibrary.modeling").info("chatter")
    logging.getLogger("alibrary.modeling").warning("careful")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        logging.captureWarnings(True)
        warnings.warn("old call", DeprecationWarning, stacklevel=1)
    text = rank_file(tmp_path)
    assert "chatter" not in text
    assert "[alibrary] WARNING: careful" in text
    assert "old call" in text


@pytest.mark.parametrize(
    ("which", "shown"),
    [("all", [0, 1, 2, 3]), ("first-last", [0, 3]), ("none", [])],
    ids=["all", "first-last", "none"],
)
def test_batches_shown(which: str, shown: list[int]) -> None:
    assert [i for i in range(4) if logs.shows_batch(which, i, 4)] == shown  # type: ignore[arg-type]


def test_secrets_vanish_from_lines_and_tracebacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    logs.configure("INFO", tmp_path)
    logs.MODEL.info("asked with %s", TOKEN)
    try:
        raise ValueError(f"401 for {TOKEN}")
    except ValueError:
        logs.MODEL.exception("refused")
    text = rank_file(tmp_path)
    assert TOKEN not in text
    assert text.count("[secret]") == 2
    assert "Traceback" in text


def test_an_uncaught_exception_is_logged_without_the_secret(tmp_path: Path) -> None:
    program = (
        "import os, sys, threading; from pathlib import Path; from kubetune.base import logs\n"
        "logs.configure('INFO', Path(sys.argv[1]))\n"
        "def fail(): raise RuntimeError('in thread ' + os.environ['MY_API_KEY'])\n"
        "t = threading.Thread(target=fail); t.start(); t.join()\n"
        "raise RuntimeError('in main ' + os.environ['MY_API_KEY'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path],
        capture_output=True,
        text=True,
        env={"MY_API_KEY": TOKEN},
    )
    assert done.returncode == 1
    for text in (done.stdout, rank_file(tmp_path)):
        assert "in thread [secret]" in text
        assert "in main [secret]" in text
    assert TOKEN not in done.stdout + done.stderr + rank_file(tmp_path)


@pytest.mark.parametrize(
    ("program", "code"),
    [
        (
            "from kubetune import cli; raise SystemExit(cli.main(['plan', os.environ['HF_TOKEN'] + '.yaml']))",
            2,
        ),
        (
            "from kubetune.base import logs; logs.scrub_tracebacks(); raise RuntimeError(os.environ['HF_TOKEN'])",
            1,
        ),
    ],
    ids=["error", "traceback"],
)
def test_the_command_line_prints_no_secret_either(program: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import os; {program}"],
        capture_output=True,
        text=True,
        env={"HF_TOKEN": TOKEN},
    )
    assert done.returncode == code
    assert "[secret]" in done.stderr
    assert TOKEN not in done.stderr


@given(
    secret=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=8, max_size=40),
    before=st.binary(max_size=5),
    after=st.binary(max_size=5),
)
def test_base64_of_any_text_around_a_secret_is_found(
    secret: str, before: bytes, after: bytes
) -> None:
    text = base64.b64encode(before + secret.encode() + after).decode()
    assert "[secret]" in logs.scrub(f"Authorization: Basic {text}", {"X_SECRET": secret})


def test_what_counts_as_secret() -> None:
    environ = {
        "HF_TOKEN": TOKEN,
        "DB_PASSWORD": "hunter22",
        "SOME_KEY": "train",
        "MODEL_ID": "Qwen/Qwen3-8B",
    }
    assert logs.scrub(f"a {TOKEN} b hunter22", environ) == "a [secret] b [secret]"
    assert logs.scrub(quote_plus(TOKEN), environ) == "[secret]"
    # Too short to be replaced safely, and not secret by name.
    assert logs.scrub("train Qwen/Qwen3-8B", environ) == "train Qwen/Qwen3-8B"
    assert logs.scrub("https://me:pw@host/x", {}) == "https://me:[secret]@host/x"
    assert logs.scrub("2026-11-20 http://host:5000/a@b", {}) == "2026-11-20 http://host:5000/a@b"


def test_the_longer_of_two_secrets_leaves_no_tail() -> None:
    environ = {"A_TOKEN": "abcdefgh", "B_TOKEN": "abcdefghTAIL"}
    assert logs.scrub("abcdefghTAIL", environ) == "[secret]"


@pytest.mark.parametrize(
    "token",
    [
        "hf_" + "aB3" * 11,
        "ghp_" + "aB3" * 12,
        "github_pat_" + "aB3_" * 10,
        "glpat-" + "aB3-" * 5,
        "xoxb-" + "123-aB3" * 5,
        "AKIA" + "IOSF0DNN" * 2,
        "sk-proj-" + "aB3_" * 10,
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
    ],
)
def test_tokens_are_known_by_their_form_where_no_variable_has_them(token: str) -> None:
    whole = f"login with {token}, then\n\033[32m{token}\033[0m"
    for text in (whole, json.dumps(whole)):
        cleaned = logs.scrub(text, {})
        assert cleaned == text.replace(token, "[secret]")


@pytest.mark.parametrize(
    "text",
    [
        "task-classification-of-4-languages",
        "https://host/disk-encryption-by-2-keys",
        "half_precision_weights_16",
        "sk-learn-pipelines-and-models",
        "eyJhbGciOiJIUzI1NiJ9",
    ],
)
def test_words_that_only_begin_like_tokens_stay(text: str) -> None:
    assert logs.scrub(text, {}) == text
