"""The log of a rank as one file, which a browser saves. The page of a run shows its last lines."""

from __future__ import annotations

from collections.abc import Iterator
from io import BufferedReader
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kubetune.base.files import open_inside
from kubetune.base.logs import scrub
from kubetune.ui.site import Missing, run_of

_BATCH_BYTES = 1 << 20  # of lines that are sent at a time


def rank_of(request: Request) -> int:
    """Return the rank in an address; 0 for anything but a number."""
    # An address may hold anything.
    text = request.query_params.get("rank", "")
    if not text.isdecimal() or len(text) > 6:
        return 0
    return int(text)


def log_file(request: Request) -> Response:
    """Send the whole log of a rank. Raise Missing without one."""
    run_dir = run_of(request)
    name = f"rank-{rank_of(request)}.log"
    try:
        file = open_inside(run_dir / "logs" / name, run_dir)
    except FileNotFoundError:
        raise Missing(f"{run_dir / 'logs' / name}: no log of this rank") from None
    saved_as = quote(f"{run_dir.name}-{name}")
    headers = {"content-disposition": f"attachment; filename*=UTF-8''{saved_as}"}
    return StreamingResponse(
        _lines_of(file), media_type="text/plain; charset=utf-8", headers=headers
    )


def _lines_of(file: BufferedReader) -> Iterator[str]:
    """Yield the lines of a log in batches, without secrets."""
    # What a library prints need not be UTF-8.
    with file:
        while lines := file.readlines(_BATCH_BYTES):
            yield scrub(b"".join(lines).decode(errors="replace"))
