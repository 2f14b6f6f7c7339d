"""A model's tokenizer and chat template: turn text and conversations into ids, and ids into text.

Ids and renderings are those of transformers' `AutoTokenizer` (see tokenizer_files.py). encode.py decides which ids are
labels.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import tokenizers

from kubetune.base.files import user_cache
from kubetune.config.schema import ModelConfig
from kubetune.config.schema.model import BUILT_IN_TEMPLATE
from kubetune.data.reading import hub
from kubetune.data.text.tokenizer_files import (
    FILES,
    MODEL_FILES,
    PROCESSOR_FILES,
    TOOL_TEMPLATE,
    load_backend,
    names_missing_tokens,
    read_json,
    special_tokens,
    tokenizer_class,
)
from kubetune.data.text.turns.limited_template import LimitedTemplate
from kubetune.data.text.turns.marks import Message
from kubetune.data.text.turns.sandbox import writes_date
from kubetune.data.text.turns.template import CHATML
from kubetune.errors import ModelError


def cache_folder(folder: str | None = None) -> Path:
    """Return the folder for prepared data and for answers about tokenizers. `folder`: `data.cache`, if it is set."""
    if folder:
        return Path(folder).expanduser()
    return user_cache(os.environ) / "kubetune"


# Texts that show what a tokenizer puts before a text. A small vocabulary may know none of them.
PROBES = ("a", "0", "the")


def _texts_to_try(backend: tokenizers.Tokenizer) -> Iterator[str]:
    """Yield texts that a tokenizer should know. Copying its vocabulary takes long, so that comes last."""
    yield from PROBES
    added = {str(token) for token in backend.get_added_tokens_decoder().values()}
    yield from islice(backend.get_vocab().keys() - added, 100)


class _Loaded(NamedTuple):
    """The parts of a tokenizer that take long to load."""

    backend: tokenizers.Tokenizer
    prefix: list[int]
    post_processor: Any


class Tokenizer:
    """A tokenizer with its chat template. Made by `load_tokenizer`.

    Whatever takes long to load is loaded when it is first used, so that a run whose data are prepared starts fast.
    """

    def __init__(
        self,
        name: str,
        files: Mapping[str, Path],
        template: tuple[str, str] | None = None,
        cache: Path | None = None,
        date: str | None = None,
    ) -> None:
        """`template`: (name, source) of a chat template that replaces the tokenizer's own."""
        # For messages: the folder or the hub's name.
        self.name = name
        # Name -> path of the files that it was read from.
        self.files = dict(files)
        self._config = read_json(self.files.get("tokenizer_config.json"))
        self._given_template = template
        # The day that a chat template gets when it asks for today's; None for the real one.
        self.date = date
        self._cache = cache or cache_folder()

    @cached_property
    def _names_missing(self) -> bool:
        # Kept, because a tokenizer.json of some megabytes is parsed for it.
        return names_missing_tokens(self.files, self._config)

    @cached_property
    def special(self) -> dict[str, str]:
        """The special tokens that have a name, such as `eos_token`."""
        return special_tokens(
            self.files,
            self._config,
            self._cache,
            names_missing=self._names_missing,
        )

    @cached_property
    def _loaded(self) -> _Loaded:
        backend = load_backend(
            self.files,
            self._config,
            self._cache,
            names_missing=self._names_missing,
        )

        # tokenizer.json may have both on, and rows would be cut or filled up in silence.
        backend.no_truncation()
        backend.no_padding()

        prefix = self._prefix_of(backend)
        # Post-processors add special tokens, and may also trim offsets, which have to be exact here.
        post_processor = backend.post_processor
        backend.post_processor = tokenizers.processors.Sequence([])
        return _Loaded(backend, prefix, post_processor)

    def _prefix_of(self, backend: tokenizers.Tokenizer) -> list[int]:
        """Return the ids that come before those of a text. Raise ModelError if no text has ids."""
        for text in _texts_to_try(backend):
            bare = backend.encode(text, add_special_tokens=False).ids
            full = backend.encode(text, add_special_tokens=True).ids
            # The text's own ids are somewhere in the full ones. What comes before them is the prefix.
            for place in range(len(full)):
                if bare and full[place : place + len(bare)] == bare:
                    return full[:place]

        kind = tokenizer_class(self.files, self._config)
        raise ModelError(
            f"the tokenizer of {self.name} makes no token of {', '.join(map(repr, PROBES))} or of entries of its own "
            f"vocabulary; expected ids. transformers reads its files as {kind or 'they are'}, which they may not be "
            "made for: set `tokenizer_class` in its tokenizer_config.json, or give another with `model.tokenizer`"
        )

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The tokenizer of the `tokenizers` library. It adds no special tokens."""
        return self._loaded.backend

    @cached_property
    def framing_backend(self) -> tokenizers.Tokenizer:
        """The tokenizer with its post-processor, which puts special tokens around a text or a pair of texts."""
        # A copy, because `backend` must not add special tokens. It shares no settings either, such as truncation.
        framing = tokenizers.Tokenizer.from_str(self.backend.to_str())
        framing.post_processor = self._loaded.post_processor
        return framing

    @property
    def prefix(self) -> list[int]:
        """Ids of the special tokens that the tokenizer puts before a text, such as BOS; often none."""
        return self._loaded.prefix

    @cached_property
    def chat(self) -> LimitedTemplate | None:
        """The chat template, None if the model has none."""
        if self._given_template is not None:
            name, source = self._given_template
        else:
            name = "the tokenizer's"
            source = self._own_template()
        if not source:
            return None
        return LimitedTemplate(source, self.special, name, self.date, self._tags)

    def _tags(self) -> tuple[str, ...]:
        """Return the added tokens that a template may write around texts: no words, and no white space."""
        tags = []
        for text in self.added_tokens.values():
            is_word = text.isalnum() or len(text.split()) != 1
            if len(text) >= 3 and not is_word:
                tags.append(text)
        # In a fixed order, so that two tokenizers with the same files ask for the same template.
        return tuple(sorted(tags))

    @property
    def writes_date(self) -> bool:
        """True if the chat template may write today's date."""
        return self.chat is not None and writes_date(self.chat.source)

    @property
    def given_template(self) -> str | None:
        """The source of the chat template that the run's config names, which replaces the tokenizer's."""
        if self._given_template is None:
            return None
        _, source = self._given_template
        return source

    @property
    def files_not_copied(self) -> tuple[str, ...]:
        """Names of files that `save` leaves out: the model's, and templates that the run's own replaces."""
        if self.given_template is None:
            return MODEL_FILES
        return (*MODEL_FILES, "chat_template.jinja", TOOL_TEMPLATE)

    def require_chat(self) -> LimitedTemplate:
        """Return the chat template. Raise ModelError, which says how to give one, if there is none."""
        if self.chat is None:
            raise ModelError(
                f"the tokenizer of {self.name} has no chat template, and the data are conversations; set "
                "`model.chat_template: chatml` (built in), or a Jinja file: `model.chat_template: template.jinja`"
            )
        # The other process reads it when it is needed, not when the tokenizer is made.
        self.chat.load()
        return self.chat

    def _own_template(self) -> str:
        """Return the model's template: from its files, or else from its settings, as transformers does."""
        # Its files come first.
        templates = {}  # name -> source
        for name, file in (("default", "chat_template.jinja"), ("tool_use", TOOL_TEMPLATE)):
            if file in self.files:
                templates[name] = self.files[file].read_text("utf-8")
        if templates:
            return joined(templates)

        # Then a setting: one template, or a list of named ones.
        setting = self._config.get("chat_template")
        if not setting:
            setting = read_json(self.files.get("chat_template.json")).get("chat_template")
        if isinstance(setting, list):
            return joined({entry["name"]: entry["template"] for entry in setting})
        return joined({"default": setting or ""})

    @cached_property
    def added_tokens(self) -> dict[int, str]:
        """Id -> text of the tokens that were added to the vocabulary."""
        decoder = self.backend.get_added_tokens_decoder()
        return {id: token.content for id, token in decoder.items()}

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of all special tokens."""
        decoder = self.backend.get_added_tokens_decoder()
        return frozenset(id for id, token in decoder.items() if token.special)

    @cached_property
    def find_special(self) -> Callable[[str], object]:
        """A function that returns something true if a text holds the text of a special token, else None."""
        texts = [self.added_tokens[id] for id in self.special_ids]
        if not texts:
            return lambda _: None
        # Longest first: of `<|im|>` and `<|im|>s`, a pattern takes the first that fits.
        texts.sort(key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts))).search

    @property
    def eos_id(self) -> int:
        """The token that ends a text. Raise ModelError if the tokenizer has none."""
        id = self._id("eos_token")
        if id is None:
            raise ModelError(
                f"the tokenizer of {self.name} has no eos_token, which is to end each row; name one in its "
                "tokenizer_config.json (a classifier takes cls_token and sep_token as well)"
            )
        return id

    @cached_property
    def turn_end_id(self) -> int | None:
        """The token with which the chat template ends an answer, such as `<|im_end|>`, if there is one."""
        if self.chat is None or not self.chat.closing:
            return None
        # A template may write more after it, such as a line break.
        for id in reversed(self.encode_text(self.chat.closing, special=False)):
            if id in self.special_ids:
                return id
        return None

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """All tokens that end generation: the tokenizer's, the model's, and the end of a turn."""
        ids = [self._id("eos_token"), self.turn_end_id]

        of_model = read_json(self.files.get("generation_config.json")).get("eos_token_id")
        if isinstance(of_model, list):
            ids += of_model
        else:
            ids.append(of_model)

        # Each once, in this order: the first is the one that training appends.
        return tuple(dict.fromkeys(id for id in ids if id is not None))

    @property
    def pad_id(self) -> int:
        """The token that fills up rows of a rectangular batch; it is never a label. Raise ModelError if there is none."""
        for id in (self._id("pad_token"), self._stated_pad_id, self._id("eos_token")):
            if id is not None:
                return id
        raise ModelError(
            f"the tokenizer of {self.name} names no pad_token, and no eos_token in its place; name one in its "
            "tokenizer_config.json"
        )

    @property
    def names_padding(self) -> bool:
        """True if the tokenizer or the model names a token for padding; otherwise EOS is used."""
        return "pad_token" in self.special or self._stated_pad_id is not None

    @property
    def _stated_pad_id(self) -> int | None:
        id = read_json(self.files.get("config.json")).get("pad_token_id")
        if not isinstance(id, int) or id < 0:  # some models state -1
            return None
        return id

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, if the model has one."""
        return self._id("bos_token")

    def _id(self, name: str) -> int | None:
        if name not in self.special:
            return None
        return self.backend.token_to_id(self.special[name])

    @property
    def max_length(self) -> int | None:
        """Most tokens that the model can take, None if its files do not say."""
        of_tokenizer = self._config.get("model_max_length")
        of_model = read_json(self.files.get("config.json")).get("max_position_embeddings")
        # The smaller one holds: tokenizers often state a huge number that means none.
        limits = [int(limit) for limit in (of_tokenizer, of_model) if limit]
        return min(limits, default=None)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self.backend.get_vocab().values()) + 1

    def encode_text(self, text: str, *, special: bool = True) -> list[int]:
        """Return the ids of a text; with `special` the special tokens that begin a text come first."""
        ids = self.backend.encode(text, add_special_tokens=False).ids
        if special:
            return [*self.prefix, *ids]
        return ids

    def encode_prompt(
        self,
        prompt: str | Sequence[Message],
        tools: Sequence[Any] | None = None,
    ) -> list[int]:
        """Return the ids that a model gets to continue: those that were before its labels in training.

        `prompt`: a text, or the messages of a conversation. Raise ValueError if the template refuses them.
        """
        if isinstance(prompt, str):
            return self.encode_text(prompt)
        # The template writes BOS itself where a conversation begins with it.
        text = self.require_chat().render(prompt, tools, generation_prompt=True)
        return self.encode_text(text, special=False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def save(self, folder: Path) -> None:
        """Copy the tokenizer's files, byte for byte, and write the chat template that replaced its own."""
        folder.mkdir(exist_ok=True)
        for name, file in (self.files | self._named_templates()).items():
            if name not in self.files_not_copied:
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(file, folder / name)
        if self.given_template is not None:
            (folder / "chat_template.jinja").write_text(self.given_template, encoding="utf-8")

    def _named_templates(self) -> dict[str, Path]:
        """Return further chat templates of the tokenizer, which `apply_chat_template` takes by name.

        There are none unless the main template is a file too: transformers would see only these, and no main one.
        """
        template = self.files.get("chat_template.jinja")
        if template is None or self.given_template is not None:
            return {}
        folder = PurePosixPath(TOOL_TEMPLATE).parent
        named = {}
        for file in sorted(template.parent.joinpath(folder).glob("*.jinja")):
            named[str(folder / file.name)] = file
        return named

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of all that decides ids and labels: files, chat template and the date that it writes."""
        settings = (tokenizers.__version__, self._given_template)
        digest = hashlib.sha256(repr(settings).encode())
        # Names and sizes too, so that the bytes of two files cannot be taken for those of others.
        for name, file in sorted(self.files.items()):
            digest.update(f"\0{name}\0{file.stat().st_size}\0".encode() + file.read_bytes())
        if self.date is not None and self.writes_date:
            digest.update(f"\0{self.date}".encode())
        return digest.hexdigest()


def joined(named: Mapping[str, str]) -> str:
    """Return one chat template made of those that a tokenizer names: the one for tools is used when there are tools."""
    plain = str(named.get("default") or "")
    with_tools = str(named.get("tool_use") or "")
    if not plain or not with_tools:
        return plain
    # `{{ '' }}` keeps a line break at a template's beginning. Jinja never writes the one at its end.
    with_tools = with_tools.removesuffix("\n")
    plain = plain.removesuffix("\n")
    return "{% if tools %}{{ '' }}" + with_tools + "{% else %}{{ '' }}" + plain + "{% endif %}"


def load_tokenizer(
    model: ModelConfig,
    cache: Path | None = None,
    *,
    date: str | None = None,
) -> Tokenizer:
    """Return the tokenizer of a model, or of `model.tokenizer` if that is set.

    `date`: the day that a chat template gets when it asks for today's; by default the real one, as at inference.
    Raise ModelError if there is no usable tokenizer, and EnvironmentFault if the hub cannot be reached.
    """
    path = model.tokenizer or model.path
    files = hub.find_files(model, path, (*FILES, *MODEL_FILES))
    if "vision_config" in read_json(files.get("config.json")):
        files |= hub.find_files(model, path, PROCESSOR_FILES)

    vocabularies = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
    if not any(name in files for name in vocabularies):
        raise ModelError(f"{path} holds no tokenizer; expected one of {', '.join(vocabularies)}")
    return Tokenizer(path, files, _given_template(model), cache, date)


def _given_template(model: ModelConfig) -> tuple[str, str] | None:
    """Return the (name, source) of the chat template that a config names."""
    if model.chat_template is None:
        return None
    if model.chat_template == BUILT_IN_TEMPLATE:
        return "the built-in chatml", CHATML
    file = Path(model.chat_template).expanduser()
    try:
        return str(file), file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"model.chat_template {model.chat_template} cannot be read: {error}; give a Jinja file, or `chatml`"
        ) from error
