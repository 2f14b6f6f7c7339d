"""Images by the processor that comes with a model, used whole: what it writes into the text for an image, and tensors.

For models whose images are no grids of patches as Qwen-VL cuts them (image_processor.py): LLaVA, Idefics3, Gemma 3,
InternVL and what is like them. Which of them need more than Pillow is theirs to say.
"""

from __future__ import annotations

import builtins
import re
import sys
import warnings
from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kubetune.data.reading.images import pillow
from kubetune.data.text.tokenizer_files import read_json
from kubetune.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

_OF_THE_TEXT: Final = (
    "input_ids",
    "labels",
    "attention_mask",
    "token_type_ids",
    "mm_token_type_ids",
)
_KINDS: Final = ("token_type_ids", "mm_token_type_ids")
"""Keys that tell tokens of images from those of text, where a model wants to be told."""
_SEEING: Final = ("image_processor", "tokenizer")


class WholeProcessor:
    """The processor of the model in `folder`; `feature` is the token repeated for each feature of an image."""

    def __init__(self, name: str, folder: Path, feature: str) -> None:
        self._name = name
        self._folder = folder
        self._feature = feature

    @cached_property
    def theirs(self) -> Any:
        """transformers' processor. Raises ModelError where it cannot be used, saying why."""
        pillow()
        from transformers import AutoProcessor

        try:
            kind = self._without_video() or AutoProcessor
            processor: Any = kind.from_pretrained(
                self._folder, backend="pil", local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            # Other libraries missing, damaged files, unknown classes: each raises its own kind.
            reason = " ".join(str(error).split())
            raise ModelError(
                f"{self._name} has no processor that can be used with Pillow alone: {reason}"
            ) from error
        if not getattr(processor, "image_token", None):
            raise ModelError(
                f"the images of {self._name} are prepared by {type(processor).__name__}, which `task: vision_language` "
                "does not know; see docs/vision.md for those it does"
            )
        return processor

    def _without_video(self) -> Any:
        """The processor's class without the parts that hear or cut videos, which need other libraries.

        None where it has no such parts.
        """
        import transformers

        files = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
        name = ""
        for file in files:
            if not name and (self._folder / file).is_file():
                name = str(read_json(self._folder / file).get("processor_class", ""))
        # SmolVLM's own asks for what writes numbers in words, for videos; that of Idefics3 makes the same of images.
        substitutes = {"SmolVLMProcessor": "Idefics3Processor"}
        kind: Any = getattr(transformers, substitutes.get(name, name), None) if name else None
        try:
            parts = kind.get_attributes() if kind is not None else _SEEING
        except ImportError:  # it needs a library that is not here
            kind = _beside_pillow(name)
            return kind and only_seeing(kind)
        if set(parts) <= set(_SEEING):
            return kind if name == "SmolVLMProcessor" else None
        return only_seeing(kind)

    @property
    def written(self) -> str:
        """The text that chat templates of this model write for an image."""
        return str(self.theirs.image_token)

    @cached_property
    def reads_prefixes(self) -> bool:
        """A question is read in both directions, laid out by the processor, and followed by one answer: PaliGemma."""
        return "suffix" in signature(type(self.theirs).__call__).parameters

    def lay_out(self, question: str, images: int) -> str:
        """A question that holds as many of `written` as it has images, as the processor lays it out."""
        blank = pillow().new("RGB", (1, 1))
        _, [text], *_ = self.theirs.prepare_inputs_layout(images=[blank] * images, text=[question])
        return str(text)

    def see(self, images: Sequence[Any]) -> list[tuple[str, tuple[int, ...]]]:
        """Tokens of each image of a text, each run of its feature token as one, and how long the runs are."""
        if not images:
            return []
        written = self.written * len(images)
        made = self.theirs(
            images=list(images), text=[written], return_text_replacement_offsets=True
        )
        runs = re.compile(f"(?:{re.escape(self._feature)})+")
        seen = []
        for replaced in made["text_replacement_offsets"][0]:
            text = str(replaced["replacement"])
            lengths = tuple(len(run) // len(self._feature) for run in runs.findall(text))
            if not lengths:
                raise ModelError(
                    f"the processor of {self._name} writes no {self._feature!r} for an image"
                )
            seen.append((runs.sub(lambda _: self._feature, text), lengths))
        return seen

    def look(self, images: Sequence[Any], is_image: Tensor, answer: int) -> dict[str, Tensor]:
        """The images of one sequence as the model's code takes them.

        `is_image`: bool `[tokens]`; `answer`: the token with which what is trained begins.
        """
        import torch

        kind = torch.arange(len(is_image)) >= answer if self.reads_prefixes else is_image
        kinds = {name: kind.int()[None] for name in _KINDS if name in self.theirs.model_input_names}
        if not images:
            return kinds
        with warnings.catch_warnings():
            # PaliGemma's makes arrays of tensors in an old way.
            warnings.simplefilter("ignore", DeprecationWarning)
            made = self.theirs(
                images=list(images), text=[self.written * len(images)], return_tensors="pt"
            )
        seen = {name: value for name, value in made.items() if name not in _OF_THE_TEXT}
        strange = [name for name, value in seen.items() if not isinstance(value, torch.Tensor)]
        if strange:
            raise ModelError(
                f"the processor of {self._name} makes {', '.join(strange)} in a form that is not known here"
            )
        return seen | kinds


def only_seeing(kind: Any) -> Any:
    """The class of a processor that is loaded with its image processor and tokenizer alone, None for other parts."""
    seeing: Any = type(
        kind.__name__, (kind,), {"get_attributes": classmethod(lambda _: list(_SEEING))}
    )

    def load(cls: Any, *args: Any, **kwargs: Any) -> list[Any]:
        parts = dict(
            zip(_SEEING, seeing._get_arguments_from_pretrained(*args, **kwargs), strict=True)
        )
        return [parts.get(name) for name in kind.get_attributes()]

    def check(self: Any, name: str, part: Any) -> Any:
        return part and kind.check_argument_for_proper_class(self, name, part)

    members = {
        "_get_arguments_from_pretrained": classmethod(load),
        "check_argument_for_proper_class": check,
    }
    return type(kind.__name__, (kind,), members)


def _beside_pillow(name: str) -> Any:
    """The class of a processor whose module asks for an image processor of torchvision, with that of Pillow instead.

    transformers has both for a model, under names alike. None where that does not help. The module is loaded anew,
    under a name of its own, so that nothing of transformers changes.
    """
    import transformers

    def import_twin(name: str, *args: Any, **kwargs: Any) -> Any:
        return __import__(
            name.replace("image_processing_", "image_processing_pil_"), *args, **kwargs
        )

    place = getattr(transformers, "_class_to_module", {}).get(name)
    theirs = find_spec(f"transformers.{place}") if place else None
    if theirs is None or theirs.origin is None:
        return None
    spec = spec_from_file_location(f"{theirs.name}_beside_pillow", theirs.origin)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # where transformers looks for the file of a class
    vars(module)["__builtins__"] = {**vars(builtins), "__import__": import_twin}
    try:
        spec.loader.exec_module(module)
    except ImportError:
        return None
    return getattr(module, name)
