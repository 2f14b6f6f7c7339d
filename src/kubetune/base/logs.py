"""Log lines: their families, where each rank writes them, and how secrets are removed from all of them.

    2026-11-20 10:15:00 [TRAIN] step 12/300 loss 1.9312

Every rank writes `logs/rank-N.log`. The console shows rank 0, and errors of the other ranks as `[rank 3] …`. Where it
is brief (base/terminal), it shows warnings, errors and what a person wants to see at first, without times and families.
Numbers of a run are in rundir/metrics, and the progress bar is in terminal/progress_bar.py.
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
from typing import Final, Literal, TextIO
from urllib.parse import quote, quote_plus

from kubetune.base.humanize import visible
from kubetune.base.secrets import TOKEN
from kubetune.base.terminal import CLEAR, RED, YELLOW, coloured, folded

# Of lines that a brief console shows too: above INFO, which all other lines have, and below WARNING.
NOTICE: Final = 25

_ROOT = "kubetune"
_ERROR_FAMILY = "ERROR"


def family_logger(family: str) -> logging.Logger:
    """Return the logger whose lines are marked `[family]`."""
    return logging.getLogger(f"{_ROOT}.{family}")


# What the run does next: load, prepare, train, save.
STEP = family_logger("STEP")
# Ranks, devices, backends, process groups.
DDP = family_logger("DDP")
# Rows, sources, batches.
DATA = family_logger("DATA")
# Parameters, adapters, optimizer, schedule.
MODEL = family_logger("MODEL")
# One line every `logging_steps`. The progress bar shows the same numbers.
TRAIN = family_logger("TRAIN")
# Summary of an epoch.
EPOCH = family_logger("EPOCH")
# Result of an evaluation.
EVAL = family_logger("EVAL")
# Results and where they are.
RESULT = family_logger("RESULT")
# The last line of a run.
DONE = family_logger("DONE")
# Faults that end a run.
ERROR = family_logger(_ERROR_FAMILY)
# Shapes of batches, at DEBUG.
COLLATE = family_logger("COLLATE")
# Loss and time of single batches, at DEBUG (see `shows_batch`).
BATCH = family_logger("BATCH")


def configure(
    level: str, run_dir: Path | None = None, rank: int = 0, *, brief: bool = False
) -> None:
    """Send log lines to the console and, with a run directory, to `logs/rank-N.log`. It may be called again.

    `level` is a name such as "INFO". A `brief` console has lines of NOTICE and above alone; the file has all of them.
    Uncaught exceptions and Python warnings become log lines too.
    """
    root = logging.getLogger()
    # Remove the handlers of an earlier call.
    for handler in list(root.handlers):
        if isinstance(handler, _Console | _RankFile):
            root.removeHandler(handler)
            handler.close()
    console = _Console(rank, brief=brief)
    root.addHandler(console)
    if run_dir is not None:
        root.addHandler(_RankFile(run_dir, rank))
    # `level` is for our lines. Libraries show only warnings.
    root.setLevel(logging.WARNING)
    logging.getLogger(_ROOT).setLevel(level)
    logging.captureWarnings(True)
    logging.setLogRecordFactory(_Record)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


def shows_batch(which: Literal["all", "first-last", "none"], index: int, count: int) -> bool:
    """True if batch `index` of `count` gets a `[BATCH]` line; `which` is the setting `logging.batches`."""
    return which == "all" or (which == "first-last" and index in (0, count - 1))


class _Lines(logging.Formatter):
    """Writes `time [FAMILY] message`, without secrets, in tracebacks too. Warnings and errors name their level.

    Lines may hold texts of data and models, which must not reach a terminal as commands: see `visible`.
    """

    def format(self, record: logging.LogRecord) -> str:
        family = record.name.removeprefix(f"{_ROOT}.").partition(".")[0]
        level = ""
        if record.levelno >= logging.WARNING and family != _ERROR_FAMILY:
            level = f"{record.levelname}: "
        line = f"{self.formatTime(record, '%Y-%m-%d %H:%M:%S')} [{family}] {level}{record.getMessage()}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return visible(scrub(line))


class _BriefLines(logging.Formatter):
    """Writes the message alone, and before warnings and errors what they are."""

    def format(self, record: logging.LogRecord) -> str:
        line = record.getMessage()
        if record.levelno >= logging.WARNING:
            # A library is named, since its words are not ours.
            library = ""
            if not record.name.startswith(_ROOT):
                library = f" of {record.name.partition('.')[0]}"
            kind = "error" if record.levelno >= logging.ERROR else "warning"
            line = f"{kind}{library}: {line}"
        line = folded(visible(scrub(line)), sys.stdout)
        if record.exc_info:
            line += "\n" + visible(scrub(self.formatException(record.exc_info)))
        if record.levelno >= logging.ERROR:
            return coloured(line, RED)
        if record.levelno >= logging.WARNING:
            return coloured(line, YELLOW)
        return line


class _Lenient(logging.Handler):
    """Loses a line if the disk is full or the terminal is gone. The other handler still has it, and the run goes on."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _Console(_Lenient, logging.StreamHandler[TextIO]):
    """Writes to what sys.stdout is at the moment: while a progress bar runs, that is the bar's stream."""

    def __init__(self, rank: int, *, brief: bool) -> None:
        level = logging.ERROR
        if rank == 0:
            level = NOTICE if brief else logging.DEBUG
        logging.Handler.__init__(self, level)
        self.setFormatter(_BriefLines() if brief else _Lines())
        self._prefix = "" if rank == 0 else f"[rank {rank}] "
        self._is_brief = brief

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stdout

    def format(self, record: logging.LogRecord) -> str:
        line = self._prefix + super().format(record)
        # The line of a sign of life, which another process draws (supervisor/start_signs). A bar draws by itself.
        if self._is_brief and sys.stdout is sys.__stdout__:
            line = CLEAR + line
        return line


class _RankFile(_Lenient, logging.FileHandler):
    """Appends to `logs/rank-N.log`, which so has the lines of every start of a run."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        path = run_dir / "logs" / f"rank-{rank}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self.setFormatter(_Lines())


def scrub_tracebacks() -> None:
    """Print uncaught exceptions without secrets. For processes that do not `configure` logging."""
    sys.excepthook = _print_uncaught
    logging.setLogRecordFactory(_Record)


class _Record(logging.LogRecord):
    """A line of any logger, without secrets. Libraries have handlers of their own: huggingface_hub logs addresses."""

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
_SHORTEST_SECRET = 6  # characters; shorter values would be removed from innocent words
_SHORTEST_REFUSED = 8  # characters; a shorter value may be in a run file by chance
_REDACTED = "[secret]"


def scrub(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Return a text without secrets, be they plain, in base64 or URL-encoded.

    Secrets are the values of variables named like `HF_TOKEN`, `…_KEY`, `…_SECRET` or `…_PASSWORD`, passwords inside
    URLs, and tokens with a known form.
    """
    environ = os.environ if environ is None else environ
    # Look at names first: os.environ decodes each value anew, and every log line passes here.
    values = {environ.get(name, "") for name in environ if _is_secret(name)}
    values = {value for value in values if len(value) >= _SHORTEST_SECRET}
    if values:
        text = _secret_pattern(frozenset(values)).sub(_REDACTED, text)
    text = TOKEN.sub(_REDACTED, text)
    return _URL_PASSWORD.sub(rf"\1:{_REDACTED}@", text)


def secret_variable(text: str) -> str | None:
    """Return the name of a secret environment variable whose value a text holds. None if it holds none.

    Values of fewer than 8 characters do not count, nor parts of longer words: both happen by chance.
    """
    for name in sorted(filter(_is_secret, os.environ)):
        value = os.environ.get(name, "")
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
    """Return a pattern of all forms in which secrets may be in a text."""
    forms = set[str]()
    for value in values:
        forms |= {value, quote(value), quote(value, safe=""), quote_plus(value)}
        # JSON and HTML escape some characters.
        forms |= {json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
        forms |= {html.escape(value), value.replace("&", "&amp;"), _escaped_by_jinja(value)}
        forms |= _base64_forms(value.encode(errors="surrogateescape"))
    # Longest first: if one secret is the beginning of another, the rest of the longer one must not stay.
    return re.compile("|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True)))


def _escaped_by_jinja(value: str) -> str:
    return html.escape(value).replace("&quot;", "&#34;").replace("&#x27;", "&#39;")


def _base64_forms(secret: bytes) -> set[str]:
    """Return what base64 of a text with `secret` in it holds, for each offset of the secret modulo three bytes.

    A character of base64 has 6 bits, a byte has 8. A secret of 3 bytes that begins at offset 1 has the bits 8 to 31. The
    characters 2 to 4, with the bits 12 to 29, depend on the secret alone; 1 and 5 also on the bytes around it.
    """
    forms = set()
    for offset in range(3):
        first = -(-offset * 8 // 6)  # rounded up
        last = (offset + len(secret)) * 8 // 6  # rounded down
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            forms.add(encode(b"\0" * offset + secret).decode()[first:last])
    return forms
