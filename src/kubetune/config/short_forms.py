"""Settings that may be written shorter than they are, and settings that displace others."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kubetune.base.provenance import (
    Entry,
    KeyPath,
    Origin,
    Problem,
    Tree,
    dotted,
)
from kubetune.config.environment import max_samples

log = logging.getLogger(__name__)

# Sections that may be written as a text, and the key that the text stands for.
_SHORT_FORMS: dict[KeyPath, str] = {
    ("data", "train"): "path",
    ("data", "eval"): "path",
    ("push",): "repo",
}


def into_sections(entries: Iterable[Entry], tree: Tree, problems: list[Problem]) -> Iterator[Entry]:
    """Yield the entries. What was written as a text becomes a section before a key of it is set.

    `--data faq.csv data.train.columns.prompt=q` means `data.train: {path: faq.csv, columns: {prompt: q}}`. A key of a
    list of several has no item that it belongs to, and is a problem.
    """
    for entry in entries:
        section = _short_form_above(entry.path)
        if section is None:
            yield entry
            continue
        written = tree.find(section)
        # `--data` may be repeated, so it makes a list.
        if isinstance(written, list) and len(written) == 1:
            written = written[0]
            yield Entry(section, written, tree.origin(section))
        if isinstance(written, list):
            example = dotted((*section, 0, *entry.path[len(section) :]))
            what = f"{dotted(section)} is a list; expected a key of one of its items, such as {example}"
            problems.append(Problem(entry.origin, f"{dotted(entry.path)}: {what}"))
            continue
        if isinstance(written, str):
            yield Entry(section, {_SHORT_FORMS[section]: written}, tree.origin(section))
        yield entry


def _short_form_above(path: KeyPath) -> KeyPath | None:
    """Return the section with a short form that `path` is a key of; None where there is none, or `path` is an item."""
    for section in _SHORT_FORMS:
        is_below = path[: len(section)] == section and len(path) > len(section)
        if is_below and not isinstance(path[len(section)], int):
            return section
    return None


def sample_sources(tree: Tree, environ: Mapping[str, str], problems: list[Problem]) -> None:
    """Add `#N` of MAX_SAMPLES to every training source that has no number yet."""
    try:
        # MAX_SAMPLES is no key of the file, so it is read here and not with the other variables.
        number = max_samples(environ)
    except ValueError as error:
        problems.append(Problem(Origin("environment variable MAX_SAMPLES"), str(error)))
        return

    data = tree.data.get("data")
    if number is None or not isinstance(data, dict):
        return

    def limited(source: Any) -> Any:
        if isinstance(source, list):
            return [limited(item) for item in source]
        if isinstance(source, dict):
            return {**source, "path": limited(source.get("path"))}
        if isinstance(source, str) and "#" not in source:
            return f"{source}#{number}"
        return source

    data["train"] = limited(data.get("train"))


def split_output(tree: Tree, problems: list[Problem]) -> None:
    """Unfold the short form of a mirror.

    output: s3://bucket/run  →  output: outputs/bucket/run
                                mirror: s3://bucket/run
    """
    output = tree.data.get("output")
    if not isinstance(output, str) or "://" not in output:
        return

    # s3://bucket/run has a bucket and a folder in it; a whole bucket cannot be one run's.
    origin = tree.origin(("output",))
    address = output.strip().rstrip("/")
    _, _, place = address.partition("://")
    bucket, _, folder = place.partition("/")
    if not bucket or not folder.strip("/"):
        message = (
            f"output: found {output}; expected a folder, or SCHEME://BUCKET/PATH of an object store"
        )
        problems.append(Problem(origin, message))
        return

    # A `mirror` of its own may name the same address, but no other.
    mirror = tree.data.get("mirror")
    if mirror not in (None, address):
        message = (
            f"output: found {output} beside mirror: {mirror}; leave one out, or make them agree"
        )
        problems.append(Problem(origin, message))
    tree.data |= {"output": f"outputs/{place}", "mirror": address}


def displace_global_batch(tree: Tree, typed: set[KeyPath]) -> None:
    """Let accumulation that the user types, or sets in the environment, decide over the file's global batch.

    The two contradict each other, and the later source wins. `packed` is a multiple of the accumulation, so it stays.
    """
    training = tree.data.get("training")
    if ("training", "gradient_accumulation_steps") not in typed or not isinstance(training, dict):
        return
    for key in ("global_batch_size", "global_batch_tokens"):
        if ("training", key) not in typed and training.get(key) not in (None, "packed"):
            log.info(
                "gradient_accumulation_steps decides the global batch; the file's %s is left out",
                key,
            )
            del training[key]
