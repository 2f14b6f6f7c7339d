"""Rows that a run keeps in its directory, so that its exports can be proved, and its model asked, without its data.

They lie in safetensors files, with the bytes of their images: PROOF here, and QUESTION_ROWS of scoring/kept_questions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kubetune import errors
from kubetune.base import files, logs
from kubetune.base.humanize import size
from kubetune.data.order import shuffled
from kubetune.data.reading.strict_json import JsonObject
from kubetune.data.vision.image_processor import content_of
from kubetune.rundir import shapes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kubetune.data.prepared.prepare import Prepared
    from kubetune.data.prepared.rows import Rows

PROOF: Final = "proof_rows.safetensors"

# Rows that an export is proved with.
PROOF_ROWS: Final = 8
# Most tokens that are kept of a proof's row. Labelled rows and rows with images are kept whole.
LONGEST: Final = 256
# Most bytes of all images of a file. With more, no file is written, and the data have to be at hand later.
MOST_IMAGE_BYTES: Final = 64 << 20
# The arrays of a file: type in its header, type in memory, axes. Empty ones may be missing.
_ARRAYS: Final = {
    "numbers": ("I64", np.int64, 1),
    "lengths": ("I64", np.int64, 1),
    "images_of_rows": ("I64", np.int64, 1),
    "image_lengths": ("I64", np.int64, 1),
    "targets": ("F32", np.float32, 2),
    "ids": ("U32", np.uint32, 1),
    "trained": ("U8", np.uint8, 1),
    "segments": ("U8", np.uint8, 1),
    "images": ("U8", np.uint8, 1),
}


@dataclass(frozen=True)
class KeptRow:
    """One prepared row."""

    number: int  # index in its split
    ids: NDArray[np.uint32]  # [tokens]
    trained: NDArray[np.bool_]  # [tokens]
    target: NDArray[np.float32] | None = None  # [width] of a labelled row
    segments: NDArray[np.uint8] | None = None  # [tokens] token types of a labelled row
    images: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class KeptRows:
    """Some rows of one split."""

    rows: tuple[KeptRow, ...]
    origin: str  # where they come from, in words
    # Row number -> the conversation, for pages.
    turns: Mapping[str, Any] = field(default_factory=dict)


def proof_rows(data: Prepared) -> KeptRows:
    """Return rows to prove an export with: held-out rows if the run has some, always the same ones."""
    rows = data.train
    origin = "training rows"
    if data.eval is not None:
        rows = data.eval
        origin = "held-out rows"

    ids = np.arange(len(rows), dtype=np.int64)
    chosen = np.sort(shuffled(ids, "proof of export")[:PROOF_ROWS])

    # A class is read off the last token, and an image may lie anywhere, so those rows are not cut.
    may_be_cut = not rows.is_labelled and rows.processor is None
    longest = LONGEST if may_be_cut else None
    return KeptRows(tuple(row(rows, int(number), longest) for number in chosen), origin)


def row(
    rows: Rows,
    number: int,
    longest: int | None = None,
) -> KeptRow:
    """Return a row with all that is needed to run it, cut to `longest` tokens. For a pair, only the chosen answer."""
    ids, trained = rows.sequences(number)[0]
    ids = ids[:longest]
    trained = trained[:longest]

    if rows.is_labelled and rows.targets is not None:
        return KeptRow(
            number,
            ids,
            trained,
            rows.targets[number],
            rows.segments(number),
        )

    images: tuple[bytes, ...] = ()
    if rows.processor is not None:
        images = tuple(map(content_of, rows.images(number)))
    return KeptRow(number, ids, trained, images=images)


def keep(run_dir: Path, data: Prepared) -> None:
    """Write the rows that proofs of the run's exports will need, unless they are there.

    Raise DataError if one of their images has changed, EnvironmentFault for a full disk.
    """
    if not (run_dir / PROOF).exists():
        write(run_dir, PROOF, proof_rows(data))


def write(run_dir: Path, name: str, kept: KeptRows) -> None:
    """Write a file of rows, unless their images are too large to be kept."""
    images = [image for row in kept.rows for image in row.images]
    image_bytes = sum(map(len, images))
    if image_bytes > MOST_IMAGE_BYTES:
        logs.DATA.info(
            "%s of images are too much to keep in %s; what needs them will read the data",
            size(image_bytes),
            name,
        )
        return

    from safetensors.numpy import save

    # safetensors keeps arrays, and texts as metadata.
    facts = {
        "format": "np",
        "origin": kept.origin,
        "turns": json.dumps(kept.turns, default=str),
    }
    content = save(_arrays(kept.rows, images), facts)
    files.write_atomic(run_dir / name, content, within=run_dir)


def _arrays(rows: Sequence[KeptRow], images: Sequence[bytes]) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file. Whatever differs in length between rows lies end to end, with the lengths beside it."""
    # Two rows of 3 and 2 tokens, the second with two images:
    #     lengths 3 2    ids . . . . .    images_of_rows 0 2    image_lengths 90 70    images: 160 bytes
    arrays: dict[str, NDArray[Any]] = {
        "numbers": np.array([row.number for row in rows], np.int64),
        "lengths": np.array([len(row.ids) for row in rows], np.int64),
        "images_of_rows": np.array([len(row.images) for row in rows], np.int64),
        "image_lengths": np.array([len(image) for image in images], np.int64),
    }

    targets = [row.target for row in rows if row.target is not None]
    arrays["targets"] = np.array(targets, np.float32)

    # Some may be empty, for which concatenate raises an error: they get no entry.
    end_to_end: dict[str, Sequence[NDArray[Any]]] = {
        "ids": [row.ids for row in rows],
        "trained": [row.trained.astype(np.uint8) for row in rows],
        "segments": [row.segments for row in rows if row.segments is not None],
        "images": [np.frombuffer(image, np.uint8) for image in images],
    }
    for name, parts in end_to_end.items():
        if parts:
            arrays[name] = np.concatenate(parts)
    return arrays


def read(run_dir: Path, name: str) -> KeptRows | None:
    """Return the rows that a run keeps in a file of this name; None if there is no such file.

    Raise EnvironmentFault if the file is damaged, or holds what no run keeps.
    """
    from safetensors import SafetensorError, safe_open

    path = run_dir / name
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="np") as file:
            texts = _texts(file.metadata() or {})
            rows = _rows(_read_arrays(file))
    except (SafetensorError, ValueError) as error:
        raise damaged(path, " ".join(str(error).split())) from error
    return KeptRows(rows, texts["origin"], texts["turns"])


def damaged(path: Path, reason: str) -> errors.EnvironmentFault:
    """Return the error for a file of kept rows that cannot be used."""
    return errors.EnvironmentFault(
        f"{path} is damaged ({reason}); put it back from a copy, such as a mirror's, or "
        "remove it: rows are then chosen from the data, where these are at hand"
    )


def require_vocabulary(path: Path, ids: Iterable[Iterable[int]], vocabulary: int) -> None:
    """Raise EnvironmentFault where rows of a file have an id that the tokenizer, of so many ids, does not know."""
    largest = max((int(number) for row in ids for number in row), default=0)
    if largest >= vocabulary:
        raise damaged(path, f"ids: {largest} is beyond the {vocabulary:,} of the tokenizer")


def _texts(metadata: Mapping[str, str]) -> JsonObject:
    """Return the texts beside the rows of a file. Raise ValueError where they are not what a run keeps."""
    texts: JsonObject = {}
    if "origin" in metadata:
        texts["origin"] = metadata["origin"]
    try:
        texts["turns"] = json.loads(metadata.get("turns", "{}"))
    except RecursionError:
        raise ValueError("turns: it is nested too deeply") from None
    problem = shapes.problem_of_header("kept rows", texts)
    if problem is not None:
        raise ValueError(problem)
    return texts


def _read_arrays(file: Any) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file that `safe_open` gave. Raise ValueError where one is missing or of another type.

    Types are compared in the header, before anything is read: numpy does not know all of them.
    """
    names = set(file.keys())
    arrays = {}
    for name, (kind, dtype, number_of_axes) in _ARRAYS.items():
        if name not in names:
            arrays[name] = np.empty([0] * number_of_axes, dtype)
            continue
        stored = file.get_slice(name)
        shape = stored.get_shape()
        # Without a row there is no width.
        if stored.get_dtype() != kind or (len(shape) != number_of_axes and shape != [0]):
            raise ValueError(
                f"{name}: {kind} of {number_of_axes} axes expected, {stored.get_dtype()} {shape} found"
            )
        arrays[name] = file.get_tensor(name)
    return arrays


def _rows(arrays: dict[str, NDArray[Any]]) -> tuple[KeptRow, ...]:
    """Return the rows of a file: `_arrays` backwards. Raise ValueError if they do not fit each other."""
    lengths = arrays["lengths"]
    ids = split(arrays["ids"], lengths)
    trained = split(arrays["trained"], lengths)
    images = [part.tobytes() for part in split(arrays["images"], arrays["image_lengths"])]
    images_of_rows = split(np.arange(len(images)), arrays["images_of_rows"])
    if len(arrays["numbers"]) != len(lengths) or len(images_of_rows) != len(lengths):
        raise ValueError(f"{len(lengths):,} rows expected in each part")
    if arrays["trained"].max(initial=0) > 1:
        raise ValueError("trained: 0 or 1 expected")

    # All rows of a file are of one kind.
    targets = arrays["targets"]
    is_labelled = len(targets) > 0
    if is_labelled and len(targets) != len(lengths):
        raise ValueError(f"{len(lengths):,} targets expected, {len(targets):,} found")
    segments = split(arrays["segments"], lengths) if is_labelled else []

    rows = []
    for i in range(len(lengths)):
        rows.append(
            KeptRow(
                number=int(arrays["numbers"][i]),
                ids=ids[i],
                trained=trained[i].view(np.bool_),
                target=targets[i] if is_labelled else None,
                segments=segments[i] if is_labelled else None,
                images=tuple(images[number] for number in images_of_rows[i]),
            )
        )
    return tuple(rows)


def split(values: NDArray[Any], lengths: NDArray[np.int64]) -> list[NDArray[Any]]:
    """Cut an array into parts of these lengths. Raise ValueError if they do not add up to all of it."""
    # Python's numbers, whose sum does not overflow.
    counts = lengths.tolist()
    if min(counts, default=0) < 0:
        raise ValueError(f"a length is {min(counts):,}")
    if sum(counts) != len(values):
        raise ValueError(f"{sum(counts):,} values expected, {len(values):,} found")
    if not counts:
        return []
    # Lengths 3 2 4 are cut at 3 and at 5.
    return np.split(values, np.cumsum(lengths)[:-1])
