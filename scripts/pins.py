"""Ask pip whether each pin of constraints.txt installs on the lowest and on the newest Python that is promised.

pip answers as if it ran on these interpreters, which need not be here: whether a wheel of that version fits, or a package
of source code that says it does (`Requires-Python`, to the patch release). What it answered is in scripts/pins.asked, so
that only new pins are asked for; all of them took eight minutes. `scripts/check` runs this. Without a package index it
says that nothing was asked.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
ASKED = ROOT / "scripts" / "pins.asked"
# The lowest patch release of the lowest Python, and the newest Python that the pinned torch has wheels for.
LOWEST = "3.11.0"
NEWEST = "3.14.0"
# Published as source code alone, which any Python builds.
SOURCE_ONLY = ("langdetect", "rouge-score")
# Their wheels are of one index, which scripts/venv may be told of.
OTHER_INDEX = ("torch",)
PARTS = 8  # pips at a time: each waits for the index most of the time


def main() -> int:
    """Ask for the pins that are new, and write down those that install. Return the exit code."""
    constraints = CONSTRAINTS.read_text()
    known = set(ASKED.read_text().splitlines()) if ASKED.is_file() else set()
    wanted: set[str] = set()
    refused = []
    for python in (LOWEST, NEWEST):
        pins = pins_for(constraints, python)
        wanted |= {f"{pin} {python}" for pin in pins}
        answers = ask_all([pin for pin in pins if f"{pin} {python}" not in known], python)
        if answers is None:
            print(
                f"scripts/pins.py: pip reaches no package index, so new pins were not asked for ({ASKED.name})"
            )
            return 0
        refused += [f"{pin} {python}" for pin in answers]
    # Written anew only with what changed, so that a clone that cannot be written is checked too.
    installable = wanted - set(refused)
    if installable != known:
        ASKED.write_text("".join(f"{line}\n" for line in sorted(installable)))
    if not refused:
        return 0
    for line in refused:
        print(
            "constraints.txt: {} does not install on Python {}".format(*line.split()),
            file=sys.stderr,
        )
    print(
        "Pin an older version, or one for each Python by a marker: name==1.0 ; python_version < '3.12'",
        file=sys.stderr,
    )
    return 1


def pins_for(constraints: str, python: str) -> list[str]:
    """Return the pins that hold on a Python, without their markers."""
    environment: dict[str, Any] = {**default_environment()}
    environment["python_full_version"] = python
    environment["python_version"] = python.rpartition(".")[0]
    pins = []
    for line in constraints.splitlines():
        if not line or line.startswith("#"):
            continue
        pin = Requirement(line)
        holds = pin.marker is None or pin.marker.evaluate(environment)
        if holds and pin.name not in OTHER_INDEX:
            pins.append(f"{pin.name}{pin.specifier}")
    return pins


def ask_all(pins: Sequence[str], python: str) -> list[str] | None:
    """Return a line for each pin that pip would not install on a Python, None if no index can be reached."""
    source_only = [pin for pin in pins if pin.partition("==")[0] in SOURCE_ONLY]
    wheels = [pin for pin in pins if pin not in source_only]
    parts = [wheels[number::PARTS] for number in range(PARTS)]
    with ThreadPoolExecutor(PARTS + 1) as pool:
        answers = [pool.submit(ask, part, python, "--only-binary=:all:") for part in parts if part]
        answers.append(pool.submit(ask, source_only, python))
        lines: list[str] = []
        for answer in answers:
            refused = answer.result()
            if refused is None:
                return None
            lines += refused
    return lines


def ask(pins: Sequence[str], python: str, *options: str) -> list[str] | None:
    """Return a line for each of some pins that pip would not install, None if no index can be reached."""
    lines: list[str] = []
    asked = list(pins)
    while asked:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
            command += ["--dry-run", "--ignore-installed", "--no-deps", "--target", folder]
            command += ["--python-version", python, *options, *asked]
            process = subprocess.run(command, capture_output=True, text=True)
        if process.returncode == 0:
            return lines
        # pip ends at the first that it cannot have.
        unmet = "Could not find a version that satisfies the requirement "
        refused = [line for line in process.stderr.splitlines() if unmet in line]
        if not refused or "connection" in process.stderr.lower():
            return None
        pin = refused[0].partition(unmet)[2].partition(" (")[0]
        lines.append(pin)
        asked.remove(pin)
    return lines


if __name__ == "__main__":
    sys.exit(main())
