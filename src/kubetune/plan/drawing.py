"""The costs of drawing the answers of a run by reward: how many are drawn, tokens, memory and hours.

All numbers are upper bounds: they take each answer to be as long as it may be.

Worked example: Qwen3-8B (36 layers, 8 heads of keys of 128) in bf16 on one GPU, 16 prompts of 100 tokens a step, 8 answers
of at most 256 tokens to each, `generation_batch_size: 64`, 500 steps:

    answers         16 · 8 = 128 a step, 64,000 in all
    tokens drawn    128 · 256 = 32,768 a step, 16.4 M in all
    cache           a token has a key and a value in each layer: 2 · 36 · 8 · 128 · 2 bytes = 144 KiB
                    64 answers · (100 + 256) tokens · 144 KiB = 3.13 GiB, and one layer more as it grows: 3.21 GiB
    sampling        64 answers · 151,936 words · (2 + 24) bytes = 0.24 GiB
    shared prompts  8 · 356 = 2,848 tokens of a prompt with its answers, of which 7 · 100 are copies of the prompt: 25 %
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from kubetune.base.humanize import counted, duration, size
from kubetune.config.schema.grpo import GrpoConfig
from kubetune.plan.memory import Shape
from kubetune.plan.plan import Plan

# Bytes of a word's number besides its logit while a token is drawn (training/rollouts/sampler): its log-probability and
# probability in fp32, the latter in fp64, and the sums of these.
SAMPLING_BYTES = 4 + 4 + 8 + 8


@dataclass(frozen=True)
class Drawing:
    """The answers that a run draws, if each is as long as it may be."""

    sets: int  # times that answers are drawn, before as many steps
    prompts: int  # of a set
    answers: int  # of a set
    completion_tokens: int  # of the longest answer
    prompt_tokens: float | None  # of a prompt with its right answer, on average; None: not known
    rows: int  # answers that a process draws at a time
    steps_of_set: int  # optimizer steps that learn from a set
    uses: int  # times that each answer is learnt from

    @property
    def drawn_tokens(self) -> int:
        """Tokens that are drawn in all."""
        return self.sets * self.answers * self.completion_tokens

    @property
    def learnt_tokens(self) -> int | None:
        """Tokens of all answers with their prompts, each time that they are learnt from, as a run counts them."""
        if self.prompt_tokens is None:
            return None
        row_tokens = self.prompt_tokens + self.completion_tokens
        return round(self.sets * self.uses * self.answers * row_tokens)

    @property
    def shared_share(self) -> float | None:
        """Share of these tokens that are copies of a prompt, which is computed once for all of its answers."""
        if self.prompt_tokens is None:
            return None
        answers_to_prompt = self.answers / self.prompts
        copies = (answers_to_prompt - 1) * self.prompt_tokens
        return copies / (answers_to_prompt * (self.prompt_tokens + self.completion_tokens))


def drawing_of(settings: GrpoConfig, plan: Plan) -> Drawing | None:
    """Return what a run draws; None while nobody knows its number of steps."""
    if not plan.num_steps:
        return None
    prompts = plan.global_batch_size * settings.steps_per_generation
    prompt_tokens = None
    if plan.tokens_per_epoch and plan.rows:
        prompt_tokens = plan.tokens_per_epoch / plan.rows
    return Drawing(
        sets=math.ceil(plan.num_steps / settings.window),
        prompts=prompts,
        answers=prompts * settings.num_generations,
        completion_tokens=settings.max_completion_length,
        prompt_tokens=prompt_tokens,
        rows=rows_at_once(settings, plan),
        steps_of_set=settings.window,
        uses=settings.num_iterations,
    )


def rows_at_once(settings: GrpoConfig, plan: Plan) -> int:
    """Return how many answers a process draws at a time: whole groups, no more than its share of a set."""
    groups = max(1, settings.generation_batch_size // settings.num_generations)
    prompts = plan.global_batch_size * settings.steps_per_generation
    if prompts:
        groups = min(groups, prompts)
    return groups * settings.num_generations


def cache_bytes(text: Mapping[str, Any], shape: Shape, rows: int, tokens: int, element: int) -> int:
    """Return the most bytes of the key-value cache of so many rows of so many tokens each.

    `text`: the model's text config. `element`: bytes of a number.
    """
    width = 2 * shape.keys  # numbers of a token and layer
    if text.get("kv_lora_rank"):
        # DeepSeek's attention: transformers keeps whole keys and values of each head.
        key = text["qk_nope_head_dim"] + text["qk_rope_head_dim"]
        width = text["num_attention_heads"] * (key + text["v_head_dim"])
    kept = [_kept_tokens(kind, text, tokens) for kind in _layer_types(text, shape)]
    # A layer's cache is copied to a larger place for each token, so that one layer lies there twice.
    return rows * width * element * (sum(kept) + max(kept, default=0))


def _layer_types(text: Mapping[str, Any], shape: Shape) -> list[str]:
    """Return the kind of each layer, by the names of transformers."""
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and kinds:
        return [str(kind) for kind in kinds]
    return ["full_attention"] * shape.layers


# Kinds of layers that keep a state that does not grow, or nothing, as configs of several releases call them.
_WITHOUT_TOKENS: Final = frozenset(("linear_attention", "mamba", "conv", "moe", "sparse", "dense"))


def _kept_tokens(kind: str, text: Mapping[str, Any], tokens: int) -> int:
    """Return of how many tokens a layer keeps keys and values: of all, if its kind is not known to keep fewer."""
    if kind in _WITHOUT_TOKENS:
        return 0
    if kind in ("sliding_attention", "hybrid_sliding"):
        return min(tokens, int(text.get("sliding_window") or tokens))
    if kind == "chunked_attention":
        return min(tokens, int(text.get("attention_chunk_size") or tokens))
    return tokens


def sampling_bytes(text: Mapping[str, Any], rows: int, element: int) -> int:
    """Return the bytes of the logits of so many rows' next tokens, and of what becomes of them."""
    vocabulary = int(text.get("vocab_size") or 0)
    return rows * vocabulary * (element + SAMPLING_BYTES)


@dataclass(frozen=True)
class Hours:
    """Hours of the parts of all steps."""

    generate: float  # all that a step waits for: drawing, rewards, adapters for servers
    train: float


def hours_by_part(total_hours: float | None, waiting_share: float | None) -> Hours | None:
    """Return the hours by part; None if speed or share are not known.

    `waiting_share`: of the seconds of a step, those in which it waits for answers, as earlier runs had it.
    """
    if total_hours is None or waiting_share is None:
        return None
    generate = total_hours * waiting_share
    return Hours(generate=generate, train=total_hours - generate)


def facts(drawing: Drawing, cache: int | None, hours: Hours | None) -> dict[str, Any]:
    """Return all of it as `kubetune plan --json` has it. `cache`: bytes of a process, None if servers draw."""
    return {
        **asdict(drawing),
        "drawn_tokens": drawing.drawn_tokens,
        "learnt_tokens": drawing.learnt_tokens,
        "shared_share": drawing.shared_share,
        "cache_bytes": cache,
        "hours": None if hours is None else asdict(hours),
    }


def lines(
    settings: GrpoConfig, drawing: Drawing, drawer: str, hours: Hours | None
) -> Iterator[tuple[str, str]]:
    """Yield it as labelled lines. `drawer`: who draws, by `drawn_here` or `drawn_by_servers`."""
    # A token's id, its text and a log-probability, and further log-probabilities in base64.
    further = (settings.window > 1) + (settings.beta > 0)
    on_disk = drawing.drawn_tokens * (17 + 5.4 * further)
    answers = drawing.sets * drawing.answers
    yield (
        "answers",
        f"{answers:,}, at most {size(on_disk)} in rollouts/, if each is as long as it may be",
    )
    tokens = drawing.answers * drawing.completion_tokens
    yield (
        "",
        f"{drawing.answers:,} each time, to {counted(drawing.prompts, 'prompt')}, at most {tokens:,} tokens; "
        f"{drawing.drawn_tokens:,} in all",
    )
    yield "drawn by", drawer
    if drawing.shared_share is not None:
        yield (
            "",
            f"a prompt is computed once for all of its answers, which saves {drawing.shared_share:.0%} of the tokens "
            "or less",
        )
    if hours is None:
        yield "hours by part", "unknown: no run of such a shape has ended on this machine"
        return
    generate = duration(3600 * hours.generate)
    train = duration(3600 * hours.train)
    yield "hours by part", f"answers and rewards {generate}, training {train}"


def drawn_here(drawing: Drawing, cache: int | None) -> str:
    """Return how a run's own processes draw. `cache`: bytes of the key-value cache of one, None if unknown."""
    text = f"each process, {drawing.rows} answers at a time"
    if cache is None:
        return text
    return f"{text}, with a key-value cache of at most {size(cache)}"


def drawn_by_servers(drawing: Drawing, servers: int, rank: int, lag: int) -> str:
    """Return how servers draw. `rank`: of the adapter that they load."""
    every = "every step"
    if drawing.steps_of_set > 1:
        every = f"every {drawing.steps_of_set} steps"
    loads = f"load {counted(drawing.sets, 'adapter')} of rank {rank}, one {every}, lag {lag}"
    if servers == 1:
        loads = loads.replace("load ", "loads ", 1)
    return f"{counted(servers, 'vLLM server')}, which {loads}"
