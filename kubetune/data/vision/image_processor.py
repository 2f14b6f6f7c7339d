"""Images to what a vision tower takes, by the image processor that comes with the model, and how many tokens they are.

For processors that cut an image into a grid of patches as large as the image asks for: Qwen2-VL's and those after it.
Other models' processors are used whole (whole_processor.py). Not for telling what is an image (reading/images).
"""

from __future__ import annotations

import hashlib
import json
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kubetune.base.files import write_atomic
from kubetune.config.schema import Config, VisionConfig
from kubetune.data.reading import hub
from kubetune.data.reading.images import FORMATS, ImageFacts, pillow, verify_image
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.data.text.tokenizer_files import read_json
from kubetune.data.vision.whole_processor import WholeProcessor
from kubetune.errors import ConfigError, DataError, ModelError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CONFIGS: Final = ("preprocessor_config.json", "processor_config.json")
_NO_LIMITS: Final = (VisionConfig().image_max_tokens, VisionConfig().image_min_tokens)
_OLD_LIMITS: Final = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}


class ImageRef(NamedTuple):
    """An image of a prepared row: its absolute path, and the CRC-32 of the file when the row was prepared."""

    path: str
    crc: int


class Picture(NamedTuple):
    """One image, ready: fp32 `pixel_values` `[patches, values]`; `grid`: patches in time, down and across."""

    pixel_values: NDArray[np.float32]
    grid: tuple[int, int, int]


class Upright(NamedTuple):
    """One image, decoded, upright and in RGB, for a processor that takes all of a sequence at once."""

    image: Any


class Seen(NamedTuple):
    """An image in a text: `text`, whose runs of the image token are one each, the lengths of these `runs`, the
    CRC-32 of its file, and what else there is to be counted of it: names of fields of `pipeline.Tally`."""

    text: str
    runs: tuple[int, ...]
    crc: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Placeholder:
    """The stand-in for an image in a text: `text` is tokenised, and the `token` in it repeated for each feature."""

    text: str
    token: int
    start: int | None


class ImageProcessor:
    """Made by `load_image_processor`. transformers is imported when an image is first looked at."""

    def __init__(
        self,
        name: str,
        files: Mapping[str, Path],
        vision: VisionConfig,
        placeholder: Placeholder,
        feature: str = "",
    ) -> None:
        """`feature`: the name of the token that is repeated for each feature of an image."""
        self._feature = feature
        self.name = name
        self.files = dict(files)
        self.placeholder = placeholder
        self._vision = vision

    @cached_property
    def _loaded(self) -> Any:
        pillow()  # says what to install
        from transformers import AutoImageProcessor

        try:
            return AutoImageProcessor.from_pretrained(
                self._folder, backend="pil", local_files_only=True, trust_remote_code=False
            )
        except (
            Exception
        ) as error:  # remote code, damaged files, unknown classes: each raises its own kind
            raise ModelError(
                f"{self.name} has no image processor that can be used: {error}"
            ) from error

    @property
    def _folder(self) -> Path:
        return next(iter(self.files.values())).parent

    @cached_property
    def is_grid(self) -> bool:
        """Images are cut into grids, whose sizes and positions are known here."""
        names = ("patch_size", "merge_size", "size", "get_number_of_image_patches")
        return all(hasattr(self._loaded, name) for name in names) and (
            "image_grid_thw" in self._loaded.model_input_names
        )

    @cached_property
    def whole(self) -> WholeProcessor:
        """The model's own processor, where images are no grids. Raises ConfigError for limits that it does not keep."""
        if (self._vision.image_max_tokens, self._vision.image_min_tokens) != _NO_LIMITS:
            raise ConfigError(
                f"vision.image_max_tokens and image_min_tokens: images of {self.name} have the size that its own "
                f"processor ({type(self._loaded).__name__}) gives them; leave these out"
            )
        return WholeProcessor(self.name, self._folder, self._feature)

    @property
    def reads_prefixes(self) -> bool:
        """A question with its images is read in both directions, and followed by one answer."""
        return not self.is_grid and self.whole.reads_prefixes

    @cached_property
    def theirs(self) -> Any:
        """transformers' image processor, told our budget of tokens. Raises ModelError where it is of another kind."""
        processor = self._loaded
        if not self.is_grid:
            raise ModelError(
                f"the images of {self.name} are prepared by {type(processor).__name__}; a budget of tokens is for "
                "models whose processor cuts images into a grid (Qwen2-VL, Qwen2.5-VL, Qwen3-VL and the like)"
            )
        pixels = (processor.patch_size * processor.merge_size) ** 2
        least = self._vision.image_min_tokens
        longest = self._vision.image_max_tokens * pixels
        shortest = (
            least * pixels if least is not None else min(processor.size["shortest_edge"], longest)
        )
        processor.size = {"shortest_edge": shortest, "longest_edge": longest}
        return processor

    def import_libraries(self) -> None:
        """Import what reading images needs, in one thread and not in several at once."""
        _ = self.theirs if self.is_grid else self.whole.theirs

    @property
    def merge_size(self) -> int:
        """Patches on each side of what becomes one token."""
        return int(self.theirs.merge_size)

    def measure(self, facts: ImageFacts) -> int:
        """Tokens of an image that `verify_image` has found good."""
        patches = self.theirs.get_number_of_image_patches(facts.height, facts.width)
        return int(patches) // self.merge_size**2

    def see(self, files: Sequence[Path]) -> list[Seen]:
        """The images of one row as they stand in its text. Raises UnusableImage for what cannot be trained on.

        All at once: some models lay out an image otherwise where it is not alone.
        """
        facts = [verify_image(file) for file in files]
        contents = [file.read_bytes() for file in files]
        written: list[tuple[str, tuple[int, ...]]]
        if self.is_grid:
            written = [(self.placeholder.text, (self.measure(one),)) for one in facts]
        else:
            written = self.whole.see([_upright(content) for content in contents])
        crcs = map(zlib.crc32, contents)
        notes = (self._notes(one, sum(runs)) for one, (_, runs) in zip(facts, written, strict=True))
        return [Seen(*one, crc, note) for one, crc, note in zip(written, crcs, notes, strict=True)]

    def _notes(self, facts: ImageFacts, tokens: int) -> tuple[str, ...]:
        above = self.is_grid and tokens > self._vision.image_max_tokens
        notes = {
            "images_above_budget": above,
            "images_animated": facts.is_animated,
            "images_deep": facts.is_deep,
        }
        return tuple(note for note, holds in notes.items() if holds)

    def read(self, image: ImageRef) -> Picture | Upright:
        """An image that `see` has found good. Raises DataError where the file is another one now."""
        return self.process(self.content(image))

    @staticmethod
    def content(image: ImageRef) -> bytes:
        """The bytes of an image's file. Raises DataError where it is another one now."""
        try:
            content = Path(image.path).read_bytes()
        except OSError as error:
            raise DataError(
                f"image {image.path} was there when the data were prepared: {error.strerror}"
            ) from error
        if zlib.crc32(content) != image.crc:
            raise DataError(
                f"image {image.path} has changed since the data were prepared; prepare them again"
            )
        return content

    def features(self, picture: Picture | Upright) -> int:
        """Tokens of an image that has been made ready."""
        if isinstance(picture, Upright):
            [(_, runs)] = self.whole.see([picture.image])
            return sum(runs)
        return len(picture.pixel_values) // self.merge_size**2

    def process(self, content: bytes) -> Picture | Upright:
        """The image in these bytes: the patches of its grid, or as it is."""
        upright = _upright(content)
        if not self.is_grid:
            return Upright(upright)
        made = self.theirs(images=[upright], return_tensors="np")
        down, across = (int(number) for number in made["image_grid_thw"][0][1:])
        return Picture(made["pixel_values"], (1, down, across))

    def tell_limits(self, folder: Path) -> list[str]:
        """Put our budget of tokens into the image processor's files in an exported folder; returns their names.

        Whoever loads them then sees images in the sizes of training. Raises ModelError where that does not come about.
        """
        if not self.is_grid:
            return []
        from transformers import AutoImageProcessor

        size = {name: self.theirs.size[name] for name in ("shortest_edge", "longest_edge")}
        told = []
        for name in (name for name in CONFIGS if (folder / name).is_file()):
            facts = read_json(folder / name)
            own = facts.get("image_processor") if name == "processor_config.json" else facts
            if own is None:
                continue
            own["size"] = size
            own |= {old: size[new] for old, new in _OLD_LIMITS.items() if old in own}
            write_atomic(folder / name, json.dumps(facts, indent=2) + "\n")
            told.append(name)
        loaded = AutoImageProcessor.from_pretrained(
            folder, backend="pil", local_files_only=True, trust_remote_code=False
        )
        if {name: loaded.size[name] for name in size} != size:
            raise ModelError(
                f"the exported image processor of {self.name} does not keep the limits {size}"
            )
        return told

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of all that decides how many tokens an image is."""
        digest = hashlib.sha256(repr((self.placeholder, self._vision.image_max_tokens)).encode())
        digest.update(repr(self._vision.image_min_tokens).encode())
        for name, file in sorted(self.files.items()):
            digest.update(f"\0{name}\0".encode() + file.read_bytes())
        return digest.hexdigest()


def _upright(content: bytes) -> Any:
    """The image in these bytes, turned as its camera was held, in RGB."""
    from PIL import ImageOps

    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # Pillow warns of sizes, which have been looked at, and of odd metadata
        with pillow().open(BytesIO(content), formats=FORMATS) as opened:
            return ImageOps.exif_transpose(opened).convert("RGB")


def load_image_processor(config: Config, tokenizer: Tokenizer) -> ImageProcessor | None:
    """The image processor of a run's model; None where the task has no images.

    Raises ModelError when the model has no vision tower, or one that is not known here.
    """
    if not config.sees:
        return None
    model = config.model
    files = hub.find_files(model, model.path, ("config.json", *CONFIGS))
    facts = read_json(files.pop("config.json", None))
    token = facts.get("image_token_id", facts.get("image_token_index"))
    if "vision_config" not in facts or token is None:
        advice = (
            "leave out preference.images" if config.preference.images else "set `task: causal_lm`"
        )
        raise ModelError(
            f"model {model.path} ({facts.get('model_type', 'of no known type')}) takes no images in a way "
            f"that is known: its config.json has no vision_config and image_token_id; {advice}, or take another model"
        )
    if not files:
        raise ModelError(
            f"model {model.path} has no image processor; expected {CONFIGS[0]} beside its weights"
        )
    frame = [
        facts.get(f"vision_{end}_token_id", facts.get(f"image_{end}_token_id"))
        for end in ("start", "end")
    ]
    ids = (frame[0], token, frame[1])
    text = ""
    for id in (id for id in ids if id is not None):
        name = tokenizer.backend.id_to_token(id)
        if name is None:
            raise ModelError(
                f"the tokenizer of {tokenizer.name} has no token {id}, which config.json has for images"
            )
        text += name
    feature = tokenizer.backend.id_to_token(token) or ""
    return ImageProcessor(
        model.path, files, config.vision, Placeholder(text, token, ids[0]), feature
    )
