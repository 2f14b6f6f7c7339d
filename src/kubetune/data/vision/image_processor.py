"""Images to what a vision tower takes, by the image processor that comes with the model, and how many tokens they are.

For processors that cut an image into a grid of patches as large as the image asks for: Qwen2-VL's and those after it.
Other models' processors are used whole (whole_processor.py). Not for telling what is an image (reading/images).
"""

from __future__ import annotations

import hashlib
import json
import numbers
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kubetune.base.files import write_atomic
from kubetune.config.schema import ModelConfig, VisionConfig
from kubetune.config.starting_values import VISION_MODEL
from kubetune.data.reading import hub
from kubetune.data.reading.images import FORMATS, ImageFacts, ImageRef, pillow, verify_image
from kubetune.data.spec import DataSpec
from kubetune.data.text.row_notes import RowNote
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.data.text.tokenizer_files import read_json
from kubetune.data.vision.whole_processor import WholeProcessor
from kubetune.errors import ConfigError, DataError, ModelError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Files of an image processor's settings.
CONFIGS: Final = ("preprocessor_config.json", "processor_config.json")
# The limits of a run file that sets none, by which the user is known to have asked for some.
_NO_LIMITS: Final = (VisionConfig().image_max_tokens, VisionConfig().image_min_tokens)
# What older files call the limits on pixels.
_OLD_LIMITS: Final = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}


class Picture(NamedTuple):
    """One image as a grid of patches."""

    pixel_values: NDArray[np.float32]  # [patches, values]
    grid: tuple[int, int, int]  # patches in time, down and across


class Upright(NamedTuple):
    """One image, decoded, for a processor that takes all of a sequence at once."""

    image: Any  # Pillow's, upright and in RGB


class Seen(NamedTuple):
    """An image as it is in a text."""

    text: str  # in which each run of the image token is one token
    runs: tuple[int, ...]  # how long these runs are
    crc: int  # CRC-32 of its file
    notes: tuple[RowNote, ...] = ()  # to be counted of it


@dataclass(frozen=True)
class Placeholder:
    """The stand-in for an image in a text."""

    text: str  # what is tokenised
    token: int  # the token in it that is repeated for each feature of the image
    start: int | None  # the token before it, if the model has one


class ImageProcessor:
    """The image processor of a model, made by `load_image_processor`.

    transformers is imported when an image is first looked at.
    """

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
                self._folder,
                backend="pil",
                local_files_only=True,
                trust_remote_code=False,
            )
        except Exception as error:
            # Remote code, damaged files, unknown classes: each raises its own kind.
            raise ModelError(
                f"{self.name} has no image processor that can be used: {error}"
            ) from error

    @property
    def _folder(self) -> Path:
        # All files of a model lie in one folder, also in the hub's cache.
        return next(iter(self.files.values())).parent

    @cached_property
    def is_grid(self) -> bool:
        """True if images are cut into grids, whose sizes and positions are known here."""
        # Asked for what it has, not for its class: new families keep to these names.
        for name in ("patch_size", "merge_size", "size", "get_number_of_image_patches"):
            if not hasattr(self._loaded, name):
                return False
        if "image_grid_thw" not in self._loaded.model_input_names:
            return False
        # HYV4-VL's returns two numbers, since it writes a token after each row of a grid: its own code counts those.
        side = self._loaded.patch_size * self._loaded.merge_size
        return isinstance(self._loaded.get_number_of_image_patches(side, side), numbers.Integral)

    @cached_property
    def whole(self) -> WholeProcessor:
        """Return the model's own processor, if images are no grids. Raise ConfigError for limits of tokens."""
        if (self._vision.image_max_tokens, self._vision.image_min_tokens) != _NO_LIMITS:
            raise ConfigError(
                f"vision.image_max_tokens and image_min_tokens: images of {self.name} have the size that its own "
                f"processor ({type(self._loaded).__name__}) gives them; leave these out"
            )
        return WholeProcessor(self.name, self._folder, self._feature)

    @property
    def reads_prefixes(self) -> bool:
        """True if a question with its images is read in both directions, and followed by one answer."""
        return not self.is_grid and self.whole.reads_prefixes

    @cached_property
    def theirs(self) -> Any:
        """Return transformers' image processor with our budget of tokens. Raise ModelError for another kind."""
        processor = self._loaded
        if not self.is_grid:
            raise ModelError(
                f"the images of {self.name} are prepared by {type(processor).__name__}; a budget of tokens is for "
                "models whose processor cuts images into a grid (Qwen2-VL, Qwen2.5-VL, Qwen3-VL and the like)"
            )

        # "Edges" are areas in pixels. A token is, for example, 28 × 28 of them: patches of 14, of which 2 × 2 are merged.
        pixels_per_token = (processor.patch_size * processor.merge_size) ** 2
        longest = self._vision.image_max_tokens * pixels_per_token
        shortest = min(processor.size["shortest_edge"], longest)
        if self._vision.image_min_tokens is not None:
            shortest = self._vision.image_min_tokens * pixels_per_token
        processor.size = {"shortest_edge": shortest, "longest_edge": longest}
        return processor

    def import_libraries(self) -> None:
        """Import what reading images needs, in one thread and not in several at once."""
        _ = self.theirs if self.is_grid else self.whole.theirs

    @property
    def merge_size(self) -> int:
        """Return the patches on each side of what becomes one token."""
        return int(self.theirs.merge_size)

    def measure(self, facts: ImageFacts) -> int:
        """Return how many tokens an image is that `verify_image` has accepted."""
        # Of 28 × 28 patches with a merge size of 2 become 14 × 14 tokens.
        patches = self.theirs.get_number_of_image_patches(facts.height, facts.width)
        return int(patches) // self.merge_size**2

    def see(self, files: Sequence[Path]) -> list[Seen]:
        """Return the images of one row as they are in its text. Raise UnusableImage for what cannot be trained on.

        All at once: some models lay out an image otherwise if there are others.
        """
        facts = []
        contents = []
        for file in files:
            facts.append(verify_image(file))
            contents.append(file.read_bytes())

        whole: list[tuple[str, tuple[int, ...]]] = []
        if not self.is_grid:
            whole = self.whole.see([_upright(content) for content in contents])
        seen = []
        for number, content in enumerate(contents):
            if self.is_grid:
                text = self.placeholder.text
                runs: tuple[int, ...] = (self.measure(facts[number]),)
            else:
                text, runs = whole[number]
            notes = self._notes(facts[number], sum(runs))
            seen.append(Seen(text, runs, zlib.crc32(content), notes))

        return seen

    def _notes(self, facts: ImageFacts, tokens: int) -> tuple[RowNote, ...]:
        notes: list[RowNote] = []
        if self.is_grid and tokens > self._vision.image_max_tokens:
            notes.append("images_above_budget")
        if facts.is_animated:
            notes.append("images_animated")
        if facts.is_deep:
            notes.append("images_deep")
        return tuple(notes)

    def read(self, image: ImageRef) -> Picture | Upright:
        """Return an image that `see` has accepted. Raise DataError if the file is another one now."""
        return self.process(content_of(image))

    def features(self, picture: Picture | Upright) -> int:
        """Return how many tokens an image is that has been made ready."""
        if isinstance(picture, Upright):
            [(_, runs)] = self.whole.see([picture.image])
            return sum(runs)
        return len(picture.pixel_values) // self.merge_size**2

    def process(self, content: bytes) -> Picture | Upright:
        """Return the image in these bytes: the patches of its grid, or as it is."""
        # Cameras write how a picture is to be turned; the model sees it as people do.
        upright = _upright(content)
        if not self.is_grid:
            return Upright(upright)
        made = self.theirs(images=[upright], return_tensors="np")
        _, down, across = made["image_grid_thw"][0].tolist()
        return Picture(made["pixel_values"], (1, down, across))

    @cached_property
    def fingerprint(self) -> str:
        """Return the SHA-256, in hex, of all that decides how many tokens an image is."""
        digest = hashlib.sha256(repr((self.placeholder, self._vision.image_max_tokens)).encode())
        digest.update(repr(self._vision.image_min_tokens).encode())
        for name, file in sorted(self.files.items()):
            digest.update(f"\0{name}\0".encode() + file.read_bytes())
        return digest.hexdigest()


def _upright(content: bytes) -> Any:
    """Return the image in these bytes, turned as its camera was held, in RGB."""
    from PIL import ImageOps

    with warnings.catch_warnings():
        # Pillow warns of sizes, which have been looked at, and of odd metadata.
        warnings.simplefilter("ignore")
        with pillow().open(BytesIO(content), formats=FORMATS) as opened:
            return ImageOps.exif_transpose(opened).convert("RGB")


def content_of(image: ImageRef) -> bytes:
    """Return the bytes of an image's file. Raise DataError if it is another one now."""
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


def write_limits(processor: ImageProcessor, folder: Path) -> list[str]:
    """Put our budget of tokens into the image processor's files in an exported folder. Return their names.

    Whoever loads them then sees images in the sizes of training. Raise ModelError if that does not come about.
    """
    if not processor.is_grid:
        return []
    from transformers import AutoImageProcessor

    size = {name: processor.theirs.size[name] for name in ("shortest_edge", "longest_edge")}
    written = []
    for name in CONFIGS:
        if not (folder / name).is_file():
            continue
        # The newer file has the settings of all parts of a processor, the older only of images.
        facts = read_json(folder / name)
        settings = facts.get("image_processor") if name == "processor_config.json" else facts
        if settings is None:
            continue
        settings["size"] = size
        # Where a file has the older names too, both must say the same.
        for old, new in _OLD_LIMITS.items():
            if old in settings:
                settings[old] = size[new]
        write_atomic(folder / name, json.dumps(facts, indent=2) + "\n")
        written.append(name)

    # Read back as its user would: a file may have keys that override these.
    loaded = AutoImageProcessor.from_pretrained(
        folder,
        backend="pil",
        local_files_only=True,
        trust_remote_code=False,
    )
    if {name: loaded.size[name] for name in size} != size:
        raise ModelError(
            f"the exported image processor of {processor.name} does not keep the limits {size}"
        )

    return written


def processor_of(spec: DataSpec, tokenizer: Tokenizer) -> ImageProcessor | None:
    """Load the image processor of the model; None if rows have no images. Raise as `load_image_processor` does."""
    if spec.vision is None:
        return None
    return load_image_processor(spec.model, spec.vision, tokenizer, compares=spec.preference.images)


def load_image_processor(
    model: ModelConfig,
    vision: VisionConfig,
    tokenizer: Tokenizer,
    *,
    compares: bool,
) -> ImageProcessor:
    """Return the image processor of a model. `compares`: it is asked for by `preference.images`.

    Raise ModelError when the model has no vision tower, or one that is not known here.
    """
    files = hub.find_files(model, model.path, ("config.json", *CONFIGS))
    # The token's id has an older and a newer name.
    facts = read_json(files.pop("config.json", None))
    token = facts.get("image_token_id", facts.get("image_token_index"))
    if "vision_config" not in facts or token is None:
        another = f"take a model that does, such as {VISION_MODEL}"
        advice = f"leave out preference.images, or {another}"
        if not compares:
            advice = another
            # With sections for several kinds of input, such as speech, it is no plain language model either.
            if "text_config" not in facts:
                advice = f"set `task: causal_lm`, or {advice}"
        raise ModelError(
            f"model {model.path} ({facts.get('model_type', 'of no known type')}) takes no images in a way "
            f"that is known: its config.json has no vision_config and image_token_id; {advice}"
        )

    if not files:
        raise ModelError(
            f"model {model.path} has no image processor; expected {CONFIGS[0]} beside its weights"
        )

    # An image is between two tokens of its own: <|vision_start|><|image_pad|><|vision_end|>
    start = facts.get("vision_start_token_id", facts.get("image_start_token_id"))
    end = facts.get("vision_end_token_id", facts.get("image_end_token_id"))
    text = ""
    for id in (start, token, end):
        # Some models have nothing around an image.
        if id is None:
            continue
        name = tokenizer.backend.id_to_token(id)
        if name is None:
            raise ModelError(
                f"the tokenizer of {tokenizer.name} has no token {id}, which config.json has for images"
            )
        text += name

    feature = tokenizer.backend.id_to_token(token) or ""
    return ImageProcessor(
        model.path,
        files,
        vision,
        Placeholder(text, token, start),
        feature,
    )
