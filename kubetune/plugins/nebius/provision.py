"""Brings the steps of a cluster about, one after another, and takes them away again.

Each thing is looked for before it is made, and written down before and after: whatever fails, the same command goes on
where it stopped, makes nothing twice, and knows later what was made here and what had been there before.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from kubetune.base.files import write_atomic
from kubetune.errors import ConfigError, EnvironmentFault
from kubetune.plugins.nebius.steps import KINDS, Command, Step, fill, is_absent

INSTALL = {
    "nebius": "https://docs.nebius.com/cli/install",
    "helm": "https://helm.sh/docs/intro/install",
    "kubectl": "https://kubernetes.io/docs/tasks/tools",
}
CLOCK_SKEW = timedelta(minutes=5)
POLL_SECONDS = 10.0


@dataclass(frozen=True)
class Record:
    """Knowledge of one step. `id` is None from the moment it is about to be made until it is known to be made.

    `created`: it was made here, and may be deleted here. `made`: the options it was made with.
    """

    kind: str
    name: str
    parent: str
    id: str | None = None
    created: bool = False
    intended_at: str = ""
    made: tuple[str, ...] = ()


@dataclass
class State:
    """The records of one cluster, in the order in which they were made, and the file they are kept in."""

    path: Path
    context: str
    records: dict[str, Record] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, context: str) -> State:
        """Raises ConfigError when the file is not one of ours."""
        if not path.exists():
            return cls(path, context)
        try:
            content = json.loads(path.read_text("utf-8"))
            records = {
                key: Record(**{**r, "made": tuple(r["made"])})
                for key, r in content["records"].items()
            }
            if content["version"] != 1 or any(
                record.kind not in KINDS for record in records.values()
            ):
                raise ValueError("another version")
            return cls(path, content["context"], records)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            what = "not a state file of this version of kubetune"
            raise ConfigError(f"{path}: {what}: {error}. Nothing was done.") from None

    def put(self, key: str, record: Record | None) -> None:
        """Remember, or with None forget, a record; on disk before this returns."""
        if record is None:
            del self.records[key]
        else:
            self.records[key] = record
        content = {
            "version": 1,
            "provider": "nebius",
            "context": self.context,
            "records": {name: asdict(each) for name, each in self.records.items()},
        }
        write_atomic(self.path, json.dumps(content, indent=2) + "\n")

    def fill(self, command: Sequence[str], record: Record | None = None) -> Command:
        """The command with the ids of what is known, and what `record` is called."""
        values = {key: each.id or "" for key, each in self.records.items()} | {
            "context": self.context
        }
        if record is not None:
            values |= {"id": record.id or "", "name": record.name, "parent": record.parent}
        return fill(command, values)


@dataclass(frozen=True)
class Finished:
    """End of a command."""

    code: int
    out: str
    err: str


def run_command(command: Command, stdin: str = "", *, quiet: bool = False) -> Finished:
    """Run one command. What it says on stderr is shown as it comes, unless `quiet`; stdout is kept for us."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    said: list[str] = []

    def listen() -> None:
        for line in process.stderr or ():
            said.append(line)
            if not quiet:
                print(f"  {line}", end="", file=sys.stderr, flush=True)

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        # It may end without reading; its exit code then says why.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(stdin)
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        out = process.stdout.read()
    finally:
        code = process.wait()
        listener.join()
        process.stdout.close()
        process.stderr.close()
    return Finished(code, out, "".join(said))


def require_programs(names: Sequence[str]) -> None:
    """Raises EnvironmentFault naming every program that is not on the PATH."""
    if missing := [name for name in names if shutil.which(name) is None]:
        wanted = "\n".join(
            f"{name} is not on the PATH; install it: {INSTALL[name]}" for name in missing
        )
        raise EnvironmentFault(f"{wanted}\nNothing was done.")


@dataclass(frozen=True)
class Provisioner:
    """Everything that commands are run with. `say` prints a line; `wait` passes time between two looks."""

    state: State
    say: Callable[[str], None]
    ready_minutes: int = 60
    wait: Callable[[float], None] = time.sleep

    def create(self, steps: Sequence[Step]) -> None:
        """Bring all steps about. Raises EnvironmentFault at the first that cannot be; what is made stays."""
        for number, step in enumerate(steps, 1):
            title = f"{KINDS[step.kind].title} {step.name}".strip() if step.kind else step.key
            self.say(f"[{number}/{len(steps)}] {re.sub(r' ?@.*', '', title)}")
            if not step.kind:
                self._run(self.state.fill(step.make), "")
            elif step.repeats:
                self._apply(step)
            else:
                self._ensure(step)

    def delete(self, only: Collection[str] | None = None) -> None:
        """Remove what was made here, last made first. What it did not make is only forgotten.

        `only`: nothing but the records with these keys, and of those none that was not made here; the rest stays known.
        """
        for key, record in self._chosen(only):
            record = self._completed(key, record)
            if only is not None and not record.created and record.id is not None:
                continue
            kind = KINDS[record.kind]
            if (
                record.created
                and record.id is not None
                and kind.remove
                and not self._goes_with(record)
            ):
                done = self._ask(self.state.fill(kind.remove, record))
                if done.code and not is_absent(kind.remove, done.err):
                    raise _failed(
                        kind.remove, done, "The rest stays until then; run the same command again."
                    )
            if not self._goes_with(record):
                self._forget(key)
        if only is not None:
            return
        for key in list(self.state.records):
            self._forget(key)
        self.state.path.unlink(missing_ok=True)

    def _chosen(self, only: Collection[str] | None) -> list[tuple[str, Record]]:
        found = reversed(list(self.state.records.items()))
        return [(key, record) for key, record in found if only is None or key in only]

    def _forget(self, key: str) -> None:
        """Forget a record and all that went with it."""
        for inner, record in list(self.state.records.items()):
            if KINDS[record.kind].within == key:
                self.state.put(inner, None)
        if key in self.state.records:
            self.state.put(key, None)

    def _goes_with(self, record: Record) -> bool:
        outer = self.state.records.get(KINDS[record.kind].within)
        return outer is not None and outer.created

    def doomed(self, only: Collection[str] | None = None) -> Iterator[tuple[str, Record, str]]:
        """Every record with what `delete` will do to it: deleted, goes with another, or stays."""
        for key, record in self._chosen(only):
            record = self._completed(key, record)
            if not record.created or record.id is None:
                yield key, record, "stays: it was not made here" if record.id else "was never made"
            elif self._goes_with(record):
                yield key, record, f"goes with the {KINDS[KINDS[record.kind].within].title}"
            else:
                yield (
                    key,
                    record,
                    "is deleted" if KINDS[record.kind].remove else "stays: others may use it",
                )

    def look(self, record: Record) -> Finished | None:
        """Resource there is now of a record, by its id where it has one; None where there is nothing.

        Raises EnvironmentFault when that cannot be known.
        """
        kind = KINDS[record.kind]
        by_id = kind.get if record.id is not None else ()
        command = self.state.fill(by_id or kind.look, record)
        done = self._ask(command)
        if done.code and not is_absent(command, done.err, "" if by_id else record.parent):
            raise _failed(command, done, "Nothing was changed by it.")
        exists = not done.code and (bool(by_id) or _read_id(record, done.out) is not None)
        return done if exists else None

    def _completed(self, key: str, record: Record) -> Record:
        """The record with its id, for one that was being made when something broke off."""
        if record.id is None and record.intended_at:
            record = self._found(record) or record
            self.state.put(key, record)
        return record

    def _found(self, record: Record) -> Record | None:
        """The record of what is there under that name; it counts as made here if it is no older than our intention."""
        record = replace(record, id=None)
        done = self.look(record)
        if done is None:
            return None
        dated = bool(KINDS[record.kind].get)  # the others say nothing of their age
        made_here = bool(record.intended_at) and (
            not dated or _is_since(done.out, record.intended_at)
        )
        return replace(record, id=_read_id(record, done.out), created=made_here)

    def _ensure(self, step: Step) -> None:
        name, parent = self.state.fill((step.name, step.parent or ""))
        make = self.state.fill(step.make)
        known = self.state.records.get(step.key)
        if known is not None and known.name == name and known.id is not None:
            if self.look(known) is not None:
                if known.created and known.made != make:
                    self.say(f"  keeps the settings it was made with: {shlex.join(known.made)}")
                self._until_it_runs(step.key)
                return
            self.say("  is gone; making it again")
            known = None
        if known is not None and known.name != name:
            raise ConfigError(
                f"{self.state.path}: {step.key} is {known.name} there and {name} in the cluster file; names cannot be "
                "changed. Use another file for another cluster, or delete this one first."
            )
        if known is None:
            known = Record(step.kind, name, parent)
        found = self._found(known)
        if found is not None:
            self.say(f"  {'was made before' if found.created else 'is there already'}: {found.id}")
            self.state.put(step.key, replace(found, made=make))
        elif not step.make:
            raise EnvironmentFault(
                f"there is no {KINDS[step.kind].title}; make one in the console, and run it again"
            )
        else:
            self.state.put(step.key, replace(known, intended_at=_now(), made=make))
            out = self._run(make, step.stdin)
            made = replace(self.state.records[step.key], created=True)
            self.state.put(step.key, replace(made, id=_made_id(out, make)))
        self._until_it_runs(step.key)

    def _apply(self, step: Step) -> None:
        known = self.state.records.get(step.key)
        if known is None:
            known = self._found(Record(step.kind, step.name, step.parent))
            known = known or Record(
                step.kind, step.name, step.parent, created=True, intended_at=_now()
            )
            self.state.put(step.key, known)
        if not known.created:
            self.say("  is there already, and is left as it is")
            return
        self._run(self.state.fill(step.make), step.stdin)
        self.state.put(step.key, replace(known, id=step.name))

    def _until_it_runs(self, key: str) -> None:
        record = self.state.records[key]
        if not KINDS[record.kind].has_state:
            return
        deadline = time.monotonic() + 60 * self.ready_minutes
        while True:
            there = self.look(record)
            status = json.loads(there.out).get("status", {}) if there else {}
            state = status.get("state", "unknown") if there else "gone"
            if state in ("RUNNING", "READY"):
                return
            if state in ("ERROR", "DELETING", "gone"):
                why = status.get("state_description", "its events in the console say why")
                raise EnvironmentFault(f"{record.name} is {state}: {why}")
            if time.monotonic() > deadline:
                raise EnvironmentFault(
                    f"{record.name} is still {state} after {self.ready_minutes} minutes; run the same command again "
                    "to go on waiting, and look at its events in the console"
                )
            self.say(f"  {state}; looking again in {POLL_SECONDS:.0f} s")
            self.wait(POLL_SECONDS)

    def _ask(self, command: Command) -> Finished:
        self.say(f"  + {shlex.join(command)}")
        return run_command(command, quiet=True)

    def _run(self, command: Command, stdin: str) -> str:
        shown = shlex.join(command)
        self.say(f"  + {shown}" + (f" <<'EOF'\n{stdin}EOF" if stdin else ""))
        done = run_command(command, stdin)
        if done.code:
            raise _failed(
                command,
                done,
                "What was made so far stays; run the same command again to go on here.",
            )
        return done.out


def _failed(command: Command, done: Finished, advice: str) -> EnvironmentFault:
    said = done.err.strip().splitlines()[-5:] or ["it said nothing"]
    lines = "\n".join(f"  {line}" for line in said)
    return EnvironmentFault(
        f"`{shlex.join(command)[:300]}` ended with {done.code}:\n{lines}\n{advice}"
    )


def _made_id(out: str, command: Command) -> str:
    try:
        return str(json.loads(out)["metadata"]["id"])
    except (ValueError, KeyError, TypeError):
        raise EnvironmentFault(
            f"`{shlex.join(command)[:300]}` printed no JSON with metadata.id; run the same command again, "
            "which looks for what it made"
        ) from None


def _read_id(record: Record, out: str) -> str | None:
    title = KINDS[record.kind].title
    try:
        return KINDS[record.kind].found(out, record.name)
    except (KeyError, TypeError, json.JSONDecodeError):
        raise EnvironmentFault(
            f"looking for the {title} gave other JSON than expected: {out[:200]}"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{error}. Nothing was made by it.") from None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _is_since(out: str, moment: str) -> bool:
    """A resource says that it was created after a moment; without a word of it, it counts as older."""
    try:
        created = datetime.fromisoformat(json.loads(out)["metadata"]["created_at"])
    except (ValueError, KeyError, TypeError):
        return False
    return created >= datetime.fromisoformat(moment) - CLOCK_SKEW
