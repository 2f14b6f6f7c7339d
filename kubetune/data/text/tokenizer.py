"""A model's tokenizer and chat template: text and conversations to ids and back.

Ids and renderings are those of transformers' `AutoTokenizer` (see tokenizer_files.py). What of them is a label is
decided in encode.py.
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
from typing import Any

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
    """Return the folder of prepared data and of what is known about tokenizers. `folder`: `data.cache`, if it is set."""
    if folder:
        return Path(folder).expanduser()
    return user_cache(os.environ) / "kubetune"


# Texts that show what a tokenizer puts before one; a vocabulary of few words may know none of them.
PROBES = ("a", "0", "the")


def _texts_to_try(backend: tokenizers.Tokenizer) -> Iterator[str]:
    """Yield texts that a tokenizer should make something of. Copying its vocabulary takes long, so that comes last."""
    yield from PROBES
    added = {str(token) for token in backend.get_added_tokens_decoder().values()}
    yield from islice(backend.get_vocab().keys() - added, 100)


class Tokenizer:
    """Made by `load_tokenizer`. Loading what is heavy is put off until it is used, so that a cached run starts fast.

    Attributes: `name` for messages; `files`, those it was read from; `date`, what a chat template is told that asks for
    today's, None for the real one.
    """

    def __init__(
        self,
        name: str,
        files: Mapping[str, Path],
        template: tuple[str, str] | None = None,
        cache: Path | None = None,
        date: str | None = None,
    ) -> None:
        """`template` is the (name, source) of a chat template that replaces the tokenizer's own."""
        self.name = name
        self.files = dict(files)
        self._config = read_json(self.files.get("tokenizer_config.json"))
        self._given_template = template
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
            self.files, self._config, self._cache, names_missing=self._names_missing
        )

    @cached_property
    def _loaded(self) -> tuple[tokenizers.Tokenizer, list[int], Any]:
        backend = load_backend(
            self.files, self._config, self._cache, names_missing=self._names_missing
        )
        backend.no_truncation()
        backend.no_padding()
        prefix = self._prefix_of(backend)
        # Besides adding special tokens, post-processors may trim offsets, which are wanted exact here.
        post_processor = backend.post_processor
        backend.post_processor = tokenizers.processors.Sequence([])
        return backend, prefix, post_processor

    def _prefix_of(self, backend: tokenizers.Tokenizer) -> list[int]:
        """Return the ids that come before those of a text. Raises ModelError if no text has ids."""
        for text in _texts_to_try(backend):
            bare = backend.encode(text, add_special_tokens=False).ids
            full = backend.encode(text, add_special_tokens=True).ids
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
        """The tokenizer proper; it adds no special tokens."""
        return self._loaded[0]

    @cached_property
    def framing_backend(self) -> tokenizers.Tokenizer:
        """The tokenizer with its post-processor, which puts special tokens around a text or a pair of texts."""
        framing = tokenizers.Tokenizer.from_str(self.backend.to_str())
        framing.post_processor = self._loaded[2]
        return framing

    @property
    def prefix(self) -> list[int]:
        """Ids of the special tokens that the tokenizer puts before a text, such as BOS; often none."""
        return self._loaded[1]

    @cached_property
    def chat(self) -> LimitedTemplate | None:
        """The chat template, or None when the model has none."""
        name, source = self._given_template or ("the tokenizer's", self._own_template())
        return LimitedTemplate(source, self.special, name, self.date) if source else None

    @property
    def writes_date(self) -> bool:
        """The chat template may write today's date."""
        return self.chat is not None and writes_date(self.chat.source)

    @property
    def given_template(self) -> str | None:
        """The source of the chat template that the run's config names, which replaces the tokenizer's."""
        return self._given_template[1] if self._given_template else None

    @property
    def has_given_template(self) -> bool:
        """The run's own chat template replaces the tokenizer's."""
        return self._given_template is not None

    @property
    def spared(self) -> tuple[str, ...]:
        """Files that are not copied with the tokenizer: the model's, and templates that the run's own replaces."""
        if not self.has_given_template:
            return MODEL_FILES
        return (*MODEL_FILES, "chat_template.jinja", TOOL_TEMPLATE)

    def require_chat(self) -> LimitedTemplate:
        """The chat template. Raises ModelError, saying how to give one, when there is none."""
        if self.chat is None:
            raise ModelError(
                f"the tokenizer of {self.name} has no chat template, and the data are conversations; set "
                "`model.chat_template: chatml` (built in), or a Jinja file: `model.chat_template: template.jinja`"
            )
        self.chat.load()
        return self.chat

    def _own_template(self) -> str:
        """Return the model's template: from its files, or else from its settings, as transformers does."""
        templates = {}  # by name
        for name, file in (("default", "chat_template.jinja"), ("tool_use", TOOL_TEMPLATE)):
            if file in self.files:
                templates[name] = self.files[file].read_text("utf-8")
        if templates:
            return joined(templates)
        setting = self._config.get("chat_template")
        if not setting:
            setting = read_json(self.files.get("chat_template.json")).get("chat_template")
        if isinstance(setting, list):
            return joined({entry["name"]: entry["template"] for entry in setting})
        return joined({"default": setting or ""})

    @cached_property
    def added_tokens(self) -> dict[int, str]:
        """The texts of the tokens beside the vocabulary proper, by id."""
        decoder = self.backend.get_added_tokens_decoder()
        return {id: token.content for id, token in decoder.items()}

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of all special tokens."""
        decoder = self.backend.get_added_tokens_decoder()
        return frozenset(id for id, token in decoder.items() if token.special)

    @cached_property
    def find_special(self) -> Callable[[str], object]:
        """A function that returns something true for a text that holds the text of a special token, else None."""
        texts = [self.added_tokens[id] for id in self.special_ids]
        if not texts:
            return lambda _: None
        texts.sort(key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts))).search

    @property
    def eos_id(self) -> int:
        """The token that ends a text. Raises ModelError when the tokenizer has none."""
        id = self._id("eos_token")
        if id is None:
            raise ModelError(
                f"the tokenizer of {self.name} has no eos_token, so the model could not learn to stop; name one in "
                "its tokenizer_config.json"
            )
        return id

    @cached_property
    def turn_end_id(self) -> int | None:
        """The token with which the chat template ends an answer, such as `<|im_end|>`."""
        if self.chat is None or not self.chat.closing:
            return None
        for id in reversed(self.encode_text(self.chat.closing, special=False)):
            if id in self.special_ids:
                return id
        return None

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """All tokens that end generation: the tokenizer's, the model's, and the end of a turn."""
        generation = read_json(self.files.get("generation_config.json")).get("eos_token_id")
        listed = generation if isinstance(generation, list) else [generation]
        ids = [self._id("eos_token"), self.turn_end_id, *listed]
        return tuple(dict.fromkeys(id for id in ids if id is not None))

    @property
    def pad_id(self) -> int:
        """Token that fills up batches that must be rectangular; never a label."""
        for id in (self._id("pad_token"), self._stated_pad_id):
            if id is not None:
                return id
        return self.eos_id

    @property
    def names_padding(self) -> bool:
        """The tokenizer or the model names a token for padding; EOS stands in for it where neither does."""
        return "pad_token" in self.special or self._stated_pad_id is not None

    @property
    def _stated_pad_id(self) -> int | None:
        id = read_json(self.files.get("config.json")).get("pad_token_id")
        return id if isinstance(id, int) and id >= 0 else None  # some models state -1

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
        """Most tokens that the model takes, where its files say so."""
        limits = (
            self._config.get("model_max_length"),
            read_json(self.files.get("config.json")).get("max_position_embeddings"),
        )
        return min((int(limit) for limit in limits if limit), default=None)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self.backend.get_vocab().values()) + 1

    def encode_text(self, text: str, *, special: bool = True) -> list[int]:
        """Return the ids of a text; with `special` after the special tokens that begin one."""
        ids = self.backend.encode(text, add_special_tokens=False).ids
        if special:
            return [*self.prefix, *ids]
        return ids

    def encode_prompt(
        self, prompt: str | Sequence[Message], tools: Sequence[Any] | None = None
    ) -> list[int]:
        """Return the ids that a model is given to go on from: those that it saw before its labels in training.

        `prompt` is a text or the messages of a conversation. Raises ValueError when the template refuses them.
        """
        if isinstance(prompt, str):
            return self.encode_text(prompt)
        text = self.require_chat().render(prompt, tools, generation_prompt=True)
        return self.encode_text(text, special=False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def save(self, folder: Path) -> None:
        """Copy the tokenizer's files, byte for byte, and the chat template that replaced its own."""
        folder.mkdir(exist_ok=True)
        for name, file in (self.files | self._named_templates()).items():
            if name not in self.spared:
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(file, folder / name)
        if self._given_template:
            (folder / "chat_template.jinja").write_text(self._given_template[1], encoding="utf-8")

    def _named_templates(self) -> dict[str, Path]:
        """Return the chat templates beside the tokenizer's, which `apply_chat_template` can be told to use.

        Only if the tokenizer's is a file too: where these lie alone, transformers sees no other.
        """
        template = self.files.get("chat_template.jinja")
        if template is None or self.has_given_template:
            return {}
        folder = PurePosixPath(TOOL_TEMPLATE).parent
        named = {}
        for file in sorted(template.parent.joinpath(folder).glob("*.jinja")):
            named[str(folder / file.name)] = file
        return named

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of all that decides ids and labels: files, chat template and the date that it writes."""
        digest = hashlib.sha256(repr((tokenizers.__version__, self._given_template)).encode())
        for name, file in sorted(self.files.items()):
            digest.update(f"\0{name}\0{file.stat().st_size}\0".encode() + file.read_bytes())
        if self.date is not None and self.writes_date:
            digest.update(f"\0{self.date}".encode())
        return digest.hexdigest()


def joined(named: Mapping[str, str]) -> str:
    """Return one chat template of those that a tokenizer names. The one for tools is used where there are tools."""
    plain = str(named.get("default") or "")
    with_tools = str(named.get("tool_use") or "")
    if not plain or not with_tools:
        return plain
    # `{{ '' }}` keeps a line break that a template begins with. The one that it ends with is never written.
    with_tools = with_tools.removesuffix("\n")
    plain = plain.removesuffix("\n")
    return "{% if tools %}{{ '' }}" + with_tools + "{% else %}{{ '' }}" + plain + "{% endif %}"


def load_tokenizer(
    model: ModelConfig, cache: Path | None = None, *, date: str | None = None
) -> Tokenizer:
    """Return the tokenizer of a model, from `model.tokenizer` where that is given.

    `date`: what a chat template is told that asks for today's; left out: the real one, as at inference.

    Raises ModelError when it cannot be had, saying why, and EnvironmentFault when the hub cannot be reached.
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
