"""The findings about the data of a run, from the counts that a check makes and prepared rows keep.

Only this file and labels.py put them into words. A new finding is one function and one line in FINDERS.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from kubetune.base.humanize import counted, place, unused_keys
from kubetune.config.schema import ModelConfig
from kubetune.data.column_words import lacking
from kubetune.data.findings.finding import Finding, Severity
from kubetune.data.findings.group_findings import LEARNS_ALIKE, of_names
from kubetune.data.findings.labels import LABEL_FINDERS
from kubetune.data.findings.other_splits import lacking_parts, other_splits, read_otherwise
from kubetune.data.findings.split_counts import SplitCounts
from kubetune.data.findings.split_files import located_sources
from kubetune.data.prepared.tally import require_rows
from kubetune.data.reading.sources import locate
from kubetune.data.reading.strict_json import JsonObject
from kubetune.data.row_counts import evaluated_rows
from kubetune.data.spec import DataSpec, Split
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.data.unread_columns import left_out
from kubetune.data.verdict_names import says_bad, turned
from kubetune.errors import DataError, ModelError
from kubetune.plan.base_model import embeddings_of, positions_of
from kubetune.plan.model_shapes import ModelFiles

# The finding that counts records which a run refuses.
BAD_RECORDS: Final = "bad_records"
# Share of trained tokens below which a warning asks whether that is meant.
LITTLE_TRAINED: Final = 0.05
# Columns that are named.
MOST_NAMES: Final = 8


def find(
    spec: DataSpec,
    stats: Mapping[Split, JsonObject],
    tokenizer: Tokenizer | None = None,
    *,
    names: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Finding, ...]:
    """Return all findings about the data of a run: errors first, then warnings, then notes.

    `stats`: of each split, `tally.summarise` and `RowWatch.facts` together. `tokenizer`: to show a token that the
    model does not know. `names`: of splits that are called something else.
    """
    # What each finder looks at: the counts of one split, with its name for people.
    splits = []
    for split, of_split in stats.items():
        name = names.get(split, split)
        sources = spec.splits[split]
        # A teacher reads the same prompt as the model if the two are only compared.
        shown: Collection[str] = ()
        if spec.task == "distill" and split == "train":
            shown = spec.distill.shown_columns
        splits.append(
            SplitCounts(
                spec.task,
                spec.data,
                split,
                name,
                sources,
                of_split,
                spec.rewards,
                shown,
                are_labels_listed=bool(spec.classification.labels),
            )
        )

    findings: list[Finding] = []
    for finder in FINDERS:
        for counts in splits:
            findings += finder(counts)
    findings += _unknown_ids(spec.model, stats, tokenizer)
    findings += _padding(spec.task, tokenizer)
    findings += _positions(spec.task, spec.model.path, stats)

    # Findings of the same severity stay in the order of FINDERS.
    severities = ("error", "warning", "note")
    return tuple(sorted(findings, key=lambda finding: severities.index(finding.severity)))


def _unknown_ids(
    model: ModelConfig,
    stats: Mapping[Split, JsonObject],
    tokenizer: Tokenizer | None,
) -> Iterator[Finding]:
    """Find ids that the model has no embedding for, in all splits together."""
    embeddings = embeddings_of(model, os.environ)
    largest = max((of_split["largest_id"] for of_split in stats.values()), default=-1)
    if embeddings is None or largest < embeddings.known:
        return
    number = 0  # rows with such an id
    rows = 0
    # Rows that were prepared when another model was at hand were counted by its embeddings.
    is_counted = True
    for of_split in stats.values():
        facts = of_split["unknown_ids"]
        is_counted = is_counted and facts["known"] == embeddings.known
        number += facts["rows"]
        rows += of_split["rows"]

    holding = f"{number:,} of {counted(rows, 'row')}"
    if not is_counted:
        number = 0
        holding = "some rows"
    token = str(largest)
    if tokenizer is not None:
        token = tokenizer.decode([largest], skip_special_tokens=False)
    yield Finding(
        "unknown_ids",
        "error",
        "",
        embeddings.say(largest, token, holding),
        number,
    )


def _padding(task: str, tokenizer: Tokenizer | None) -> Iterator[Finding]:
    """Find that no token fills up rows, if a model is given several rows as a rectangle."""
    if tokenizer is None or task not in ("sequence_classification", "grpo"):
        return
    try:
        _ = tokenizer.pad_id
    except ModelError as error:
        yield Finding("no_padding", "error", "", str(error))


def _positions(
    task: str,
    model_path: str,
    stats: Mapping[Split, JsonObject],
) -> Iterator[Finding]:
    """Find rows that are longer than what the model knows positions for."""
    positions = positions_of(task, ModelFiles(model_path, os.environ))
    longest = max((of_split["longest_kept"] for of_split in stats.values()), default=0)
    if positions is not None and longest > positions.limit:
        # A table has no entry for later positions; computed ones only go beyond what the model was trained on.
        severity: Severity = "error" if positions.is_table else "warning"
        yield Finding(
            "positions",
            severity,
            "",
            positions.say(longest),
            longest,
        )


def _bad_records(counts: SplitCounts) -> Iterator[Finding]:
    # A run refuses to begin with any of these.
    number = counts.stats["refused"] + counts.stats["unreadable"]
    if number:
        sentence = f"{counted(number, 'record')} of {counts.name} cannot be used"
        advice = "`kubetune data check` names their lines"
        yield counts.finding("error", BAD_RECORDS, sentence, number, advice=advice)
        # Once these are fixed, enough rows may be left.
        return

    try:
        require_rows(counts.data, counts.split, dict(counts.stats))
    except DataError as error:
        yield counts.finding("error", "too_few_rows", error.problem)


def _doubtful_headers(counts: SplitCounts) -> Iterator[Finding]:
    """Find first lines of tables that may be records."""
    # Those of a held-out share are the tables of train, and older counts lack the key.
    if counts.split == "eval" and isinstance(counts.data.eval, float):
        return
    for sentence in sorted(counts.stats.get("doubtful_headers", {})):
        yield counts.finding("warning", "doubtful_header", sentence, 1)


def _in_train(counts: SplitCounts) -> Iterator[Finding]:
    # Only splits other than train have this count.
    facts = counts.stats.get("in_train") or {"rows": 0}
    number = facts["rows"]
    if not number:
        return
    meaning = "the model looks better than it is"
    if counts.split == "forget":
        meaning = "what it forgets does not show"
    are = "is" if number == 1 else "are"
    yield counts.finding(
        "warning",
        "in_train",
        f"{counts.rows(number)} {are} in train too: {meaning}",
        number,
        counts.places(facts["places"]),
        _advice_on_leaks(counts, same_records=facts["same_records"] > 0),
    )


def _advice_on_leaks(counts: SplitCounts, *, same_records: bool) -> str:
    # The advice names the key that has to change.
    key = "data.eval" if counts.split == "eval" else "evaluation.forget"
    held_out = counts.data.eval
    if same_records:
        return (
            f"data.train and {key} take the same records of a file: give ranges that do not overlap, "
            "or other files"
        )

    if counts.split == "eval" and isinstance(held_out, float):
        return (
            f"data.eval: {held_out:g} chooses records by their number, so of two equal records one may be trained on "
            "and the other evaluated: remove the repeats, or give data.eval a file"
        )

    return f"Remove them from data.train, or give {key} other rows"


# Records that lose something: what they are counted under, what became of them, what to do.
_LEFT_OUT: Final = (
    ("overlong", "left out: longer than {limit:,} tokens",
     "A larger data.max_length keeps them, data.overlong: truncate cuts them"),
    ("truncated", "truncated at {limit:,} tokens", "A larger data.max_length keeps them whole"),
    ("no_label", "left out: nothing to train on", "They have no answer, or it was truncated"),
    ("unusable", "left out: their answers are equal or empty, or have different prompts", ""),
)  # fmt: skip


def _lost(counts: SplitCounts) -> Iterator[Finding]:
    """Find records that lose something."""
    limit = counts.data.max_length
    for what, fate, advice in _LEFT_OUT:
        number = counts.stats[what]
        if number:
            sentence = f"{counts.records(number)} {fate.format(limit=limit)}"
            yield counts.counted_warning(what, sentence, advice)


# Rows that lack or have something of which their records say nothing: counted under, how they are, what to do.
_CHANGED: Final = (
    ("plain_prompts",
     "with a prompt as plain text: it is trained without the chat template that `chat` and `generate` use",
     "Write them as conversations, under `messages`"),
    ("reasoning_dropped", "with reasoning that the chat template leaves out", ""),
    ("unlike_prompt",
     "with an answer that does not begin where the generation prompt ends (the prompt may open a thought): the model "
     "learns a beginning that it is never asked for",
     "Set model.chat_template to one that begins both alike"),
    ("text_moved",
     "with a text before a call, which the chat template writes after the call's result: it is trained there",
     "Choose a template that writes it where it was said (model.chat_template), or leave such texts out"),
    ("rewrites_answer",
     "with an answer that the chat template changes: the changed answer is trained",
     "Choose a template that writes answers as they are (model.chat_template)"),
    ("begins_inside_token",
     "with an answer that begins inside a token, which also holds the end of the prompt (a space, a line break): that "
     "token is trained, but at inference the prompt ends with other tokens",
     "Begin answers without white space, or set model.chat_template to one whose generation prompt does not end with "
     "a space"),
    ("bos_twice",
     "with BOS twice: the tokenizer writes it before every text, and the text begins with it too. Of a text without a "
     "prompt the second is trained",
     "Take it out of the texts, or set data.add_special_tokens: false"),
    ("first_not_trained",
     "with an empty prompt, after no BOS: nothing predicts the first token of such an answer, so it is not trained",
     "Write a prompt, or `text` in place of both"),
    ("open_answers",
     "with an answer whose end is not trained: the chat template writes nothing after answers that ends one, so the model "
     "would not learn to stop there",
     "Name the tokens that end an answer in generation_config.json (`eos_token_id`), such as that of the next question, "
     "or set model.chat_template to one that ends turns"),
    ("answers_in_a_row",
     "with two answers in a row: the model learns to end its turn between them, and nothing asks it to go on",
     "Join them into one message, or put what was said between them there"),
    ("thoughts_twice",
     "with thoughts in a field and in the content too: both are written",
     "Keep one of them"),
    ("results_wrapped",
     "with results of tools that begin with a tag that the chat template writes too, so it is there twice",
     "Take the tags out of the results"),
    ("calls_not_offered",
     "with a call of a function that is none of its tools: the model learns to call what it is not offered",
     "Add it to `tools`, or correct its name"),
    ("answers_missing",
     "with an answer that is a word for none, such as `nan`, `NULL` or `N/A`: it is learned as a text",
     "Leave these records out, unless the model is to say that"),
    ("scored_otherwise",
     "whose own score or margin says that the rejected answer is the better one",
     "Exchange the two answers of these records, or leave them out"),
    ("special_texts", "with special tokens in their texts, which become such tokens", ""),
)  # fmt: skip

# Images that are not seen as they are: counted under, what they are called, what is wrong.
_IMAGES: Final = (
    ("images_above_budget", "image", "with more tokens than vision.image_max_tokens, because of a narrow shape"),
    ("images_animated", "animated image", "of which only the first frame is seen"),
    ("images_deep", "image", "with more than 8 bits of grey, whose brighter parts become white"),
)  # fmt: skip


def _changed(counts: SplitCounts) -> Iterator[Finding]:
    for what, meaning, advice in _CHANGED:
        number = counts.stats.get(what, 0)  # older counts lack some
        if number:
            sentence = f"{counts.records(number)} {meaning}"
            yield counts.counted_warning(what, sentence, advice)

    for what, unit, meaning in _IMAGES:
        number = counts.stats[what]
        if number:
            sentence = f"{counted(number, unit)} of {counts.name} {meaning}"
            yield counts.counted_warning(what, sentence)


def _one_verdict(counts: SplitCounts) -> Iterator[Finding]:
    """Find judged answers that are all good, or all bad."""
    good = counts.stats["answers"].get("good", 0)
    bad = counts.stats["answers"].get("bad", 0)
    # Both are 0 if answers are not judged.
    if bool(good) == bool(bad):
        return

    verdict = "good" if good else "bad"
    missing = "bad" if good else "good"
    answers = counted(good + bad, "answer")
    yield counts.finding(
        "warning",
        "one_verdict",
        f"all {answers} of {counts.name} are judged {verdict}: the model learns no difference",
        good + bad,
        advice=f"Add answers that are judged {missing}, or train on the good ones with task: causal_lm",
    )


def _opposite_verdicts(counts: SplitCounts) -> Iterator[Finding]:
    """Find columns that are read as true for good answers, and are called as if they were true for bad ones."""
    if counts.task != "preference" or counts.split != "train":
        return
    for source in counts.sources:
        name = source.columns.get("label", "")
        if says_bad(name):
            yield counts.finding(
                "warning",
                "opposite_verdict",
                f"`{name}` is read as the verdict on answers, true for good ones, and is called as if it were true for bad "
                "ones",
                advice=f"If it is, leave it out of `columns`: {turned(name, source.path)}",
            )


def _reversed_pairs(counts: SplitCounts) -> Iterator[Finding]:
    """Find pairs of which another has the answers the other way round."""
    number = counts.stats["reversed"]
    if number:
        contradict = "contradicts" if number == 1 else "contradict"
        yield counts.finding(
            "warning",
            "reversed_pairs",
            f"{counts.rows(number, 'pair')} {contradict} another pair: the answer chosen in one is rejected in the "
            "other",
            number,
            counts.places(counts.stats["reversed_places"]),
            "Decide which answer is better, and remove the other pair",
        )


def _repeats(counts: SplitCounts) -> Iterator[Finding]:
    number = counts.stats["duplicates"]
    if number:
        repeat = "repeats" if number == 1 else "repeat"
        sentence = f"{counts.rows(number)} {repeat} another"
        places = counts.places(counts.stats["duplicate_places"])
        yield counts.finding("warning", "repeats", sentence, number, places)


def _little_trained(counts: SplitCounts) -> Iterator[Finding]:
    if counts.task != "causal_lm" or not counts.stats["rows"]:
        return
    # Long prompts with short answers are often meant so; a wrong `train_on` or `columns` looks the same.
    trained = counts.stats["trained_tokens"]
    share = trained / max(1, counts.stats["tokens"])
    if share < LITTLE_TRAINED:
        sentence = (
            f"only {share:.1%} of the tokens of {counts.name} are trained; the rest is only read"
        )
        yield counts.finding("warning", "little_trained", sentence, trained)


def _samples(counts: SplitCounts) -> Iterator[Finding]:
    """Find parts of sources that ask for more records than there are."""
    # The sources of a held-out share are the sources of train, which were reported already.
    if counts.split == "eval" and isinstance(counts.data.eval, float):
        return
    for source, available in zip(counts.sources, counts.stats["available"], strict=True):
        if available is None:
            continue
        path = place(source.path)
        asked = locate(source).sample
        if asked is not None and asked > available:
            sentence = f"{counts.name}: {path} asks for {asked:,} records, and there are only {available:,}"
            yield counts.finding("warning", "sample_beyond_end", sentence, asked - available)
        last = available if asked is None else min(asked, available)
        if source.range is not None and source.range[1] > last:
            begin, end = source.range
            sentence = (
                f"{counts.name}: range [{begin}, {end}) of {path} asks for {end - begin:,} records and gets "
                f"{last - begin:,}, since there are only {last:,}"
            )
            yield counts.finding("warning", "range_beyond_end", sentence, end - last)


def _named_splits(counts: SplitCounts) -> Iterator[Finding]:
    """Find files that are named as data to evaluate on and trained on, are read in another way, or are missing."""
    sources = located_sources(counts.sources)
    if counts.split == "train":
        yield from other_splits(sources)
        if counts.task in LEARNS_ALIKE:
            yield from of_names(sources)
    if counts.name == "eval":
        yield from read_otherwise(counts.data)
    if counts.split == "train" or not isinstance(counts.data.eval, float):
        yield from lacking_parts(sources, counts.name)


def _mix(counts: SplitCounts) -> Iterator[Finding]:
    """Find rows that no evaluation takes, so that it measures the mix that is trained on."""
    if counts.name in ("train", "forget"):
        return
    rows = [source["rows"] for source in counts.stats["sources"]]
    weights = [source.weight for source in counts.sources]
    evaluated = sum(evaluated_rows(rows, weights))
    if evaluated < counts.stats["rows"]:
        sentence = (
            f"{counts.rows(evaluated)} evaluated, in the mix that the weights of their sources make"
        )
        yield counts.finding("note", "evaluated_mix", sentence, evaluated)


def _split_texts(counts: SplitCounts) -> Iterator[Finding]:
    number = counts.stats["split"]
    if number:
        sentence = f"{counts.records(number)} split into {counted(counts.stats['pieces'], 'row')}"
        yield counts.finding(
            "note",
            "split",
            sentence,
            number,
            counts.counted_places("split"),
        )


def _answers(counts: SplitCounts) -> Iterator[Finding]:
    """Find the lengths of answers that are compared: a model may learn nothing else of them."""
    answers = counts.stats["answers"]
    rows = counts.stats["rows"]
    # Pairs, or answers that are judged.
    if "chosen_tokens" in answers and rows:
        chosen = answers["chosen_tokens"] / rows
        rejected = answers["rejected_tokens"] / rows
        longer = answers.get("chosen_longer", 0) / rows
        sentence = (
            f"{counts.name}: chosen answers have {chosen:,.1f} tokens, rejected ones {rejected:,.1f}, on average; "
            f"in {longer:.0%} of the pairs the chosen one is longer"
        )
        yield counts.finding("note", "answers", sentence, rows)
    elif answers.get("good") and answers.get("bad"):
        sentence = f"{counts.name}: {answers['good']:,} good answers and {answers['bad']:,} bad"
        yield counts.finding("note", "answers", sentence, rows)


def _taken_columns(counts: SplitCounts) -> Iterator[Finding]:
    for taken, number in sorted(counts.stats["taken"].items()):
        sentence = f"{counts.name}: {taken}, in {counted(number, 'record')}"
        advice = "`data.train.columns` and `data.train.format` can say otherwise"
        yield counts.finding("note", "taken_columns", sentence, number, advice=advice)
    # Older counts lack the key.
    for column, number in sorted(counts.stats.get("absent", {}).items()):
        sentence = f"{counts.name}: {lacking(column)}, in {counted(number, 'record')}"
        yield counts.finding("note", "absent_columns", sentence, number)


def _blank_lines(counts: SplitCounts) -> Iterator[Finding]:
    number = counts.stats["blank_lines"]
    if number:
        sentence = f"{counts.name}: {counted(number, 'blank line')} among the records, skipped"
        yield counts.finding("note", "blank_lines", sentence, number)


def _unused(counts: SplitCounts) -> Iterator[Finding]:
    """Find columns, keys and files that nothing reads."""
    sources = counts.stats["sources"]
    # Functions of the user's are given all columns.
    is_given = any(reward.is_code for reward in counts.rewards)
    is_read = {reward.column for reward in counts.rewards} | set(counts.shown_columns)
    for source in () if is_given else sources:
        where = counts.name
        if len(sources) > 1:
            where += f", {place(source['path'])}"
        is_rewarded = counts.task == "grpo"
        keys = {key: n for key, n in source["unused_keys"].items() if key not in is_read}
        facts = {key: fact for key, fact in source["unused_columns"].items() if key in keys}
        columns = list(left_out(facts, source["path"], is_rewarded=is_rewarded))[:MOST_NAMES]
        for column in columns:
            number = keys[column.name]
            sentence = f"{where}: `{column.name}` ({column.what}) is not used, in {counted(number, 'record')}"
            # Answers are learned without what leads to them, or texts without their class.
            is_classified = counts.task == "sequence_classification" and column.meaning != "medium"
            is_grave = column.is_decisive and not is_classified
            severity: Severity = "warning" if is_grave else "note"
            yield counts.finding(severity, "unused_column", sentence, number, advice=column.advice)

        named = {column.name for column in columns}
        others = {key: count for key, count in keys.items() if key not in named}
        line = unused_keys(others)
        if line:
            yield counts.finding("note", "unused_keys", f"{where}: {line}", sum(others.values()))

    # Only folders have such files, and older counts lack the key.
    files = counts.stats.get("files_not_read", {})
    line = unused_keys(files, "files not read")
    if line:
        yield counts.finding(
            "note", "files_not_read", f"{counts.name}: {line}", sum(files.values())
        )


FINDERS: Final[tuple[Callable[[SplitCounts], Iterator[Finding]], ...]] = (
    _bad_records,
    _doubtful_headers,
    _in_train,
    _named_splits,
    _lost,
    _changed,
    *LABEL_FINDERS,
    _one_verdict,
    _opposite_verdicts,
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
