"""Conversations have the ids that transformers gives to them, and what is trained is what the assistant says.

The rendering, its ids and the spans are made here without kubetune: by `AutoTokenizer`, and by writing the template's
own words one after the other.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from kubetune.config.schema import ModelConfig
from kubetune.data.reading.examples import Chat, Pair, Preference
from kubetune.data.reading.formats import convert
from kubetune.data.text.encode import Encoded, Encoder
from kubetune.data.text.encode_preferences import PreferenceEncoder
from kubetune.data.text.tokenizer import load_tokenizer
from tests.tiny import CORPUS

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
ROLES = ("system", "user", "assistant")
TAGS = (*(f"<|{role}|>" for role in ROLES), "<|end|>")
STRIPPING = {"rstrip": True}
# Settings that an added token may have.
SETTINGS: dict[str, dict[str, bool]] = {
    "plain": {},
    "rstrip": STRIPPING,
    "lstrip": {"lstrip": True},
    "both": {"lstrip": True, "rstrip": True},
    "single_word": {"single_word": True},
    "normalized": {"normalized": True},
}


@dataclass(frozen=True)
class Template:
    """A chat template in two forms: in Jinja, and as the texts around each message."""

    before: str  # {role} in it is the role of the message
    after: str

    @property
    def prompt(self) -> str:
        """Return the ids behind which a model is asked."""
        return self.before.format(role="assistant")

    @property
    def jinja(self) -> str:
        """Return the ids behind which transformers asks a model."""
        before, after = (
            json.dumps(text).replace("{role}", '" + message.role + "')
            for text in (self.before, self.after)
        )
        return (
            "{%- for message in messages %}"
            f"{{{{- {before} + message.content + {after} }}}}"
            "{%- endfor %}"
            f"{{%- if add_generation_prompt %}}{{{{- {json.dumps(self.prompt)} }}}}{{% endif %}}"
        )

    def write(self, messages: list[dict[str, str]]) -> tuple[str, list[tuple[int, int]]]:
        """Return the rendering, and the span of each answer with the end of its turn."""
        text = ""
        spans = []
        for message in messages:
            text += self.before.format(role=message["role"])
            start = len(text)
            text += message["content"]
            if message["role"] == "assistant":
                spans.append((start, len(text) + len(self.after.rstrip() or self.after)))
            text += self.after
        return text, spans


PHI3 = Template("<|{role}|>\n", "<|end|>\n")
TEMPLATES = {"phi3": PHI3, "tight": Template("<|{role}|>", "<|end|>")}
QUESTIONS = ["Hello", "What now?", "  and  \n"]
ANSWERS = [
    "I am a bot.",
    "Nothing.",
    "\n\nTwo lines.\n",
    " Space",
    "ç \U0001f642",
    "say <|end|> twice",
    "x <|user|> y",
]


def conversations() -> list[list[dict[str, str]]]:
    """Return conversations of one, two and three turns, some with a system."""
    rows = []
    for number, answers in enumerate(itertools.permutations(ANSWERS, 3)):
        messages = [{"role": "system", "content": "Be short. "}] if number % 2 else []
        for question, answer in zip(QUESTIONS, answers[: 1 + number % 3], strict=False):
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        rows.append(messages)
    return rows[::7]


def save(folder: Path, backend: Tokenizer, template: str, settings: dict[str, bool]) -> Path:
    """Save a tokenizer whose tags have these settings."""
    folder.mkdir(parents=True, exist_ok=True)
    content = json.loads(backend.to_str())
    for token in content["added_tokens"]:
        if token["content"] in TAGS:
            token |= settings
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def byte_level(template: Template, folder: Path, settings: dict[str, bool]) -> Path:
    """Make a tokenizer like GPT-2's."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[*TAGS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*CORPUS, "\n\n\n  \n\n"], trainer)
    return save(folder, backend, template.jinja, settings)


def sentence_pieces(template: Template, folder: Path, settings: dict[str, bool]) -> Path:
    """Make a tokenizer like Llama 2's and Phi-3's, which begins a text with a space."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Replace("▁", " ")
    octets = [f"<0x{octet:02X}>" for octet in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", *TAGS, *octets], show_progress=False
    )
    backend.train_from_iterator([part for line in CORPUS for part in line.split(" ")], trainer)
    content = json.loads(backend.to_str())
    content["added_tokens"] = [
        t for t in content["added_tokens"] if not t["content"].startswith("<0x")
    ]
    return save(folder, Tokenizer.from_str(json.dumps(content)), template.jinja, settings)


def trained_tokens(
    theirs: Any, text: str, spans: list[tuple[int, int]], settings: dict[str, bool]
) -> list[bool]:
    """Return which tokens hold a character of a span; a tag that takes space holds its own characters alone."""
    encoding = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
    wanted = []
    for id, (begin, end) in zip(encoding["input_ids"], encoding["offset_mapping"], strict=True):
        span = text[begin:end]
        if theirs.convert_ids_to_tokens(id) in TAGS:
            begin += len(span) - len(span.lstrip())
            end = begin + len(span.strip())
        wanted.append(any(start < end and begin < stop for start, stop in spans))
    return [False, *wanted[1:]]


def compare(folder: Path, template: Template, settings: dict[str, bool]) -> int:
    """Hold rows to transformers. Return how many begin an answer inside a token."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    encoder = Encoder(tokenizer)
    inside = 0
    for messages in conversations():
        text, spans = template.write(messages)
        assert text == theirs.apply_chat_template(messages, tokenize=False)
        ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
        row = encoder.encode(Chat(tuple(messages)))
        assert row.ids[: len(ids)] == ids
        assert row.ids[len(ids) :] in ([], [tokenizer.eos_id])
        assert row.trained[: len(ids)] == trained_tokens(theirs, text, spans, settings), text
        as_asked = [
            theirs.apply_chat_template(
                messages[:i], tokenize=True, add_generation_prompt=True, return_dict=False
            )
            for i, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        firsts = [
            i for i, is_label in enumerate(row.trained) if is_label and not row.trained[i - 1]
        ]
        equal = [row.ids[:first] for first in firsts] == as_asked
        begins_inside = "begins_inside_token" in row.notes
        assert begins_inside is not equal, text
        inside += begins_inside
    return inside


@pytest.mark.parametrize("make", [byte_level, sentence_pieces])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=[*SETTINGS])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=[*TEMPLATES])
def test_ids_and_labels_are_those_of_transformers(
    template: Template, settings: dict[str, bool], make: Any, tmp_path: Path
) -> None:
    compare(make(template, tmp_path, settings), template, settings)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=[*SETTINGS])
@pytest.mark.parametrize("special", [True, False], ids=["special", "plain"])
def test_ids_are_those_of_a_class_that_builds_its_tokenizer_anew(
    special: bool, settings: dict[str, bool], tmp_path: Path
) -> None:
    """Transformers drops some settings of added tokens then, and keeps others: kubetune has to ask it which."""
    from transformers import AutoTokenizer

    folder = byte_level(PHI3, tmp_path, {**settings, "special": special})
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    listed = {"additional_special_tokens": [*TAGS], "split_special_tokens": False}
    path.write_text(json.dumps({**config, **listed, "tokenizer_class": "Qwen2Tokenizer"}))
    theirs = AutoTokenizer.from_pretrained(folder)
    encoder = Encoder(load_tokenizer(ModelConfig(path=str(folder)), tmp_path / "cache"))
    for messages in conversations():
        ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert encoder.encode(Chat(tuple(messages))).ids[: len(ids)] == ids


@pytest.mark.parametrize("make", [byte_level, sentence_pieces])
def test_the_end_of_an_answer_takes_the_line_break_behind_it(make: Any, tmp_path: Path) -> None:
    """As in Phi-3, whose `<|end|>` strips what stands behind it."""
    encoder = Encoder(load_tokenizer(ModelConfig(path=str(make(PHI3, tmp_path, STRIPPING)))))
    messages = (
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "I am a bot."},
        {"role": "user", "content": "What now?"},
        {"role": "assistant", "content": "Nothing."},
    )
    row = encoder.encode(Chat(messages))
    tokenizer = encoder.tokenizer
    line_break = tokenizer.encode_text("a\n", special=False)[-1]
    assert line_break not in row.ids
    again = tokenizer.encode_prompt(messages[:3])
    assert row.ids[: len(again)] == again
    assert row.trained[len(again)]


def test_a_template_without_tags_keeps_the_ids_of_the_whole(tmp_path: Path) -> None:
    """Turns end with line breaks, which one token may hold together with a full stop."""
    for name, make in (("bytes", byte_level), ("pieces", sentence_pieces)):
        for number, template in enumerate(
            (
                Template("{role}:", "\n\n"),
                Template("### {role}:\n\n", "\n"),
                Template("{role}: ", "\n"),
            )
        ):
            compare(make(template, tmp_path / f"{name}{number}", {}), template, {})


@pytest.mark.parametrize("settings", [{}, STRIPPING], ids=["plain", "rstrip"])
@pytest.mark.parametrize("make", [byte_level, sentence_pieces])
def test_a_pair_of_plain_texts_goes_on_from_the_prompt_that_is_asked(
    make: Any, settings: dict[str, bool], tmp_path: Path
) -> None:
    """Its ids are those of the whole text, unless a token lies across the border: then the prompt stays as it is."""
    from transformers import AutoTokenizer

    folder = make(PHI3, tmp_path, settings)
    theirs = AutoTokenizer.from_pretrained(folder)
    encoder = Encoder(load_tokenizer(ModelConfig(path=str(folder))))
    for prompt, completion in (
        ("What is", " this?"),
        ("Answer:\n", "Paris"),
        ("Answer: ", "Paris"),
        ("Hi<|end|>", "\nHello"),
        ("Hi<|end|>\n", "Hello"),
        ("", "Hello"),
    ):
        row = encoder.encode(Pair(prompt, completion))
        asked, whole = (
            theirs(text, add_special_tokens=False)["input_ids"]
            for text in (prompt, prompt + completion)
        )
        assert row.ids[: len(asked)] == asked
        assert row.ids[-1] == theirs.eos_token_id
        texts = [theirs.decode(ids) for ids in (row.ids[:-1], whole)]
        assert texts[0].split() == texts[1].split()
        if whole[: len(asked)] == asked:
            assert row.ids == [*whole, theirs.eos_token_id]


@pytest.mark.parametrize("make", [byte_level, sentence_pieces])
def test_answers_to_compare_share_their_prompt(make: Any, tmp_path: Path) -> None:
    """Also where one of them begins with a line break that the prompt ends with."""
    folder = make(PHI3, tmp_path, {})
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    question = {"role": "user", "content": "Hello"}
    chosen, rejected = (
        Chat((question, {"role": "assistant", "content": text}), context=1)
        for text in ("\n\nYes", "No")
    )
    (row,) = PreferenceEncoder(Encoder(tokenizer, keeps_prompts=True)).encode_batch(
        [Preference(chosen, rejected)]
    )
    assert isinstance(row, Encoded), row
    prompt = tokenizer.encode_prompt([question])
    for ids, trained in row.sequences:
        assert ids[: len(prompt)] == prompt
        assert trained.index(True) == len(prompt)


# Writes every key of a message, so that a null which is not as if it were missing shows.
TELLING = (
    "{% for message in messages %}{{ message.role }}:"
    "{% if message.content is defined %}{{ message.content }}{% endif %}"
    "{% if message.name is defined %}[{{ message.name }}]{% endif %}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}<|end|>{% endfor %}"
)


@pytest.mark.parametrize(
    "message",
    [
        {"content": "Hello", "name": None},
        {"content": "Hello", "tool_calls": None, "name": None},
        {"content": "Hello", "name": "Ann"},
        {
            "content": None,
            "tool_calls": [
                {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
            ],
        },
    ],
    ids=["name", "calls", "none", "content"],
)
def test_keys_that_are_null_are_as_if_they_were_missing(
    message: dict[str, Any], tmp_path: Path
) -> None:
    """As in transformers since 5.23: in a message, and not in the arguments of its calls."""
    from transformers import AutoTokenizer

    folder = byte_level(PHI3, tmp_path, {})
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TELLING}))
    messages = [
        {"role": "user", "content": "Hi", "name": None},
        {"role": "assistant", **message},
    ]
    chat = convert({"messages": messages})
    assert isinstance(chat, Chat)
    theirs = AutoTokenizer.from_pretrained(folder)
    ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
    encoder = Encoder(load_tokenizer(ModelConfig(path=str(folder))))
    assert encoder.encode(chat).ids == ids


SYSTEM = {"role": "system", "content": "Be short."}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real tokenizers are not on this machine")
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "qwen2-5-vl", "qwen3-vl"])
def test_real_tokenizers_give_the_same_ids(name: str) -> None:
    from transformers import AutoTokenizer

    folder = SHARED / "tokenizers" / name
    if not (folder / "tokenizer.json").is_file():
        pytest.skip("only the processor is there")
    theirs = AutoTokenizer.from_pretrained(folder)
    encoder = Encoder(load_tokenizer(ModelConfig(path=str(folder))))
    # Both by one reading of the tokenizer, which takes a second.
    for messages, tools in itertools.product(conversations(), ([], TOOLS)):
        turns = tuple(messages) if messages[0]["role"] == "system" else (SYSTEM, *messages)
        row = encoder.encode(Chat(turns, tuple(tools)))
        assert row.ids == theirs.apply_chat_template(
            list(turns), tools=tools or None, tokenize=True, return_dict=False
        )
        assert sum(row.trained) < len(row.ids)
