"""The table of docs/models.md: `python -m tests.families` builds each family tiny, asks the self-check, writes it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from kubetune.models.learner import Learner
from kubetune.models.padding_free import choose_attention
from kubetune.models.prefix_sharing import why_not
from tests.architectures import ONE_BY_ONE, PADDING_FREE, PROMISED, build_model
from tests.hybrids import BIASED, HYBRIDS

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
FAMILIES = PROMISED | PADDING_FREE | HYBRIDS | ONE_BY_ONE | BIASED
_BEGINS, _ENDS = "<!-- families -->\n", "<!-- end -->\n"


def line(name: str) -> str:
    """The row of a family: how it runs, what is shared, and why not."""
    model = build_model(name, FAMILIES[name], lora=False)
    learner = Learner(model, choose_attention(model))
    route = learner.route
    if not route.padding_free:
        return f"| `{name}` | one sequence at a time: {_plain(route.why_not)} | |\n"
    shared = why_not(learner)
    rows = f", by rows: {', '.join(route.by_rows)}" if route.by_rows else ""
    return f"| `{name}` | packed{rows} | {f'no: {_plain(shared)}' if shared else 'yes'} |\n"


def _plain(said: str) -> str:
    """A reason without numbers that rounding decides."""
    return re.sub(r" \([^)]*\de-\d+\)", "", said).replace("|", "/")


def table() -> dict[str, str]:
    """The rows of the page as it is, by family."""
    rows = PAGE.read_text().partition(_BEGINS)[2].partition(_ENDS)[0].splitlines(keepends=True)
    return {row.split("`")[1]: row for row in rows[2:]}


def main() -> None:
    """Write the rows of the families named, or of all; the others stay as they are."""
    found = table() | {name: line(name) for name in sys.argv[1:] or FAMILIES}
    before, _, rest = PAGE.read_text().partition(_BEGINS)
    head = "| `model_type` | micro-batches | beginnings shared |\n|---|---|---|\n"
    rows = "".join(found[name] for name in sorted(found) if name in FAMILIES)
    PAGE.write_text(before + _BEGINS + head + rows + _ENDS + rest.partition(_ENDS)[2])


if __name__ == "__main__":
    main()
