"""The findings about the data of a run, from the counts that a check makes and prepared rows keep.

This is the only place that puts them into words. A new finding is one function and one line in FINDERS.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from kubetune.base.humanize import counted, place, unused_keys
from kubetune.config.schema import Config, SourceConfig
from kubetune.data.findings.finding import MOST_PLACES, Finding, Severity
from kubetune.data.prepared.pipeline import Split
from kubetune.data.reading.sources import evaluated_rows, locate
from kubetune.data.reading.splits import require_rows, split_sources
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.errors import DataError
from kubetune.plan.base_model import embeddings_of, positions_of

LITTLE_TRAINED: Final = 0.05
MOST_NAMES: Final = 8
"""So many labels are named."""


@dataclass(frozen=True)
class Counts:
    """What the findings are made from."""

    config: Config
    sources: Mapping[Split, Sequence[SourceConfig]]
    stats: Mapping[
        Split, Mapping[str, Any]
    ]  # of each split: counts of its records, and RowWatch.facts
    tokenizer: Tokenizer | None  # to show a token that the model does not know
    names: Mapping[str, str]  # of splits that are not called what they are

    def splits(self) -> Iterator[tuple[Split, str, Mapping[str, Any]]]:
        """Yield each split, what it is called, and its counts."""
        for split, stats in self.stats.items():
            yield split, self.names.get(split, split), stats

    def places(self, split: Split, pairs: Sequence[Sequence[int]]) -> tuple[str, ...]:
        """Return pairs of a source's index and a record's, as people read them: `data.jsonl records 5, 9`."""
        by_source: dict[int, list[str]] = {}
        for source, record in pairs:
            by_source.setdefault(source, []).append(f"{record + 1:,}")
        texts = []
        for source, records in by_source.items():
            noun = "record" if len(records) == 1 else "records"
            path = place(self.sources[split][source].path)
            texts.append(f"{path} {noun} {', '.join(records)}")
        return tuple(texts)

    def places_of(self, split: Split, what: str) -> tuple[str, ...]:
        """Return the first records of a split that are counted under `what`."""
        pairs = []
        for index, source in enumerate(self.stats[split]["sources"]):
            pairs += [(index, record) for record in source["places"].get(what, ())]
        return self.places(split, pairs[:MOST_PLACES])


def find(
    config: Config,
    stats: Mapping[Split, Mapping[str, Any]],
    tokenizer: Tokenizer | None = None,
    *,
    names: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Finding, ...]:
    """Return all findings about the data of a run: errors first, then warnings, then notes.

    `stats`: of each split, `splits.summarise` and `RowWatch.facts` together. `names`: of splits, where they are called
    something else.
    """
    counts = Counts(config, split_sources(config), stats, tokenizer, names)
    findings: list[Finding] = []
    for finder in FINDERS:
        findings += finder(counts)
    severities = ("error", "warning", "note")
    return tuple(sorted(findings, key=lambda finding: severities.index(finding.severity)))


def _rows(number: int, of: int, unit: str = "row") -> str:
    """Return `3 of 20 rows`."""
    return f"{number:,} of {counted(of, unit)}"


def _bad_records(counts: Counts) -> Iterator[Finding]:
    for split, name, stats in counts.splits():
        if number := stats["refused"] + stats["unreadable"]:
            yield Finding(
                "bad_records",
                "error",
                split,
                f"{counted(number, 'record')} of {name} cannot be used",
                number,
                advice="`kubetune data check` names their lines",
            )


def _too_few_rows(counts: Counts) -> Iterator[Finding]:
    for split, _, stats in counts.splits():
        if stats["refused"] + stats["unreadable"]:
            continue  # once these are mended, enough may be left
        try:
            require_rows(counts.config, split, dict(stats))
        except DataError as error:
            text = str(error).removesuffix(" Nothing was written.")
            yield Finding("too_few_rows", "error", split, text.rstrip("."))


def _unknown_ids(counts: Counts) -> Iterator[Finding]:
    embeddings = embeddings_of(counts.config, os.environ)
    largest = max((stats["largest_id"] for stats in counts.stats.values()), default=-1)
    if embeddings is None or largest < embeddings.known:
        return
    seen = [stats["unknown_ids"] for stats in counts.stats.values()]
    holding, number = "some rows", 0
    if all(facts["known"] == embeddings.known for facts in seen):
        number = sum(facts["rows"] for facts in seen)
        holding = _rows(number, sum(stats["rows"] for stats in counts.stats.values()))
    token = str(largest)
    if counts.tokenizer is not None:
        token = counts.tokenizer.decode([largest], skip_special_tokens=False)
    yield Finding("unknown_ids", "error", "", embeddings.say(largest, token, holding), number)


def _positions(counts: Counts) -> Iterator[Finding]:
    positions = positions_of(counts.config, os.environ)
    longest = max((stats["longest_kept"] for stats in counts.stats.values()), default=0)
    if positions is not None and longest > positions.limit:
        severity: Severity = "error" if positions.is_table else "warning"
        yield Finding("positions", severity, "", positions.say(longest), longest)


def _in_train(counts: Counts) -> Iterator[Finding]:
    for split, name, stats in counts.splits():
        facts = stats.get("in_train") or {"rows": 0}
        number = facts["rows"]
        if not number:
            continue
        if split == "eval":
            meaning = "the model looks better than it is"
        else:
            meaning = "what is trained on is not forgotten"
        are = "is" if number == 1 else "are"
        yield Finding(
            "in_train",
            "warning",
            split,
            f"{_rows(number, stats['rows'])} of {name} {are} in train too: {meaning}",
            number,
            counts.places(split, facts["places"]),
            _advice_on_leaks(counts, split, facts),
        )


def _advice_on_leaks(counts: Counts, split: Split, facts: Mapping[str, Any]) -> str:
    key = "data.eval" if split == "eval" else "evaluation.forget"
    if facts["same_records"]:
        return (
            f"data.train and {key} take the same records of a file: give ranges that do not overlap, "
            "or other files"
        )
    if split == "eval" and isinstance(counts.config.data.eval, float):
        return (
            f"data.eval: {counts.config.data.eval:g} chooses records by their number, so of those that are there "
            "twice one may be trained on and the other evaluated: remove the repeats, or give data.eval a file"
        )
    return f"Remove them from data.train, or give {key} other rows"


def _repeats(counts: Counts) -> Iterator[Finding]:
    for split, name, stats in counts.splits():
        if number := stats["duplicates"]:
            yield Finding(
                "repeats",
                "warning",
                split,
                f"{_rows(number, stats['rows'])} of {name} {'repeats' if number == 1 else 'repeat'} another",
                number,
                counts.places(split, stats["duplicate_places"]),
            )


def _reversed_pairs(counts: Counts) -> Iterator[Finding]:
    for split, name, stats in counts.splits():
        if number := stats["reversed"]:
            stand = "stands" if number == 1 else "stand"
            yield Finding(
                "reversed_pairs",
                "warning",
                split,
                f"{_rows(number, stats['rows'], 'pair')} of {name} {stand} there a second time the other way "
                "round: the answer chosen in one is rejected in the other",
                number,
                counts.places(split, stats["reversed_places"]),
                "Decide which answer is better, and remove the other pair",
            )


def _one_verdict(counts: Counts) -> Iterator[Finding]:
    for split, name, stats in counts.splits():
        answers = stats["answers"]
        good, bad = answers.get("good", 0), answers.get("bad", 0)
        if (good or bad) and not (good and bad):
            only, missing = ("good", "bad") if good else ("bad", "good")
            yield Finding(
                "one_verdict",
                "warning",
                split,
                f"all {counted(good + bad, 'answer')} of {name} are judged {only}: the model learns no "
                "difference",
                good + bad,
                advice=f"Add answers that are judged {missing}, or train on the good ones with task: causal_lm",
            )


def _labels_without_rows(counts: Counts) -> Iterator[Finding]:
    for split, name, stats in counts.splits():
        if split == "forget":
            continue
        missing = [label for label, number in stats["classes"].items() if not number]
        if not missing:
            continue
        names = ", ".join(missing[:MOST_NAMES]) + (" …" if len(missing) > MOST_NAMES else "")
        meaning = "they are not measured, and means over the classes leave them out where nothing is predicted as one"
        if name == "train":
            meaning = "they are never learned"
        yield Finding(
            "labels_without_rows",
            "warning",
            split,
            f"{counted(len(missing), 'label')} without a row of {name}: {names}; {meaning}",
            len(missing),
            advice="`classification.labels` names those that are meant",
        )


_LEFT_OUT: Final = (
    ("overlong", "left out as too long, with more than {limit:,} tokens",
     "A larger data.max_length keeps them, data.overlong: truncate cuts them"),
    ("truncated", "truncated at {limit:,} tokens", "A larger data.max_length keeps them whole"),
    ("no_label", "left out with nothing to train on", "They have no answer, or it was truncated"),
    ("unusable", "left out, whose answers are equal, empty, or to different prompts", ""),
)  # fmt: skip
"""Records that lose something: what they are counted under, what became of them, what to do."""


def _lost(counts: Counts) -> Iterator[Finding]:
    limit = counts.config.data.max_length
    for split, name, stats in counts.splits():
        for what, fate, advice in _LEFT_OUT:
            if number := stats[what]:
                records = _rows(number, stats["records"], "record")
                sentence = f"{records} of {name} {fate.format(limit=limit)}"
                places = counts.places_of(split, what)
                yield Finding(what, "warning", split, sentence, number, places, advice)


_CHANGED: Final = (
    ("plain_prompts",
     "with a prompt as plain text, around which the model's chat template does not go, as it will in `chat` and "
     "`generate`",
     "Write them as conversations, under `messages`"),
    ("reasoning_dropped", "with reasoning that the chat template leaves out", ""),
    ("unlike_prompt",
     "with an answer that does not begin where the generation prompt ends, which may open a thought: such a "
     "beginning is trained and never asked for",
     "Set model.chat_template to one that begins both alike"),
    ("rewrites_answer",
     "with an answer that the chat template writes otherwise than the data have it, and as it writes it, it is trained",
     "Choose a template that writes answers as they are (model.chat_template)"),
    ("begins_inside_token",
     "with an answer that begins inside a token, which holds the end of its prompt too (a space, a line break): that "
     "token is trained, but a model is asked behind the prompt",
     "Begin answers without white space, or set model.chat_template to one whose generation prompt does not end with "
     "a space"),
    ("bos_twice",
     "with BOS twice: the text begins with the token that the tokenizer writes before every text, and the second is "
     "trained",
     "Take it out of the texts, or set data.add_special_tokens: false"),
    ("special_texts", "with special tokens in their texts, which become such tokens", ""),
)  # fmt: skip
"""Rows that lack or have something of which their records say nothing."""

_IMAGES: Final = {
    "images_above_budget": (
        "image",
        "of more tokens than vision.image_max_tokens, being so narrow",
    ),
    "images_animated": ("animated image", "the first frame of which alone is seen"),
    "images_deep": ("image", "with more than 8 bits of grey, whose brighter parts become white"),
}


def _changed(counts: Counts) -> Iterator[Finding]:
    for split, name, stats in counts.splits():
        for what, meaning, advice in _CHANGED:
            if number := stats[what]:
                sentence = f"{_rows(number, stats['records'], 'record')} of {name} {meaning}"
                places = counts.places_of(split, what)
                yield Finding(what, "warning", split, sentence, number, places, advice)
        for what, (unit, meaning) in _IMAGES.items():
            if number := stats[what]:
                sentence = f"{counted(number, unit)} of {name}, {meaning}"
                places = counts.places_of(split, what)
                yield Finding(what, "warning", split, sentence, number, places)


def _little_trained(counts: Counts) -> Iterator[Finding]:
    if counts.config.task != "causal_lm":
        return
    for split, name, stats in counts.splits():
        share = stats["trained_tokens"] / max(1, stats["tokens"])
        if stats["rows"] and share < LITTLE_TRAINED:
            yield Finding(
                "little_trained",
                "warning",
                split,
                f"only {share:.1%} of the tokens of {name} are trained; the rest is only read",
                stats["trained_tokens"],
            )


def _samples(counts: Counts) -> Iterator[Finding]:
    """Find parts of sources that ask for more records than there are."""
    held_out = isinstance(counts.config.data.eval, float)
    for split, name, stats in counts.splits():
        if split == "eval" and held_out:
            continue  # its sources are those of train
        for source, available in zip(counts.sources[split], stats["available"], strict=True):
            if available is None:
                continue
            path, asked = place(source.path), locate(source).sample
            if asked is not None and asked > available:
                sentence = f"{name}: {path} asks for {asked:,} of {counted(available, 'record')}, and gets all"
                yield Finding("sample_beyond_end", "warning", split, sentence, asked - available)
            last = available if asked is None else min(asked, available)
            if source.range is not None and source.range[1] > last:
                begin, end = source.range
                sentence = (
                    f"{name}: range [{begin}, {end}) of {path} gets {last - begin:,} of {end - begin:,} records, as "
                    f"there are {last:,}"
                )
                yield Finding("range_beyond_end", "warning", split, sentence, end - last)


def _split_texts(counts: Counts) -> Iterator[Finding]:
    for split, name, stats in counts.splits():
        if number := stats["split"]:
            pieces = counted(stats["pieces"], "row")
            sentence = f"{_rows(number, stats['records'], 'record')} of {name} split into {pieces}"
            places = counts.places_of(split, "split")
            yield Finding("split", "note", split, sentence, number, places)


def _mix(counts: Counts) -> Iterator[Finding]:
    """Find rows that no evaluation takes, so that those of it are the mix that is trained on."""
    for split, name, stats in counts.splits():
        if name in ("train", "forget"):
            continue
        rows = [source["rows"] for source in stats["sources"]]
        weights = [source.weight for source in counts.sources[split]]
        evaluated = sum(evaluated_rows(rows, weights))
        if evaluated < stats["rows"]:
            sentence = (
                f"{_rows(evaluated, stats['rows'])} of {name} evaluated, the mix that their sources' "
                "weights make"
            )
            yield Finding("evaluated_mix", "note", split, sentence, evaluated)


def _answers(counts: Counts) -> Iterator[Finding]:
    """Find the lengths of answers that are compared: they may be all that is known of them."""
    for split, name, stats in counts.splits():
        answers, rows = stats["answers"], stats["rows"]
        if "chosen_tokens" in answers and rows:
            chosen = answers["chosen_tokens"] / rows
            rejected = answers["rejected_tokens"] / rows
            longer = answers.get("chosen_longer", 0) / rows
            sentence = (
                f"{name}: chosen answers of {chosen:,.1f} tokens, rejected of {rejected:,.1f}; "
                f"{longer:.0%} of the chosen longer"
            )
            yield Finding("answers", "note", split, sentence, rows)
        elif answers.get("good") and answers.get("bad"):
            sentence = f"{name}: {answers['good']:,} good answers and {answers['bad']:,} bad"
            yield Finding("answers", "note", split, sentence, rows)


def _taken_columns(counts: Counts) -> Iterator[Finding]:
    for split, name, stats in counts.splits():
        for taken, number in sorted(stats["taken"].items()):
            sentence = f"{name}: {taken}, in {counted(number, 'record')}"
            advice = "`data.columns` and `data.format` can say otherwise"
            yield Finding("taken_columns", "note", split, sentence, number, advice=advice)


def _blank_lines(counts: Counts) -> Iterator[Finding]:
    for split, name, stats in counts.splits():
        if number := stats["blank_lines"]:
            sentence = f"{name}: {counted(number, 'blank line')} among the records, passed over"
            yield Finding("blank_lines", "note", split, sentence, number)


def _unused(counts: Counts) -> Iterator[Finding]:
    for split, name, stats in counts.splits():
        sources = stats["sources"]
        for source in sources:
            if line := unused_keys(source["unused_keys"]):
                name = f"{name}, {place(source['path'])}" if len(sources) > 1 else name
                number = sum(source["unused_keys"].values())
                yield Finding("unused_keys", "note", split, f"{name}: {line}", number)
        if line := unused_keys(stats.get("files_not_read", {}), "files not read"):
            number = sum(stats["files_not_read"].values())
            yield Finding("files_not_read", "note", split, f"{name}: {line}", number)


FINDERS: Final[tuple[Callable[[Counts], Iterator[Finding]], ...]] = (
    _bad_records,
    _too_few_rows,
    _unknown_ids,
    _positions,
    _in_train,
    _lost,
    _changed,
    _labels_without_rows,
    _one_verdict,
    _reversed_pairs,
    _repeats,
    _little_trained,
    _samples,
    _mix,
    _split_texts,
    _answers,
    _taken_columns,
    _blank_lines,
    _unused,
)
