"""Log lines: their families, where each rank writes them, and the removal of secrets from all of them.

    2026-11-20 10:15:00 [TRAIN] step 12/300 loss 1.9312

Every rank writes `logs/rank-N.log`; the console shows rank 0, and the errors of the others as `[rank 3] …`.
Not for numbers (rundir/metrics) and not for the progress bar (progress_bar.py).
"""

from __future__ import annotations

import base64
import functools
import html
import json
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, TextIO
from urllib.parse import quote, quote_plus

from kubetune.base.humanize import visible
from kubetune.base.secrets import TOKEN

_ROOT = "kubetune"
_ERROR_FAMILY = "ERROR"


def family_logger(family: str) -> logging.Logger:
    """The logger whose lines are marked `[family]`."""
    return logging.getLogger(f"{_ROOT}.{family}")


STEP = family_logger("STEP")
"""Announcements of the next thing to do: load, prepare, train, save."""
DDP = family_logger("DDP")
"""Ranks, devices, backends, process groups."""
DATA = family_logger("DATA")
"""Rows, sources, batches."""
MODEL = family_logger("MODEL")
"""Parameters, adapters, optimizer, schedule."""
TRAIN = family_logger("TRAIN")
"""One line every `logging_steps`; on a terminal the progress bar shows it instead."""
EPOCH = family_logger("EPOCH")
"""Summary of an epoch."""
EVAL = family_logger("EVAL")
"""Result of an evaluation."""
RESULT = family_logger("RESULT")
"""Results and where they lie."""
DONE = family_logger("DONE")
"""The last line of a run."""
ERROR = family_logger(_ERROR_FAMILY)
"""Faults that end a run."""
COLLATE = family_logger("COLLATE")
"""Shapes of batches, at DEBUG."""
BATCH = family_logger("BATCH")
"""Loss and time of single batches, at DEBUG; see `shows_batch`."""


def configure(
    level: str, run_dir: Path | None = None, rank: int = 0, *, progress: bool = False
) -> None:
    """Send log lines to the console and, with a run directory, to `logs/rank-N.log`; may be called again.

    `level` is a name such as "INFO". With `progress`, `[TRAIN]` lines stay out of the console, where the bar shows the
    same numbers. Uncaught exceptions and Python warnings become log lines too.
    """
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, _Console | _RankFile):
            root.removeHandler(handler)
            handler.close()
    console = _Console(rank, hide_train_lines=progress)
    root.addHandler(console)
    if run_dir is not None:
        root.addHandler(_RankFile(run_dir, rank))
    # The level is ours; of libraries only what needs attention is shown, whatever they set up for themselves.
    root.setLevel(logging.WARNING)
    logging.getLogger(_ROOT).setLevel(level)
    logging.captureWarnings(True)
    logging.setLogRecordFactory(_Record)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


def shows_batch(which: Literal["all", "first-last", "none"], index: int, count: int) -> bool:
    """Batch `index` of `count` gets a `[BATCH]` line under the setting `logging.batches`."""
    return which == "all" or (which == "first-last" and index in (0, count - 1))


class _Lines(logging.Formatter):
    """`time [FAMILY] message`, with the level named from WARNING up, and no secrets: not in tracebacks either.

    Texts of data and models are part of lines: nothing in them may reach a terminal as a command."""

    def format(self, record: logging.LogRecord) -> str:
        family = record.name.removeprefix(f"{_ROOT}.").partition(".")[0]
        level = (
            f"{record.levelname}: "
            if record.levelno >= logging.WARNING and family != _ERROR_FAMILY
            else ""
        )
        line = f"{self.formatTime(record, '%Y-%m-%d %H:%M:%S')} [{family}] {level}{record.getMessage()}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return visible(scrub(line))


class _Lenient(logging.Handler):
    """Leaves lines to the other handler where the disk is full or the terminal gone: none of them may end a run."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _Console(_Lenient, logging.StreamHandler[TextIO]):
    """Writes to whatever sys.stdout is at the moment: while a progress bar runs that is the bar's own stream."""

    def __init__(self, rank: int, *, hide_train_lines: bool) -> None:
        logging.Handler.__init__(self, logging.DEBUG if rank == 0 else logging.ERROR)
        self.setFormatter(_Lines())
        self._prefix = "" if rank == 0 else f"[rank {rank}] "
        self._hide_train_lines = hide_train_lines

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stdout

    def emit(self, record: logging.LogRecord) -> None:
        if not (
            self._hide_train_lines
            and record.name == TRAIN.name
            and record.levelno < logging.WARNING
        ):
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        return self._prefix + super().format(record)


class _RankFile(_Lenient, logging.FileHandler):
    """`logs/rank-N.log`, appended to, so that it tells of every start of a run."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        path = run_dir / "logs" / f"rank-{rank}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self.setFormatter(_Lines())


def scrub_tracebacks() -> None:
    """Have uncaught exceptions printed without secrets, in processes that do not `configure` logging."""
    sys.excepthook = _print_uncaught
    logging.setLogRecordFactory(_Record)


class _Record(logging.LogRecord):
    """A line of any library, whose own handlers know nothing of secrets: huggingface_hub tells addresses it retries."""

    def getMessage(self) -> str:
        return scrub(super().getMessage())


def _print_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    sys.stderr.write(scrub("".join(traceback.format_exception(kind, error, trace))))


def _log_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        _print_uncaught(kind, error, trace)
    else:
        ERROR.critical("uncaught exception", exc_info=(kind, error, trace))


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None:
        _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)


_SECRET_NAME = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE)$", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(?<=://)([^/\s:@]*):[^/\s@]+@")
_SHORTEST_SECRET = 6
_SHORTEST_REFUSED = 8
_REDACTED = "[secret]"


def scrub(text: str, environ: Mapping[str, str] | None = None) -> str:
    """`text` without the values of secret environment variables, be they plain, base64 or URL-encoded.

    Secret are variables named like `HF_TOKEN`, `…_KEY`, `…_SECRET`, `…_PASSWORD` with at least 6 characters (shorter
    values would tear holes into innocent words), passwords inside URLs, and tokens that are known by their form.
    """
    environ = os.environ if environ is None else environ
    # Names first: os.environ decodes each value anew, and every line of a log comes by here.
    values = {environ.get(name, "") for name in environ if _is_secret(name)}
    values = {value for value in values if len(value) >= _SHORTEST_SECRET}
    if values:
        text = _secret_pattern(frozenset(values)).sub(_REDACTED, text)
    text = TOKEN.sub(_REDACTED, text)
    return _URL_PASSWORD.sub(rf"\1:{_REDACTED}@", text)


def secret_variable(text: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Return the name of a secret environment variable whose value stands in a text, None if none does.

    Values of fewer than 8 characters do not count, nor those that are a part of a longer word: both come up by chance.
    """
    environ = os.environ if environ is None else environ
    for name in sorted(filter(_is_secret, environ)):
        value = environ.get(name, "")
        if len(value) < _SHORTEST_REFUSED or value not in text:
            continue
        if re.search(rf"(?<![A-Za-z0-9]){re.escape(value)}(?![A-Za-z0-9])", text):
            return name
    return None


@functools.lru_cache(maxsize=1024)
def _is_secret(name: str) -> bool:
    return _SECRET_NAME.search(name) is not None


@functools.lru_cache(maxsize=4)
def _secret_pattern(values: frozenset[str]) -> re.Pattern[str]:
    forms = set[str]()
    for value in values:
        forms |= {value, quote(value), quote(value, safe=""), quote_plus(value)}
        # Within JSON and HTML some characters are written otherwise.
        forms |= {json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
        forms |= {html.escape(value), value.replace("&", "&amp;"), _escaped_by_jinja(value)}
        forms |= _base64_forms(value.encode(errors="surrogateescape"))
    # Longest first: a secret that begins with another one must not leave its tail behind.
    return re.compile("|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True)))


def _escaped_by_jinja(value: str) -> str:
    return html.escape(value).replace("&quot;", "&#34;").replace("&#x27;", "&#39;")


def _base64_forms(secret: bytes) -> set[str]:
    """Parts of base64 of any text with `secret` in it: one form for each offset modulo three bytes."""
    forms = set()
    for offset in range(3):
        first = -(-offset * 8 // 6)
        last = (offset + len(secret)) * 8 // 6
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            forms.add(encode(b"\0" * offset + secret).decode()[first:last])
    return forms
