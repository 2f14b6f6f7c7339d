"""Contents of the data, without a tokenizer: roles, turns, empty answers, languages, labels, image sizes.

For the data's page. Reads every record once; languages and images are looked at in a sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from kubetune.config.schema import DataConfig, RecordKind, SourceConfig
from kubetune.data.length_bars import bars
from kubetune.data.reading.examples import (
    Chat,
    Example,
    Judged,
    Label,
    Labelled,
    Pair,
    Preference,
    Text,
    images_of,
)
from kubetune.data.reading.formats import convert
from kubetune.data.reading.images import UnusableImage, image_file, verifier
from kubetune.data.reading.record_problems import Problems
from kubetune.data.reading.sources import class_names
from kubetune.data.reading.strict_json import JsonObject
from kubetune.data.reading.taken import read_taken
from kubetune.data.text.class_labels import is_vector
from kubetune.data.text.tokenizer import cache_folder

# Texts of each role whose language is named, and the fewest characters of one: languages of short texts are guesses.
_TEXTS_FOR_LANGUAGES: Final = 300
_SHORTEST_TEXT: Final = 20
# Least probability of a language that is named.
_SURE: Final = 0.6
# Images of a source that are opened.
_MOST_IMAGES: Final = 300
# Records without an answer that are named.
_MOST_PLACES: Final = 8
# In what formats.convert says of a record whose answer, or question, is no text at all.
_EMPTY: Final = "is empty"

NameLanguage = Callable[[str], str]


def survey(
    data: DataConfig,
    kind: RecordKind,
    seed: int,
) -> list[JsonObject]:
    """Return what each source of training holds, for the page. `seed`: of the run, which chooses by `path#N`."""
    surveys = []
    for source in data.train:
        of_source = _Survey(source, cache_folder(data.cache), _language_namer())
        of_source.read(kind, seed)
        surveys.append(of_source.to_json())
    return surveys


@dataclass
class _Survey:
    """Contents of the records of one source. Records that were refused or could not be read are only counted."""

    source: SourceConfig
    cache: Path
    name_language: NameLanguage | None  # None where the library for it is not installed
    records: int = 0
    refused: int = 0
    unreadable: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    roles: Counter[str] = field(default_factory=Counter)  # texts by who says them
    characters: Counter[str] = field(default_factory=Counter)  # of these texts
    turns: Counter[int] = field(default_factory=Counter)  # conversations by number of answers
    systems: Counter[str] = field(default_factory=Counter)
    labels: Counter[str] = field(default_factory=Counter)
    languages: dict[str, Counter[str]] = field(default_factory=dict)  # by role
    empty_answers: int = 0
    empty: list[str] = field(default_factory=list)  # places of the first records without an answer
    images: int = 0
    image_sizes: list[tuple[int, int]] = field(default_factory=list)
    unusable: Counter[str] = field(default_factory=Counter)  # images by what is wrong with them

    def read(self, kind: RecordKind, seed: int) -> None:
        """Read all records of the source."""
        names: dict[Any, str] = {}  # of classes, by number
        if kind == "labelled":
            names = dict(enumerate(class_names(self.source)))

        # `Problems(0)` counts and keeps none: the check itself names them.
        problems = Problems(0)
        verify = verifier()
        for record in read_taken(self.source, seed, problems):
            try:
                example = convert(
                    record.value,
                    self.source.format,
                    self.source.columns,
                    kind=kind,
                )
            except ValueError as error:
                # The check itself says why.
                self.refused += 1
                if _EMPTY in str(error):
                    self._note_empty(record.where)
                continue

            self.kinds[_KINDS[type(example)]] += 1
            for role, text in _texts(example):
                self._add_text(role, text)
            if isinstance(example, Labelled):
                self.labels.update(_classes(example.label, names))
            if isinstance(example, Chat):
                self._add_chat(example, record.where)
            for image in images_of(example):
                self._add_image(record.file, image, verify)

        self.unreadable = problems.total
        self.records = self.refused + self.kinds.total() + self.unreadable

    def to_json(self) -> JsonObject:
        """Return the survey for the page."""
        roles = []
        for role, count in self.roles.most_common():
            roles.append((role, count, round(self.characters[role] / count)))
        languages = {role: counts.most_common(6) for role, counts in self.languages.items()}
        return {
            "path": self.source.path,
            "records": self.records,
            "refused": self.refused,
            "unreadable": self.unreadable,
            "kinds": self.kinds.most_common(),
            "roles": roles,
            "turns": sorted(self.turns.items()),
            "turn_bars": bars(self.turns.elements()),
            "systems": len(self.systems),
            "labels": self.labels.most_common(50),
            "label_count": len(self.labels),
            "languages": languages,
            "empty_answers": self.empty_answers,
            "empty": self.empty,
            "images": self.images,
            "image_sizes": _sizes(self.image_sizes),
            "unusable": self.unusable.most_common(),
        }

    def _add_text(self, role: str, text: str) -> None:
        self.roles[role] += 1
        self.characters[role] += len(text)
        if self.name_language is None:
            return

        # A sample is enough to name the languages, and each text takes its time.
        languages = self.languages.setdefault(role, Counter())
        if languages.total() < _TEXTS_FOR_LANGUAGES and len(text) >= _SHORTEST_TEXT:
            languages[self.name_language(text)] += 1

    def _add_chat(self, chat: Chat, where: str) -> None:
        answers = sum(message["role"] == "assistant" for message in chat.messages)
        self.turns[answers] += 1
        if not answers:
            self._note_empty(where)
        for message in chat.messages:
            if message["role"] == "system":
                self.systems[message["content"]] += 1

    def _add_image(
        self,
        data_file: str,
        path: str,
        verify: Callable[[Any], Any],
    ) -> None:
        self.images += 1
        if len(self.image_sizes) + self.unusable.total() >= _MOST_IMAGES:
            return
        try:
            facts = verify(image_file(data_file, path, cache=self.cache))
        except UnusableImage as error:
            self.unusable[error.reason] += 1
            return

        self.image_sizes.append((facts.width, facts.height))

    def _note_empty(self, where: str) -> None:
        self.empty_answers += 1
        if len(self.empty) < _MOST_PLACES:
            self.empty.append(where)


_KINDS: dict[type, str] = {
    Chat: "conversations",
    Pair: "prompts with a completion",
    Text: "plain texts",
    Labelled: "texts with a label",
    Preference: "pairs of answers",
    Judged: "judged answers",
}


def _texts(example: Example) -> Iterator[tuple[str, str]]:
    """Yield pairs of a role and what it says."""
    match example:
        case Chat():
            for message in example.messages:
                yield message["role"], message.get("content") or ""
        case Pair():
            yield "prompt", example.prompt
            yield "completion", example.completion
        case Text():
            yield "text", example.text
        case Preference():
            yield from _texts(example.chosen)
            # Both answers have the same prompt, which counts once.
            prompt_texts = example.chosen.context if isinstance(example.chosen, Chat) else 1
            for _, text in list(_texts(example.rejected))[prompt_texts:]:
                yield "rejected", text
        case Judged():
            yield from _texts(example.answer)
        case Labelled():
            yield "text", " ".join(filter(None, (example.text, example.second)))


def _classes(label: Label, names: Mapping[Any, str]) -> Iterator[str]:
    """Yield what a label means, by the names that its data set has for numbers."""
    classes: Sequence[Any] = label if isinstance(label, tuple) else (label,)
    # (0.0, 1.0, 1.0) are the classes 1 and 2.
    if is_vector(label):
        classes = [index for index, is_set in enumerate(label) if is_set]
    for name in classes:
        yield names.get(name, str(name))


def _sizes(sizes: Sequence[tuple[int, int]]) -> JsonObject | None:
    """Return the smallest, middle and largest by pixels, and the sizes seen most."""
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
def _language_namer() -> NameLanguage | None:
    """Return a function that names the language of a text, or "unclear"; None where py3langid is not installed."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        return None

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)

    def name(text: str) -> str:
        language, probability = identifier.classify(text)
        return str(language) if probability >= _SURE else "unclear"

    return name
