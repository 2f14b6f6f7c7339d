"""Proof of a GGUF file by running it: llama.cpp's log-probabilities, answers, ids and prompts beside transformers'.

What quantisation costs and what a fault costs look alike in a number, so each file is judged by two comparisons:

    plain       the same weights in 16 or 32 bits beside transformers: keys, names and rows are right, or it is a fault
    quantised   beside transformers, and the base quantised alike beside the base: it may lose no more than four times that

Quantisation changes greedy answers, so these are a fault only of a plain file; of a quantised one they are noted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from kubetune import errors
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.data.text.turns.template import ChatTemplate
from kubetune.models.forward_cache import cache_of
from kubetune.result.forms.equivalence import POSITIONS, Comparison, Sample
from kubetune.result.gguf_files.llama_cpp import AskedRow, LlamaAnswer, LlamaRequest, ask

# Largest mean difference of log-probability of the worst row, by the type of the weights, if transformers computes with
# them in fp32. llama.cpp rounds what goes through weights of 16 bits.
ALLOWED: Final = {"f32": 1e-3, "f16": 5e-3, "bf16": 2e-2}
# If the memory holds transformers' model only in 16 bits, so that both round.
ALLOWED_ROUNDED: Final = 5e-2
# What 16 bits cost grows with the width of logits and the number of layers, so more is allowed where transformers itself
# moves more between 32 and 16 bits. Of random Llamas llama.cpp moved by half of what transformers did:
#
#     layers   standard deviation of logits   llama.cpp, bf16   transformers, bf16   llama.cpp with rows swapped
#     3        0.4                            0.001             0.003                0.03
#     8        1.8                            0.040             0.084                3.1
#     12       3.0                            0.19              0.44                 7.0
SHARE_OF_ROUNDING: Final = 2.0
# A quantised model may lose four times what its base loses, and what is too little to tell from rounding. Of a tiny Llama
# that an adapter changed much, q8_0 lost 1.1 times as much as its base, q4_0 1.5 times, and q3_k_l, which loses most beside
# its base, 3.6 times. A file with a fault loses far more.
SHARE_OF_BASE: Final = 4.0
LEAST_ALLOWED: Final = 2e-2
# If the base cannot be quantised alike: by bits, a bound that tiny models with random weights, which lose most, stay below.
WITHOUT_BASE: Final = {8: 0.1, 6: 0.2, 5: 0.3, 4: 0.6, 3: 1.2, 2: 2.5, 1: 4.0}
# Greedy answers may part where the likeliest tokens are this close, in units of what is allowed.
CLOSE: Final = 10.0

LENGTH: Final = 64  # of a greedy answer, in tokens, at most
ROWS_ANSWERED: Final = 2  # of the proof
CHATS_ANSWERED: Final = (0, 2)  # of CHATS

# Cut apart by every rule of splitting: contractions, digits, capitals, signs, spaces, lines, accents, other scripts.
PROBE: Final = (
    "It's 12345.67 o'clock, they'LL say: Hello  World!\n\n\tif (x >= 10) { return foo_bar; }  # done…\n"
    "Größe naïve Привет 你好世界 🙂 'tis  \n"
)
_TALK: Final = (
    ("user", "Hello, who are you?"),
    ("assistant", "A model."),
    ("user", "What is 12 times 3?"),
)
CHATS: Final[tuple[tuple[tuple[str, str], ...], ...]] = (
    _TALK[:1],
    _TALK,
    (("system", "Be brief."), *_TALK),
)


@dataclass(frozen=True)
class Reference:
    """Transformers' results, which a file is compared with."""

    logits: list[Tensor]  # of each row of the sample, `[positions, vocabulary]`
    greedy: list[Tensor]  # log-probabilities of each step of each answer, `[steps, vocabulary]`


@dataclass(frozen=True)
class Parting:
    """Where two greedy answers part."""

    token: int  # number of the first other token
    gap: float  # log-probability by which transformers prefers its own token there


@dataclass
class LlamaProof:
    """All that was compared of one file, and what is wrong."""

    comparisons: list[Comparison] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def add(self, comparison: Comparison) -> None:
        """Keep a comparison, and a fault if it does not hold."""
        self.comparisons.append(comparison)
        if not comparison.holds:
            self.faults.append(
                f"{comparison.what}: log-probabilities differ by {comparison.difference:.2g}, allowed is "
                f"{comparison.tolerance:.2g}"
            )

    def facts(self) -> dict[str, Any]:
        """Return it for provenance.json. Raise ModelError for a fault."""
        if self.faults:
            raise errors.ModelError(
                f"the GGUF file does not say what the trained model says: {'; '.join(self.faults)}. Nothing was written."
            )
        return {
            "comparisons": [asdict(comparison) for comparison in self.comparisons],
            **self.notes,
        }


def rows_of(sample: Sample) -> list[AskedRow]:
    """Return the rows of a sample, with the positions that `equivalence.ask` asks about."""
    rows = []
    for batch in sample.batches:
        ids = batch.input_ids.tolist()
        asked = min(POSITIONS, len(ids))
        positions = torch.linspace(0, len(ids) - 1, asked).long()
        rows.append(AskedRow(ids, positions.tolist()))
    return rows


def prompts_of(tokenizer: Tokenizer, sample: Sample, context: int) -> list[list[int]]:
    """Return the tokens that greedy answers follow: questions of the proof's rows, and conversations."""
    # A row with the tokens A B c d, of which c and d were trained: its question is A B. A row of plain text has none.
    prompts: list[list[int]] = []
    for batch in sample.batches[:ROWS_ANSWERED]:
        length = 16
        if len(batch.rows) and int(batch.rows[0]) > 0:
            length = int(batch.rows[0]) + 1
        prompts.append(batch.input_ids.tolist()[:length])
    if tokenizer.chat is not None:
        for number in CHATS_ANSWERED:
            text = render(tokenizer, CHATS[number])
            if text is not None:
                prompts.append(tokenizer.encode_text(text, special=False))
    # The answer is to fit into the context too.
    longest = context - LENGTH
    return [ids for ids in prompts if len(ids) <= longest]


def render(tokenizer: Tokenizer, chat: Sequence[tuple[str, str]]) -> str | None:
    """Return the prompt of a conversation as in training; None if the template refuses it."""
    messages = [{"role": role, "content": text} for role, text in chat]
    try:
        return tokenizer.require_chat().render(messages, generation_prompt=True)
    except ValueError:
        return None


def asked_to_think(tokenizer: Tokenizer) -> dict[str, str] | None:
    """Return the prompt of training and that of llama.cpp's programs, if these differ by `enable_thinking`.

    They set it to true, and training leaves it to the template. For a conversation with one question, Gemma 4:

        training    <|turn>user\n…<turn|>\n<|turn>model\n
        llama.cpp   <|turn>system\n<|think|>\n<turn|>\n<|turn>user\n…<turn|>\n<|turn>model\n
    """
    if tokenizer.chat is None:
        return None
    source = tokenizer.require_chat().source
    thinking = ChatTemplate("{%- set enable_thinking = true -%}" + source, tokenizer.special)
    messages = [{"role": role, "content": text} for role, text in CHATS[0]]
    try:
        prompt = thinking.render(messages, generation_prompt=True)
    except ValueError:
        return None
    trained = render(tokenizer, CHATS[0])
    if trained is None or prompt == trained:
        return None
    return {"as_trained": trained, "by_llama_cpp": prompt}


@torch.inference_mode()
def follow_greedily(model: Any, prompt: Sequence[int], ends: Collection[int] = ()) -> Tensor:
    """Return transformers' log-probabilities at each step of its likeliest answer, `[steps, vocabulary]`.

    `ends`: tokens that end an answer; it has LENGTH tokens at most.
    """
    device = next(model.parameters()).device
    ids = torch.tensor([list(prompt)], device=device)
    past: dict[str, Any] = {}
    steps: list[Tensor] = []
    while len(steps) < LENGTH:
        # After the first time one token goes in, and the cache has the others.
        answer = model(input_ids=ids, **past, use_cache=True)
        past = cache_of(answer)
        last = answer.logits[0, -1].float()
        steps.append(last.log_softmax(-1).cpu())
        likeliest = int(last.argmax())
        if likeliest in ends:
            break
        ids = torch.tensor([[likeliest]], device=device)
    return torch.stack(steps)


def compare(
    what: str,
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    tolerance: float,
) -> Comparison:
    """Return how far the log-probabilities of two models are apart, by their logits of the same rows.

    For a position it is the mean of |difference| over tokens, each as often as the first model would choose it; of a row
    the mean of its positions. The worst row counts.
    """
    # A position with three tokens:
    #
    #     p of the first model           0.70   0.20   0.10
    #     |difference| of log p          0.01   0.05   0.40
    #     p · |difference|               0.007  0.010  0.040      → 0.057
    #
    # so a token that nobody would choose weighs little, however far apart the two are on it.
    differences = []
    same = []
    for a, b in zip(first, second, strict=True):
        # A file may have rows for tokens that the tokenizer lacks.
        width = min(a.shape[1], b.shape[1])
        p = a[:, :width].double().log_softmax(1)
        q = b[:, :width].double().log_softmax(1)
        differences.append(((p - q).abs() * p.exp()).sum(1).mean())
        same.append(p.argmax(1) == q.argmax(1))
    # torch's maximum is NaN if one of the values is.
    worst = float(torch.stack(differences).max())
    return Comparison(what, worst, tolerance, float(torch.cat(same).float().mean()))


def partings(reference: Sequence[Tensor], answers: Sequence[Sequence[int]]) -> list[Parting | None]:
    """Return where each greedy answer of llama.cpp leaves that of transformers; None if it does not.

    What llama.cpp writes after the end of transformers' answer does not count.
    """
    return [_parting(steps, tokens) for steps, tokens in zip(reference, answers, strict=True)]


def _parting(steps: Tensor, tokens: Sequence[int]) -> Parting | None:
    """Return the first token of an answer that is not the likeliest of its step.

    Transformers' likeliest tokens 7 9 4, llama.cpp's answer 7 9 5: they part at token 2. If log p of 4 and 5 there are
    -0.70 and -0.71, the gap is 0.01, which says that both are as good. What follows is of different texts.
    """
    for number, (step, token) in enumerate(zip(steps, tokens, strict=False)):
        likeliest = int(step.argmax())
        if token != likeliest:
            gap = step[likeliest] - step[token]
            return Parting(number, float(gap))
    return None


def check_plain(
    proof: LlamaProof,
    what: str,
    request: LlamaRequest,
    reference: Reference,
    allowed: float,
    rounding: Callable[[], float] | None,
) -> LlamaAnswer:
    """Compare a file of plain weights with transformers, token by token of the answers too. Return llama.cpp's answer.

    `rounding`: returns how far transformers in 16 bits is from itself in 32. It is only called if more is wrong than
    `allowed`, since it loads the model again.
    """
    answer = ask(request)
    comparison = compare(what, reference.logits, answer.logits, allowed)
    parted = partings(reference.greedy, answer.continuations)
    if rounding is not None and (not comparison.holds or _wide_gaps(parted, allowed)):
        lost = rounding()
        proof.notes["rounding"] = lost
        # NaN, of a model that overflows in f16, allows no more.
        allowed = max(allowed, SHARE_OF_ROUNDING * lost)
    proof.add(replace(comparison, tolerance=allowed))
    proof.faults += _wide_gaps(parted, allowed)
    proof.notes["greedy"] = noted(parted)
    return answer


def _wide_gaps(parted: Sequence[Parting | None], allowed: float) -> list[str]:
    """Return in words which greedy answers part where the likeliest tokens are not close."""
    wide = []
    for number, parting in enumerate(parted, 1):
        # NaN is no small gap.
        if parting is not None and not parting.gap <= CLOSE * allowed:
            wide.append(
                f"greedy answer {number} parts at token {parting.token + 1}, where transformers prefers its own by "
                f"{parting.gap:.2g}"
            )
    return wide


def noted(parted: Sequence[Parting | None]) -> list[dict[str, Any] | None]:
    """Return for provenance.json where greedy answers part; None for an answer that is equal."""
    notes: list[dict[str, Any] | None] = []
    for parting in parted:
        if parting is None:
            notes.append(None)
        else:
            notes.append(asdict(parting))
    return notes


def check_tokens(
    proof: LlamaProof,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    answer: LlamaAnswer,
) -> None:
    """Compare llama.cpp with training: the tokens of texts, those before a text, and those that end an answer."""
    equal = 0
    for text, ids in zip(texts, answer.tokens, strict=True):
        expected = tokenizer.encode_text(text, special=False)
        if ids == expected:
            equal += 1
            continue
        place = _first_difference(ids, expected)
        proof.faults.append(
            f"llama.cpp makes other tokens of {tokenizer.decode(expected[place : place + 3])!r}: "
            f"{ids[place : place + 3]}, and training {expected[place : place + 3]}"
        )
    proof.notes["texts_tokenized_alike"] = f"{equal} of {len(texts)}"

    start = tokenizer.prefix
    if answer.start != start:
        proof.faults.append(f"llama.cpp puts {answer.start} before a text, and training {start}")
    missing = sorted(set(tokenizer.eos_ids) - set(answer.ends))
    if missing:
        proof.faults.append(
            f"llama.cpp does not end at the tokens {missing}, at which the model was trained to end"
        )


def _first_difference(ids: Sequence[int], expected: Sequence[int]) -> int:
    place = 0
    for a, b in zip(ids, expected, strict=False):
        if a != b:
            break
        place += 1
    return place


def note_chats(proof: LlamaProof, tokenizer: Tokenizer, answer: LlamaAnswer) -> None:
    """Note whether llama.cpp's own code, which runs no Jinja, makes the prompts of training."""
    bos = tokenizer.special.get("bos_token") or ""
    chats: list[dict[str, Any]] = []
    for chat, prompt in zip(CHATS, answer.chats, strict=False):
        trained = render(tokenizer, chat)
        if prompt is None:
            chats.append({"alike": None})
            continue
        # A template that refuses a system text, for example.
        if trained is None:
            continue
        # llama.cpp may leave BOS to the tokenizer.
        if prompt in (trained, trained.removeprefix(bos)):
            chats.append({"alike": True})
        else:
            chats.append({"alike": False, "by_llama_cpp": prompt, "as_trained": trained})
    proof.notes["chats"] = chats


def check_quantised(
    proof: LlamaProof,
    what: str,
    request: LlamaRequest,
    reference: Reference,
    allowed: float,
) -> None:
    """Compare a file of quantised weights with transformers, and note where its greedy answers part."""
    answer = ask(replace(request, texts=[], chats=[]))
    proof.add(compare(what, reference.logits, answer.logits, allowed))
    parted = partings(reference.greedy, answer.continuations)
    proof.notes["greedy_quantised"] = noted(parted)
