"""Contents of the data, without a tokenizer: roles, turns, empty answers, languages, labels, image sizes.

For the data's page. Reads every record once; languages and images are looked at in a sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from kubetune.config.schema import Config, SourceConfig
from kubetune.data.prepared.histogram import bars
from kubetune.data.reading.formats import (
    Chat,
    Example,
    Judged,
    Label,
    Labelled,
    Pair,
    Preference,
    Text,
    convert,
    images_of,
)
from kubetune.data.reading.images import UnusableImage, image_file, verifier
from kubetune.data.reading.problems import Problems
from kubetune.data.reading.sources import class_names
from kubetune.data.reading.splits import read_taken
from kubetune.data.text.labels import is_vector
from kubetune.data.text.tokenizer import cache_folder

_TEXTS_FOR_LANGUAGES = 300
_SHORTEST_TEXT = 20
_IMAGES = 300
_SURE = 0.6
_EXAMPLES = 8
_EMPTY = "is empty"
"""In what formats.convert says of a record whose answer, or question, is no text at all."""


@dataclass
class Survey:
    """Contents of the records of one source; of `refused` and `unreadable` ones nothing else is known.

    `empty`: where the first records without an answer are.
    """

    path: str
    records: int = 0
    refused: int = 0
    unreadable: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    roles: Counter[str] = field(default_factory=Counter)
    characters: Counter[str] = field(default_factory=Counter)
    turns: Counter[int] = field(default_factory=Counter)
    systems: Counter[str] = field(default_factory=Counter)
    labels: Counter[str] = field(default_factory=Counter)
    languages: dict[str, Counter[str]] = field(default_factory=dict)
    empty_answers: int = 0
    empty: list[str] = field(default_factory=list)
    image_sizes: list[tuple[int, int]] = field(default_factory=list)
    images: int = 0
    unusable: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> dict[str, Any]:
        """For the page."""
        return {
            "path": self.path,
            "records": self.records,
            "refused": self.refused,
            "unreadable": self.unreadable,
            "kinds": self.kinds.most_common(),
            "roles": [
                (role, count, round(self.characters[role] / count))
                for role, count in self.roles.most_common()
            ],
            "turns": sorted(self.turns.items()),
            "turn_bars": bars(self.turns.elements()),
            "systems": len(self.systems),
            "labels": self.labels.most_common(50),
            "label_count": len(self.labels),
            "languages": {role: found.most_common(6) for role, found in self.languages.items()},
            "empty_answers": self.empty_answers,
            "empty": self.empty,
            "images": self.images,
            "image_sizes": _sizes(self.image_sizes),
            "unusable": self.unusable.most_common(),
        }


def survey(config: Config) -> list[dict[str, Any]]:
    """A survey of each source of training."""
    name_language = _language_namer()
    return [_survey(source, config, name_language).to_json() for source in config.data.train]


def _survey(
    source: SourceConfig, config: Config, name_language: Callable[[str], str] | None
) -> Survey:
    found = Survey(source.path)
    labelled = config.task == "sequence_classification"
    names = dict(enumerate(class_names(source))) if labelled else {}
    verify, cache = verifier(), cache_folder(config.data.cache)
    problems = Problems(0)
    for record in read_taken(source, config.training.seed, problems):
        found.records += 1
        try:
            example = convert(record.value, source.format, source.columns, kind=config.record_kind)
        except ValueError as error:
            if _EMPTY in str(error):
                _note_empty(found, record.where)
            found.refused += 1
            continue  # a bad record, which the check itself names
        found.kinds[_KINDS[type(example)]] += 1
        for role, text in _texts(example):
            found.roles[role] += 1
            found.characters[role] += len(text)
            sampled = found.languages.setdefault(role, Counter()) if name_language else None
            if (
                sampled is not None
                and sampled.total() < _TEXTS_FOR_LANGUAGES
                and len(text) >= _SHORTEST_TEXT
            ):
                assert name_language is not None
                sampled[name_language(text)] += 1
        if _has_no_answer(example):
            _note_empty(found, record.where)
        if isinstance(example, Labelled):
            found.labels.update(_classes(example.label, names))
        if isinstance(example, Chat):
            found.turns[sum(message["role"] == "assistant" for message in example.messages)] += 1
            found.systems.update(m["content"] for m in example.messages if m["role"] == "system")
        _look_at_images(
            found, images_of(example), partial(image_file, record.file, cache=cache), verify
        )
    found.unreadable = problems.total
    found.records += problems.total
    return found


_KINDS: dict[type, str] = {
    Chat: "conversations",
    Pair: "prompts with a completion",
    Text: "plain texts",
    Labelled: "texts with a label",
    Preference: "pairs of answers",
    Judged: "judged answers",
}


def _texts(example: Example) -> Iterator[tuple[str, str]]:
    """Pairs of a role and what it says."""
    match example:
        case Chat():
            yield from (
                (message["role"], message.get("content") or "") for message in example.messages
            )
        case Pair():
            yield "prompt", example.prompt
            yield "completion", example.completion
        case Text():
            yield "text", example.text
        case Preference():
            yield from _texts(example.chosen)
            yield from (
                ("rejected", text)
                for _, text in list(_texts(example.rejected))[_prompt_texts(example) :]
            )
        case Judged():
            yield from _texts(example.answer)
        case Labelled():
            yield "text", " ".join(filter(None, (example.text, example.second)))


def _prompt_texts(pair: Preference) -> int:
    """Number of the texts before the answers."""
    return pair.chosen.context if isinstance(pair.chosen, Chat) else 1


def _classes(label: Label, names: Mapping[Any, str]) -> Iterator[str]:
    """The meaning of a label, by the names that its data set has for numbers."""
    if is_vector(label):
        label = tuple(index for index, is_set in enumerate(label) if is_set)
    return (names.get(one, str(one)) for one in (label if isinstance(label, tuple) else (label,)))


def _has_no_answer(example: Example) -> bool:
    return isinstance(example, Chat) and not any(
        message["role"] == "assistant" for message in example.messages
    )


def _note_empty(found: Survey, where: str) -> None:
    found.empty_answers += 1
    if len(found.empty) < _EXAMPLES:
        found.empty.append(where)


def _look_at_images(
    found: Survey, images: Sequence[str], find: Callable[[str], Path], verify: Callable[[Any], Any]
) -> None:
    for path in images:
        found.images += 1
        if len(found.image_sizes) + found.unusable.total() >= _IMAGES:
            continue
        try:
            facts = verify(find(path))
            found.image_sizes.append((facts.width, facts.height))
        except UnusableImage as error:
            found.unusable[error.reason] += 1


def _sizes(sizes: list[tuple[int, int]]) -> dict[str, Any] | None:
    """Smallest, middle and largest by pixels, and the sizes seen most."""
    if not sizes:
        return None
    ordered = sorted(sizes, key=lambda size: size[0] * size[1])
    return {
        "sampled": len(sizes),
        "smallest": ordered[0],
        "middle": ordered[len(ordered) // 2],
        "largest": ordered[-1],
        "common": Counter(sizes).most_common(5),
        "longer_sides": bars(max(size) for size in sizes),
    }


@cache
def _language_namer() -> Callable[[str], str] | None:
    """The language of a text, or "unclear"; None where py3langid is not installed."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        return None
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)

    def name(text: str) -> str:
        language, probability = identifier.classify(text)
        return str(language) if probability >= _SURE else "unclear"

    return name
