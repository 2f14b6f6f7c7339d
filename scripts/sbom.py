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
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any
from urllib.parse import quote

Component = dict[str, Any]


def python_packages(folder: Path) -> Iterator[Component]:
    """Yield the packages installed for a Python below a folder, such as a virtual environment or its `lib`."""
    sites = {*folder.glob("python3*/*-packages"), *folder.glob("lib/python3*/*-packages")}
    for site in sorted(sites):
        for package in distributions(path=[str(site)]):
            name = re.sub(r"[-_.]+", "-", package.name).lower()
            purl = f"pkg:pypi/{name}@{quote(package.version)}"
            yield component(name, package.version, purl, python_licence(package))


def python_licence(package: Distribution) -> Component:
    """Return the licence as an SPDX expression if the package has one, else in the package's words."""
    facts: Any = package.metadata
    expression = facts.get("License-Expression")
    if expression:
        return {"licenses": [{"expression": expression}]}

    # Some packages have the full text of their licence here. Its first line is the name.
    lines = (facts.get("License") or "").strip().splitlines()
    if lines:
        name = lines[0]
    else:
        classifiers = facts.get_all("Classifier") or ()
        licences = [text.rpartition(" :: ")[2] for text in classifiers if "License ::" in text]
        name = ", ".join(licences)
    return {"licenses": [{"license": {"name": name}}]} if name else {}


def debian_packages(folder: Path, distribution: str) -> Iterator[Component]:
    """Yield the packages in dpkg's status file, and those in the folder status.d beside it."""
    for path in (folder / "status", *sorted((folder / "status.d").glob("*"))):
        if not path.is_file():
            continue
        for paragraph in path.read_text("utf-8").split("\n\n"):
            facts = dict(re.findall(r"^([A-Za-z-]+): *(.*)$", paragraph, re.MULTILINE))
            if "Package" not in facts:
                continue
            # What is in status.d was unpacked over the base's package of that name.
            is_replaced = "Status" in facts and (folder / "status.d" / facts["Package"]).is_file()
            is_installed = facts.get("Status", "ok installed").endswith(" installed")
            if is_installed and not is_replaced:
                yield _debian_component(facts, distribution)


def _debian_component(facts: dict[str, str], distribution: str) -> Component:
    name = facts["Package"]
    version = facts["Version"]
    qualifiers = f"arch={facts['Architecture']}&distro={distribution}"
    purl = f"pkg:deb/debian/{quote(name)}@{quote(version)}?{qualifiers}"
    return component(name, version, purl)


def component(name: str, version: str, purl: str, licences: Component | None = None) -> Component:
    """Return an entry of the bill. `purl` is the identity of the package."""
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
        **(licences or {}),
    }


def distribution_of(root: Path) -> str:
    """Return `debian-13`, by os-release; `debian` if that has no version."""
    file = root / "etc" / "os-release"
    version = None
    if file.is_file():
        version = re.search(r'^VERSION_ID="?([\d.]+)', file.read_text(), re.MULTILINE)
    return f"debian-{version[1]}" if version else "debian"


def bill(name: str, version: str, components: Iterable[Component]) -> Component:
    """Return the whole document. A component that occurs twice is listed once."""
    version_here = platform.python_version()
    python = component("python", version_here, f"pkg:generic/python@{version_here}")
    by_purl = {entry["purl"]: entry for entry in (python, *components)}
    image = {"type": "container", "bom-ref": "image", "name": name, "version": version}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": image},
        "components": [by_purl[purl] for purl in sorted(by_purl)],
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
    packages_of: list[tuple[Path, list[Component]]] = []
    for folder in args.python:
        packages_of.append((folder, list(python_packages(folder))))
    for folder in args.dpkg:
        packages_of.append((folder, list(debian_packages(folder, distribution))))
    components: list[Component] = []
    for folder, packages in packages_of:
        components += packages
        if not packages:
            print(
                f"sbom.py: no package is installed in {folder}: the bill has none of it",
                file=sys.stderr,
            )
    json.dump(bill(args.name, args.version, components), sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main(sys.argv[1:])
