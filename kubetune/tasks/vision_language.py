"""Vision-language modelling: a causal language model with a vision tower. What differs from causal_lm is what goes in.

Sequences with and without images share a packed batch: the vision tower sees all images of a micro-batch at once, and
each sequence has its own positions. A packed batch without any image skips the tower on that rank alone; ranks meet
only once per step, so none waits for another.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from kubetune import errors
from kubetune.batching.batch import Batch
from kubetune.batching.image_batches import collate_pictured, image_inputs
from kubetune.data.text.tokenizer import load_tokenizer
from kubetune.data.vision.image_processor import (
    ImageProcessor,
    Picture,
    Upright,
    load_image_processor,
)
from kubetune.distributed.process_group import World
from kubetune.models import fsdp, loading, quantization
from kubetune.models.acceleration import Workload, tune, without_compiler
from kubetune.models.adapters import lora
from kubetune.models.attention_hooks import CannotRunPaddingFree, packed
from kubetune.models.learner import Learner, lone_sequences
from kubetune.models.padding_free import (
    FOREIGN_ERRORS,
    Route,
    backbone,
    check_padding_free,
    choose_attention,
    logit_rule,
    require_head,
    unwrap,
    varlen_kwargs,
)
from kubetune.plan.linears import frozen_names
from kubetune.plan.model_shapes import TOWERS
from kubetune.tasks.causal_lm import (
    STEP_METRICS,
    backward,
    completed,
    confusion,
    evaluate,
    labels_of,
    load_settings,
    metrics,
    predictions,
    sample_losses,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kubetune.config.schema import Config, VisionConfig

__all__ = [
    "AUTO_CLASS",
    "STEP_METRICS",
    "backward",
    "build",
    "completed",
    "confusion",
    "evaluate",
    "labels_of",
    "load",
    "load_settings",
    "metrics",
    "plain_logits",
    "predictions",
    "sample_losses",
]

AUTO_CLASS = "AutoModelForImageTextToText"


def build(config: Config, world: World, workload: Workload) -> Learner:
    """Load the model, freeze what is not to learn, add adapters, and choose and prove the attention."""
    from transformers import AutoModelForImageTextToText

    config = quantization.decide(config, world)
    model = fsdp.load(
        AutoModelForImageTextToText, config, world, lambda lm: frozen_modules(lm, config.vision)
    )
    frozen = frozen_modules(model, config.vision)
    if config.lora is not None:
        seed = config.training.seed
        model = lora.add_lora(model, config.lora, task_type="CAUSAL_LM", seed=seed, frozen=frozen)
    elif frozen is not None:
        still = [
            parameter for name, parameter in model.named_parameters() if re.fullmatch(frozen, name)
        ]
        for parameter in still:
            parameter.requires_grad_(False)
        # The optimizer copies what learns; the rest alone would keep the file mapped, and all that was read of it.
        loading.let_go_of_files(still)
    learner = ready(model.train(), config)
    if config.training.compile == "auto":
        config = without_compiler(config)  # what it gains here has not been measured
    return tune(learner, config, workload, world.device)


def load(config: Config, folder: Path, device: torch.device) -> Learner:
    """The trained model of a checkpoint folder, to be evaluated."""
    from transformers import AutoModelForImageTextToText

    config = quantization.decide(config, World(device=device))
    return ready(loading.load_trained(AutoModelForImageTextToText, config, folder, device), config)


def ready(model: nn.Module, config: Config) -> Learner:
    """Choose how sequences go through a loaded model."""
    processor = load_image_processor(config, load_tokenizer(config.model))
    assert processor is not None, "this task has one"
    route = choose_attention(model, config.model.attention, lambda m: self_check(m, processor))
    if not route.padding_free:  # else its check has looked at images and the head too
        require_sight(model, processor)
    return seeing(model, route)


def seeing(model: nn.Module, route: Route) -> Learner:
    """A causal language model whose hidden states are of images too."""
    return Learner(model, route, hidden=_hidden)


def _hidden(learner: Learner, batch: Batch) -> Tensor:
    if learner.route.padding_free:
        found = hidden_states(learner.lm, batch, padding_free=True)
    else:
        found = torch.cat(
            [hidden_states(learner.lm, one, padding_free=False) for one in lone_sequences(batch)]
        )
    return fsdp.reaching(learner.lm, found)


def frozen_modules(model: nn.Module, vision: VisionConfig) -> str | None:
    """An expression for the full names of what must not learn; None where all may."""
    names = [name for name, _ in model.named_modules()]
    if vision.freeze_vision_tower and not any(
        part in TOWERS for name in names for part in name.split(".")
    ):
        raise errors.ModelError(
            f"the vision tower of {type(model).__name__} was not found under {', '.join(TOWERS)}; set "
            "vision.freeze_vision_tower to false and name what should learn in lora.target_modules"
        )
    return frozen_names(vision, names)


def hidden_states(lm: Any, batch: Batch, *, padding_free: bool) -> Tensor:
    """Final hidden states `[tokens, hidden]` of one packed batch; `padding_free`: inside `attention.packed(...)`."""
    given: dict[str, Any] = {}
    if padding_free:
        assert batch.pictures is not None, "prepared rows of this task have them"
        # The first row is for the mask, the others for the rotary embedding.
        given["position_ids"] = torch.cat([batch.position_ids[None], batch.pictures.positions])[
            :, None
        ]
        if len(batch.cu_seqlens) > 2:
            given |= varlen_kwargs(batch.cu_seqlens, batch.input_ids.device)
    out = backbone(lm)(
        input_ids=batch.input_ids[None], use_cache=False, **given, **image_inputs(batch)
    )
    return cast(Tensor, out[0][0])


def plain_logits(model: Any, batch: Batch) -> Tensor:
    """Logits `[tokens, vocabulary]` of a single sequence, by the model's own code."""
    return cast(
        Tensor,
        model(input_ids=batch.input_ids[None], use_cache=False, **image_inputs(batch)).logits[0],
    )


def require_sight(model: nn.Module, processor: ImageProcessor) -> None:
    """Raise ModelError where the tower makes more or fewer features of an image than there are tokens for it, or its
    hidden states, head and rule do not give the logits of the model's own code."""
    number, picture = next(iter(_examples(processor).items()))
    row = _with_image(np.arange(1, number + 1, dtype=np.uint32), picture, processor)
    try:
        require_head(
            model,
            collate_pictured([row], [[picture]], processor),
            partial(hidden_states, padding_free=False),
            plain_logits,
        )
    except FOREIGN_ERRORS as error:
        raise errors.ModelError(
            f"{processor.name} cannot look at an image as its processor prepares it: {' '.join(str(error).split())}"
        ) from error


def self_check(model: nn.Module, processor: ImageProcessor) -> float:
    """Compare the padding-free run with the model's own attention, as `check_padding_free` does.

    Two of the sequences have an image, one has none.

    Raises CannotRunPaddingFree for a model whose images are no grids: only its own code knows where their tokens stand.
    """
    if not processor.is_grid:
        raise CannotRunPaddingFree("its images are no grids of patches")
    rule, pictures = logit_rule(unwrap(model)), _examples(processor)

    def run_packed(lm: Any, batch: Batch) -> Sequence[Tensor]:
        with packed(batch.cu_seqlens):
            logits = rule.apply(fsdp.inside(lm, raw_logits, lm, batch).float())
        return [logits[start:stop] for start, stop in pairwise(batch.cu_seqlens)]

    def raw_logits(lm: Any, batch: Batch) -> Tensor:
        return cast(Tensor, lm.get_output_embeddings()(hidden_states(lm, batch, padding_free=True)))

    def lay(sequences: Sequence[NDArray[np.uint32]]) -> Batch:
        rows, own = [], []
        for ids in sequences:
            # Sequences are told apart by their lengths, as the check also runs them alone and with other words.
            picture = pictures.get(len(ids))
            rows.append(_with_image(ids, picture, processor))
            own.append([picture] if picture else [])
        return collate_pictured(rows, own, processor)

    return check_padding_free(model, lay, run_packed, plain_logits)


def _examples(processor: ImageProcessor) -> dict[int, Picture | Upright]:
    """Images for the first two of the sequences that the check runs, by their lengths."""
    from io import BytesIO

    from PIL import Image

    found = {}
    for length, size in ((7, (96, 64)), (19, (64, 112))):
        noise = np.random.default_rng(length).integers(0, 256, (size[1], size[0], 3), np.uint8)
        buffer = BytesIO()
        Image.fromarray(noise).save(buffer, "PNG")
        found[length] = processor.process(buffer.getvalue())
    return found


def _with_image(
    ids: NDArray[np.uint32], picture: Picture | Upright | None, processor: ImageProcessor
) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    place, token = 3, processor.placeholder.token
    ids = np.where(ids == token, token - 1, ids).astype(np.uint32)
    if picture is not None:
        ids = np.insert(ids, place, [token] * processor.features(picture)).astype(np.uint32)
    return ids, np.ones(len(ids), bool)
