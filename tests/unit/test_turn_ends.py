"""Where turns end in templates whose ends have another shape, no end at all, or a text behind a call's result.

The ids are held to those of transformers, and what is trained to what is written down here.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kubetune.config.schema import ModelConfig
from kubetune.data.reading.examples import Chat
from kubetune.data.text.encode import Encoder
from kubetune.data.text.tokenizer import load_tokenizer
from tests.tiny import CORPUS

CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": "x"}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "Fs.", "parameters": {"type": "object"}},
    }
]
ASKED = {"role": "user", "content": "One?"}
RESULT = {"role": "tool", "content": "Rain."}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
SAID = {"role": "assistant", "content": "A moment.", "tool_calls": [CALL]}
FIRST = {"role": "assistant", "content": "First."}
SECOND = {"role": "assistant", "content": "Second."}

# Like EXAONE 4: ends in square brackets, with a line break behind each.
BRACKETS = (
    "{% if tools %}[|system|]\n{{ tools | tojson }}[|endofturn|]\n{% endif %}"
    "{% for m in messages %}[|{{ m.role }}|]\n{{ m.content }}"
    "{% for c in m.tool_calls %}{{ '\n' if m.content }}<call>{{ c.function | tojson }}</call>{% endfor %}"
    "[|endofturn|]\n{% endfor %}{% if add_generation_prompt %}[|assistant|]\n{% endif %}"
)
# An end that looks like no tag.
WORDS = BRACKETS.replace("[|endofturn|]", " ##END##")
# Like GLM 4.5: nothing ends a turn but the head of the next.
OPEN = (
    "{% if tools %}<|system|>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}"
    "{% for c in m.tool_calls %}<call>{{ c.function | tojson }}</call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# Like Gemma 4: results stand within the turn of the call, and its text behind them.
MOVED = (
    "{% if tools %}<|turn>system\n{{ tools | tojson }}<turn|>\n{% endif %}{% set ns = namespace(open=false) %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|turn>user\n{{ m.content }}<turn|>\n{% set ns.open = false %}"
    "{% elif m.role == 'assistant' %}{% if not ns.open %}<|turn>model\n{% endif %}"
    "{% for c in m.tool_calls %}<call>{{ c.function | tojson }}</call>{% endfor %}"
    "{% if m.tool_calls and loop.nextitem is defined %}<|result>{{ loop.nextitem.content }}<result|>{% endif %}"
    "{{ m.content }}{% if m.tool_calls and loop.nextitem is not defined %}<|result>{% set ns.open = true %}"
    "{% elif m.tool_calls and not m.content %}{% set ns.open = true %}"
    "{% else %}<turn|>\n{% set ns.open = true %}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.open %}<|turn>model\n{% endif %}"
)
TAGS = ("[|system|]", "[|user|]", "[|assistant|]", "[|tool|]", "[|endofturn|]", "<|turn>", "<turn|>", "<|result>",
        "<result|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "##END##")  # fmt: skip


def tokenizer(
    folder: Path, template: str, eos: str, *, tags: bool, ends: tuple[str, ...] = ()
) -> Path:
    """Write a tokenizer. `tags`: they are tokens of it. `ends`: those that generation_config.json names."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<pad>", "<eos>", *(TAGS if tags else ())]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    ids = [backend.token_to_id(end) for end in ends]
    if ids:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return folder


def shown(
    folder: Path, messages: list[dict[str, Any]], *, added: bool = False
) -> tuple[str, frozenset[str]]:
    """Return a row with what is trained between ⟦ and ⟧, and its notes. `added`: an EOS stands behind it."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    tools = TOOLS if any("tool_calls" in message for message in messages) else None
    row = Encoder(load_tokenizer(ModelConfig(path=str(folder)), folder / "cache")).encode(
        Chat(tuple(copy.deepcopy(messages)), tuple(tools or ()))
    )
    expected = theirs.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=False)
    assert row.ids == [*expected, *([theirs.eos_token_id] if added else [])]
    text = ""
    before = False
    for id, trained in zip(row.ids, row.trained, strict=True):
        if trained != before:
            text += "⟦" if trained else "⟧"
        text += theirs.decode([id])
        before = trained
    text += "⟧" if before else ""
    return text.partition("One?")[2], row.notes


F = '<call>{"name": "f", "arguments": {"a": "x"}}</call>'
LONG = [ASKED, SAID, RESULT, FIRST, ASKED, SECOND]


@pytest.mark.parametrize("tags", [True, False], ids=["tokens", "no tokens"])
def test_ends_in_square_brackets(tags: bool, tmp_path: Path) -> None:
    """No second EOS, no line break behind an end, and calls end as texts do."""
    eos = "[|endofturn|]" if tags else "<eos>"
    folder = tokenizer(tmp_path, BRACKETS, eos, tags=tags)
    end = "[|endofturn|]"
    text, _ = shown(folder, LONG)
    assert text == (
        f"{end}\n[|assistant|]\n⟦A moment.\n{F}{end}⟧\n[|tool|]\nRain.{end}\n[|assistant|]\n⟦First.{end}⟧\n"
        f"[|user|]\nOne?{end}\n[|assistant|]\n⟦Second.{end}⟧\n"
    )
    assert shown(folder, [ASKED, CALLED])[0] == f"{end}\n[|assistant|]\n⟦{F}{end}⟧\n"
    assert shown(folder, [ASKED, FIRST])[0] == f"{end}\n[|assistant|]\n⟦First.{end}⟧\n"


def test_an_end_is_known_by_the_tokens_of_the_tokenizer(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path, WORDS, "##END##", tags=True)
    text, _ = shown(folder, [ASKED, SAID, RESULT, FIRST])
    assert text == (
        f" ##END##\n[|assistant|]\n⟦A moment.\n{F} ##END##⟧\n[|tool|]\nRain. ##END##\n[|assistant|]\n⟦First. ##END##⟧\n"
    )


def test_an_answer_without_an_end_is_noticed(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path, OPEN, "<eos>", tags=True)
    text, notes = shown(folder, LONG, added=True)
    assert "⟦A moment." + F + "⟧<|observation|>" in text
    assert "open_answers" in notes
    # One answer alone ends with EOS.
    assert "open_answers" not in shown(folder, [ASKED, FIRST], added=True)[1]


def test_the_token_that_serving_stops_at_is_trained(tmp_path: Path) -> None:
    ends = ("<|user|>", "<|observation|>")
    folder = tokenizer(tmp_path, OPEN, "<eos>", tags=True, ends=ends)
    text, notes = shown(folder, LONG, added=True)
    assert text == (
        f"<|assistant|>\n⟦A moment.{F}<|observation|>⟧\nRain.<|assistant|>\n⟦First.<|user|>⟧\nOne?<|assistant|>\n"
        "⟦Second.<eos>⟧"
    )
    assert "open_answers" not in notes


def test_a_text_that_stands_behind_the_result_of_its_call_is_found(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path, MOVED, "<turn|>", tags=True)
    text, notes = shown(folder, LONG)
    assert text == (
        f"<turn|>\n<|turn>model\n⟦{F}<|result>⟧Rain.<result|>⟦A moment.<turn|>⟧\n⟦First.<turn|>⟧\n"
        "<|turn>user\nOne?<turn|>\n<|turn>model\n⟦Second.<turn|>⟧\n"
    )
    assert "text_moved" in notes
    text, notes = shown(folder, [ASKED, CALLED, RESULT, FIRST])
    assert text == f"<turn|>\n<|turn>model\n⟦{F}<|result>⟧Rain.<result|>⟦First.<turn|>⟧\n"
    assert "text_moved" not in notes
