"""Compare the names of weights in their headers with those of the family that config.json names.

What the modules of a family are called is read in transformers' code of it, as text: nothing of it is run or imported, which
would take seconds. Where that code is not found, or is written in another way, nothing is judged: loading tells.

    transformers                                          headers                                 judged
    class LlamaDecoderLayer:
        self.self_attn = LlamaAttention(…)
        self.input_layernorm = LlamaRMSNorm(…)            model.layers.0.input_layernorm.weight   known
    class LlamaAttention:
        self.q_proj = nn.Linear(…, bias=config.…)         model.layers.0.self_attn.q_proj.weight  known
                                                          model.layers.0.self_attn.q_norm.weight  of another family
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from kubetune.errors import ModelError
from kubetune.plan.base_model import FETCH_AGAIN
from kubetune.plan.model_shapes import Weights, layer_of

# A file with the names that tensors have in files where these differ from the model's, by family or class.
_RENAMES: Final = "conversion_mapping.py"
_NORMS: Final = ("LayerNorm", "RMSNorm")
# What the tensors of a norm are called in old files. Loading knows them.
_OLD: Final = {"gamma": "weight", "beta": "bias"}


@dataclass(frozen=True)
class _Code:
    """What transformers' code of a family says."""

    words: frozenset[str]
    is_renamed: bool  # loading renames tensors of it, so files may have other names than the model
    text: str


@dataclass
class _Stack:
    """The layers that follow one another under one name, such as `model.layers`."""

    layers: set[str] = field(default_factory=set)
    # modules within a layer, and their tensors, by the layers that have them: {"mlp.up_proj.weight": {"0", "1"}}
    tensors: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def has_mostly(self, tensor: str) -> bool:
        """True if most layers have this tensor; the first or the last may be of another kind."""
        return 2 * len(self.tensors.get(tensor, ())) > len(self.layers)


def require_family(path: str, weights: Weights) -> None:
    """Raise ModelError for weights whose names are not those of the family that config.json names."""
    difference = _difference(weights)
    if difference:
        family = next(_types(weights.config))
        raise ModelError(
            f"model {path}: its weights are of another kind of model than its config.json, which says {family}: "
            f"{difference}. {FETCH_AGAIN}"
        )


def _difference(weights: Weights) -> str:
    """Return how the layers differ from the family's; empty if they do not, or if its code does not tell."""
    codes = [_code(family) for family in dict.fromkeys(_types(weights.config))]
    known = [code for code in codes if code is not None]
    stack = _longest_stack(weights.shapes)
    if not known or len(known) < len(codes) or stack is None:
        return ""
    words = frozenset[str]().union(*(code.words for code in known))
    foreign = _foreign_module(stack, words)
    if foreign:
        return foreign
    # Of a model that is made of several, this code has only the part that joins them. Other formats add biases.
    if len(known) > 1 or known[0].is_renamed or "quantization_config" in weights.config:
        return ""
    return _differing_module(stack, _modules_of_layers(known[0].text, weights.config))


def _foreign_module(stack: _Stack, words: frozenset[str]) -> str:
    """Return a sentence about a module that most layers have and the family's code does not name; empty without one."""
    for tensor in stack.tensors:
        module = tensor.rpartition(".")[0]
        if stack.has_mostly(tensor) and not _is_known(module, words):
            return f"most layers have {module}, which such a model does not have"
    return ""


def _differing_module(stack: _Stack, modules: Mapping[str, bool | None]) -> str:
    """Return a sentence about a module or a bias that only the family or only the weights have; empty without one.

    `modules`: those of each layer of the family, as `_modules_of_layers` returns them.
    """
    present = {tensor.rpartition(".")[0] for tensor in stack.tensors}
    for module, has_bias in modules.items():
        bias = f"{module}.bias"
        if module not in present:
            return f"no layer has {module}, which such a model has"
        if has_bias and bias not in stack.tensors:
            return f"no layer has {bias}, which such a model has"
        if has_bias is False and stack.has_mostly(bias):
            return f"most layers have {bias}, which such a model does not have"
    return ""


def _types(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the model_type of a config.json, and those of its parts: a language model, a tower."""
    if isinstance(config.get("model_type"), str):
        yield config["model_type"]
    for key, part in config.items():
        if isinstance(part, dict) and key.endswith("_config") and key != "quantization_config":
            yield from _types(part)


def _longest_stack(names: Iterable[str]) -> _Stack | None:
    """Return the stack with the most layers; None if no name has the number of a layer."""
    stacks: dict[str, _Stack] = defaultdict(_Stack)
    for name in names:
        layer = layer_of(name)
        if not layer:
            continue
        stack, _, number = layer.rpartition(".")
        stacks[stack].layers.add(number)
        module, _, kind = name.removeprefix(f"{layer}.").rpartition(".")
        kind = _OLD.get(kind, kind)
        # Buffers and the parts of quantised weights have other names.
        if kind in ("weight", "bias"):
            stacks[stack].tensors[f"{module}.{kind}"].add(number)
    return max(stacks.values(), key=lambda stack: len(stack.layers), default=None)


def _is_known(module: str, words: frozenset[str]) -> bool:
    """True if each part of a module's name is a word of the family's code; numbers are places in lists."""
    return all(part.isdecimal() or part in words for part in module.split("."))


@cache
def _code(family: str) -> _Code | None:
    """Return what transformers' code of a family says; None if it is not found."""
    folder = _folder(family)
    files = [] if folder is None else sorted(folder.glob("modeling_*.py"))
    if not files:
        return None
    text = "\n".join(file.read_text("utf-8") for file in files)
    words = set(re.findall(r"\w+", text))
    names = [family, *re.findall(r"^class (\w+)", text, re.MULTILINE)]
    renames = _renames()
    is_renamed = any(f'"{name}"' in renames for name in names)
    if is_renamed:
        words.update(re.findall(r"\w+", renames))
    return _Code(frozenset(words), is_renamed, text)


def _folder(family: str) -> Path | None:
    """Return the folder of transformers' code of a family."""
    package = find_spec("transformers")
    if package is None or package.origin is None:
        return None
    models = Path(package.origin).parent / "models"
    usual = models / family.replace("-", "_")
    if usual.is_dir():
        return usual
    # The part of a model has a type of its own, in the folder of the whole.
    line = re.compile(rf'model_type\b.*=\s*"{re.escape(family)}"')
    for file in sorted(models.glob("*/configuration_*.py")):
        if line.search(file.read_text("utf-8")):
            return file.parent
    return None


@cache
def _renames() -> str:
    """Return the text of the file that says how tensors are called in files; empty without one."""
    package = find_spec("transformers")
    if package is None or package.origin is None:
        return ""
    file = Path(package.origin).parent / _RENAMES
    return file.read_text("utf-8") if file.is_file() else ""


def _modules_of_layers(text: str, config: Mapping[str, Any]) -> dict[str, bool | None]:
    """Return the modules with a weight that each layer of a family has, whatever its settings.

    The value is True if the module has a bias, False if it has none, None if the code alone does not say.
    """
    classes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    layers: set[str] = set()
    for node in classes.values():
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and _name(call.func) == "ModuleList":
                layers.update(_made_for_each(call))
    kinds = layers & classes.keys()
    # Of an encoder beside a decoder, or of layers of several kinds, nobody knows here which is which.
    if len(layers) != 1 or len(kinds) != 1:
        return {}
    return dict(_modules(kinds.pop(), classes, config))


def _made_for_each(call: ast.Call) -> Iterator[str]:
    """Yield the class of `ModuleList([Layer(config) for _ in range(config.num_hidden_layers)])`."""
    for argument in call.args:
        if isinstance(argument, (ast.ListComp, ast.GeneratorExp)):
            made = argument.elt
            yield _name(made.func) if isinstance(made, ast.Call) else ""


def _modules(
    kind: str, classes: Mapping[str, ast.ClassDef], config: Mapping[str, Any]
) -> Iterator[tuple[str, bool | None]]:
    """Yield the modules with a weight that a class makes whatever its settings: what is within an `if` is left out."""
    node = classes[kind]
    # A class above may make them, or this one may take them away.
    if any(_name(base) in classes for base in node.bases):
        return
    for statement in _begin_of(node):
        for target, call in _assigned(statement):
            made = _name(call.func)
            if made == "Linear":
                yield target, _bias_of(call, config)
            elif made in _NORMS and not any(
                word.arg == "elementwise_affine" for word in call.keywords
            ):
                yield target, None
            elif made in classes:
                if _holds_weight(classes[made]):
                    yield target, None
                for inner, has_bias in _modules(made, classes, config):
                    yield f"{target}.{inner}", has_bias


def _begin_of(node: ast.ClassDef) -> list[ast.stmt]:
    """Return the statements of a class's `__init__`."""
    for function in node.body:
        if isinstance(function, ast.FunctionDef) and function.name == "__init__":
            return function.body
    return []


def _assigned(statement: ast.stmt) -> Iterator[tuple[str, ast.Call]]:
    """Yield name and call of `self.name = Call(…)`."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return
    for target in statement.targets:
        if isinstance(target, ast.Attribute) and _name(target.value) == "self":
            yield target.attr, statement.value


def _holds_weight(node: ast.ClassDef) -> bool:
    """True for a class that makes a parameter `weight`, as those of norms do."""
    for statement in _begin_of(node):
        for target, call in _assigned(statement):
            if target == "weight" and _name(call.func) == "Parameter":
                return True
    return False


def _bias_of(call: ast.Call, config: Mapping[str, Any]) -> bool | None:
    """True if a linear layer has a bias, by `bias=False` or `bias=config.attention_bias`; None if the code does not say."""
    for word in call.keywords:
        if word.arg != "bias":
            continue
        value: Any = None
        if isinstance(word.value, ast.Constant):
            value = word.value.value
        elif isinstance(word.value, ast.Attribute) and _name(word.value.value) == "config":
            value = config.get(word.value.attr)
        return value if isinstance(value, bool) else None
    # Its place among the arguments is the third.
    return True if len(call.args) < 3 else None


def _name(node: ast.expr) -> str:
    """Return the last part of a name: `Linear` of `nn.Linear`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
