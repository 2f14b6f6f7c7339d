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
from kubetune.base import files, logs
from kubetune.config.naming import RESOLVED
from kubetune.config.resolved import dotted_values, load_resolved, resolved
from kubetune.rundir import metrics
from kubetune.rundir.mirror.stored_run import REMOTE, StoredRun
from kubetune.rundir.starts import moved_numbers

LOCAL = ".mirror.json"
# The claim that is being made, written before the store gets it.
DRAFT = ".mirror-draft.json"

_log = logs.family_logger("MIRROR")


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
        except (ValueError, TypeError, RecursionError) as error:
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
    #   run that finds another name there refuses (`recognise`). So two runs never mix. The name is in the directory
    #   before it is in the store: a process that is killed before the store has answered knows its claim again.
    # - A claim with nothing beside it protects nothing, so a run that has begun takes it over. A run that has just made
    #   it, and still lives, notices at its next `check`.
    # - The *start* that writes has a name too, and the newest wins: `take` overwrites it. The displaced start notices at
    #   its next `check`, before each time it sends, and stops. What it sent in between is harmless: checkpoints of the
    #   same run and the same steps, whole by their manifests.

    def __init__(self, stored: StoredRun, run_dir: Path) -> None:
        self._stored = stored
        self._address = stored.address
        self._run_dir = run_dir
        self._writer = ""  # name of this start, once it has taken the copy

    def recognise(self, *, claims: bool) -> None:
        """Check that the store and the directory hold the same run. A directory that has not begun takes the store's.

        `claims`: a store that is empty, or holds only a claim, gets the directory's run. Raise ConfigError if the two
        hold different runs.
        """
        remote = self._remote_owner()
        local = self._owner_in(LOCAL)
        draft = self._owner_in(DRAFT)
        if remote is None:
            if claims:
                self._create(local or draft or self._draft())
            return
        if local is not None and local.run == remote.run:
            return
        if draft is not None and draft.run == remote.run:
            self._keep(remote)  # the answer to our claim was lost
            return
        if local is None and not self.has_begun():
            # Another node on the same disk may have written its config already.
            config = self._run_dir / RESOLVED
            if config.is_file():
                self.require_config(json.loads(config.read_text()), has_begun=False)
            self._keep(remote)
            return
        self._displace(remote, local or draft, claims=claims)

    def _displace(self, remote: Owner, known: Owner | None, *, claims: bool) -> None:
        """Take over the claim of another run that has sent nothing. Raise ConfigError if it has sent something."""
        sent = self._stored.files()
        # A start that held the copy and lost it does not take it back.
        if claims and not sent and not self._writer:
            _log.warning(
                "%s was claimed by another run%s that sent nothing; it is now that of %s",
                self._address,
                _begun(remote),
                self._run_dir,
            )
            owner = known or self._draft()
            self._stored.write(REMOTE, owner.text())
            self._keep(owner)
            return
        remedy = f"or fetch that one into a folder of its own: kubetune sync {self._address} DIR"
        if RESOLVED not in sent:
            remedy = "or delete what is there, which is no whole run"
        raise errors.ConfigError(
            f"{self._address} holds another run than {self._run_dir}{_begun(remote)}; choose another address for "
            f"this one, {remedy}. Nothing was sent."
        )

    def has_begun(self) -> bool:
        """True if a step was trained in the directory. Until then it may become any run of its config."""
        lines = self._run_dir / metrics.METRICS
        is_measured = lines.is_file() and lines.stat().st_size > 0
        return is_measured or any((self._run_dir / "checkpoints").glob("*step-*"))

    def require_config(self, starting: Mapping[str, Any], *, has_begun: bool) -> None:
        """Raise ConfigError if the store holds a run that has begun with another config than `starting`."""
        text = self._stored.read(RESOLVED)
        if text is None or not (has_begun or self._stored.read(metrics.METRICS)):
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
        self._stored.write(REMOTE, owner.text())
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
            self._stored.store.pipe_file(
                self._stored.place(REMOTE), owner.text().encode(), mode="create"
            )
        except FileExistsError:
            # Either the answer to our own request was lost, and the library repeated it; or another run came first.
            if self._remote_owner() != owner:
                self.recognise(claims=False)
                return
        except NotImplementedError:  # this store cannot refuse to overwrite
            self._stored.write(REMOTE, owner.text())
        self._keep(owner)

    def _draft(self) -> Owner:
        """Return a new claim, which is on the disk of the run from now on."""
        owner = Owner(uuid.uuid4().hex)
        files.write_atomic(self._run_dir / DRAFT, owner.text())
        return owner

    def _keep(self, owner: Owner) -> None:
        files.write_atomic(self._run_dir / LOCAL, owner.text())
        (self._run_dir / DRAFT).unlink(missing_ok=True)

    def _owner_in(self, name: str) -> Owner | None:
        path = self._run_dir / name
        if not path.is_file():
            return None
        return Owner.read(path.read_text("utf-8", "replace"), str(path))

    def _remote_owner(self) -> Owner | None:
        text = self._stored.read(REMOTE)
        if text is None:
            return None
        return Owner.read(text, f"{self._address}/{REMOTE}")


def _begun(owner: Owner) -> str:
    if not owner.writer:
        return ""
    return f" (by {owner.host}, {owner.since})"
