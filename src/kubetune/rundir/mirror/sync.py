"""A run directory and its copy in an object store: send what is new, fetch what the store knows longer.

copier.py decides when to send and what to do while a store does not answer; lease.py decides whose copy it is.
"""

from __future__ import annotations

from pathlib import Path

from kubetune.rundir.mirror.fetching import Fetcher
from kubetune.rundir.mirror.lease import Lease
from kubetune.rundir.mirror.sending import Sender
from kubetune.rundir.mirror.stored_run import StoredRun


class Mirror:
    """A run directory and its copy. All that reaches the store raises whatever the store's library raises."""

    def __init__(self, run_dir: Path, address: str) -> None:
        self.run_dir = run_dir
        self.address = address
        self.stored = StoredRun(address)
        self.lease = Lease(self.stored, run_dir)
        self.sender = Sender(run_dir, self.stored, self.lease)
        self.fetcher = Fetcher(run_dir, self.stored, self.lease)

    def send(self) -> None:
        """Make the copy equal to the directory: see `Sender`."""
        self.sender.send()

    def fetch(self, *, everything: bool = False) -> int | None:
        """Fetch the run if the store knows more of it: see `Fetcher`."""
        return self.fetcher.fetch(everything=everything)
