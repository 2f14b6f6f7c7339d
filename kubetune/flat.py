"""Running an unmodified Hugging Face causal LM on flat streams, and proving on the model at hand that this is exact.

`choose_attention` tries the flat route and checks it against the model's own code on short sequences. Where the
result differs (recurrent states, ALiBi, chunked attention …) the model keeps its own attention and gets one sequence
per micro-batch: still without padding, still exact, only slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from kubetune import sharded
from kubetune.attention import CURRENT, CannotRunFlat, longest, stream
from kubetune.data.batches import Batch, collate

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
LEAK = 1e-6


@dataclass(frozen=True)
class Route:
    """How sequences go through the model. `flat`: many per stream; `why_not`: what refused it."""

    flat: bool
    why_not: str = ""
    difference: float = 0.0


def unwrap(model: nn.Module) -> Any:
    """The transformers model inside a PEFT model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def backbone(lm: Any) -> nn.Module:
    """The causal LM without its head. Some classes name a prefix that does not exist (Llama 4)."""
    found = getattr(lm, lm.base_model_prefix, None) or getattr(lm, "model", None) or lm.get_decoder()
    return cast(nn.Module, found)


@dataclass(frozen=True)
class LogitRule:
    """What a model does to raw logits: `cap * tanh(multiplier * logits / cap)`; a cap of 0 means none."""

    multiplier: float = 1.0
    cap: float = 0.0

    def apply(self, logits: Tensor) -> Tensor:
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        return torch.tanh(logits / self.cap) * self.cap if self.cap else logits


def logit_rule(lm: Any) -> LogitRule:
    """Read the rule from the config (Cohere, Granite, Gemma). The self-check catches one it does not know."""
    config = lm.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None) or 0.0
    return LogitRule(scale / divisor, float(cap))


def hidden_states(lm: Any, batch: Batch) -> Tensor:
    """Final hidden states `[tokens, hidden]` of one stream. Call inside `attention.stream(...)`."""
    kwargs: dict[str, Any] = {}
    if len(batch.borders) > 2:
        # A lone sequence passes none of these: models with linear attention refuse packed input.
        cu = torch.tensor(batch.borders, dtype=torch.int32, device=batch.input_ids.device)
        length = longest(batch.borders)
        kwargs = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": length, "max_length_k": length}
    out = backbone(lm)(
        input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False, **kwargs
    )
    return cast(Tensor, out[0][0])


def _example(vocabulary: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    low = min(5, vocabulary - 2)
    return [torch.randint(low, vocabulary, (n,), generator=generator).to(device) for n in (7, 19, 12)]


def _stream_of(sequences: list[Tensor]) -> Batch:
    rows = [(s.cpu().numpy().astype("uint32"), s.cpu().numpy() >= 0) for s in sequences]
    return collate(rows).to(sequences[0].device)


@torch.no_grad()
def self_check(model: nn.Module) -> float:
    """Compare the flat run with the model's own attention, one by one; return the largest relative difference.

    Raises CannotRunFlat where they differ, where tokens of the first sequence change the others, or on NaN.
    """
    lm = unwrap(model)
    was_training, device = lm.training, next(lm.parameters()).device
    lm.eval()
    sequences = _example(lm.config.get_text_config().vocab_size, device)
    changed = [sequences[0].flip(0), *sequences[1:]]
    rule, first = logit_rule(lm), len(sequences[0])

    def flat_logits(parts: list[Tensor]) -> Tensor:
        batch = _stream_of(parts)
        with stream(batch.borders):
            return rule.apply(sharded.inside(lm, raw_logits, batch).float())

    def raw_logits(batch: Batch) -> Tensor:
        return cast(Tensor, lm.get_output_embeddings()(hidden_states(lm, batch)))

    try:
        lm.set_attn_implementation("flat")
        if implementation(lm) != "flat":
            raise CannotRunFlat("its attention cannot be set from outside")
        flat, other = flat_logits(sequences), flat_logits(changed)
        lm.set_attn_implementation("eager")
        alone = [lm(input_ids=s[None], use_cache=False).logits[0] for s in sequences]
    finally:
        sharded.close(lm)
        lm.train(was_training)
    parts = flat.split([len(s) for s in sequences])
    differences = [float((a - b).norm() / b.norm()) for a, b in zip(parts, [a.float() for a in alone], strict=True)]
    leak = float((other - flat)[first:].norm() / flat.norm())
    return require_exact(differences, leak, alone[0].dtype)


def require_exact(differences: Sequence[float], leak: float, dtype: torch.dtype) -> float:
    """The largest of the relative differences; raises CannotRunFlat when one, or the leak, is too large or NaN."""
    # `not (<=)` instead of `>`: NaN must refuse too.
    if not leak <= LEAK:
        raise CannotRunFlat(f"sequences see each other (relative change {leak:.0e})")
    if not all(d <= TOLERANCE[dtype] for d in differences):
        raise CannotRunFlat(f"the flat run differs from one by one ({max(differences):.0e})")
    return max(differences)


def implementation(lm: Any) -> str | None:
    # Old models only warn in set_attn_implementation and keep what they had.
    return cast("str | None", lm.config.get_text_config()._attn_implementation)


def choose_attention(model: nn.Module, wanted: str = "auto", check: Callable[[nn.Module], float] = self_check) -> Route:
    """Set the model's attention: flat where `check` proves it exact, else its own. `wanted` is `model.attention`.

    Raises CannotRunFlat only when "flat" was asked for by name.
    """
    lm = unwrap(model)
    CURRENT.borders = None
    if wanted in ("eager", "sdpa"):
        lm.set_attn_implementation(wanted)
        return Route(False, f"model.attention is {wanted}")
    try:
        difference = check(model)
    except CannotRunFlat as refusal:
        reason: Exception = refusal
    except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError, KeyError) as error:
        # Whatever a foreign model does with an unknown mask or packed input, its own attention is the safe way.
        reason = error
    else:
        lm.set_attn_implementation("flat")
        return Route(True, difference=difference)
    if wanted == "flat":
        raise CannotRunFlat(f"model.attention is flat, but {reason}") from reason
    _restore(lm)
    return Route(False, str(reason).splitlines()[0])


def _restore(lm: Any) -> None:
    for implementation in ("sdpa", "eager"):
        try:
            lm.set_attn_implementation(implementation)
            return
        except (ValueError, ImportError):
            continue
