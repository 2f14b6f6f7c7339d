"""A GGUF file in words: how to run it and the proof by llama.cpp, for a card and for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from kubetune.base.humanize import counted

# What llama.cpp's programs are given if they would ask a template to think, and training did not.
WITHOUT_THINKING: Final = """--chat-template-kwargs '{"enable_thinking": false}'"""


def how_to_run(facts: Mapping[str, Any]) -> str:
    """Return the commands that run the file. `facts`: of the file, in provenance.json."""
    file = facts["file"]
    if facts["type"] == "adapter":
        lines = [
            f"llama-cli -m BASE.gguf --lora {file}    # the base as a GGUF file of any type",
            "ollama create tuned -f Modelfile && ollama run tuned    # the file says what its line FROM wants",
        ]
    else:
        options = "--jinja"
        if "asked_to_think" in facts:
            options = f"--jinja {WITHOUT_THINKING}"
        lines = [
            f"llama-cli -m {file} {options}",
            f"llama-server -m {file} {options}    # an API like OpenAI's on port 8080",
            "ollama create tuned -f Modelfile && ollama run tuned",
        ]
    typed = [f"$ {line}" for line in lines]
    return "\n".join(["```console", *typed, "```"])


def proof_by_llama_cpp(facts: Mapping[str, Any]) -> str:
    """Return llama.cpp's results beside those of transformers, as a table and sentences."""
    if "not_proved" in facts:
        return f"The file was not run by llama.cpp: {facts['not_proved']}."
    proof = facts["proof"]
    rows = [
        f"llama.cpp (llama-cpp-python {proof['llama_cpp_python']}) beside transformers on the same rows:",
        "",
        "| log-probabilities of | mean difference of the worst row | allowed | same first choice |",
        "|---|---|---|---|",
    ]
    for comparison in proof["comparisons"]:
        difference = f"{comparison['difference']:.1e}"
        allowed = f"{comparison['tolerance']:.0e}"
        rows.append(
            f"| {comparison['what']} | {difference} | {allowed} | {comparison['agreement']:.2%} |"
        )

    sentences = _of_greedy(proof)
    base = proof.get("base_quantised_alike")
    if isinstance(base, Mapping):
        sentences.append(
            f"The base, quantised alike, is {base['difference']:.1e} from itself, and {count_equal(base['greedy'])} of its "
            "greedy answers are equal."
        )
    if "rounding" in proof:
        sentences.append(
            f"Transformers in 16 bits is {proof['rounding']:.1e} from itself in 32, so up to twice that is rounding."
        )
    if "texts_tokenized_alike" in proof:
        sentences.append(f"Texts tokenized alike: {proof['texts_tokenized_alike']}.")
    parts = ["\n".join(rows), " ".join(sentences)]
    parts += _chats(proof.get("chats") or ())
    return "\n\n".join(parts)


def count_equal(partings: Sequence[Mapping[str, Any] | None]) -> str:
    """Return how many greedy answers do not part, such as `2 of 3`."""
    equal = sum(parting is None for parting in partings)
    return f"{equal} of {len(partings)}"


def _of_greedy(proof: Mapping[str, Any]) -> list[str]:
    """Return in words how far greedy answers are the same: of the file, and of the plain one that it was quantised from."""
    asked = "Greedy answers of up to 64 tokens"
    if "greedy_quantised" not in proof:
        return [_greedy(asked, proof["greedy"])]
    return [
        _greedy(asked, proof["greedy_quantised"]),
        _greedy("Before quantising", proof["greedy"]),
    ]


def _greedy(of: str, partings: Sequence[Mapping[str, Any] | None]) -> str:
    # Greedy answers of up to 64 tokens: 2 of 3 equal; answer 3 parts at token 17, where the first choice leads by 1.2e-03.
    text = f"{of}: {count_equal(partings)} equal"
    for number, parting in enumerate(partings):
        if parting is not None:
            text += (
                f"; answer {number + 1} parts at token {parting['token'] + 1}, where the first choice leads by "
                f"{parting['gap']:.1e}"
            )
    return f"{text}."


def _chats(chats: Any) -> list[str]:
    """Return whether llama.cpp's own code makes the prompts of training, and the first that it does not."""
    if not chats:
        return []
    if all(chat["alike"] is None for chat in chats):
        return [
            "llama.cpp runs the chat template of the file (`--jinja`, the default of newer versions). Without that it does "
            "not know this template."
        ]
    wrong = [chat for chat in chats if chat["alike"] is False]
    if not wrong:
        return [
            f"Prompts by llama.cpp's own code, without `--jinja`: all {len(chats)} as in training."
        ]
    first = wrong[0]
    return [
        f"Prompts by llama.cpp's own code, without `--jinja`: {len(wrong)} of {len(chats)} are **not** as in training. "
        "The first of them:",
        f"```text\nas trained    {first['as_trained']!r}\nby llama.cpp  {first['by_llama_cpp']!r}\n```",
    ]


def lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the results of running a GGUF file in llama.cpp, as labelled lines."""
    if facts.get("kept_in_16_bits"):
        kept = counted(len(facts["kept_in_16_bits"]), "tensor")
        yield "", f"{kept} in f16, as rows do not fill blocks of {facts['type']}"
    if "not_proved" in facts:
        yield "llama.cpp", f"not proved: {facts['not_proved']}"
        return
    proof = facts["proof"]
    label = "llama.cpp"
    for comparison in proof["comparisons"]:
        apart = f"{comparison['difference']:.1e} apart (allowed {comparison['tolerance']:.0e})"
        agreement = f"same first choice {comparison['agreement']:.1%}"
        yield label, f"log-probabilities of {comparison['what']}: {apart}, {agreement}"
        label = ""
    base = proof.get("base_quantised_alike")
    if isinstance(base, dict):
        equal = count_equal(base["greedy"])
        yield (
            "",
            f"the base quantised alike loses {base['difference']:.1e}, greedy answers equal: {equal}",
        )
    elif base is not None:
        yield "", f"the base quantised alike: {base}"
    if "rounding" in proof:
        yield "", f"transformers in 16 bits is {proof['rounding']:.1e} from itself in 32"
    asked = "greedy answers of up to 64 tokens equal"
    if "greedy_quantised" in proof:
        yield "", _greedy_line(asked, proof["greedy_quantised"])
        asked = "before quantising"
    yield "", _greedy_line(asked, proof["greedy"])
    if "texts_tokenized_alike" in proof:
        yield "", f"texts tokenized alike: {proof['texts_tokenized_alike']}"
    chats = proof.get("chats")
    if chats:
        alike = sum(chat["alike"] is True for chat in chats)
        unknown = sum(chat["alike"] is None for chat in chats)
        line = f"prompts by llama.cpp's own code alike: {alike} of {len(chats)}"
        if unknown:
            line += "; it does not know this template, so run it with --jinja"
        yield "", line


def _greedy_line(of: str, partings: list[dict[str, Any] | None]) -> str:
    """Return how many greedy answers are equal, and where the others part."""
    # greedy answers of up to 64 tokens equal: 2 of 4; others part from token 17 on, where the first choice leads by …
    line = f"{of}: {count_equal(partings)}"
    parted = [parting for parting in partings if parting is not None]
    if parted:
        first = min(parting["token"] for parting in parted) + 1
        gap = max(parting["gap"] for parting in parted)
        line += f"; others part from token {first} on, where the first choice leads by {gap:.1e} at most"
    return line
