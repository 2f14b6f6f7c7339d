"""The files of a saved adapter, read before PEFT does what they say.

A run may have been received, and then anybody may have written its adapter_config.json and the header of its weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kubetune import errors
from kubetune.base.humanize import counted
from kubetune.config.schema.model import Alpha, Rank
from kubetune.data.text.tokenizer_files import read_json
from kubetune.models import weight_files
from kubetune.plan.linears import learns_whole

SETTINGS: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"

ADVICE: Final = "put the file back from a copy, or choose another checkpoint. Nothing was loaded."
_FLOATS: Final = ("F64", "F32", "F16", "BF16")
# The names that PEFT gives to the tensors of an adapter on a module.
_PART: Final = re.compile(
    r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>A|B|embedding_A|embedding_B|magnitude_vector)(\.weight)?"
)
_OTHER_HALF: Final = {
    "A": "B",
    "B": "A",
    "embedding_A": "embedding_B",
    "embedding_B": "embedding_A",
}

Value = TypeVar("Value")
# PEFT makes expressions of such names. Those of modules mean nothing special in one.
Name = Annotated[str, Field(pattern=r"^[\w-]+(\.[\w-]+)*$", max_length=1000)]
# An expression for whole names. It may be anything, so only `base/expressions` may apply it.
Expression = Annotated[str, Field(min_length=1)]


class AdapterSettings(BaseModel):
    """What adapter_config.json may say. What is not named here must be as PEFT leaves it."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", allow_inf_nan=False)

    peft_type: Literal["LORA"]
    task_type: Literal["CAUSAL_LM", "SEQ_CLS"] | None = None
    r: Rank
    lora_alpha: Alpha
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    # Ranks and scales of modules that have others, by the ends of their names.
    rank_pattern: dict[Name, Rank] | None = None
    alpha_pattern: dict[Name, Alpha] | None = None
    target_modules: list[Name] | Expression | None = None
    exclude_modules: list[Name] | Expression | None = None
    target_parameters: list[Name] | None = None
    modules_to_save: list[Name] | None = None
    use_dora: bool = False
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    # Any other way to begin would change the base.
    init_lora_weights: bool = True
    inference_mode: bool = True
    # Facts that nothing is made of.
    base_model_name_or_path: str | None = None
    revision: str | None = None
    peft_version: str | None = None

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's adapter."""
        return _by_end(self.rank_pattern, module, self.r)

    def alpha_of(self, module: str) -> float:
        """Return the alpha of a module's adapter."""
        return _by_end(self.alpha_pattern, module, self.lora_alpha)

    def is_on_tensor(self, module: str) -> bool:
        """True if the adapter is on a tensor of the module, such as that of stacked experts, not on the module."""
        # PEFT puts a second adapter on a module around the first: `experts.base_layer`.
        name = re.sub(r"(\.base_layer)+$", "", module)
        for parameter in self.target_parameters or ():
            owner, dot, _ = parameter.rpartition(".")
            if not dot or f".{name}".endswith(f".{owner}"):
                return True
        return False


def _by_end(values: Mapping[str, Value] | None, module: str, default: Value) -> Value:
    """Return the value whose key is the end of a module's name, as PEFT chooses it; the first of several."""
    for end, value in (values or {}).items():
        if f".{module}".endswith(f".{end}"):
            return value
    return default


def read_settings(folder: Path) -> AdapterSettings:
    """Return what the adapter_config.json of a folder says. Raise ModelError for what no run writes."""
    facts = read_json(folder / SETTINGS)
    try:
        settings = AdapterSettings.model_validate(facts)
    except (ValidationError, RecursionError) as error:
        raise errors.ModelError(
            f"adapter {folder}: its {SETTINGS} has {_first_problem(error)}; {ADVICE}"
        ) from None
    _require_nothing_else(folder, settings.model_extra or {})
    return settings


def _first_problem(error: ValidationError | RecursionError) -> str:
    """Return the first wrong value and what was expected: `r: '4'; expected a valid integer`."""
    if isinstance(error, RecursionError):
        return "values that are nested too deeply"
    problem = error.errors(include_url=False, include_context=False)[0]
    key = str(problem["loc"][0]) if problem["loc"] else ""
    if problem["type"] == "missing":
        return f"no {key}; expected one"
    expected = (
        problem["msg"].replace("Input should be", "expected").replace("should", "which should")
    )
    return f"{key}: {_shown(problem['input'])}; {expected}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _require_nothing_else(folder: Path, others: Mapping[str, Any]) -> None:
    """Raise ModelError for a setting of PEFT that no run uses.

    By some PEFT imports a module, loads other weights, repeats layers or changes the base:

        megatron_config, arrow_config, layer_replication, corda_config, loftq_config, trainable_token_indices, …
    """
    from peft import LoraConfig

    defaults = LoraConfig().to_dict()
    for key, value in others.items():
        if value and value != defaults.get(key):
            raise errors.ModelError(
                f"adapter {folder}: its {SETTINGS} has {key[:60]}: {_shown(value)}, which no run writes, and by which "
                "other code or weights may be loaded; take that key out. Nothing was loaded."
            )


def require_fitting_weights(folder: Path, settings: AdapterSettings) -> None:
    """Raise ModelError if the tensors of a folder are not those of an adapter with these settings.

    Each half of a pair A, B has the rank as its rows or columns, and all hold floats. Only the header is read:

        q_proj.lora_A.weight          [rank, inputs]
        q_proj.lora_B.weight          [outputs, rank]
        experts.lora_A.weight         [rank × experts, inputs]      of a tensor with all experts
        q_proj.lora_magnitude_vector  [outputs]                     of DoRA
        lm_head.weight                [outputs, inputs]             of a module in modules_to_save

    Whether the model has such modules, and inputs and outputs of these sizes, PEFT says.
    """
    shapes = _shapes(folder)
    missing = []
    foreign = []
    has_adapter = False
    for name, shape in shapes.items():
        match = _PART.fullmatch(name)
        if match is None:
            # Modules that were trained whole are compared with the model's when they are put into it. Any other tensor
            # would be put in the place of the base's own.
            if not learns_whole(name, settings.modules_to_save or ()):
                foreign.append(name)
            continue
        has_adapter = True
        part = match["part"]
        if part == "magnitude_vector":
            _require_magnitudes(folder, name, shape, shapes)
            continue
        other = _sibling(name, part, _OTHER_HALF[part])
        if other not in shapes:
            missing.append(other)
        _require_rank(folder, settings, name, match, shape)
    weight_files.require_same_names(folder, missing, foreign)
    if not has_adapter:
        raise errors.ModelError(f"{folder / WEIGHTS} has no adapter in it; {ADVICE}")


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Return the shapes of an adapter's tensors by their names. Raise ModelError if one does not hold floats."""
    path = folder / WEIGHTS
    shapes = {}
    with weight_files.opened(path) as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            tensor = file.get_slice(name)
            dtype = tensor.get_dtype()
            if dtype not in _FLOATS:
                raise errors.ModelError(
                    f"{path}: {name} holds {dtype}; expected floats ({', '.join(_FLOATS)}); {ADVICE}"
                )
            shapes[name] = tensor.get_shape()
    return shapes


def _sibling(name: str, part: str, other: str) -> str:
    """Return the name of another part of the same adapter."""
    before, _, after = name.rpartition(f".lora_{part}")
    return f"{before}.lora_{other}{after}"


def _require_rank(
    folder: Path,
    settings: AdapterSettings,
    name: str,
    match: re.Match[str],
    shape: list[int],
) -> None:
    """Raise ModelError if half of an adapter has another rank than the settings say."""
    what = "rows" if match["part"].endswith("A") else "columns"
    place = 0 if what == "rows" else 1
    expected = settings.rank_of(match["module"])
    rank = shape[place] if len(shape) > 1 else 0
    fits = rank == expected
    # An adapter on a tensor of all experts has so many for each.
    if settings.is_on_tensor(match["module"]):
        fits = rank > 0 and rank % expected == 0
    if not fits:
        raise errors.ModelError(
            f"{folder / WEIGHTS}: {name} has the shape {shape}; expected {expected} {what}, the rank in {SETTINGS}; "
            f"{ADVICE}"
        )


def _require_magnitudes(
    folder: Path, name: str, shape: list[int], shapes: Mapping[str, list[int]]
) -> None:
    """Raise ModelError if DoRA has not one magnitude for each output of its adapter."""
    stem = name.partition(".lora_magnitude_vector")[0]
    outputs = None
    for part in ("lora_B.weight", "lora_embedding_B"):
        outputs = shapes.get(f"{stem}.{part}", outputs)
    if not outputs or max(shape, default=0) == outputs[0]:
        return
    raise errors.ModelError(
        f"{folder / WEIGHTS}: {name} has the shape {shape}; expected {counted(outputs[0], 'magnitude')}, one for each "
        f"output; {ADVICE}"
    )


def adapted_modules(folder: Path, settings: AdapterSettings) -> set[str]:
    """Return the whole names of modules that have an adapter on them, by the names of its tensors."""
    modules = set()
    for name in _shapes(folder):
        match = _PART.fullmatch(name)
        if match is not None and not settings.is_on_tensor(match["module"]):
            modules.add(match["module"])
    return modules
