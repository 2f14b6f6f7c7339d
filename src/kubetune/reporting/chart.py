"""One chart as data: its lines, what charts.js draws of it, and what it says in a table and in words.

Drawing is charts.js's; colours are the style sheet's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kubetune.reporting.series import Number, Series, merge

_TABLE_ROWS = 10


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    label: str
    series: Series
    colour: int = 0  # number of a colour of the style sheet
    kind: str = "line"  # line, raw, smooth (charts.js smooths it) or points
    band: bool = True  # draw the lowest and highest behind a mean
    dash: int = 0  # number of a dash pattern
    run: int = 0  # index of the run among those of the page
    mark: str = ""  # the letter of the run, drawn on the line where there are several runs

    @property
    def has_band(self) -> bool:
        """True if the lowest and highest values are drawn behind the mean."""
        return self.band and self.series.low is not None and self.series.high is not None


@dataclass(frozen=True)
class Chart:
    """Lines over steps, with a title."""

    name: str
    title: str
    unit: str  # how values are written: fixed, short, exponent, bytes or percent
    lines: Sequence[Line]
    about: str = ""  # a sentence below the title
    axis: str = ""  # what the values are; the title where it is empty
    markers: Sequence[dict[str, Any]] = field(default_factory=tuple)  # vertical lines, with text

    def to_json(self) -> dict[str, Any]:
        """Return the chart as charts.js draws it.

        A line with a band takes three columns: the mean, the highest and the lowest. `bands` holds the
        column numbers of the two edges, where column 0 is the steps:

            lines   loss   loss, highest   loss, lowest   evaluation loss
            column  1      2               3              4
            bands   [[2, 3]]
        """
        # Three lists that grow together: a column of numbers, the series whose steps it has, and its look.
        parts: list[Series] = []
        columns: list[Sequence[Number]] = []
        drawn: list[dict[str, Any]] = []
        bands: list[list[int]] = []
        for line in self.lines:
            series = line.series
            # The column of the line itself.
            look = {"colour": line.colour, "run": line.run}
            parts.append(series)
            columns.append(series.values)
            drawn.append(
                {
                    "label": line.label,
                    "kind": line.kind,
                    "dash": line.dash,
                    "mark": line.mark,
                    **look,
                }
            )
            if not line.has_band:
                continue
            # The columns of the band's edges. charts.js shades what lies between.
            bands.append([len(drawn) + 1, len(drawn) + 2])
            for name, edge in (("highest", series.high), ("lowest", series.low)):
                assert edge is not None, "a line with a band has both"
                parts.append(series)
                columns.append(edge)
                drawn.append({"label": f"{line.label}, {name}", "kind": "edge", **look})

        return {
            "name": self.name,
            "title": self.title,
            "unit": self.unit,
            "axis": self.axis or self.title,
            "lines": drawn,
            "bands": bands,
            "data": merge(parts, columns),
            "markers": list(self.markers),
        }

    @property
    def is_positive(self) -> bool:
        """True if a logarithmic scale can show all values."""
        for line in self.lines:
            # The lowest values of a band lie below its means.
            values = line.series.low or line.series.values
            if any(value is not None and value <= 0 for value in values):
                return False
        return True

    def table(self) -> tuple[list[str], list[list[Any]]]:
        """Return heading and a few rows of the lines' values. The first column is the step."""
        heading = ["step"]
        all_steps: set[int] = set()
        columns = []  # of each line, its values by step
        for line in self.lines:
            heading.append(line.label)
            all_steps.update(line.series.steps)
            columns.append(dict(zip(line.series.steps, line.series.values, strict=True)))

        rows: list[list[Any]] = []
        for step in _spread(sorted(all_steps)):
            rows.append([step, *(column.get(step) for column in columns)])
        return heading, rows


def _spread(steps: list[int]) -> list[int]:
    """Return at most `_TABLE_ROWS` of the steps, evenly spread, with the first and the last."""
    if len(steps) <= _TABLE_ROWS:
        return steps
    # No whole number: 100 steps in 10 rows are the first, the 12th, the 23rd, …, the last.
    stride = (len(steps) - 1) / (_TABLE_ROWS - 1)
    return [steps[round(row * stride)] for row in range(_TABLE_ROWS)]
