"""Write what is in an image as a CycloneDX bill of materials: Python's packages and Debian's, with their licences.

    python3 scripts/sbom.py NAME VERSION --python FOLDER … --dpkg FOLDER … > kubetune.cdx.json

Folders of Python are searched for installed packages, those of dpkg (such as /var/lib/dpkg) for its status. The same
packages give the same bytes: there is no time and no random number in it. Only the standard library is used, since this
runs inside the build.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

Component = dict[str, Any]


def python_packages(folder: Path) -> Iterator[Component]:
    """Every package installed for some Python below a folder, such as a virtual environment or its `lib`."""
    for site in sorted(
        {*folder.glob("python3*/*-packages"), *folder.glob("lib/python3*/*-packages")}
    ):
        for found in distributions(path=[str(site)]):
            name = re.sub(r"[-_.]+", "-", found.name).lower()
            yield component(
                name,
                found.version,
                f"pkg:pypi/{name}@{quote(found.version)}",
                python_licence(found),
            )


def python_licence(found: Distribution) -> Component:
    """An SPDX expression where the package gives one, else what it says in words; a licence's full text is not one."""
    facts = found.metadata
    if expression := facts.get("License-Expression"):
        return {"licenses": [{"expression": expression}]}
    classifiers = [
        text.rpartition(" :: ")[2]
        for text in facts.get_all("Classifier") or ()
        if "License ::" in text
    ]
    words = next(iter((facts.get("License") or "").strip().splitlines()), "")
    name = words or ", ".join(classifiers)
    return {"licenses": [{"license": {"name": name}}]} if name else {}


def debian_packages(folder: Path, distribution: str) -> Iterator[Component]:
    """Every package that dpkg has installed, by its status file, and those beside it in status.d."""
    files = [folder / "status", *sorted((folder / "status.d").glob("*"))]
    for paragraph in (
        part for path in files if path.is_file() for part in path.read_text("utf-8").split("\n\n")
    ):
        facts = dict(re.findall(r"^([A-Za-z-]+): *(.*)$", paragraph, re.MULTILINE))
        # What is in status.d was unpacked over what the base had of it.
        is_gone = "Status" in facts and (folder / "status.d" / facts["Package"]).is_file()
        if (
            "Package" in facts
            and not is_gone
            and facts.get("Status", "ok installed").endswith(" installed")
        ):
            name, version, architecture = facts["Package"], facts["Version"], facts["Architecture"]
            facts_of_it = f"arch={architecture}&distro={distribution}"
            yield component(
                name, version, f"pkg:deb/debian/{quote(name)}@{quote(version)}?{facts_of_it}"
            )


def component(name: str, version: str, purl: str, licences: Component | None = None) -> Component:
    """One entry; `purl` is its identity."""
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
        **(licences or {}),
    }


def distribution_of(root: Path) -> str:
    """`debian-13` from os-release; `debian` where it does not say."""
    file = root / "etc" / "os-release"
    found = (
        re.search(r'^VERSION_ID="?([\d.]+)', file.read_text(), re.MULTILINE)
        if file.is_file()
        else None
    )
    return f"debian-{found[1]}" if found else "debian"


def bill(name: str, version: str, components: Iterator[Component]) -> Component:
    """The whole document; what is found twice is listed once."""
    version_here = platform.python_version()
    python = component("python", version_here, f"pkg:generic/python@{version_here}")
    everything = {found["purl"]: found for found in (python, *components)}
    image = {"type": "container", "bom-ref": "image", "name": name, "version": version}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": image},
        "components": [everything[purl] for purl in sorted(everything)],
    }


def main(words: list[str]) -> None:
    """Print the bill of what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("name")
    parser.add_argument("version")
    parser.add_argument("--python", type=Path, nargs="*", default=[])
    parser.add_argument("--dpkg", type=Path, nargs="*", default=[])
    args = parser.parse_args(words)
    distribution = distribution_of(Path("/"))
    places = [(folder, [*python_packages(folder)]) for folder in args.python]
    places += [(folder, [*debian_packages(folder, distribution)]) for folder in args.dpkg]
    for folder, found in places:
        if not found:
            print(
                f"sbom.py: no package is installed in {folder}: the bill has none of it",
                file=sys.stderr,
            )
    json.dump(
        bill(args.name, args.version, chain.from_iterable(found for _, found in places)),
        sys.stdout,
        indent=1,
    )
    print()


if __name__ == "__main__":
    main(sys.argv[1:])
