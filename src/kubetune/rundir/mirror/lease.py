"""Whose copy an object store holds: the store and the run directory have the same name of the run.

The store also names the start of the run that writes. The newest start takes over, so that a run continues at once on
an empty machine. An earlier start that still lives elsewhere notices it and stops writing. Nothing is locked: a writer
looks before each write.
"""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kubetune import errors
from kubetune.base import files
from kubetune.config.load import dotted_values, load_resolved, resolved
from kubetune.config.naming import RESOLVED
from kubetune.rundir import metrics
from kubetune.rundir.starts import moved_numbers

REMOTE = "mirror.json"
LOCAL = ".mirror.json"


@dataclass(frozen=True)
class Owner:
    """Content of mirror.json: a run, and the start of it that writes."""

    run: str  # random name of the run, which never changes
    writer: str = ""  # random name of the start that writes; empty: none yet
    host: str = ""  # of the writer
    since: str = ""  # time at which it took over

    @classmethod
    def read(cls, text: str, where: str) -> Owner:
        """Return the owner in a text. `where` it was read is for messages. Raise EnvironmentFault."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise errors.EnvironmentFault(
                f"{where} is damaged ({error}); expected what kubetune wrote there"
            ) from None

    def text(self) -> str:
        """Return a line of JSON that `read` takes."""
        return json.dumps(asdict(self)) + "\n"


class Lease:
    """The right of the run in `run_dir` to the copy at `address`. Raise whatever the store's library raises."""

    # Object stores have no locks, and most have no compare-and-swap. A lease that expires would delay the new start of a
    # run whose machine has just died. So there is none:
    #
    # - The *run* has a name that never changes. `_create` writes it, without overwriting if the store can refuse that. A
    #   run that finds another name there refuses (`recognise`). So two runs never mix.
    # - The *start* that writes has a name too, and the newest wins: `take` overwrites it. The displaced start notices at
    #   its next `check`, before each time it sends, and stops. What it sent in between is harmless: checkpoints of the
    #   same run and the same steps, whole by their manifests.

    def __init__(self, store: Any, root: str, address: str, run_dir: Path) -> None:
        self._store = store
        self._root = root
        self._address = address
        self._run_dir = run_dir
        self._place = f"{root}/{REMOTE}"
        self._writer = ""  # name of this start, once it has taken the copy

    def recognise(self, *, claims: bool) -> None:
        """Check that the store and the directory hold the same run. A directory that has not begun takes the store's.

        `claims`: an empty store gets the directory's run. Raise ConfigError if the two hold different runs.
        """
        remote = self._remote_owner()
        local = self._local_owner()
        if remote is None:
            if claims:
                self._create(local or Owner(uuid.uuid4().hex))
        elif local is None and not self.has_begun():
            # Another node on the same disk may have written its config already.
            config = self._run_dir / RESOLVED
            if config.is_file():
                self.require_config(json.loads(config.read_text()), has_begun=False)
            self._keep(remote)
        elif local is None or local.run != remote.run:
            raise errors.ConfigError(
                f"{self._address} holds another run than {self._run_dir}{_begun(remote)}; choose another address for "
                f"this one, or fetch that one into a folder of its own: kubetune sync {self._address} DIR. Nothing was "
                "sent."
            )

    def has_begun(self) -> bool:
        """True if a step was trained in the directory. Until then it may become any run of its config."""
        lines = self._run_dir / metrics.METRICS
        is_measured = lines.is_file() and lines.stat().st_size > 0
        return is_measured or any((self._run_dir / "checkpoints").glob("*step-*"))

    def require_config(self, starting: Mapping[str, Any], *, has_begun: bool) -> None:
        """Raise ConfigError if the store holds a run that has begun with another config than `starting`."""
        text = self.read(RESOLVED)
        if text is None or not (has_begun or self.read(metrics.METRICS)):
            return
        old = resolved(load_resolved(json.loads(text), f"{self._address}/resolved.json"))
        changes = moved_numbers(dict(dotted_values(old)), dict(dotted_values(starting)))
        if changes:
            problems = [f"{key} was {was}, now is {now}" for key, was, now in changes]
            problems.append(
                f"{self._address} holds a run with another config; to go on with it undo these changes, to start "
                "afresh choose another address. Nothing was written."
            )
            raise errors.ConfigError(problems)

    def take(self) -> None:
        """Make this start of the run the one that writes, in place of any earlier start."""
        if self._writer:
            return
        self.recognise(claims=True)
        displaced = self._remote_owner()
        assert displaced is not None, "recognised"
        name = uuid.uuid4().hex
        owner = Owner(displaced.run, writer=name, host=socket.gethostname(), since=metrics.now())
        self._store.pipe_file(self._place, owner.text().encode())
        self._writer = name

    def check(self) -> None:
        """Raise ConfigError if another run, or a later start of this run elsewhere, writes to the store."""
        self.recognise(claims=True)
        remote = self._remote_owner()
        if self._writer and remote is not None and remote.writer != self._writer:
            raise errors.ConfigError(
                f"{self._address} is kept up by a later start of this run{_begun(remote)}, so nothing more is sent from "
                f"here; what was made since is in {self._run_dir} alone"
            )

    def _create(self, owner: Owner) -> None:
        try:
            self._store.pipe_file(self._place, owner.text().encode(), mode="create")
        except FileExistsError:
            # Either the answer to our own request was lost, and the library repeated it; or another run came first.
            if self._remote_owner() != owner:
                self.recognise(claims=False)
                return
        except NotImplementedError:  # this store cannot refuse to overwrite
            self._store.pipe_file(self._place, owner.text().encode())
        self._keep(owner)

    def _keep(self, owner: Owner) -> None:
        files.write_atomic(self._run_dir / LOCAL, owner.text())

    def _local_owner(self) -> Owner | None:
        path = self._run_dir / LOCAL
        if not path.is_file():
            return None
        return Owner.read(path.read_text(), str(path))

    def _remote_owner(self) -> Owner | None:
        text = self.read(REMOTE)
        if text is None:
            return None
        return Owner.read(text, f"{self._address}/{REMOTE}")

    def read(self, name: str) -> str | None:
        """Return the text of a file of the run in the store. None if there is none."""
        try:
            return str(self._store.cat_file(f"{self._root}/{name}").decode())
        except FileNotFoundError:
            return None


def _begun(owner: Owner) -> str:
    if not owner.writer:
        return ""
    return f" (by {owner.host}, {owner.since})"
