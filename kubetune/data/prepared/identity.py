"""The content of what a run is made from, whatever its names say: its base model, image processor and tokenizer.

identity.json in the run directory holds the hub's commit, and size and SHA-256 of each file. It is there before the
first checkpoint is, and whoever goes on from a checkpoint, or loads an adapter, compares: weights trained on one base
and added to another are worth nothing, and nothing else would tell. Files are read once: what has the same size, inode
and times as before is taken for the same; the kernel's own time of change (ctime) is one that no tool can set back.
Prepared data have a fingerprint and a manifest of their own (prepare.py), compared by the same means.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kubetune import errors
from kubetune.base import files, logs
from kubetune.base.humanize import size
from kubetune.config.schema import Config, ModelConfig
from kubetune.data.reading.hub import find_files, is_local
from kubetune.data.text.tokenizer import cache_folder, load_tokenizer
from kubetune.data.text.tokenizer_files import PROCESSOR_FILES
from kubetune.plan import model_shapes
from kubetune.rundir.metrics import IDENTITY

TEMPLATE = "model.chat_template"
"""Stands among the tokenizer's files for a template that the config names."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_BLOB = re.compile(r"[0-9a-f]{64}")
_SHOWN = 4
_WORTH_KEEPING_BYTES = 1 << 20

Stamp = tuple[int, ...]
"""Size and inode of a file, and when it and its inode were changed, in nanoseconds."""


@dataclass(frozen=True)
class Content:
    """Digest and size of a file. `stamp`: that of the file it was read from."""

    sha256: str
    bytes: int
    stamp: Stamp | None = None

    def __str__(self) -> str:
        return f"{self.bytes:,} bytes of sha256 {self.sha256[:12]}"


@dataclass(frozen=True)
class Part:
    """One thing that a run is made from: where it was, the hub's commit where it came from there, its files."""

    path: str
    commit: str | None
    files: Mapping[str, Content]

    def differences(self, other: Part) -> list[str]:
        """The files in which `other` is another; none where the hub says that both are the same commit."""
        if self.commit is not None and (self.path, self.commit) == (other.path, other.commit):
            return []
        return sorted(
            name
            for name in self.files.keys() | other.files.keys()
            if (one := self.files.get(name)) is None
            or (two := other.files.get(name)) is None
            or (one.sha256, one.bytes) != (two.sha256, two.bytes)
        )

    def __str__(self) -> str:
        return f"{self.path} at commit {self.commit[:12]}" if self.commit else self.path


def pinned(model: ModelConfig, run_dir: Path) -> ModelConfig:
    """Return the section with the commit of the hub that it means: the run's own, if it has begun, else today's.

    A branch may move between two starts of a run, and even between the loading of a tokenizer and that of the weights.
    """
    if is_local(model.path):
        return model
    known = read(run_dir).get("model")
    if known is not None and known.path == model.path and known.commit:
        commit: str | None = known.commit
    else:
        commit = _commit_of(model)
    if commit is None or commit == model.revision:
        return model
    logs.MODEL.info("%s is taken at commit %s", model.path, commit)
    return model.model_copy(update={"revision": commit})


def read(run_dir: Path) -> dict[str, Part]:
    """The parts that identity.json names; none where a run has no such file, or its disk has damaged it."""
    try:
        return {
            name: _part(facts)
            for name, facts in files.read_object(run_dir / IDENTITY)["parts"].items()
        }
    except FileNotFoundError:
        return {}
    except (errors.EnvironmentFault, KeyError, TypeError, AttributeError) as error:
        is_told = isinstance(error, errors.EnvironmentFault)
        damage = (
            error
            if is_told
            else f"{run_dir / IDENTITY} is damaged ({type(error).__name__}: {error})"
        )
        logs.MODEL.warning("the base of the run is not compared: %s", damage)
        return {}


def _part(facts: Mapping[str, Any]) -> Part:
    contents = {
        name: Content(
            file["sha256"], file["bytes"], tuple(file["stamp"]) if file.get("stamp") else None
        )
        for name, file in facts["files"].items()
    }
    return Part(facts["path"], facts["commit"], contents)


@dataclass
class Check:
    """Compares what a config names now with what its run was made from; reads large files beside other work.

    `said`: how the user named the model, for messages. `only`: the parts that matter.
    """

    config: Config
    run_dir: Path
    said: str = "the run's config"
    only: tuple[str, ...] = ("model", "tokenizer")
    _now: dict[str, Part] | None = field(default=None, init=False)
    _taken: dict[str, Part] | None = field(default=None, init=False)
    _failure: Exception | None = field(default=None, init=False)
    bytes_read: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._known = read(self.run_dir)
        # Nobody waits for this thread at an early end. What the hub has need not even be there yet; once it is, its
        # cache knows the checksums.
        self._thread = threading.Thread(target=self._try, name="identity", daemon=True)
        if "model" not in self.only or is_local(self.config.model.path):
            self._thread.start()

    def now(self) -> dict[str, Part]:
        """The parts as they are, which may have to be waited for."""
        if self._now is None:
            began = time.perf_counter()
            if self._thread.ident is None:
                self._thread.start()
            self._thread.join()
            if self._failure is not None:
                raise self._failure
            assert self._taken is not None, "taken, or failed"
            self._now = self._taken
            waited = time.perf_counter() - began
            if self.bytes_read:
                logs.MODEL.info(
                    "%s of the base read for its checksums, %.1f s of it waited for",
                    size(self.bytes_read),
                    waited,
                )
        return self._now

    def require_same(self) -> None:
        """Raise ConfigError, naming both, when the run was made from anything else."""
        if not self.only:
            return
        if not self._known:
            logs.MODEL.warning(
                "%s has no %s, so whether its base is still the same cannot be checked",
                self.run_dir,
                IDENTITY,
            )
            return
        for name, part in self.now().items():
            known = self._known.get(name)
            if known is not None and (wrong := known.differences(part)):
                raise errors.ConfigError(self._difference(name, known, part, wrong))

    def record(self) -> None:
        """Leave identity.json, unless it is there and says the same. Raises EnvironmentFault for a full disk."""
        if self._known == self.now():
            return
        facts = {"version": 1, "parts": {name: _as_json(part) for name, part in self.now().items()}}
        files.write_atomic(
            self.run_dir / IDENTITY, json.dumps(facts, indent=1) + "\n", within=self.run_dir
        )
        self._known = self.now()

    def _difference(self, name: str, known: Part, now: Part, wrong: list[str]) -> str:
        def shown(file: str) -> str:
            one, two = known.files.get(file), now.files.get(file)
            if one is None or two is None:
                return f"{file} was {'not there' if one is None else 'there'}, now is{' not' if two is None else ''}"
            return f"{file} was {one}, now is {two}"

        more = f"; and {len(wrong) - _SHOWN} more files" if len(wrong) > _SHOWN else ""
        return (
            f"{self.run_dir} was trained with the {name} {known}, but {self.said} names {now}, which is another: "
            f"{'; '.join(map(shown, wrong[:_SHOWN]))}{more}. Put back what changed, or give the one it was "
            "trained with. Nothing was written."
        )

    def _try(self) -> None:
        try:
            self._taken = self._take()
        except Exception as error:  # told to whoever waits
            self._failure = error

    def _take(self) -> dict[str, Part]:
        cache = cache_folder(self.config.data.cache)
        model, found = self.config.model, dict[str, Part]()
        if "model" in self.only:
            folder, commit = _model_folder(model)
            names = ["config.json", *PROCESSOR_FILES, *model_shapes.files_of(folder)]
            if model.trust_remote_code:
                names += sorted(str(path.relative_to(folder)) for path in folder.rglob("*.py"))
            there = {name: folder / name for name in names if (folder / name).is_file()}
            found["model"] = Part(model.path, commit, self._contents("model", there, cache))
        if "tokenizer" in self.only:
            tokenizer = load_tokenizer(model, cache)
            contents = self._contents("tokenizer", tokenizer.files, cache)
            if (template := tokenizer.given_template) is not None:
                text = template.encode()
                contents[TEMPLATE] = Content(hashlib.sha256(text).hexdigest(), len(text))
            found["tokenizer"] = Part(
                model.tokenizer or model.path, _commit_in(tokenizer.files.values()), contents
            )
        return found

    def _contents(self, part: str, paths: Mapping[str, Path], cache: Path) -> dict[str, Content]:
        known = self._known[part].files if part in self._known else {}
        return {
            name: self._content(path, known.get(name), cache)
            for name, path in sorted(paths.items())
        }

    def _content(self, path: Path, known: Content | None, cache: Path) -> Content:
        found, size = content_of(path, cache, known)
        self.bytes_read += size
        return found


def content_of(path: Path, cache: Path, known: Content | None = None) -> tuple[Content, int]:
    """A file's content, and the bytes that were read for it: none where it has the stamp that it was `known` by, or
    that the cache holds."""
    real = path.resolve()
    facts = real.stat()
    stamp = _stamp_of(facts)
    if known is not None and known.stamp == stamp:
        return known, 0
    if (
        _BLOB.fullmatch(real.name) and real.parent.name == "blobs"
    ):  # the hub's cache names it by its checksum
        return Content(real.name, facts.st_size, stamp), 0
    with suppress(OSError, errors.EnvironmentFault, KeyError, TypeError):
        before = files.read_object(_kept_at(real, cache))
        if tuple(before["stamp"]) == stamp:
            return Content(str(before["sha256"]), facts.st_size, stamp), 0
    found = Content(files.sha256_file(real), facts.st_size, stamp)
    _remember(real, found.sha256, stamp, cache)
    return found, facts.st_size


def remember(path: Path, sha256: str, cache: Path) -> None:
    """Note the checksum of a file that was just written, so that nobody has to read the file for it."""
    real = path.resolve()
    _remember(real, sha256, _stamp_of(real.stat()), cache)


def _remember(real: Path, sha256: str, stamp: Stamp, cache: Path) -> None:
    """Keep the checksum that a large file had when it had this stamp."""
    if stamp[0] < _WORTH_KEEPING_BYTES:
        return
    note = json.dumps({"path": str(real), "sha256": sha256, "stamp": stamp}) + "\n"
    with suppress(errors.EnvironmentFault):  # a cache that cannot be written to costs time, no more
        files.write_atomic(_kept_at(real, cache), note)


def _stamp_of(facts: os.stat_result) -> Stamp:
    return facts.st_size, facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns


def _kept_at(real: Path, cache: Path) -> Path:
    """Return the place in the cache of the checksum of a file."""
    return cache / "checksums" / f"{hashlib.sha256(os.fsencode(real)).hexdigest()[:32]}.json"


@contextmanager
def checked(check: Check) -> Iterator[None]:
    """Load what is checked within: at the end it is known to be the run's. Raises ConfigError as `require_same`."""
    try:
        yield
    except errors.KubetuneError:
        raise
    except Exception:
        check.require_same()  # weights of another base may not even have the shapes
        raise
    check.require_same()


def _as_json(part: Part) -> dict[str, Any]:
    facts = {
        name: {"sha256": content.sha256, "bytes": content.bytes, "stamp": content.stamp}
        for name, content in part.files.items()
    }
    return {"path": part.path, "commit": part.commit, "files": facts}


def _model_folder(model: ModelConfig) -> tuple[Path, str | None]:
    """A model's folder on this machine, and the hub's commit if it comes from there. Raises as `find_files`."""
    if is_local(model.path):
        return Path(model.path).expanduser(), None
    found = find_files(model, model.path, ("config.json",))
    if "config.json" not in found:
        raise errors.ModelError(
            f"model {model.path} has no config.json; expected a model in Hugging Face form"
        )
    return found["config.json"].parent, _commit_in(found.values())


def _commit_of(model: ModelConfig) -> str | None:
    if model.revision is not None and _COMMIT.fullmatch(model.revision):
        return model.revision
    return _commit_in(find_files(model, model.path, ("config.json",)).values())


def _commit_in(paths: Iterable[Path]) -> str | None:
    """The commit that the hub's cache has these files of; None for files of a folder."""
    found = {path.parent.name for path in paths if path.parent.parent.name == "snapshots"}
    return next(iter(found)) if len(found) == 1 and all(map(_COMMIT.fullmatch, found)) else None
