"""Compile chat templates as transformers does, in Jinja's sandbox, because they come with models from anywhere.

A `{% generation %}` block writes two marks around its output; `take_generation_marks` makes spans of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final, NamedTuple, NoReturn

import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

# Strings that are in no data set.
_OPEN: Final = "\U000f7e00open\U000f7e01"
_CLOSE: Final = "\U000f7e00close\U000f7e01"
_MARK: Final = re.compile(f"{_OPEN}|{_CLOSE}")
_GENERATION: Final = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_METHODS_OF_DICTIONARIES: Final = frozenset(dir(dict))


def marks_generation(source: str) -> bool:
    """True if a template itself marks which part of its text is generated."""
    return _GENERATION.search(source) is not None


def writes_date(source: str) -> bool:
    """True if a template may write today's date, as gpt-oss' does."""
    return "strftime_now" in source


class Generated(NamedTuple):
    """A rendering without the marks of its generation blocks, and the blocks' spans.

    with marks   Hi«Hello»      text Hi      spans (2, 7)      marked_spans (2, 8)
    """

    text: str
    # Of each block, in `text`.
    spans: list[tuple[int, int]]
    # Of each block, in the rendering with the marks.
    marked_spans: list[tuple[int, int]]


def without_generation_marks(marked: str) -> str:
    """Return a rendering, or a piece of one, without the marks of generation blocks."""
    return _MARK.sub("", marked)


def take_generation_marks(marked: str) -> Generated:
    """Return a rendering without the marks of its generation blocks, and where the blocks are."""
    pieces = _MARK.split(marked)
    # Marks open and close in turn, and a mark is where the piece before it ends.
    ends = list(accumulate(map(len, pieces)))
    spans = list(zip(ends[:-1:2], ends[1:-1:2], strict=True))

    # A marked span begins with its opening mark, and ends before the closing one.
    places = [mark.start() for mark in _MARK.finditer(marked)]
    marked_spans = list(zip(places[::2], places[1::2], strict=True))
    return Generated("".join(pieces), spans, marked_spans)


@lru_cache(maxsize=16)
def compile_template(source: str) -> jinja2.Template:
    """Compile a template with the options, filters and functions that transformers gives to chat templates."""
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    # Jinja's own filter escapes HTML, which would change what a model reads.
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _now
    return environment.from_string(source)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    def getattr(self, obj: Any, attribute: str) -> Any:
        """Do what Jinja does, but look up `message.role` of a dictionary without the cost of an exception."""
        if type(obj) is dict and attribute in obj and attribute not in _METHODS_OF_DICTIONARIES:
            return obj[attribute]
        return super().getattr(obj, attribute)


class _GenerationBlock(jinja2.ext.Extension):
    """Writes marks around the output of `{% generation %}…{% endgeneration %}`."""

    tags = {"generation"}  # noqa: RUF012 - the name and type are Jinja's

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        # As Jinja's own blocks are parsed: up to the tag that ends it, which is dropped.
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        output = caller()
        if not output:
            return ""
        return f"{_OPEN}{output}{_CLOSE}"


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON, with the options that transformers' filter `tojson` has."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
