"""The table of docs/models.md: `python -m tests.families` builds each family tiny, asks the self-check, writes it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import AutoModelForImageTextToText

from kubetune.config.schema import Config
from kubetune.models.learner import Learner
from kubetune.models.model_spec import ModelSpec
from kubetune.models.padding_free import choose_attention
from kubetune.models.prefix_sharing import why_not
from kubetune.tasks import vision_language
from tests.architectures import ONE_BY_ONE, PADDING_FREE, PROMISED, build_model
from tests.hybrids import BIASED, HYBRIDS
from tests.pictures import ARCHITECTURES, save_family_model, save_seeing_model
from tests.pictures import FAMILIES as SEEING_FAMILIES
from tests.small_configs import OTHERS, UNTRIED, settings

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
OURS = PROMISED | PADDING_FREE | HYBRIDS | ONE_BY_ONE | BIASED
FAMILIES = (*OURS, *OTHERS)
SEEING = (*ARCHITECTURES, *SEEING_FAMILIES)
NAMED = ("<!-- not tried -->\n", "<!-- end of those -->\n")
TEXT = ("<!-- families -->\n", "<!-- end -->\n")
IMAGES = ("<!-- families that see -->\n", "<!-- end of them -->\n")


def line(name: str) -> str:
    """Return the row of a family: how it runs, what is shared, and why not."""
    model = build_model(name, OURS[name] if name in OURS else settings(name), lora=False)
    learner = Learner(model, choose_attention(model))
    if not learner.route.padding_free:
        return f"| `{name}` | {_way(learner)} | |\n"
    shared = why_not(learner)
    return f"| `{name}` | {_way(learner)} | {f'no: {_plain(shared)}' if shared else 'yes'} |\n"


def seeing_line(name: str) -> str:
    """Return the row of a family that sees images."""
    with TemporaryDirectory() as folder:
        save = save_seeing_model if name in ARCHITECTURES else save_family_model
        path = str(save(Path(folder), name))
        config = Config.model_validate(
            {"model": path, "task": "vision_language", "data": {"train": "none"}}
        )
        learner = vision_language.TASK.learner_of(
            AutoModelForImageTextToText.from_pretrained(path), ModelSpec.of(config)
        )
        return f"| `{name}` | {_way(learner)} |\n"


def _way(learner: Learner) -> str:
    route = learner.route
    if not route.padding_free:
        return f"one sequence at a time: {_plain(route.why_not)}"
    return f"packed, in rows: {', '.join(route.in_rows)}" if route.in_rows else "packed"


def _plain(text: str) -> str:
    """Return a reason without numbers that rounding decides."""
    return re.sub(r" \([^)]*\de-\d+\)", "", text).replace("|", "/")


def untried() -> str:
    """Return the lines of the page on families that were not tried."""
    lines = [
        f"- {why}: {', '.join(f'`{name}`' for name in names)}\n" for why, names in UNTRIED.items()
    ]
    return "Not tried:\n\n" + "".join(lines)


def table(marks: tuple[str, str] = TEXT) -> dict[str, str]:
    """Return the rows of a table of the page as it is, by family."""
    rows = PAGE.read_text().partition(marks[0])[2].partition(marks[1])[0].splitlines(keepends=True)
    return {row.split("`")[1]: row for row in rows[2:]}


def main() -> None:
    """Write the rows of the families named, or of all; the others stay as they are."""
    names = sys.argv[1:] or [*FAMILIES, *SEEING]
    _write(
        TEXT,
        "| `model_type` | micro-batches | beginnings shared |\n|---|---|---|\n",
        FAMILIES,
        names,
        line,
    )
    _replace(NAMED, untried())
    _write(IMAGES, "| `model_type` | micro-batches |\n|---|---|\n", SEEING, names, seeing_line)


def _write(
    marks: tuple[str, str],
    head: str,
    known: Collection[str],
    names: Sequence[str],
    line: Callable[[str], str],
) -> None:
    lines = table(marks) | {name: line(name) for name in names if name in known}
    _replace(marks, head + "".join(lines[name] for name in sorted(lines) if name in known))


def _replace(marks: tuple[str, str], text: str) -> None:
    before, _, rest = PAGE.read_text().partition(marks[0])
    PAGE.write_text(before + marks[0] + text + marks[1] + rest.partition(marks[1])[2])


if __name__ == "__main__":
    main()
