"""Identify what a run is made from by content rather than by name: base model, image processor, tokenizer.

identity.json in the run directory holds the hub's commit, and the size and SHA-256 of each file. It is written before
the first checkpoint. Code that resumes from a checkpoint, or loads an adapter, compares: an adapter that is trained on one
base is worthless on another, and nothing else would show it.

A file is read once. Later, the same size, inode and times mean the same content; one of these times, the kernel's own
time of change (ctime), no tool can set back. Prepared data have a fingerprint and a manifest (prepare.py), which are
compared by the same means.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from kubetune import errors
from kubetune.base import files, logs
from kubetune.base.humanize import size
from kubetune.config.schema import ModelConfig
from kubetune.data.reading.hub import find_files, image_folder, is_image, is_local
from kubetune.data.text.tokenizer import load_tokenizer
from kubetune.data.text.tokenizer_files import PROCESSOR_FILES
from kubetune.plan import model_shapes
from kubetune.rundir.metrics import IDENTITY

# Stands among the tokenizer's files for a template that the config names.
TEMPLATE = "model.chat_template"

_COMMIT = re.compile(r"[0-9a-f]{40}")
_BLOB = re.compile(r"[0-9a-f]{64}")
_SHOWN = 4  # files that differ, in a message
# For smaller files the checksum is computed again rather than kept in the cache.
_WORTH_KEEPING_BYTES = 1 << 20

# Size and inode of a file, and the times when its content and its inode were changed, in nanoseconds.
Stamp = tuple[int, ...]


@dataclass(frozen=True)
class Content:
    """Digest and size of a file."""

    sha256: str
    bytes: int
    stamp: Stamp | None = None  # of the file when it was read

    def is_same(self, other: Content) -> bool:
        """True if both have the same bytes, wherever they lie."""
        return (self.sha256, self.bytes) == (other.sha256, other.bytes)

    def __str__(self) -> str:
        return f"{self.bytes:,} bytes of sha256 {self.sha256[:12]}"


@dataclass(frozen=True)
class IdentityPart:
    """One thing that a run is made from."""

    path: str  # a folder, or a model's name on the hub
    commit: str | None  # the hub's, None for a folder
    files: Mapping[str, Content]  # by name

    def differences(self, other: IdentityPart) -> list[str]:
        """Return the files in which the two differ; none if both are the same commit of the hub."""
        if self.commit is not None and (self.path, self.commit) == (other.path, other.commit):
            return []
        # A file that is missing on one side differs too.
        names = []
        for name in sorted(self.files.keys() | other.files.keys()):
            before = self.files.get(name)
            now = other.files.get(name)
            if before is None or now is None or not before.is_same(now):
                names.append(name)
        return names

    def __str__(self) -> str:
        if not self.commit:
            return self.path
        return f"{self.path} at commit {self.commit[:12]}"


_PARTS: Final = TypeAdapter(dict[str, IdentityPart])


def pinned(model: ModelConfig, run_dir: Path) -> ModelConfig:
    """Return the model section with a commit of the hub as its revision: the run's if it has begun, else today's.

    A branch may move between two starts of a run, and even between loading the tokenizer and loading the weights. An
    image of a registry is fetched, and its path is then that of its folder, which is named by its digest.
    """
    if is_image(model.path):
        return _fetched(model, run_dir)
    if is_local(model.path):
        return model

    # The commit that the run began with, even if the branch has moved since.
    known = read(run_dir).get("model")
    commit = None
    if known is not None and known.path == model.path:
        commit = known.commit
    if not commit:
        commit = _commit_of(model)
    if commit is None or commit == model.revision:
        return model
    logs.MODEL.info("%s is taken at commit %s", model.path, commit)
    return model.model_copy(update={"revision": commit})


def _fetched(model: ModelConfig, run_dir: Path) -> ModelConfig:
    """Return the section with the folder of its image: the one that the run began with, else that of today's tag."""
    from kubetune.base.registry.address import cached_digest

    known = read(run_dir).get("model")
    digest = None
    if known is not None:
        digest = cached_digest(known.path, model.path)
    folder = image_folder(model, model.path, digest)
    logs.MODEL.info("%s is taken at %s", model.path, folder.name.replace("-", ":", 1))
    return model.model_copy(update={"path": str(folder)})


def read(run_dir: Path) -> dict[str, IdentityPart]:
    """Return the parts in identity.json; none if a run has no such file, or its disk has damaged it."""
    path = run_dir / IDENTITY
    try:
        return _PARTS.validate_python(files.read_object(path).get("parts"))
    except FileNotFoundError:
        return {}
    except errors.EnvironmentFault as error:
        damage = str(error)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, ("parts", *problem["loc"])))
        damage = f"{path} is damaged ({place}: {problem['msg']})"

    logs.MODEL.warning("the base of the run is not compared: %s", damage)
    return {}


@dataclass
class Check:
    """Compares the model and tokenizer that a config names now with those that its run was made from.

    A thread reads the files while the caller does other work.
    """

    model: ModelConfig
    cache: Path  # of checksums, and of answers about tokenizers
    run_dir: Path
    named_by: str = "the run's config"  # where the model is named, for messages
    only: tuple[str, ...] = ("model", "tokenizer")  # the parts that matter

    # The parts as the thread reads them.
    _parts: Future[dict[str, IdentityPart]] = field(default_factory=Future, init=False)
    bytes_read: int = field(default=0, init=False)
    _has_logged: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._known = read(self.run_dir)
        # A daemon: when the process ends early, nobody waits for it.
        self._thread = threading.Thread(target=self._try, name="identity", daemon=True)
        # A model of the hub need not even be downloaded yet; once it is, the hub's cache knows the checksums.
        if "model" not in self.only or is_local(self.model.path):
            self._thread.start()

    def now(self) -> dict[str, IdentityPart]:
        """Return the parts as they are now. This may take as long as reading all files."""
        if self._thread.ident is None:
            self._thread.start()
        began = time.perf_counter()
        parts = self._parts.result()
        waited = time.perf_counter() - began
        if self.bytes_read and not self._has_logged:
            logs.MODEL.info(
                "%s of the base read for its checksums, %.1f s of it waited for",
                size(self.bytes_read),
                waited,
            )

        self._has_logged = True
        return parts

    def require_same(self) -> None:
        """Raise ConfigError, naming both, if the run was made from anything else."""
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
            if known is None:
                continue
            differing = known.differences(part)
            if differing:
                raise errors.ConfigError(self._difference(name, known, part, differing))

    def record(self) -> None:
        """Write identity.json, unless the same is there. Raise EnvironmentFault for a full disk."""
        if self._known == self.now():
            return
        parts = {name: _as_json(part) for name, part in self.now().items()}
        facts = {"version": 1, "parts": parts}
        files.write_atomic(
            self.run_dir / IDENTITY, json.dumps(facts, indent=1) + "\n", within=self.run_dir
        )
        self._known = self.now()

    def _difference(
        self,
        name: str,
        known: IdentityPart,
        now: IdentityPart,
        differing: list[str],
    ) -> str:
        """Return a message about the files in which a part differs."""
        shown = []
        for file in differing[:_SHOWN]:
            shown.append(_change(file, known.files.get(file), now.files.get(file)))
        more = ""
        if len(differing) > _SHOWN:
            more = f"; and {len(differing) - _SHOWN} more files"
        return (
            f"{self.run_dir} was trained with the {name} {known}, but {self.named_by} names {now}, which is another: "
            f"{'; '.join(shown)}{more}. Put back what changed, or give the one it was "
            "trained with. Nothing was written."
        )

    def _try(self) -> None:
        try:
            self._parts.set_result(self._read_all())
        except Exception as error:  # `now` raises it in the thread of whoever waits
            self._parts.set_exception(error)

    def _read_all(self) -> dict[str, IdentityPart]:
        parts = {}
        if "model" in self.only:
            parts["model"] = self._read_model()
        if "tokenizer" in self.only:
            parts["tokenizer"] = self._read_tokenizer()
        return parts

    def _read_model(self) -> IdentityPart:
        model = self.model
        folder, commit = _model_folder(model)
        # Only files that decide what the model computes: a changed README does not matter.
        names = ["config.json", *PROCESSOR_FILES, *model_shapes.files_of(folder)]
        if model.trust_remote_code:
            names += sorted(str(path.relative_to(folder)) for path in folder.rglob("*.py"))
        paths = {}
        for name in names:
            if (folder / name).is_file():
                paths[name] = folder / name
        return IdentityPart(model.path, commit, self._contents("model", paths))

    def _read_tokenizer(self) -> IdentityPart:
        tokenizer = load_tokenizer(self.model, self.cache)
        contents = self._contents("tokenizer", tokenizer.files)
        # A template that the config names is no file of the tokenizer, but decides as much.
        template = tokenizer.given_template
        if template is not None:
            text = template.encode()
            contents[TEMPLATE] = Content(hashlib.sha256(text).hexdigest(), len(text))
        commit = _commit_in(tokenizer.files.values())
        return IdentityPart(self.model.tokenizer or self.model.path, commit, contents)

    def _contents(self, part: str, paths: Mapping[str, Path]) -> dict[str, Content]:
        known: Mapping[str, Content] = {}
        if part in self._known:
            known = self._known[part].files
        contents = {}
        for name, path in sorted(paths.items()):
            contents[name], bytes_read = content_of(path, self.cache, known.get(name))
            self.bytes_read += bytes_read
        return contents


def _change(
    file: str,
    before: Content | None,
    now: Content | None,
) -> str:
    """Return in words how a file differs from what it was."""
    if before is None:
        return f"{file} was not there, now is"
    if now is None:
        return f"{file} was there, now is not"
    return f"{file} was {before}, now is {now}"


def content_of(
    path: Path,
    cache: Path,
    known: Content | None = None,
) -> tuple[Content, int]:
    """Return a file's content, and how many bytes were read for it.

    Nothing is read if the file has the stamp of the `known` content, or of one that the cache holds.
    """
    real = path.resolve()
    facts = real.stat()
    stamp = _stamp_of(facts)
    if known is not None and known.stamp == stamp:
        return known, 0

    # The hub's cache names large files by their checksums.
    if _BLOB.fullmatch(real.name) and real.parent.name == "blobs":
        return Content(real.name, facts.st_size, stamp), 0

    # The cache has checksums of earlier looks. If it is damaged, the file is read.
    with suppress(OSError, errors.EnvironmentFault, KeyError, TypeError):
        before = files.read_object(_kept_at(real, cache))
        if tuple(before["stamp"]) == stamp:
            return Content(str(before["sha256"]), facts.st_size, stamp), 0

    content = Content(files.sha256_file(real), facts.st_size, stamp)
    _remember(real, content.sha256, stamp, cache)
    return content, facts.st_size


def remember(path: Path, sha256: str, cache: Path) -> None:
    """Keep the checksum of a file that was just written, so that nobody has to read the file for it."""
    real = path.resolve()
    _remember(real, sha256, _stamp_of(real.stat()), cache)


def _remember(
    real: Path,
    sha256: str,
    stamp: Stamp,
    cache: Path,
) -> None:
    """Keep the checksum that a large file has while it has this stamp."""
    file_size = stamp[0]
    if file_size < _WORTH_KEEPING_BYTES:
        return
    note = json.dumps({"path": str(real), "sha256": sha256, "stamp": stamp}) + "\n"
    with suppress(errors.EnvironmentFault):  # a cache that cannot be written to costs time, no more
        files.write_atomic(_kept_at(real, cache), note)


def _stamp_of(facts: os.stat_result) -> Stamp:
    return facts.st_size, facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns


def _kept_at(real: Path, cache: Path) -> Path:
    """Return where the cache keeps the checksum of a file."""
    return cache / "checksums" / f"{hashlib.sha256(os.fsencode(real)).hexdigest()[:32]}.json"


@contextmanager
def checked(check: Check) -> Iterator[None]:
    """Compare when the block that loads the base has ended. Raise ConfigError as `require_same` does."""
    try:
        yield
    except Exception as error:
        # Weights of another base may not even have the same shapes: then the difference is the better message.
        is_of_shapes = isinstance(error.__cause__, RuntimeError)
        if is_of_shapes or not isinstance(error, errors.KubetuneError):
            check.require_same()
        raise
    check.require_same()


def _as_json(part: IdentityPart) -> dict[str, Any]:
    contents = {}
    for name, content in part.files.items():
        contents[name] = {"sha256": content.sha256, "bytes": content.bytes, "stamp": content.stamp}
    return {"path": part.path, "commit": part.commit, "files": contents}


def _model_folder(model: ModelConfig) -> tuple[Path, str | None]:
    """Return a model's folder on this machine, and the hub's commit if it comes from there. Raise as `find_files`."""
    if is_local(model.path):
        return Path(model.path).expanduser(), None
    paths = find_files(model, model.path, ("config.json",))
    if "config.json" not in paths:
        raise errors.ModelError(
            f"model {model.path} has no config.json; expected a model in Hugging Face form"
        )
    return paths["config.json"].parent, _commit_in(paths.values())


def _commit_of(model: ModelConfig) -> str | None:
    """Return the commit that the hub has for a model's revision today."""
    if model.revision is not None and _COMMIT.fullmatch(model.revision):
        return model.revision
    paths = find_files(model, model.path, ("config.json",))
    return _commit_in(paths.values())


def _commit_in(paths: Iterable[Path]) -> str | None:
    """Return the commit that these files of the hub's cache are of; None for files of a folder."""
    # The cache has them as models--OWNER--NAME/snapshots/COMMIT/FILE.
    names = {path.parent.name for path in paths if path.parent.parent.name == "snapshots"}
    if len(names) != 1:
        return None
    name = names.pop()
    return name if _COMMIT.fullmatch(name) else None
