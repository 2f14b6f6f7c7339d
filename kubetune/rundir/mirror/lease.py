"""The owner of the copy in an object store: a name of the run, there and in its directory, so that two never share one.

Besides the run, the store names the start of it that writes: the newest takes over, so that a run goes on at once on an
empty machine, and one that is still alive elsewhere finds out and leaves the copy alone. Nothing is locked: whoever
writes looks first, every time. Who is displaced without having said that it ended is named in the log.
"""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kubetune import errors
from kubetune.base import files, logs
from kubetune.config.load import dotted_values, load_resolved, resolved
from kubetune.config.naming import RESOLVED
from kubetune.rundir import metrics
from kubetune.rundir.starts import moved_numbers

REMOTE = "mirror.json"
LOCAL = ".mirror.json"

_log = logs.family_logger("MIRROR")


@dataclass(frozen=True)
class Owner:
    """A run, and the start of it that writes (none yet: ""), with where, since when, and when it ended (not yet: "").

    `before`: the one it took over from, which the store still names where that did not arrive.
    """

    run: str
    writer: str = ""
    before: str = ""
    host: str = ""
    since: str = ""
    ended: str = ""

    @classmethod
    def read(cls, text: str, where: str) -> Owner:
        """The owner that a store holds; `where` it was read from. Raises EnvironmentFault."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise errors.EnvironmentFault(
                f"{where} is damaged ({error}); expected what kubetune wrote there"
            ) from None

    def text(self) -> str:
        """A line of JSON, as `read` takes it."""
        return json.dumps(asdict(self)) + "\n"


class Lease:
    """The right of the run in `run_dir` to the copy at `address`. Raises whatever the store's library raises."""

    # Object stores have no locks, and most no compare-and-swap. So nobody waits for a lease to expire, which would hold
    # up the new start of a run whose machine has just died; instead
    #   - the *run* has a name that never changes. It is written by `create`, which stores that can refuse to overwrite
    #     make exclusive; whoever finds another name there refuses (`recognise`). So two runs never mix;
    #   - the *start* that writes has a name too, and the newest wins: `take` overwrites it. The one displaced finds out
    #     at its next look (`check`, each time before it sends) and stops. What it sent in between are
    #     checkpoints of the same run, whole by their manifests, from the same steps: harmless;
    #   - first the own name is kept here and then sent. Killed in between, or with the answer lost, the store still
    #     names `before`, and `check` takes that for oneself, not for a later start.

    def __init__(self, store: Any, root: str, address: str, run_dir: Path) -> None:
        self._store, self._root, self._address, self._run_dir = store, root, address, run_dir
        self._place = f"{root}/{REMOTE}"

    def recognise(self, *, claims: bool) -> None:
        """See that the store and the directory hold the same run. One that has not begun takes the name that is there.

        `claims`: an empty store gets the directory's. Raises ConfigError where they hold two.
        """
        there, here = self._there(), self._here()
        if there is None:
            if claims:
                self._create(here or Owner(uuid.uuid4().hex))
        elif here is None and not self.has_begun():
            # Another node on the same disk may have written its config already.
            if (own := self._run_dir / RESOLVED).is_file():
                self.require_config(json.loads(own.read_text()), has_begun=False)
            self._keep(there)
        elif here is None or here.run != there.run:
            raise errors.ConfigError(
                f"{self._address} holds another run than {self._run_dir}{_begun(there)}; choose another address for "
                f"this one, or fetch that one into a folder of its own: kubetune sync {self._address} DIR. Nothing was "
                "sent."
            )

    def has_begun(self) -> bool:
        """A step was trained in the directory; until then it may become any run of its config."""
        lines = self._run_dir / metrics.METRICS
        is_measured = lines.is_file() and lines.stat().st_size > 0
        return is_measured or any((self._run_dir / "checkpoints").glob("*step-*"))

    def require_config(self, starting: Mapping[str, Any], *, has_begun: bool) -> None:
        """Raise ConfigError where the store holds a run that has begun with another config than `starting`."""
        there = self.read(RESOLVED)
        if there is None or not (has_begun or self.read(metrics.METRICS)):
            return
        old = resolved(load_resolved(json.loads(there), f"{self._address}/resolved.json"))
        if changes := moved_numbers(dict(dotted_values(old)), dict(dotted_values(starting))):
            raise errors.ConfigError(
                [
                    *(f"{key} was {was}, now is {now}" for key, was, now in changes),
                    f"{self._address} holds a run with another config; to go on with it undo these changes, to start "
                    "afresh choose another address. Nothing was written.",
                ]
            )

    def take(self) -> None:
        """Become the one that writes: this start of the run, and no earlier one any more."""
        self.recognise(claims=True)
        there = self._there()
        assert there is not None, "recognised"
        here = socket.gethostname()
        mine = Owner(
            there.run, writer=uuid.uuid4().hex, before=there.writer, host=here, since=metrics.now()
        )
        self._keep(mine)
        self._store.pipe_file(self._place, mine.text().encode())
        if there.writer and not there.ended and there.host != here:
            _log.warning(
                "%s is kept up from here now; until now it was by a start of this run on %s%s, which has not said that "
                "it ended. Should it still train, it goes on by itself, to no use: stop it there",
                self._address, there.host, self._last_heard(there),
            )  # fmt: skip

    def release(self) -> None:
        """Say that this start of the run writes no more, so that nobody wonders who takes over."""
        here = self._here()
        if here is not None:
            self._store.pipe_file(self._place, replace(here, ended=metrics.now()).text().encode())

    def _last_heard(self, owner: Owner) -> str:
        """Time at which a start of the run was last known to live, by what its first rank left in the store."""
        try:
            moment = datetime.fromtimestamp(
                json.loads(self.read("logs/rank-0.beat.json") or "")["time"], UTC
            )
        except (ValueError, TypeError, KeyError):
            return f" since {owner.since}"
        return f" since {owner.since}, last heard of at {metrics.written(moment)}"

    def check(self) -> None:
        """Raise ConfigError when another run, or a later start of this one somewhere else, writes there."""
        there, here = self._there(), self._here()
        if there is None or here is None or here.run != there.run:
            self.recognise(claims=True)
        elif there.writer not in (here.writer, here.before):
            raise errors.ConfigError(
                f"{self._address} is kept up by a later start of this run{_begun(there)}, so nothing more is sent from "
                f"here; what was made since is in {self._run_dir} alone"
            )

    def _create(self, owner: Owner) -> None:
        try:
            self._store.pipe_file(self._place, owner.text().encode(), mode="create")
        except FileExistsError:
            if self._there() == owner:  # an answer that was lost, and a library that asked again
                self._keep(owner)
            else:  # another one came first, a moment ago
                self.recognise(claims=False)
        except NotImplementedError:  # not every store can refuse to overwrite
            self._store.pipe_file(self._place, owner.text().encode())
            self._keep(owner)
        else:
            self._keep(owner)

    def _keep(self, owner: Owner) -> None:
        files.write_atomic(self._run_dir / LOCAL, owner.text())

    def _here(self) -> Owner | None:
        path = self._run_dir / LOCAL
        return Owner.read(path.read_text(), str(path)) if path.is_file() else None

    def _there(self) -> Owner | None:
        text = self.read(REMOTE)
        return None if text is None else Owner.read(text, f"{self._address}/{REMOTE}")

    def read(self, name: str) -> str | None:
        """The text of a file of the run in the store; None where there is none."""
        try:
            return str(self._store.cat_file(f"{self._root}/{name}").decode())
        except FileNotFoundError:
            return None


def _begun(owner: Owner) -> str:
    return f" (by {owner.host}, {owner.since})" if owner.writer else ""
