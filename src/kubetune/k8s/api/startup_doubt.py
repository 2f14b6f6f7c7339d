"""Refusals that a server which has just started may not mean."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

import httpx2

from kubetune.k8s.api.answers import status_of
from kubetune.k8s.api.api_errors import ApiCall
from kubetune.k8s.api.passing import passing_refusal

# For so long the server counts as ready without being asked.
_READY_SECONDS: Final = 5.0
_PAUSE_AT_START_SECONDS: Final = 0.5
# Extension of a request: when it was sent, by time.monotonic().
SENT: Final = "kubetune_sent"


class StartupDoubt:
    """Decides whether a refusal is to be believed."""

    def __init__(self, most_seconds: float) -> None:
        self._most_seconds = most_seconds
        # Both by time.monotonic().
        self._until: float | None = None  # refusals of rights are not believed before
        self._ready_since = -math.inf  # when the server last answered that it is ready

    def begin(self) -> None:
        """Doubt again: the server has been away, and what comes back may have just started."""
        self._until = None
        self._ready_since = -math.inf

    def holds(
        self,
        question: ApiCall,
        response: httpx2.Response,
        http: httpx2.Client,
        say_started: Callable[[str], None],
    ) -> bool:
        """True if a request is to be asked again, since a server that has just started may have refused it.

        `http` asks the server whether it is ready, and `say_started` tells the user what a refusal by one that is not
        means.

        A server that says that it is ready is believed, after one more try. Where it does not, or nobody may ask it,
        refusals are doubted, with a pause after each, for `row.seconds`; then no more, until it has been away. Many
        clusters lack a kind (404), so that is believed where nobody may ask.

            0 s   403     /readyz 500   asked again, after a pause
            1 s   403     /readyz 200   asked again: it may have become ready in between
            1 s   403                   believed: sent after the server was ready
        """
        message = str(status_of(response).get("message"))
        refused_code = response.status_code
        row = passing_refusal(refused_code, message, question.kind, question.subresource)
        if row is None or row.believed != "once the server is ready":
            return False
        # What was sent before the server was ready may have been refused for that, though another
        # thread knows by now that it is ready.
        sent = response.request.extensions[SENT]
        if self._ready_since <= sent < self._ready_since + _READY_SECONDS:
            return False
        now = time.monotonic()
        if self._until is None:
            self._until = now + min(row.seconds, self._most_seconds)
        if now > self._until:
            return False
        try:
            code = http.get("/readyz").status_code
        except httpx2.HTTPError:
            return True
        may_not_ask = code in (401, 403)
        if may_not_ask and refused_code == 404:
            return False
        if may_not_ask or code >= 500:
            say_started(row.meaning)
            time.sleep(_PAUSE_AT_START_SECONDS)
        else:
            # It may have become ready since it refused: one more try decides.
            self._ready_since = time.monotonic()
        return True
