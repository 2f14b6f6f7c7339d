"""Images by the processor that comes with a model, used whole: what it writes into the text for an image, and tensors.

For models whose images are no grids of patches as Qwen-VL cuts them (image_processor.py): LLaVA, Idefics3, Gemma 3,
InternVL and what is like them. Which of them need more than Pillow is theirs to say.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kubetune.data.reading.images import pillow
from kubetune.data.text.tokenizer_files import read_json
from kubetune.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

_OF_THE_TEXT: Final = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
_KINDS: Final = ("token_type_ids", "mm_token_type_ids")
"""Keys that tell tokens of images from those of text, where a model wants to be told."""
_SEES_PREFIXES: Final = ("PaliGemmaProcessor", "ColPaliProcessor")


class WholeProcessor:
    """The processor of the model in `folder`; `feature` is the token repeated for each feature of an image."""

    def __init__(self, name: str, folder: Path, feature: str) -> None:
        self._name, self._folder, self._feature = name, folder, feature

    @cached_property
    def theirs(self) -> Any:
        """transformers' processor. Raises ModelError where it cannot be used, saying why."""
        pillow()
        from transformers import AutoProcessor

        try:
            kind = self._without_video() or AutoProcessor
            processor: Any = kind.from_pretrained(self._folder, backend="pil", local_files_only=True)
        except Exception as error:  # other libraries missing, damaged files, unknown classes: each its own kind
            reason = " ".join(str(error).split())
            raise ModelError(f"{self._name} has no processor that can be used with Pillow alone: {reason}") from error
        if not getattr(processor, "image_token", None) or type(processor).__name__ in _SEES_PREFIXES:
            raise ModelError(
                f"the images of {self._name} are prepared by {type(processor).__name__}, which `task: vision_language` "
                "does not know; see docs/vision.md for those it does"
            )
        return processor

    def _without_video(self) -> Any:
        """The processor's class without the part that cuts videos, which needs torchvision; None where it has none."""
        import transformers

        files = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
        found = (read_json(path if (path := self._folder / name).is_file() else None) for name in files)
        name = next((str(facts["processor_class"]) for facts in found if "processor_class" in facts), "")
        # SmolVLM's own asks for what writes numbers in words, for videos; that of Idefics3 makes the same of images.
        kind: Any = getattr(transformers, {"SmolVLMProcessor": "Idefics3Processor"}.get(name, name), None)
        try:
            parts = kind.get_attributes() if kind is not None else []
        except ImportError:  # it needs a library that is not here, and says so itself when it is loaded
            return None
        if "video_processor" not in parts:
            return kind if name == "SmolVLMProcessor" else None
        parts = [part for part in parts if part != "video_processor"]
        return type(kind.__name__, (kind,), {"get_attributes": classmethod(lambda _: parts)})

    @property
    def written(self) -> str:
        """The text that chat templates of this model write for an image."""
        return str(self.theirs.image_token)

    def see(self, images: Sequence[Any]) -> list[tuple[str, tuple[int, ...]]]:
        """Tokens of each image of a text, each run of its feature token as one, and how long the runs are."""
        if not images:
            return []
        written = self.written * len(images)
        made = self.theirs(images=list(images), text=[written], return_text_replacement_offsets=True)
        runs = re.compile(f"(?:{re.escape(self._feature)})+")
        seen = []
        for text in (str(replaced["replacement"]) for replaced in made["text_replacement_offsets"][0]):
            lengths = tuple(len(run) // len(self._feature) for run in runs.findall(text))
            if not lengths:
                raise ModelError(f"the processor of {self._name} writes no {self._feature!r} for an image")
            seen.append((runs.sub(lambda _: self._feature, text), lengths))
        return seen

    def look(self, images: Sequence[Any], is_image: Tensor) -> dict[str, Tensor]:
        """The images of one sequence as the model's code takes them. `is_image`: bool `[tokens]`."""
        import torch

        kinds = {name: is_image.int()[None] for name in _KINDS if name in self.theirs.model_input_names}
        if not images:
            return kinds
        made = self.theirs(images=list(images), text=[self.written * len(images)], return_tensors="pt")
        seen = {name: value for name, value in made.items() if name not in _OF_THE_TEXT}
        strange = [name for name, value in seen.items() if not isinstance(value, torch.Tensor)]
        if strange:
            raise ModelError(
                f"the processor of {self._name} makes {', '.join(strange)} in a form that is not known here"
            )
        return seen | kinds
