"""Rows that a run keeps in its directory, so that its exports can be proved, and its model asked, without its data.

They lie in a safetensors file with the bytes of the images that they have: PROOF, and scoring/kept_questions'.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kubetune import errors
from kubetune.base import files, logs
from kubetune.base.humanize import size
from kubetune.data.prepared.order import hash_ids

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kubetune.data.prepared.prepare import Prepared
    from kubetune.data.prepared.rows import Rows

PROOF: Final = "proof_rows.safetensors"

PROOF_ROWS: Final = 8
LONGEST: Final = 256
"""Tokens of a row of the proof that are run; labelled rows and rows with images are run whole."""
MOST_IMAGE_BYTES: Final = 64 << 20
"""Of the images of all rows of a file; beyond that nothing is kept, and the data have to be at hand."""


@dataclass(frozen=True)
class KeptRow:
    """One prepared row: `number` in its split, `ids` and `trained` `[tokens]`, the bytes of its `images`.

    A labelled row has its `target` `[width]` and token types, `segments` `[tokens]`.
    """

    number: int
    ids: NDArray[np.uint32]
    trained: NDArray[np.bool_]
    target: NDArray[np.float32] | None = None
    segments: NDArray[np.uint8] | None = None
    images: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class KeptRows:
    """Some rows and, in words, where they come from. `turns`: what pages show of conversations, by rows' numbers."""

    rows: tuple[KeptRow, ...]
    origin: str
    turns: Mapping[str, Any] = field(default_factory=dict)


def proof_rows(data: Prepared) -> KeptRows:
    """Rows held out from training where there are any, always the same ones."""
    rows, origin = (
        (data.train, "training rows") if data.eval is None else (data.eval, "held-out rows")
    )
    ids = np.arange(len(rows), dtype=np.int64)
    chosen = np.sort(ids[np.argsort(hash_ids(ids, "proof of export"), kind="stable")][:PROOF_ROWS])
    is_plain = not rows.is_labelled and rows.processor is None
    return KeptRows(
        tuple(row(rows, int(number), LONGEST if is_plain else None) for number in chosen), origin
    )


def row(rows: Rows, number: int, longest: int | None = None) -> KeptRow:
    """One row with what is needed to run it; of a pair, the chosen answer. `longest`: most tokens that are kept."""
    ids, trained = rows.sequences(number)[0]
    ids, trained = ids[:longest], trained[:longest]
    if rows.is_labelled and rows.targets is not None:
        return KeptRow(number, ids, trained, rows.targets[number], rows.segments(number))
    processor = rows.processor
    return KeptRow(
        number,
        ids,
        trained,
        images=tuple(map(processor.content, rows.images(number))) if processor is not None else (),
    )


def keep(run_dir: Path, data: Prepared) -> None:
    """Leave in the run directory the rows that the proof of its exports will need, unless they are there.

    Raises DataError where an image of them has changed, EnvironmentFault for a full disk.
    """
    if not (run_dir / PROOF).exists():
        write(run_dir, PROOF, proof_rows(data))


def write(run_dir: Path, name: str, kept: KeptRows) -> None:
    """Write a file of rows, unless their images are too large to be kept."""
    from safetensors.numpy import save

    images = [image for row in kept.rows for image in row.images]
    if (taken := sum(map(len, images))) > MOST_IMAGE_BYTES:
        logs.DATA.info(
            "%s of images are too much to keep in %s; what needs them will read the data",
            size(taken),
            name,
        )
        return
    columns: dict[str, Sequence[NDArray[Any]]] = {
        "ids": [row.ids for row in kept.rows],
        "trained": [row.trained.astype(np.uint8) for row in kept.rows],
        "segments": [row.segments for row in kept.rows if row.segments is not None],
        "images": [np.frombuffer(image, np.uint8) for image in images],
    }
    arrays: dict[str, NDArray[Any]] = {
        "numbers": np.array([row.number for row in kept.rows], np.int64),
        "lengths": np.array([len(row.ids) for row in kept.rows], np.int64),
        "images_of_rows": np.array([len(row.images) for row in kept.rows], np.int64),
        "image_lengths": np.array([len(image) for image in images], np.int64),
        "targets": np.array(
            [row.target for row in kept.rows if row.target is not None], np.float32
        ),
        **{name: np.concatenate(parts) for name, parts in columns.items() if parts},
    }
    facts = {"format": "np", "origin": kept.origin, "turns": json.dumps(kept.turns, default=str)}
    files.write_atomic(run_dir / name, save(arrays, facts), within=run_dir)


def read(run_dir: Path, name: str) -> KeptRows | None:
    """The rows that a run keeps in a file of this name; None where a run from before has none.

    Raises EnvironmentFault where the file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    path = run_dir / name
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="np") as file:
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
            facts = file.metadata()
        return KeptRows(_rows(arrays), facts["origin"], json.loads(facts.get("turns", "{}")))
    except (SafetensorError, LookupError, ValueError, TypeError) as error:
        raise errors.EnvironmentFault(
            f"{path} is damaged ({' '.join(str(error).split())}); put it back from a copy, such as a mirror's, or "
            "remove it: rows are then chosen from the data, where these are at hand"
        ) from error


def _rows(arrays: dict[str, NDArray[Any]]) -> tuple[KeptRow, ...]:
    lengths, image_counts = arrays["lengths"], arrays["images_of_rows"]
    images = [part.tobytes() for part in _split(arrays.get("images"), arrays["image_lengths"])]
    is_labelled, found, first = len(arrays["targets"]) > 0, list[KeptRow](), 0
    segments = _split(arrays.get("segments"), lengths) if is_labelled else None
    parts = zip(
        _split(arrays.get("ids"), lengths), _split(arrays.get("trained"), lengths), strict=True
    )
    for i, (ids, trained) in enumerate(parts):
        own = tuple(images[first : first + int(image_counts[i])])
        first += len(own)
        found.append(
            KeptRow(
                int(arrays["numbers"][i]),
                ids,
                trained.view(np.bool_),
                arrays["targets"][i] if is_labelled else None,
                segments[i] if segments else None,
                own,
            )
        )
    return tuple(found)


def _split(values: NDArray[Any] | None, lengths: NDArray[np.int64]) -> list[NDArray[Any]]:
    """Parts of these lengths. Raises ValueError where `values` are more or fewer."""
    if values is None:
        values = np.empty(0, np.uint8)
    if int(lengths.sum()) != len(values):
        raise ValueError(f"{int(lengths.sum()):,} values expected, {len(values):,} found")
    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []
