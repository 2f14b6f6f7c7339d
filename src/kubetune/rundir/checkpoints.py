"""Checkpoints that are whole or not there: written aside, checksummed, renamed, and read only when every byte is right.

This file knows folders and files, not models. A checkpoint is a folder `step-000120` whose `manifest.json` names the
sha256 of every other file and is written last; the folder gets its name by rename after everything is on disk.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from kubetune import errors
from kubetune.base import fault_injection, files, logs, whole_folder
from kubetune.base.files import read_inside, require_inside
from kubetune.rundir import metrics, shapes

STEP_FOLDER = re.compile(r"step-(\d{6,})")
MANIFEST = "manifest.json"
STATE = "state.json"
# Begins the name of a whole checkpoint while another of its step takes its place.
_FORMER = ".former-"


@dataclass(frozen=True)
class State:
    """Everything the loop cannot recompute."""

    step: int = 0  # completed optimizer steps
    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    seconds: float = 0.0
    saved_step: int = 0
    evaluated_step: int = 0
    best_step: int | None = None
    best_value: float | None = None
    evaluations_without_improvement: int = 0
    steps_above_threshold: int = 0
    loss_scale: float = 1.0
    steps_since_overflow: int = 0
    data_fingerprint: str = ""
    global_batch_size: int = 0
    global_batch_tokens: int | None = None

    def is_last(self, num_steps: int | None, *, evaluates: bool, patience: int | None) -> bool:
        """True if nothing is left to train or to evaluate. `patience`: evaluations without improvement that end a run."""
        is_evaluated = not evaluates or self.evaluated_step == self.step
        is_spent = patience is not None and self.evaluations_without_improvement >= patience
        return is_evaluated and (self.step == num_steps or is_spent)


def folder_of(run_dir: Path, step: int) -> Path:
    """Return the folder of the checkpoint after so many steps, whether it exists or not."""
    return run_dir / "checkpoints" / f"step-{step:06d}"


def commit(run_dir: Path, state: State, write: Callable[[Path], None]) -> Path:
    """Write one checkpoint and return its folder: `write(folder)` makes the files, then it is sealed and named.

    A whole checkpoint of the same step is replaced, a damaged one is set aside. Raise EnvironmentFault when the disk
    is full; whatever was there before stays good.
    """
    final = folder_of(run_dir, state.step)
    with files.explained_writes(final):
        final.parent.mkdir(exist_ok=True)  # and no run directory, which may have been deleted
    # The folder has a hidden name until all of it is on the disk. The manifest is written last: it names the others.
    with whole_folder.written(final, "commit", set_aside=_make_way) as partial:
        write(partial)
        (partial / STATE).write_text(json.dumps(asdict(state), indent=1) + "\n")
        fault_injection.reach("commit.written")
        whole_folder.share_like(partial, partial / STATE)
        sums = whole_folder.checksums(partial, but=MANIFEST)
        files.write_atomic(partial / MANIFEST, _manifest_text(sums), within=partial)
    whole_folder.remove(_former(final))
    return final


def _former(folder: Path) -> Path:
    """Return where a checkpoint is while another of its step is written."""
    return folder.with_name(_FORMER + folder.name)


def _make_way(folder: Path) -> None:
    """Move a checkpoint out of the way of another of its step; a whole one is kept until the other has its name."""
    if verify(folder) is None:
        os.rename(folder, _former(folder))
        fault_injection.reach("commit.former")
    else:
        set_aside(folder)


def _manifest_text(sums: dict[str, Any]) -> str:
    return json.dumps({"version": 1, "files": sums}, indent=1) + "\n"


def verify(
    folder: Path,
    *,
    thorough: bool = True,
    but: str = "",
    digest: Callable[[Path], str] = files.sha256_file,
) -> str | None:
    """Return what is wrong with a checkpoint, None for a whole one.

    Only names and sizes are checked where `thorough` is false, and of files that the pattern `but` names. `digest`
    returns the SHA-256 of a file: some callers know it already.
    """
    try:
        require_inside(folder, folder.parent)
        # The manifest itself.
        text = read_inside(folder / MANIFEST).decode()
        listed: dict[str, Any] = json.loads(text)["files"]
        # Byte by byte what was written: JSON forgives changes that a checksum would not.
        is_ours = text == _manifest_text(listed) and all(
            set(facts) == {"sha256", "bytes"} for facts in listed.values()
        )
    except FileNotFoundError:
        return "has no manifest"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_ours = False
    if not is_ours:
        return "has a manifest that kubetune has not written so"
    # Names, then links, then sizes and content.
    present = whole_folder.contents(folder, but=MANIFEST)
    problem = whole_folder.wrong_names(present, listed)
    if problem:
        return problem
    for name in sorted(present):
        if present[name].is_symlink():
            return f"holds {name} as a link, where the file itself is expected"
    for name, path in present.items():
        size = path.stat().st_size
        if size != listed[name]["bytes"]:
            return f"{name} has {size} bytes instead of {listed[name]['bytes']}"
        if thorough and not fnmatchcase(name, but) and digest(path) != listed[name]["sha256"]:
            return f"{name} is damaged (checksum differs)"
    return _misnamed(folder)


def _misnamed(folder: Path) -> str | None:
    """Return what is wrong with the name of a checkpoint's folder, None where it names the step of its state."""
    name = STEP_FOLDER.fullmatch(folder.name)
    if name is None:
        return None
    try:
        step = files.read_object(folder / STATE).get("step")
    except (OSError, errors.EnvironmentFault) as error:
        return f"has no {STATE} that can be read ({error})"
    if step != int(name[1]):
        return f"is of step {step}, not of the one in its name"
    return None


def steps(run_dir: Path) -> list[int]:
    """Return the steps that have a checkpoint folder, whole or not, in order."""
    root = run_dir / "checkpoints"
    names = os.listdir(root) if root.is_dir() else []
    return sorted(int(m.group(1)) for name in names if (m := STEP_FOLDER.fullmatch(name)))


def linked(run_dir: Path, name: str) -> int | None:
    """Return the step of the checkpoint that the link `best` or `last` leads to, None if there is no such link."""
    path = run_dir / "checkpoints" / name
    match = STEP_FOLDER.fullmatch(path.resolve().name) if path.is_symlink() else None
    return int(match.group(1)) if match else None


def newest_step(run_dir: Path) -> int:
    """Return the step from which the next start goes on, 0 for a start from the beginning.

    Names and sizes decide, so that not every byte is read.
    """
    for step in reversed(steps(run_dir)):
        if verify(folder_of(run_dir, step), thorough=False) is None:
            return step
    return 0


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that it is not lost and its step can be committed again. Return its new path."""
    number = 1
    while (target := folder.with_name(f"damaged-{folder.name}-{number}")).exists():
        number += 1
    os.rename(folder, target)
    return target


def find(run_dir: Path) -> Path | None:
    """Return the newest checkpoint whose every byte is right; set damaged newer ones aside.

    Raise ConfigError when there are checkpoints and none is whole: starting over silently would lose the work. They
    stay where they are then, so that the next start says the same.
    """
    # From the newest to the oldest, until one is whole.
    wrong: dict[Path, str] = {}
    for step in reversed(steps(run_dir)):
        folder = folder_of(run_dir, step)
        problem = verify(folder)
        if problem is None:
            for damaged, why in wrong.items():
                logs.STEP.warning(
                    "checkpoint %s %s; set aside as %s", damaged.name, why, set_aside(damaged).name
                )
            return folder
        wrong[folder] = problem
    if wrong:
        problems = "; ".join(f"{folder.name} {problem}" for folder, problem in wrong.items())
        raise errors.ConfigError(
            f"{run_dir / 'checkpoints'}: no checkpoint is whole: {problems}. Restore one, or start over with another "
            "`output`. Nothing was written."
        )
    return None


def choose(run_dir: Path, which: str = "best") -> Path:
    """Return the folder of the checkpoint `best`, `last` or a step.

    A run without evaluation has no best, so `best` is its last. Raise ConfigError that names the checkpoints of the
    run when this is none of them.
    """
    root = run_dir / "checkpoints"
    # `best`, `last`, a step, or the name of a folder.
    if which == "best":
        names = ["best", "last"]
    elif which.isdecimal():
        names = [folder_of(run_dir, int(which)).name]
    else:
        names = [which]
    for name in names:
        if (root / name / MANIFEST).is_file():
            return Path(require_inside(root / name, run_dir))
    # The message lists what there is.
    known = [name for name in ("best", "last") if (root / name / MANIFEST).is_file()]
    known += [f"step {step}" for step in steps(run_dir)]
    if not known:
        raise errors.ConfigError(
            f"{run_dir} has no checkpoint, so there is no result of it yet; train it first, by `kubetune train`"
        )
    raise errors.ConfigError(f"{run_dir}: no checkpoint {which!r}; there are: {', '.join(known)}")


def load_state(folder: Path) -> State:
    """Return the state that a checkpoint holds.

    Raise ConfigError for keys of another version, EnvironmentFault for damage.
    """
    facts = shapes.read(folder / STATE)
    unknown = sorted(facts.keys() - State.__dataclass_fields__.keys())
    if unknown:
        raise errors.ConfigError(
            f"{folder / STATE} has {', '.join(unknown)}, which this version of kubetune does not know; go on with the "
            "one that wrote it. Nothing was written."
        )
    return State(**facts)


def trained_on(run_dir: Path) -> tuple[int, str] | None:
    """Return the newest step whose state can be read, and the fingerprint of its data; None without such a checkpoint."""
    for step in reversed(steps(run_dir)):
        try:
            return step, load_state(folder_of(run_dir, step)).data_fingerprint
        except (OSError, errors.KubetuneError):
            continue  # what is damaged is set aside when the run resumes
    return None


def link(run_dir: Path, name: str, step: int) -> None:
    """Point `checkpoints/best` or `checkpoints/last` at a step, without a moment in which it is missing."""
    path = run_dir / "checkpoints" / name
    # A link cannot be changed in place, but a rename replaces it at once.
    temporary = files.temporary_sibling(path)
    with files.explained_writes(path):
        os.symlink(folder_of(run_dir, step).name, temporary)
        fault_injection.reach("link")
        os.replace(temporary, path)
        files.fsync_folder(path.parent)


def tidy(run_dir: Path, state: State, keep: int) -> None:
    """Point the links `last` and `best` at their checkpoints, and delete those beyond `keep`."""
    link(run_dir, "last", state.saved_step)
    best = state.best_step
    # The best may have been evaluated, and its save have failed.
    if best is not None and folder_of(run_dir, best).is_dir():
        link(run_dir, "best", best)
    # The best one stays, however old it is.
    prune(run_dir, keep, {best or 0})


def prune(run_dir: Path, keep: int, protected: set[int]) -> None:
    """Delete the checkpoints older than the newest `keep` whole ones, never a protected one (the best).

    Damaged ones do not count, so that the kept ones are worth keeping. Names and sizes decide which are whole: reading
    every byte at each save would cost more than it gives.
    """
    present = steps(run_dir)
    whole = [step for step in present if verify(folder_of(run_dir, step), thorough=False) is None]
    if len(whole) <= keep:
        return
    oldest_kept = whole[-keep]
    for step in present:
        if step < oldest_kept and step not in protected:
            whole_folder.remove(folder_of(run_dir, step))


def clean(run_dir: Path) -> None:
    """Remove what killed processes left half-written or half-deleted. Only for the holder of the run's lock.

    A whole checkpoint that was to be replaced gets its name back where the other did not get that far.
    """
    for former in (run_dir / "checkpoints").glob(f"{_FORMER}step-*"):
        folder = former.with_name(former.name.removeprefix(_FORMER))
        if not folder.exists():
            os.rename(former, folder)
        else:
            whole_folder.remove(former)
    whole_folder.remove_leftovers(run_dir / "checkpoints")
    # The launcher and others write to these folders too, and need no lock for that.
    for folder in (run_dir, run_dir / "logs", run_dir / metrics.ANSWERS):
        whole_folder.remove_abandoned(folder)
