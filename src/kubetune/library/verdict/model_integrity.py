"""Whether the files of a model belong together: weights that are whole, layers and sizes that config.json asks for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kubetune.base.humanize import counted
from kubetune.data.reading.hub import offline
from kubetune.errors import ModelError
from kubetune.plan.base_model import (
    FETCH_AGAIN,
    needs_code,
    other_shapes,
    require_plain_config,
    require_whole_groups,
)
from kubetune.plan.model_shapes import (
    ModelFiles,
    Weights,
    files_of,
    incomplete,
    number_of_layers,
    shapes_of,
)

# Decoders that are as `shapes_of` says, whatever else their config.json has.
_PLAIN = ("llama", "mistral", "qwen2", "qwen3")


def require_whole_model(model: ModelFiles, *, has_code: bool = False) -> None:
    """Raise ModelError for a model on this machine that loading would refuse for its files.

    `has_code`: the model comes with its own code, so that nothing but its files can be judged.
    """
    path = model.path
    folder = model.folder
    if folder is None:
        return
    # Loading fetches what the hub's cache lacks, if it may.
    if Path(path).is_dir() or offline(model.environ):
        _require_shards(path, folder)
    for file in sorted(folder.glob("*.safetensors")):
        problem = incomplete(file)
        if problem:
            raise ModelError(f"model {path}: {file.name} {problem}; download it again")
    facts = model.config
    if facts is not None:
        require_plain_config(path, facts)
    if has_code:
        return
    if facts is not None:
        _require_known(path, facts)
        text = facts.get("text_config")
        sizes = text if isinstance(text, dict) else facts
        heads = sizes.get("num_attention_heads")
        require_whole_groups(path, heads, sizes.get("num_key_value_heads"))
    weights = model.weights
    if weights is not None and weights.stated:
        # Most plans are made where the weights are not.
        from kubetune.library.verdict.family import require_family
        from kubetune.library.verdict.quantised import require_form

        require_form(path, weights)
        require_family(path, weights)
        _require_sizes(path, weights)


def _require_shards(path: str, folder: Path) -> None:
    """Raise ModelError for an index that names files of weights which are not beside it."""
    missing = [name for name in files_of(folder) if not (folder / name).is_file()]
    if missing:
        more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise ModelError(
            f"model {path}: its index of weights names {missing[0]}{more}, not in the folder: it was not downloaded to its "
            "end; download it again"
        )


def _require_known(path: str, facts: Mapping[str, Any]) -> None:
    """Raise ModelError for a kind of model that the installed transformers does not know."""
    known = _text_of_known_types()
    model_type = str(facts.get("model_type", ""))
    if model_type and known and f'"{model_type}"' not in known:
        if facts.get("auto_map"):
            raise needs_code(path)
        raise ModelError(
            f"model {path}: the installed transformers knows no model_type {model_type}; install a newer one "
            "(`pip install -U transformers`), or take another model"
        )


@cache
def _text_of_known_types() -> str:
    """Return the files in which transformers lists its models, "" if they are elsewhere. To import it takes seconds."""
    package = find_spec("transformers")
    if package is None or package.origin is None:
        return ""
    auto = Path(package.origin).parent / "models" / "auto"
    return "".join(file.read_text("utf-8") for file in sorted(auto.glob("*auto*.py")))


def _require_sizes(path: str, weights: Weights) -> None:
    """Raise ModelError for weights with fewer layers, or of other sizes, than config.json says."""
    config = weights.text_config
    expected = config.get("num_hidden_layers")
    layers = number_of_layers(weights.shapes)
    if isinstance(expected, int) and 0 < layers < expected:
        raise ModelError(
            f"model {path}: its weights have {counted(layers, 'layer')}, and config.json asks for {expected:,} "
            f"(num_hidden_layers). {FETCH_AGAIN}"
        )
    if config.get("model_type") not in _PLAIN or "quantization_config" in weights.config:
        return
    for name, wanted in shapes_of(config).items():
        stored = weights.shapes.get(name)
        if stored is not None and stored != wanted:
            raise other_shapes(path, [(name, stored, wanted)])
