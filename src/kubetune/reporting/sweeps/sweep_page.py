"""The page of a sweep as one file, and what its template needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kubetune.base.files import write_atomic
from kubetune.base.logs import scrub
from kubetune.reporting.page import page_of
from kubetune.reporting.reading import read_run
from kubetune.reporting.rendering import render
from kubetune.reporting.run_charts import points_of
from kubetune.reporting.sweeps.facts import SweepFacts
from kubetune.reporting.sweeps.parallel import draw
from kubetune.reporting.sweeps.scatter import course
from kubetune.reporting.sweeps.scatter import draw as draw_dots

TEMPLATE = "sweep.html"


def write_sweep_report(sweep: SweepFacts, run_dirs: Sequence[Path], output: Path) -> Path:
    """Write the page of a sweep and return its path. Its best runs are shown below the trials, side by side.

    Raise ConfigError for a folder that is no run directory.
    """
    facts: dict[str, Any] = {"has_charts": False, "runs": []}
    # A single run has nothing to be compared with.
    if len(run_dirs) > 1:
        points = points_of(len(run_dirs))
        _, facts = page_of([read_run(folder, points) for folder in run_dirs])
    # A run may have printed or recorded a secret, such as the command that started it.
    write_atomic(output, scrub(render(TEMPLATE, **facts | template_facts(sweep))))
    return output


def template_facts(sweep: SweepFacts) -> dict[str, Any]:
    """Return what the template needs of the sweep itself."""
    return {
        "title": f"Sweep {sweep.name}",
        "sweep": sweep,
        "figures": draw(sweep),
        "dots": draw_dots(sweep),
        "course": course(sweep),
    }
