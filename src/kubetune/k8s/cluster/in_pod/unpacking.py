"""Unpack a tar archive into a folder, and nowhere else."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path


def extract(archive: tarfile.TarFile, folder: Path) -> None:
    """Unpack an archive into a folder. Raise tarfile.TarError for a member that would reach outside, or is a device."""
    # Python 3.11.0 to 3.11.3 have no filters, and pods take whatever the image has.
    if hasattr(tarfile, "data_filter"):
        archive.extractall(folder, filter="data")
        return

    for member in archive:
        _require_inside(member, os.path.realpath(folder))
        # As the filter does: owned by who unpacks, and not writable by others.
        member.uid = os.getuid()
        member.gid = os.getgid()
        member.uname = member.gname = ""
        member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
        archive.extract(member, folder)


def _require_inside(member: tarfile.TarInfo, folder: str) -> None:
    def is_inside(path: str) -> bool:
        # Of an earlier member that is a link, this is where it leads.
        return os.path.commonpath([folder, os.path.realpath(path)]) == folder

    member.name = member.name.lstrip("/")
    place = os.path.join(folder, member.name)
    if not is_inside(place):
        raise tarfile.TarError(f"{member.name!r} would be unpacked outside of {folder}")

    if not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
        raise tarfile.TarError(f"{member.name!r} is a device or a pipe")

    if member.issym() or member.islnk():
        # A symbolic link counts from where it is, a hard link from the top.
        start = os.path.dirname(place) if member.issym() else folder
        if os.path.isabs(member.linkname) or not is_inside(os.path.join(start, member.linkname)):
            raise tarfile.TarError(f"{member.name!r} is a link to outside of {folder}")
