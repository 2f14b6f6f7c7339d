"""Whether files of the data were written after a run ended: what is new in them was not learned."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from pathlib import Path

from kubetune.config.data_files import without_sample
from kubetune.config.schema import SourceConfig


def written_since(sources: Iterable[SourceConfig], ending: Path) -> str:
    """Return the first file of sources that is newer than the file about a run's end; empty if none is here."""
    ended = ending.stat().st_mtime
    for source in sources:
        # The pattern of a path is the path.
        path = Path(without_sample(source.path)).expanduser()
        places = [Path(name) for name in glob.glob(str(path), recursive=True)] or [path]
        for place in places:
            for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
                if file.is_file() and file.stat().st_mtime > ended:
                    return str(file)
    return ""
