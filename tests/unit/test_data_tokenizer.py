"""The tokenizer gives what transformers gives, without importing it, and its files survive a copy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from kubetune.config.schema import ModelConfig
from kubetune.data.text import tokenizer_files
from kubetune.data.text.tokenizer import Tokenizer, load_tokenizer
from kubetune.data.text.turns.template import Rendered
from kubetune.errors import ModelError
from kubetune.result.forms.equivalence import Sample, check_tokenizer
from tests.tiny import CHATML, train_tokenizer

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
TEXTS = [
    "Hello World",
    "  a\n\nb",
    "<|im_start|>user\nhi<|im_end|>",
    "Hé 你好 🙂",
    "it's 12345",
    "[CLS] x",
    "e\u0301",
]
CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Ping <ü> & 'x'"},
    {"role": "assistant", "content": "Pong", "reasoning_content": "hm", "tool_calls": None},
    {"role": "user", "content": "Again"},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"ü": {}}}},
    }
]


def ours(folder: Path, **settings: Any) -> Tokenizer:
    return load_tokenizer(ModelConfig(path=str(folder), **settings))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def folders() -> list[Any]:
    real = [f"tokenizers/{name}" for name in ("qwen2.5", "qwen3", "bert-base-uncased")] + [
        "weights/stories260K"
    ]
    absent = pytest.mark.skipif(
        not SHARED.is_dir(), reason="the real tokenizers are not on this machine"
    )
    # Its words are those of qwen3, which has more added tokens.
    twice = {"tokenizers/qwen2.5": [pytest.mark.slow]}
    return ["tiny", *(pytest.param(n, marks=[absent, *twice.get(n, [])]) for n in real)]


@pytest.mark.parametrize("name", folders())
def test_equal_to_transformers(name: str, tiny: Path) -> None:
    from transformers import AutoTokenizer

    folder = tiny if name == "tiny" else SHARED / name
    theirs = AutoTokenizer.from_pretrained(folder)
    mine = ours(folder)
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert mine.encode_text(text, special=False) == ids
        assert mine.decode(ids, skip_special_tokens=False) == theirs.backend_tokenizer.decode(
            ids, False
        )
        assert (
            mine.encode_prompt(text) == theirs(text)["input_ids"][: len(mine.encode_prompt(text))]
        )
    assert mine.special == theirs.special_tokens_map
    assert mine.special_ids >= frozenset(
        theirs.all_special_ids
    )  # theirs leaves out those without a role
    assert mine.vocab_size == len(theirs)
    assert mine.bos_id == theirs.bos_token_id
    if mine.chat is None:
        assert theirs.chat_template is None
        return
    for messages, tools, prompt in (
        (CHAT, None, True),
        (CHAT, TOOLS, True),
        (CHAT[:3], TOOLS, False),
    ):
        options = {"tools": tools, "add_generation_prompt": prompt}
        expected = theirs.apply_chat_template(messages, tokenize=False, **options)
        assert mine.chat.render(messages, tools, generation_prompt=prompt) == expected
        if prompt:
            ids = theirs.apply_chat_template(messages, return_dict=False, **options)
            assert mine.encode_prompt(messages, tools) == ids


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_is_tokenised_and_comes_back(text: str, tiny: Path) -> None:
    tokenizer = ours(tiny)
    assert tokenizer.decode(tokenizer.encode_text(text), skip_special_tokens=False) == text


def test_a_class_that_rebuilds_its_preprocessing_is_asked_once(tiny: Path, tmp_path: Path) -> None:
    """A GPT-2 class whose tokenizer.json splits digits differently: transformers ignores the file there."""
    folder = tmp_path / "model"
    cache = tmp_path / "cache"
    folder.mkdir()
    content = json.loads((tiny / "tokenizer.json").read_text())
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, content["pre_tokenizer"]],
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>"}'
    )
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    first = load_tokenizer(ModelConfig(path=str(folder)), cache)
    expected = theirs("a 12 42 100")["input_ids"]
    assert first.encode_text("a 12 42 100") == expected
    kept = list((cache / "tokenizers").iterdir())
    assert len(kept) == 2
    script = f"""
import sys
from pathlib import Path
from kubetune.config.schema import ModelConfig
from kubetune.data.text.tokenizer import load_tokenizer
ids = load_tokenizer(ModelConfig(path={str(folder)!r}), Path({str(cache)!r})).encode_text("a 12 42 100")
assert ids == {expected}, ids
heavy = {{"torch", "transformers", "datasets", "numpy"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_tokens_that_tokenizer_json_lacks_are_added_as_transformers_does(
    tiny: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "tokenizer.json").write_bytes((tiny / "tokenizer.json").read_bytes())
    config = json.loads((tiny / "tokenizer_config.json").read_text())
    config |= {"bos_token": "<bos>", "extra_special_tokens": ["<one>", "<two>"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    mine = ours(tmp_path)
    text = "<bos>a<two>b<one>"
    assert mine.encode_text(text) == theirs(text)["input_ids"]
    assert mine.vocab_size == len(theirs)
    assert mine.bos_id == theirs.bos_token_id


MAPPING = {"image_token": "<image>", "video_token": "<video>"}
STRIPPED = {"content": "<image>", "lstrip": True, "rstrip": True, "normalized": False}
# A token as `save_pretrained` writes it into tokenizer_config.json.
SAVED = {**STRIPPED, "__type": "AddedToken"}


@pytest.mark.parametrize(
    "files",
    [
        {"config": {"extra_special_tokens": MAPPING}},
        {"config": {"extra_special_tokens": MAPPING, "additional_special_tokens": ["<two>"]}},
        {"config": {"image_token": "<image>"}},
        {"config": {"image_token": SAVED}},
        {"config": {"extra_special_tokens": {"image_token": SAVED}}},
        {"config": {"extra_special_tokens": [SAVED]}},
        {"config": {"mask_token": SAVED}},
        {"config": {"model_specific_special_tokens": MAPPING}},
        {"map": {"image_token": "<image>"}},
        {"map": {"extra_special_tokens": ["<image>"]}},
        {"config": {"extra_special_tokens": ["<image>"], "additional_special_tokens": ["<two>"]}},
        {"config": {"additional_special_tokens": ["<image>", "<two>"]}},
        {"map": {"extra_special_tokens": MAPPING}},
        {"map": {"additional_special_tokens": ["<image>"]}},
        {"map": {"mask_token": STRIPPED, "bos_token": "<two>"}},
        {
            "config": {
                "added_tokens_decoder": {"600": {**STRIPPED, "single_word": False, "special": True}}
            }
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("tokenizer_class", ["PreTrainedTokenizerFast", "GPT2Tokenizer"])
def test_special_tokens_of_all_forms_are_those_of_transformers(
    files: dict[str, dict[str, Any]], tokenizer_class: str, tiny: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "tokenizer.json").write_bytes((tiny / "tokenizer.json").read_bytes())
    config = json.loads((tiny / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": tokenizer_class, **files.get("config", {})}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if "map" in files:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(files["map"]))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    mine = ours(tmp_path)
    assert mine.special == theirs.special_tokens_map
    for text in ("see <image> image_token here", "<video>\n<two> video_token", "a<image>b"):
        assert mine.encode_text(text) == theirs(text, add_special_tokens=False)["input_ids"]
    assert mine.vocab_size == len(theirs)


@pytest.mark.parametrize("tokenizer_class", ["PreTrainedTokenizerFast", "GPT2Tokenizer"])
def test_tokens_that_the_config_does_not_list_are_those_of_transformers(
    tokenizer_class: str, tiny: Path, tmp_path: Path
) -> None:
    """A class that builds its tokenizer anew leaves out what stands in tokenizer.json alone."""
    from transformers import AutoTokenizer

    content = json.loads((tiny / "tokenizer.json").read_text())
    listed = content["added_tokens"].copy()
    later = len(content["model"]["vocab"])
    content["added_tokens"].append({**listed[0], "id": later, "content": "<think>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    config = json.loads((tiny / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = tokenizer_class
    config["added_tokens_decoder"] = {
        token["id"]: {key: value for key, value in token.items() if key != "id"} for token in listed
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    mine = ours(tmp_path)
    text = "<think>\nso<|im_end|>"
    assert mine.encode_text(text) == theirs(text, add_special_tokens=False)["input_ids"]


def roberta(folder: Path) -> Path:
    """Save RoBERTa's own files, which name no special token: its class has them by default."""
    from transformers import RobertaTokenizer

    folder.mkdir(exist_ok=True)
    names = ["<s>", "<pad>", "</s>", "<unk>", *pre_tokenizers.ByteLevel.alphabet(), "<mask>"]
    vocabulary = {name: id for id, name in enumerate(dict.fromkeys(names))}
    RobertaTokenizer(vocab=vocabulary, merges=[]).backend_tokenizer.save(
        str(folder / "tokenizer.json")
    )
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 512}')
    (folder / "config.json").write_text('{"model_type": "roberta"}')
    return folder


def test_special_tokens_of_a_class_are_known_where_the_files_say_nothing(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(roberta(tmp_path / "roberta"))
    mine = load_tokenizer(ModelConfig(path=str(tmp_path / "roberta")), tmp_path / "cache")
    assert mine.special == theirs.special_tokens_map
    assert (mine.eos_id, mine.bos_id, mine.pad_id) == (2, 0, 1)
    assert mine.encode_text("a <mask>") == theirs("a <mask>")["input_ids"][:-1]
    again = load_tokenizer(ModelConfig(path=str(tmp_path / "roberta")), tmp_path / "cache")
    assert again.special == mine.special


@pytest.mark.parametrize("name", tokenizer_files._DEFAULT_TOKENS)
def test_default_tokens_in_the_table_are_those_of_the_class(name: str) -> None:
    import transformers

    theirs = getattr(transformers, name)().special_tokens_map
    assert tokenizer_files._DEFAULT_TOKENS[name] == theirs


def test_what_ends_generation(tiny: Path, tmp_path: Path) -> None:
    folder = train_tokenizer(tmp_path, eos_token="<|endoftext|>")
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    tokenizer = ours(folder)
    assert (tokenizer.eos_id, tokenizer.turn_end_id, tokenizer.eos_ids, tokenizer.pad_id) == (
        0,
        2,
        (0, 2, 7),
        0,
    )
    assert ours(tiny).eos_ids == (2,)


@pytest.mark.parametrize(
    ("pad_token", "pad_token_id", "names", "id"),
    [
        ("<|endoftext|>", None, True, 0),
        (None, 1, True, 1),
        (None, 0, True, 0),
        (None, None, False, 2),
        (None, -1, False, 2),
    ],
)
def test_what_pads(
    pad_token: str | None, pad_token_id: int | None, names: bool, id: int, tmp_path: Path
) -> None:
    folder = train_tokenizer(tmp_path)
    facts = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(facts | {"pad_token": pad_token}))
    (folder / "config.json").write_text(json.dumps({"pad_token_id": pad_token_id}))
    assert (ours(folder).names_padding, ours(folder).pad_id) == (names, id)


def test_saving_copies_the_files_byte_for_byte(tiny: Path, tmp_path: Path) -> None:
    def contents(folder: Path) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in folder.iterdir()}

    ours(tiny).save(tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tiny)
    template = tmp_path / "mine.jinja"
    template.write_text("{{ messages[0].content }}")
    ours(tiny, chat_template=str(template)).save(tmp_path / "other")
    again = ours(tmp_path / "other")
    assert again.chat
    assert again.chat.source == template.read_text()


WITH_TOOLS = (
    "\n{%- if tools %}{{- '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}"
    "{% set names = namespace(last='') %}" + CHATML
)


@pytest.mark.parametrize("is_file", [True, False], ids=["a file", "a list"])
def test_a_template_for_tools_is_taken_where_there_are_any(is_file: bool, tmp_path: Path) -> None:
    folder = train_tokenizer(tmp_path / "model")
    saved = tmp_path / "saved"
    if is_file:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(WITH_TOOLS)
        (folder / "additional_chat_templates" / "rag.jinja").write_text("?")
        (folder / "chat_template.jinja").write_text(CHATML)
    else:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        named = {"rag": "?", "default": f"\n\n{CHATML}\n", "tool_use": f"\n{WITH_TOOLS}\n"}
        config["chat_template"] = [
            {"name": name, "template": template} for name, template in named.items()
        ]
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    load_tokenizer(ModelConfig(path=str(folder))).save(saved)
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(saved).get_chat_template("rag") == "?"
    for place in (folder, saved):
        ours = load_tokenizer(ModelConfig(path=str(place))).require_chat()
        theirs = AutoTokenizer.from_pretrained(place)
        for tools in (None, [{"type": "function", "function": {"name": "f", "parameters": {}}}]):
            rendered = ours.render_all([(messages, tools or (), [1])])[0]
            assert isinstance(rendered, Rendered)
            assert rendered.text == theirs.apply_chat_template(
                messages, tools=tools, tokenize=False
            )
            assert [rendered.text[start:end] for start, end in rendered.spans] == [
                "Hello<|im_end|>"
            ]
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    assert {*check_tokenizer(tokenizer, saved, Sample((), ""))} == {*tokenizer.files}
    tokenizer = load_tokenizer(ModelConfig(path=str(folder), chat_template="chatml"))
    tokenizer.save(tmp_path / "given")
    assert "chat_template.jinja" in check_tokenizer(tokenizer, tmp_path / "given", Sample((), ""))
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "given").chat_template == tokenizer.given_template
    )


def test_files_of_templates_go_before_a_list_of_them(tmp_path: Path) -> None:
    folder = train_tokenizer(tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": name, "template": "?"} for name in ("default", "tool_use")]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(CHATML)
    chat = ours(folder).chat
    assert chat
    from transformers import AutoTokenizer

    assert chat.source == AutoTokenizer.from_pretrained(folder).chat_template == CHATML


def test_the_template_of_a_processor_is_the_models_where_it_has_no_other(tmp_path: Path) -> None:
    folder = train_tokenizer(tmp_path / "model", None)
    (folder / "config.json").write_text('{"vision_config": {}}')
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    chat = load_tokenizer(ModelConfig(path=str(folder))).chat
    assert chat is not None
    assert chat.source == CHATML
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    tokenizer.save(tmp_path / "saved")
    assert "chat_template.json" in check_tokenizer(tokenizer, tmp_path / "saved", Sample((), ""))


def test_the_fingerprint_follows_every_file_and_the_template(tiny: Path, tmp_path: Path) -> None:
    prints = [ours(tiny).fingerprint, ours(tiny, chat_template="chatml").fingerprint]
    folder = train_tokenizer(tmp_path)
    assert ours(folder).fingerprint == prints[0]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((folder / name).read_text() + " ")
        prints.append(ours(folder).fingerprint)
    (folder / "chat_template.jinja").write_text(CHATML)
    prints.append(ours(folder).fingerprint)
    assert len(set(prints)) == len(prints)


BOMBS = [
    "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ self._TemplateReference__context }}",
    "{{ (messages | map(attribute='__class__') | list)[0].__base__.__subclasses__() }}",
    "{% for x in lipsum.__globals__.values() %}{{ x }}{% endfor %}",
    "{{ raise_exception.__globals__['json'].codecs.open('CANARY', 'w') }}",
    "{{ strftime_now.__globals__ }}{% include '/etc/passwd' %}",
]


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_hostile_template_runs_nothing(
    bomb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = ours(train_tokenizer(tmp_path / "t", bomb))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="chat template does not even write a question"):
        tokenizer.encode_prompt(CHAT)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "/nowhere/model"}, "model /nowhere/model: there is no such folder"),
        (
            {"chat_template": "/nowhere.jinja"},
            r"model\.chat_template /nowhere\.jinja cannot be read",
        ),
        ({"path": "not a hub id"}, "neither an existing folder nor a hub id"),
        (
            {"path": "someone/unheard-of", "local_files_only": True},
            "not in the local cache and local_files",
        ),
    ],
)
def test_what_cannot_be_had_is_explained(change: dict[str, Any], message: str, tiny: Path) -> None:
    with pytest.raises(ModelError, match=message):
        load_tokenizer(ModelConfig(**{"path": str(tiny), **change}))


AS_IT_IS = '{"tokenizer_class": "PreTrainedTokenizerFast"}'


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no tokenizer; expected one of tokenizer.json"),
        (
            {"tokenizer.json": "{", "tokenizer_config.json": AS_IT_IS},
            r"tokenizer\.json cannot be read",
        ),
        (
            {"tokenizer.json": "{}", "tokenizer_config.json": "["},
            "tokenizer_config.json cannot be read",
        ),
        (
            {"tokenizer.json": "{}", "tokenizer_config.json": "[]"},
            "holds a list; expected an object",
        ),
    ],
)
def test_damaged_files_are_named(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=message):
        _ = ours(tmp_path).backend


def test_a_tokenizer_without_eos_and_a_broken_template_are_explained(tmp_path: Path) -> None:
    folder = train_tokenizer(tmp_path, "{% if %}")
    with pytest.raises(
        ModelError, match="the tokenizer's chat template is not valid Jinja: line 1"
    ):
        ours(folder).require_chat()
    (folder / "tokenizer_config.json").write_text(AS_IT_IS)
    with pytest.raises(ModelError, match="has no eos_token"):
        _ = ours(folder).eos_id


@pytest.mark.parametrize("name", tokenizer_files._REBUILT)
def test_what_rebuilding_classes_build_is_known(name: str) -> None:
    import transformers

    built = json.loads(getattr(transformers, name)().backend_tokenizer.to_str())
    expected = tokenizer_files._REBUILT[name]
    assert tokenizer_files._steps(built) == tuple(
        tokenizer_files._canonical(step) for step in expected
    )


def words(folder: Path, model_type: str | None) -> Path:
    """Return a tokenizer of whole words; beside a Qwen2 model transformers reads its vocabulary as pieces of words."""
    from transformers import PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer(
        models.WordLevel({"<unk>": 0, "one": 1, "two": 2}, unk_token=None)
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<unk>").save_pretrained(folder)
    if model_type:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def test_a_tokenizer_that_makes_nothing_of_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError,
        match=r"makes no token of 'a', '0', 'the' or .* as Qwen2Tokenizer, which they may",
    ):
        ours(words(tmp_path, "qwen2")).encode_text("one two")


def test_a_vocabulary_without_the_first_letter_will_do(tmp_path: Path) -> None:
    tokenizer = ours(words(tmp_path, None))
    assert (tokenizer.prefix, tokenizer.encode_text("one two")) == ([], [1, 2])
