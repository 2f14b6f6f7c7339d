"""Reads the keys of other tools' configs from their source, for tests/peers/keys.json.

    pip install --no-deps --target FOLDER axolotl llamafactory trl ms-swift transformers
    python -m tests.peers.read_keys FOLDER

Nothing of a peer is imported, only parsed: names, types as written, and plain defaults of the classes that its config
is read into, and of those they inherit from.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("keys.json")
_HUGGING_FACE = "transformers/training_args.py:TrainingArguments"
_SEQUENCES = "transformers/training_args_seq2seq.py:Seq2SeqTrainingArguments"
# Under each name: the distribution, and the classes, as FILE:CLASS with patterns.
PEERS = {
    "axolotl": (
        "axolotl",
        [
            "axolotl/utils/schemas/config.py:AxolotlInputConfig",
            "axolotl/integrations/*/args.py:*Args",
        ],
    ),
    "axolotl datasets": (
        "axolotl",
        [
            f"axolotl/utils/schemas/datasets.py:{name}"
            for name in ("SFTDataset", "PretrainingDataset")
        ],
    ),
    "LLaMA-Factory": (
        "llamafactory",
        [
            f"llamafactory/hparams/{name}_args.py:{name.capitalize()}Arguments"
            for name in ("model", "data", "finetuning", "generating", "training")
        ]
        + [_SEQUENCES, _HUGGING_FACE],
    ),
    "TRL": (
        "trl",
        [
            "trl/trainer/sft_config.py:SFTConfig",
            "trl/trainer/model_config.py:ModelConfig",
            "trl/scripts/utils.py:ScriptArguments",
            _HUGGING_FACE,
        ],
    ),
    "ms-swift": (
        "ms_swift",
        [
            "swift/arguments/sft_args.py:SftArguments",
            "swift/megatron/arguments/sft_args.py:MegatronSftArguments",
            _SEQUENCES,
            _HUGGING_FACE,
        ],
    ),
}


def main(folder: Path) -> None:
    """Write the table. `folder`: where the peers' packages lie."""
    table: dict[str, Any] = {}
    for name, (distribution, places) in PEERS.items():
        keys: dict[str, Any] = {}
        for place in places:
            for field, written in _fields_of(folder, place):
                keys.setdefault(field, written)
        used = [distribution, *(["transformers"] if _HUGGING_FACE in places else [])]
        versions = ", ".join(f"{package} {_version(folder, package)}" for package in used)
        table[name] = {"read_from": versions, "keys": dict(sorted(keys.items()))}
    lines = [
        f' {json.dumps(name)}: {{"read_from": {json.dumps(peer["read_from"])}, "keys": {{\n  '
        + ",\n  ".join(
            f"{json.dumps(key)}: {json.dumps(written)}" for key, written in peer["keys"].items()
        )
        + "\n }}"
        for name, peer in table.items()
    ]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def _version(folder: Path, distribution: str) -> str:
    return next(
        path.name.split("-")[1].removesuffix(".dist")
        for path in folder.glob(f"{distribution}-*.dist-info")
    )


def _fields_of(folder: Path, place: str) -> Iterator[tuple[str, list[Any]]]:
    """Yield (name, [type, default]) of the classes at a place, those they inherit from included."""
    files, _, classes = place.partition(":")
    known = _classes(folder / files.partition("/")[0])
    for file in sorted(folder.glob(files)):
        inside = {
            node.name
            for node in ast.parse(file.read_text("utf-8")).body
            if isinstance(node, ast.ClassDef)
        }
        for name in sorted(inside):
            if name == classes or (classes.startswith("*") and name.endswith(classes[1:])):
                yield from _inherited(name, known, set(), prefer=file)


_SEEN: dict[Path, dict[str, list[tuple[Path, ast.ClassDef]]]] = {}


def _classes(package: Path) -> dict[str, list[tuple[Path, ast.ClassDef]]]:
    """Return every class of a package by its name; of Hugging Face's only the arguments' files."""
    if package not in _SEEN:
        classes: dict[str, list[tuple[Path, ast.ClassDef]]] = {}
        pattern = "training_args*.py" if package.name == "transformers" else "**/*.py"
        for file in sorted(package.glob(pattern)):
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                if isinstance(node, ast.ClassDef):
                    classes.setdefault(node.name, []).append((file, node))
        _SEEN[package] = classes
    return _SEEN[package]


def _inherited(
    name: str, known: dict[str, list[tuple[Path, ast.ClassDef]]], done: set[str], prefer: Path
) -> Iterator[tuple[str, list[Any]]]:
    if name in done or name not in known:
        return
    done.add(name)
    file, node = min(known[name], key=lambda candidate: _distance(candidate[0], prefer))
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            kind = ast.unparse(line.annotation)
            if line.target.id.startswith("_") or "ClassVar" in kind:
                continue
            default, alias = _default(line.value)
            yield line.target.id, [kind, default]
            if alias:
                yield alias, [kind, default]
    for base in node.bases:
        yield from _inherited(ast.unparse(base).split(".")[-1], known, done, file)


def _distance(file: Path, other: Path) -> int:
    """Return how far apart two files lie; of classes with one name the nearest is meant."""
    common = sum(1 for a, b in zip(file.parts, other.parts, strict=False) if a == b)
    return len(file.parts) + len(other.parts) - 2 * common


def _default(value: ast.expr | None) -> tuple[Any, str | None]:
    """Return a default that is written out, and another name of the field; None for what code makes."""
    alias = None
    if isinstance(value, ast.Call):
        keywords = {keyword.arg: keyword.value for keyword in value.keywords}
        if isinstance(name := keywords.get("alias"), ast.Constant):
            alias = str(name.value)
        first = value.args[0] if value.args and ast.unparse(value.func).endswith("Field") else None
        value = keywords.get("default", first)
    try:
        literal = None if value is None else ast.literal_eval(value)
        json.dumps(literal)
    except (ValueError, TypeError):
        return None, alias
    return (None if literal is Ellipsis else literal), alias


if __name__ == "__main__":
    main(Path(sys.argv[1]))
