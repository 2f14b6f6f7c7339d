"""Images by the processor that comes with a model, used whole: what it writes into the text for an image, and tensors.

For models whose images are no grids of patches as Qwen-VL cuts them (image_processor.py): LLaVA, Idefics3, Gemma 3,
InternVL and what is like them. Which of them need more than Pillow is theirs to say.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Sequence
from functools import cached_property
from importlib.abc import SourceLoader
from importlib.util import find_spec, module_from_spec, spec_from_loader
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
# Arguments that mark tokens of images, for models that take one.
_KINDS: Final = ("token_type_ids", "mm_token_type_ids")
# The parts of a processor that images and texts need.
_SEEING: Final = ("image_processor", "tokenizer")
# SmolVLM's own asks for a library that writes numbers in words, for videos. That of Idefics3 makes the same of images.
_SUBSTITUTES: Final = {"SmolVLMProcessor": "Idefics3Processor"}


class WholeProcessor:
    """The processor of the model in `folder`; `feature` is the token repeated for each feature of an image."""

    def __init__(
        self,
        name: str,
        folder: Path,
        feature: str,
    ) -> None:
        self._name = name
        self._folder = folder
        self._feature = feature

    @cached_property
    def theirs(self) -> Any:
        """Return transformers' processor. Raise ModelError where it cannot be used, saying why."""
        pillow()
        from transformers import AutoProcessor

        settings: dict[str, Any] = {
            "backend": "pil",
            "local_files_only": True,
        }
        try:
            kind = self._kind_with_other_parts()
            if kind is None:
                processor: Any = AutoProcessor.from_pretrained(
                    self._folder, trust_remote_code=False, **settings
                )
            else:
                processor = load_seeing(kind, self._folder, **settings)
        except Exception as error:
            # Other libraries missing, damaged files, unknown classes: each raises its own kind.
            reason = " ".join(str(error).split())
            raise ModelError(
                f"{self._name} has no processor that can be used with Pillow only: {reason}"
            ) from error

        if not getattr(processor, "image_token", None):
            raise ModelError(
                f"the images of {self._name} are prepared by {type(processor).__name__}, which `task: vision_language` "
                "does not know; see docs/vision.md for those it does"
            )

        return processor

    def _kind_with_other_parts(self) -> Any:
        """Return the class of a processor that has parts which hear or cut videos: these need other libraries.

        None if it has no such parts: then transformers chooses the class.
        """
        import transformers

        name = self._class_name()
        kind: Any = None
        if name:
            kind = getattr(transformers, _SUBSTITUTES.get(name, name), None)
        if kind is None:
            return None
        try:
            parts = kind.get_attributes()
        except ImportError:
            # The class needs a library that is not here. If Pillow's code cannot take its place, AutoProcessor says which.
            return with_pillow(kind)

        has_other_parts = not set(parts) <= set(_SEEING)
        if has_other_parts or name in _SUBSTITUTES:
            return kind
        return None

    def _class_name(self) -> str:
        """Return the name of the processor's class that the model's files have; empty where they have none."""
        for file in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
            if (self._folder / file).is_file():
                name = str(read_json(self._folder / file).get("processor_class", ""))
                if name:
                    return name
        return ""

    @property
    def written(self) -> str:
        """Return the text that chat templates of this model write for an image."""
        return str(self.theirs.image_token)

    @cached_property
    def reads_prefixes(self) -> bool:
        """True if a question is read in both directions, and followed by one answer: PaliGemma."""
        return "suffix" in signature(type(self.theirs).__call__).parameters

    def lay_out(self, question: str, images: int) -> str:
        """Return a question that holds as many of `written` as it has images, as the processor lays it out."""
        # Where the images go does not depend on what they show.
        blank = pillow().new("RGB", (1, 1))
        _, [text], *_ = self.theirs.prepare_inputs_layout(images=[blank] * images, text=[question])
        return str(text)

    def see(self, images: Sequence[Any]) -> list[tuple[str, tuple[int, ...]]]:
        """Return the text of each image of a row with each run of the feature token as one token, and the runs' lengths.

        An image in two tiles, with `<f>` as feature token:

            <tile 1><f><f><f><tile 2><f><f>    →    "<tile 1><f><tile 2><f>", (3, 2)
        """
        if not images:
            return []
        # A text of the images alone: the processor says what it has put in place of each.
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

    def look(
        self,
        images: Sequence[Any],
        is_image: Tensor,
        answer: int,
    ) -> dict[str, Tensor]:
        """Return the images of one sequence as the model's code takes them.

        `is_image`: bool `[tokens]`; `answer`: the token with which what is trained begins.
        """
        import torch

        kind = is_image
        if self.reads_prefixes:
            # Of such a model 0 is the question, which is read in both directions, and 1 the answer.
            kind = torch.arange(len(is_image)) >= answer
        inputs: dict[str, Tensor] = {}
        for name in _KINDS:
            if name in self.theirs.model_input_names:
                inputs[name] = kind.int()[None]
        if not images:
            return inputs
        with warnings.catch_warnings():
            # PaliGemma's makes arrays of tensors in an old way.
            warnings.simplefilter("ignore", DeprecationWarning)
            made = self.theirs(
                images=list(images), text=[self.written * len(images)], return_tensors="pt"
            )

        seen: dict[str, Tensor] = {}
        strange = []
        for name, value in made.items():
            if name in _OF_THE_TEXT:
                continue
            if not isinstance(value, torch.Tensor):
                strange.append(name)
            seen[name] = value

        if strange:
            raise ModelError(
                f"the processor of {self._name} makes {', '.join(strange)} in a form that is not known here"
            )

        return seen | inputs


def load_seeing(kind: Any, folder: Path, **settings: Any) -> Any:
    """Return a processor of class `kind` with its image processor and tokenizer alone.

    Its other parts, such as one for videos, are None. `settings` are those of `from_pretrained`.
    """
    from transformers import AutoImageProcessor, AutoTokenizer

    def check(self: Any, name: str, part: Any) -> Any:
        return part and kind.check_argument_for_proper_class(self, name, part)

    # The class itself refuses parts that are None.
    seeing = type(kind.__name__, (kind,), {"check_argument_for_proper_class": check})
    facts, facts_settings = seeing.get_processor_dict(folder, **settings)  # type: ignore[attr-defined]
    parts = {
        "image_processor": AutoImageProcessor.from_pretrained(
            folder, trust_remote_code=False, **settings
        ),
        "tokenizer": AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **settings),
    }
    # In the order of the class: Gemma 4's is feature_extractor, image_processor, tokenizer, video_processor.
    in_order = [parts.get(name) for name in kind.get_attributes()]
    return seeing.from_args_and_dict(in_order, facts, **facts_settings)  # type: ignore[attr-defined]


class _PillowSource(SourceLoader):
    """Load a source file of transformers with Pillow's image processor in place of torchvision's."""

    def __init__(self, file: str) -> None:
        self._file = file

    def get_filename(self, fullname: str) -> str:
        """Return the path of the source file."""
        return self._file

    def get_data(self, path: str) -> bytes:
        """Return the changed source. transformers has both processors, in modules whose names differ by `pil_`."""
        return Path(path).read_bytes().replace(b"image_processing_", b"image_processing_pil_")


def with_pillow(kind: Any) -> Any:
    """Return the class of a processor whose module imports torchvision, with Pillow instead; None if that fails.

    `kind` is what transformers gives in place of a class that it cannot import. The module is loaded a second time, under
    a name of its own, so that nothing of transformers changes. So Pixtral and Mistral 3 need no torchvision.
    """
    original = find_spec(kind.__module__)
    if original is None or original.origin is None:
        return None
    spec = spec_from_loader(f"{original.name}_with_pillow", _PillowSource(original.origin))
    if spec is None or spec.loader is None:
        return None
    module = module_from_spec(spec)
    # transformers looks here for the file of a class.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except ImportError:
        del sys.modules[spec.name]
        return None
    return getattr(module, kind.__name__)
