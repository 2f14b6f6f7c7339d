"""Does the steps of a cluster one after another, and takes them back again.

Each thing is looked for before it is made, and written down before and after: whatever fails, the same command goes on
where it stopped, makes nothing twice, and knows later what was made here and what existed before.

    state file            at Nebius         what `create` does
    nothing               nothing           writes down the intention, makes it, writes down its id
    nothing               it                writes down its id, as not made here: `delete` leaves it alone
    an intention          it                writes down its id, as made here: the last run broke off in between
    its id                it                nothing
    its id                nothing           makes it again

An intention is written down only after a look that has seen nothing of that name.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kubetune.base.files import write_atomic
from kubetune.errors import ConfigError, EnvironmentFault
from kubetune.plugins.nebius.steps import (
    KINDS,
    READY_MINUTES,
    Action,
    Command,
    Step,
    Thing,
    fill,
    is_absent,
)

INSTALL = {
    "nebius": "https://docs.nebius.com/cli/install",
    "helm": "https://helm.sh/docs/intro/install",
}
POLL_SECONDS = 10.0


@dataclass(frozen=True)
class ProvisionRecord:
    """What is known of one thing."""

    kind: str  # key of KINDS
    name: str
    parent: str
    id: str | None = None  # None in the state file: it was about to be made
    created: bool = False  # it was made here, and may be deleted here

    @property
    def title(self) -> str:
        """Return what it is called in lines for people."""
        return f"{KINDS[self.kind].title} {self.name} ({self.id or 'no id'})"


@dataclass
class ProvisionState:
    """The records of one cluster, in the order in which they were made, and the file they are kept in."""

    path: Path
    records: dict[str, ProvisionRecord] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> ProvisionState:
        """Read the file. Raise ConfigError when it is not one of ours."""
        if not path.exists():
            return cls(path)
        try:
            content = json.loads(path.read_text("utf-8"))
            records = {key: ProvisionRecord(**record) for key, record in content["records"].items()}
            kinds = {record.kind for record in records.values()}
            if content["version"] != 3 or not kinds <= KINDS.keys():
                raise ValueError("another version")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"{path}: not a state file of this version of kubetune: {error}. Nothing was done."
            ) from None
        return cls(path, records)

    def put(self, key: str, record: ProvisionRecord | None) -> None:
        """Remember, or with None forget, a record; on disk before this returns."""
        if record is None:
            del self.records[key]
        else:
            self.records[key] = record
        records = {name: asdict(entry) for name, entry in self.records.items()}
        write_atomic(self.path, json.dumps({"version": 3, "records": records}, indent=2) + "\n")


@dataclass(frozen=True)
class Finished:
    """End of a command."""

    command: Command
    code: int
    out: str
    err: str = ""  # empty where it was shown as it came

    def fault(self, advice: str) -> EnvironmentFault:
        """Return the error that says how it ended."""
        lines = [f"`{shlex.join(self.command)[:300]}` ended with {self.code}"]
        for line in self.err.strip().splitlines()[-5:]:
            lines.append(f"  {line}")
        lines.append(advice)
        return EnvironmentFault("\n".join(lines))

    def json(self) -> Any:
        """Return the thing that was printed. Raise EnvironmentFault where it is none."""
        try:
            thing = json.loads(self.out)
            str(thing["metadata"]["id"])
        except (ValueError, KeyError, TypeError):
            raise EnvironmentFault(
                f"`{shlex.join(self.command)[:300]}` printed no JSON with metadata.id but {self.out[:200]!r}; "
                "run the same command again, which looks for what it made"
            ) from None
        return thing


def require_programs(names: Sequence[str]) -> None:
    """Raise EnvironmentFault naming every program that is not on the PATH."""
    missing = [name for name in names if shutil.which(name) is None]
    if missing:
        lines = [f"{name} is not on the PATH; install it: {INSTALL[name]}" for name in missing]
        lines.append("Nothing was done.")
        raise EnvironmentFault("\n".join(lines))


@dataclass
class Provisioner:
    """Everything that commands are run with."""

    state: ProvisionState
    say: Callable[[str], None]  # prints a line
    wait: Callable[[float], None] = time.sleep  # between two looks
    ids: dict[str, str] = field(default_factory=dict)  # of the parts that steps name as `@{key}`

    def create(self, steps: Sequence[Step]) -> None:
        """Do all steps. Raise EnvironmentFault at the first that fails; what is made stays."""
        # Steps of an earlier run are done anew, but what they made is known.
        self.ids = {key: record.id for key, record in self.state.records.items() if record.id}
        for number, step in enumerate(steps, 1):
            self.say(f"[{number}/{len(steps)}] {step.title}")
            if isinstance(step, Action):
                self._make(fill(step.command, self.ids))
                continue
            record = self._ensured(step)
            self.ids[step.key] = str(record.id)
            self._until_it_runs(record)

    def delete(self, keys: Collection[str]) -> None:
        """Delete, last made first, what was made here of the things with these keys. The others are only forgotten."""
        for key in reversed(list(self.state.records)):
            if key not in keys:
                continue
            # A run may have been killed after it made a thing and before it wrote down its id.
            record = self.completed(key)
            if record.created and record.id is not None:
                done = self._ask(KINDS[record.kind].remove(record.id))
                if done.code and not is_absent(done.err):
                    raise done.fault("The rest stays until then; run the same command again.")
            # After each, so that a deletion that breaks off can be taken up.
            self.state.put(key, None)

    def completed(self, key: str) -> ProvisionRecord:
        """Return a record, with the id of a thing that was being made when a run broke off."""
        record = self.state.records[key]
        if record.id is None:
            identity = self._id_by_name(record)
            if identity is not None:
                record = replace(record, id=identity, created=True)
                self.state.put(key, record)
        return record

    def look(self, record: ProvisionRecord) -> Any:
        """Return a thing as Nebius shows it now, None where there is nothing.

        Raise EnvironmentFault when that cannot be known.
        """
        kind = KINDS[record.kind]
        # By name the parent may be what is missing, and that is another thing than an absent child.
        command = kind.look(record.name, record.parent)
        parent = record.parent
        if record.id is not None:
            command = kind.get(record.id)
            parent = ""
        done = self._ask(command)
        if not done.code:
            return done.json()
        if is_absent(done.err, parent):
            return None
        raise done.fault("Nothing was changed by it.")

    def _id_by_name(self, record: ProvisionRecord) -> str | None:
        """Return the id of what is there under that name."""
        thing = self.look(replace(record, id=None))
        if thing is None:
            return None
        return str(thing["metadata"]["id"])

    def _ensured(self, step: Thing) -> ProvisionRecord:
        """Return the record of a thing, which is made where it is not there."""
        record = self.state.records.get(step.key)
        is_intended = record is not None and record.id is None
        if record is None:
            record = ProvisionRecord(step.kind, step.name, fill([step.parent], self.ids)[0])
        # Two names under one key would leave the first thing behind, unknown and paid for.
        if record.name != step.name:
            raise ConfigError(
                f"{self.state.path}: {step.key} is {record.name} there and {step.name} in the cluster file; names "
                "cannot be changed. Use another file for another cluster, or delete this one first."
            )
        if record.id is not None:
            if self.look(record) is not None:
                return record
            self.say("  is gone; making it again")

        identity = self._id_by_name(record)
        if identity is not None:
            self.say(f"  is there already: {identity}")
            record = replace(record, id=identity, created=is_intended)
        else:
            # Should this break off, the next look by name knows that it is ours.
            self.state.put(step.key, replace(record, id=None, created=False))
            done = self._make(fill(step.make, self.ids))
            record = replace(record, id=str(done.json()["metadata"]["id"]), created=True)
        self.state.put(step.key, record)
        return record

    def _until_it_runs(self, record: ProvisionRecord) -> None:
        """Wait until a thing runs. Raise EnvironmentFault where it fails, or time is up."""
        if not KINDS[record.kind].has_state:
            return
        deadline = time.monotonic() + 60 * READY_MINUTES
        while True:
            thing = self.look(record)
            status = {"state": "gone"}
            if thing is not None:
                status = thing.get("status", {})
            state = status.get("state", "unknown")
            if state in ("RUNNING", "READY"):
                return
            # It will never run.
            if state in ("ERROR", "DELETING", "gone"):
                why = status.get("state_description", "its events in the console say why")
                raise EnvironmentFault(f"{record.name} is {state}: {why}")
            if time.monotonic() > deadline:
                raise EnvironmentFault(
                    f"{record.name} is still {state} after {READY_MINUTES} minutes; run the same command again "
                    "to go on waiting, and look at its events in the console"
                )
            self.say(f"  {state}; looking again in {POLL_SECONDS:.0f} s")
            self.wait(POLL_SECONDS)

    def _ask(self, command: Command) -> Finished:
        """Run a command that is allowed to fail."""
        self.say(f"  + {shlex.join(command)}")
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        )
        return Finished(command, done.returncode, done.stdout, done.stderr)

    def _make(self, command: Command) -> Finished:
        """Run a command that makes something. Raise EnvironmentFault where it fails."""
        self.say(f"  + {shlex.join(command)}")
        # Its messages are shown as they come: some commands take many minutes.
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, errors="replace", check=False
        )
        finished = Finished(command, done.returncode, done.stdout)
        if finished.code:
            raise finished.fault("What was made stays; run the same command again to go on here.")
        return finished
