"""The places that a run writes to, which have to be there, or to be made, before it starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kubetune.base.files import user_cache
from kubetune.errors import ConfigError

# Kinds of file systems, as Linux names them, in which nobody can make a file that stays.
_OF_THE_KERNEL: Final = frozenset((
    "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "efivarfs", "fusectl", "mqueue", "nsfs",
    "proc", "pstore", "securityfs", "selinuxfs", "sysfs", "tracefs",
))  # fmt: skip


def require_output(output: str) -> None:
    """Raise ConfigError for a run directory that cannot be written."""
    require_writable("output", Path(output).expanduser().absolute())


def require_cache(cache: str | None, environ: Mapping[str, str]) -> None:
    """Raise ConfigError for a folder of prepared data that cannot be written, named or not."""
    folder = user_cache(environ) / "kubetune"
    if cache is not None:
        folder = Path(cache).expanduser()
    require_writable("data.cache", folder.absolute())


def require_report_place(report: str | None) -> None:
    """Raise ConfigError if the report cannot be written; after training it is too late."""
    if report is None:
        return
    path = Path(report).absolute()
    if path.is_dir():
        raise ConfigError(
            f"logging.report_json: {path} is a folder; give the name of a file. Nothing was written."
        )
    from kubetune.rundir.report import require_place_of_report

    require_writable("logging.report_json", path.parent)
    require_place_of_report(path)


def require_writable(key: str, folder: Path) -> None:
    """Raise ConfigError unless the folder can be written, or made."""
    # Folders that are missing will be made in the nearest one that exists.
    nearest = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    kind = _file_system(nearest)
    if kind in _OF_THE_KERNEL:
        raise ConfigError(
            f"{key}: {folder} cannot be made, as {nearest} shows what the kernel knows ({kind}) and keeps no files; give "
            "another place. Nothing was written."
        )
    if not nearest.is_dir():
        raise ConfigError(
            f"{key}: {folder} cannot be made, as {nearest} is no folder; give another place. Nothing was written."
        )
    if not os.access(nearest, os.W_OK):
        raise ConfigError(
            f"{key}: {folder} cannot be written, as {nearest} is not yours to write; give a place that is, such as "
            f"{key}=outputs/my-run. Nothing was written."
        )


def _file_system(place: Path) -> str:
    """Return the kind of file system that a place is on, such as ext4; empty where the system does not tell."""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    # Device, folder, kind, and what does not matter here.
    fields = [line.split(" ") for line in lines]
    mounts = {Path(field[1]): field[2] for field in fields}
    real = Path(os.path.realpath(place))
    return next((mounts[folder] for folder in (real, *real.parents) if folder in mounts), "")
