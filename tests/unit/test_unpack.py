"""What a pod unpacks stays in its folder, with Python's own filter and on Pythons that lack it."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from kubetune.k8s.cluster.in_pod import unpacking


@pytest.fixture(params=["filter", "older"], autouse=True)
def python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11.0 to 3.11.3 have no filters."""
    if request.param == "older":
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
        # Nor do they filter without being asked, as 3.14 does.
        trusting = staticmethod(lambda member, path: member)
        monkeypatch.setattr(tarfile.TarFile, "extraction_filter", trusting, raising=False)
    elif not hasattr(tarfile, "data_filter"):
        pytest.skip("this Python has no filters")


def entry(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644
) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type = kind
    member.linkname = link
    member.mode = mode
    member.uid = member.gid = 4321
    member.uname = member.gname = "nobody"
    if kind == tarfile.REGTYPE:
        member.size = 2
    return member


def unpack(folder: Path, *members: tarfile.TarInfo) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(b"ok"))
    content.seek(0)
    folder.mkdir(parents=True)
    # A stream, as standard input is.
    with tarfile.open(fileobj=content, mode="r|") as archive:
        unpacking.extract(archive, folder)


def test_files_folders_and_inner_links_arrive(tmp_path: Path) -> None:
    unpack(
        tmp_path / "tree",
        entry("src", tarfile.DIRTYPE, mode=0o777),
        entry("src/run.py", mode=0o4777),
        entry("src/also.py", tarfile.SYMTYPE, "run.py"),
        entry("src/up.py", tarfile.SYMTYPE, "../src/run.py"),
        entry("again.py", tarfile.LNKTYPE, "src/run.py", mode=0o755),
        entry("/absolute.py"),
    )
    tree = tmp_path / "tree"
    for name in ("src/run.py", "src/also.py", "src/up.py", "again.py", "absolute.py"):
        assert (tree / name).read_text() == "ok"
    status = (tree / "src/run.py").stat()
    assert status.st_mode & 0o7777 == 0o755
    assert status.st_uid == os.getuid()
    assert (tree / "absolute.py").stat().st_mode & 0o7777 == 0o644


@pytest.mark.parametrize(
    "members",
    [
        [entry("../out.py")],
        [entry("src/../../out.py")],
        [entry("link", tarfile.SYMTYPE, "../out.py")],
        [entry("link", tarfile.SYMTYPE, "/tmp/out.py")],
        [entry("src/link", tarfile.SYMTYPE, "../../out.py")],
        [entry("link", tarfile.LNKTYPE, "../out.py")],
        [entry("link", tarfile.LNKTYPE, "/etc/passwd")],
        [entry("a", tarfile.SYMTYPE, "."), entry("a/../../out.py")],
        [entry("pipe", tarfile.FIFOTYPE)],
        [entry("device", tarfile.CHRTYPE)],
        [entry("disk", tarfile.BLKTYPE)],
    ],
    ids=lambda members: members[-1].name + " " + members[-1].linkname,
)
def test_what_would_leave_the_folder_is_refused(
    tmp_path: Path, members: list[tarfile.TarInfo]
) -> None:
    with pytest.raises(tarfile.TarError):
        unpack(tmp_path / "tree", *members)
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]
    kinds = [path for path in (tmp_path / "tree").rglob("*") if not path.is_symlink()]
    assert not any(path.is_fifo() or path.is_char_device() for path in kinds)
