"""A folder of images alone: refused, with the file of records that it lacks."""

from __future__ import annotations

from pathlib import Path

from kubetune.base.humanize import counted
from kubetune.config.data_files import ending_of, is_read
from kubetune.data.media import IMAGE_SUFFIXES
from kubetune.data.reading.sources import visible_in
from kubetune.errors import DataError


def require_no_bare_images(folder: Path) -> None:
    """Raise DataError for a folder of images without a file that says what is to be learned about them."""
    if not folder.is_dir():
        return
    images = []
    for file in visible_in(folder):
        # Texts beside images are their captions, and no records that name them.
        if is_read(file) and ending_of(file) != ".txt":
            return
        if file.suffix.lower() in IMAGE_SUFFIXES:
            images.append(file)
    if not images:
        return
    image = images[0].relative_to(folder)
    answer = image.parent.name or "…"
    raise DataError(
        f"{folder} holds {counted(len(images), 'image')} and no file of records; a run needs one that says what is to be "
        f'learned about each image. Write {folder}/train.jsonl with lines such as {{"image": "{image}", "prompt": '
        f'"What is this?", "completion": "{answer}"}}'
    )
