"""Close connections on which requests never come.

uvicorn closes a connection that is idle after a request, but waits forever for a request that is begun
and not finished. Without a token, anybody could use up the server's open files in this way.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

# For the head of a request to arrive, and for what follows an answer.
REQUEST_SECONDS = 10.0


class ImpatientProtocol(H11Protocol):
    """uvicorn's HTTP. A connection on which nothing is being answered is closed after a while."""

    # The clock of this connection: None while a request is being answered.
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Wait for the first request, but not forever."""
        super().connection_made(transport)
        self._set_deadline()

    def data_received(self, data: bytes) -> None:
        """Stop the clock when the whole head has arrived. A part of it gains no time."""
        super().data_received(data)
        if self._is_answering():
            self._drop_deadline()

    def on_response_complete(self) -> None:
        """Wait for the next request, or the rest of a body that nobody reads."""
        super().on_response_complete()
        if not self._is_answering():
            self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._drop_deadline()
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        """True from the end of a request's head to the end of its answer."""
        return self.cycle is not None and not self.cycle.response_complete

    def _set_deadline(self) -> None:
        """Restart the clock."""
        self._drop_deadline()
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)

    def _drop_deadline(self) -> None:
        """Stop the clock, if it runs."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
