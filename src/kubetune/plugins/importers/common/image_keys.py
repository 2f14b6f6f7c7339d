"""Keys of models that see, which make a task one of images."""

from __future__ import annotations

import os
import re
from typing import Any

from kubetune.plan.model_shapes import read_config
from kubetune.plugins.importers.engine import Draft, Outcome, carried, dropped, near, unneeded

MODELS = ("model", "model_id_or_path", "model_name_or_path", "base_model")


# Keys of the sizes of images.
_OF_IMAGES = (
    "image_max_pixels",
    "image_min_pixels",
    "max_pixels",
    "MAX_PIXELS",
    "min_pixels",
    "MIN_PIXELS",
)
# Names of models that see, where their config.json is not on this machine.
_SEEING = re.compile(
    r"vl|vision|llava|omni|ocr|pixtral|gemma-?3|minicpm-?[vo]|ovis|molmo|llama-?4|glm-?[\d.]+v",
    re.I,
)
# Tasks without images.
_OF_TEXTS = {
    "reward_model": "a reward model scores",
    "grpo": "GRPO asks about",
    "distill": "a teacher reads",
}
# As Qwen-VL counts.
_PIXELS_OF_A_TOKEN = 28 * 28


def sees(value: Any, draft: Draft) -> Outcome:
    """Carry a setting of the parts of a model that see. Tools freeze these by default, for models of text too."""
    model = "".join(str(draft.get(key) or "") for key in MODELS)
    facts = read_config(model, os.environ)
    does_see = "vision_config" in str(facts)
    if not facts:
        other_keys = any(draft.theirs.get(key) for key in _OF_IMAGES)
        does_see = value is False or other_keys or bool(_SEEING.search(model))
    if not does_see:
        return unneeded(
            "nothing here says that the model sees; where it does, set task: vision_language"
        )
    say_it_sees(draft, draft.at)
    return carried(value)


def say_it_sees(draft: Draft, key: str) -> None:
    """Take from a key that the model sees: images in pairs of answers, or a task of their own."""
    task = draft.ours("task")
    why = f"{key} is a setting of models that see"
    if task in _OF_TEXTS:
        draft.refuse(key, f"is a setting of models that see, and {_OF_TEXTS[task]} texts alone")
    if task == "preference":
        draft.assume("preference.images", True, why)
    elif task != "vision_language":
        draft.withdraw("task", f"the task follows from another key: {why}", "unneeded")
        why += "; `causal_lm` for one that reads texts alone"
        draft.assume("task", "vision_language", why)


def pixels(value: Any, draft: Draft) -> Outcome:
    """Make a limit of an image in tokens, at least one token, of one in pixels."""
    if not isinstance(value, int) or value <= 0:
        return dropped("no number of pixels; see image_min_tokens and image_max_tokens of vision")
    say_it_sees(draft, draft.at)
    tokens = max(1, min(16_384, value // _PIXELS_OF_A_TOKEN))
    return near(tokens, "tokens of 28 × 28 pixels; other models differ")
