"""Record a terminal session, and the page of its run, as a small GIF:

    python -m scripts.record_demo docs/images/demo.gif outputs/demo/run -- scripts/demo

The command runs in a terminal of its own, and what its screen showed becomes the picture: nothing is drawn by hand. Time
runs faster where little happens, so that a minute takes some seconds. The last screen stays, then comes the page of the
run in a headless Chromium. Needs that, and the extras [test] and [docs].
"""

from __future__ import annotations

import argparse
import io
import os
import pty
import select
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import pyte
from PIL import Image, ImageDraw, ImageFont

from tests import browser
from tests.run.test_ui_clicked import Server

COLUMNS = 100
ROWS = 26
FONT_SIZE = 14  # pixels
PADDING = 12  # pixels around the text
FRAME_SECONDS = 0.5  # of the session, between two pictures of the screen
SHOWN_SECONDS = 0.1  # of the GIF, for each of these pictures
MOST_SCREENS = 50  # of the GIF; of a longer session every other picture is shown, or every third …
LAST_SECONDS = 5.0  # of the GIF, for the last screen and for the page
PAGE_WIDTH = 1060  # pixels of the window that is drawn as wide as the terminal
PAGE_COLOURS = 96
BACKGROUND = (13, 17, 23)
COLOURS = {
    "default": (230, 237, 243),
    "black": (139, 148, 158),
    "brightblack": (139, 148, 158),
    "red": (255, 123, 114),
    "brightred": (255, 123, 114),
    "green": (86, 211, 100),
    "cyan": (86, 212, 221),
    "brown": (227, 179, 65),
    "blue": (121, 192, 255),
    "magenta": (210, 168, 255),
}


@dataclass(frozen=True)
class Cell:
    """One character of a screen."""

    text: str
    colour: str


Picture = tuple[tuple[Cell, ...], ...]  # rows of a screen


def record(command: list[str]) -> list[Picture]:
    """Run a command in a terminal and return its screen every FRAME_SECONDS, each different from the one before."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    stream.feed(f"$ {shlex.join(command)}\r\n".encode())
    pictures = [_picture(screen)]
    process, terminal = pty.fork()
    if process == 0:
        # A shell sets the size of the terminal before the command asks for it.
        script = f"stty cols {COLUMNS} rows {ROWS}; exec {shlex.join(command)}"
        os.execvp("sh", ["sh", "-c", script])
    due = time.monotonic() + FRAME_SECONDS
    while True:
        if select.select([terminal], [], [], max(0.0, due - time.monotonic()))[0]:
            try:
                output = os.read(terminal, 65536)
            except OSError:  # Linux says so when the command has closed its terminal
                output = b""
            if not output:
                break
            stream.feed(output)
        if time.monotonic() >= due:
            due += FRAME_SECONDS
            picture = _picture(screen)
            if picture != pictures[-1]:
                pictures.append(picture)
    pictures.append(_picture(screen))
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if status != 0:
        raise SystemExit(
            f"{shlex.join(command)} ended with exit code {status}; nothing was written"
        )
    return pictures


def _picture(screen: pyte.Screen) -> Picture:
    rows = []
    for row in range(ROWS):
        characters = screen.buffer[row]
        rows.append(
            tuple(Cell(characters[column].data, characters[column].fg) for column in range(COLUMNS))
        )
    return tuple(rows)


def draw(picture: Picture, font: ImageFont.FreeTypeFont) -> Image.Image:
    """Draw a screen, character by character."""
    width = font.getlength("M")
    height = FONT_SIZE * 1.35
    size = (round(COLUMNS * width) + 2 * PADDING, round(ROWS * height) + 2 * PADDING)
    image = Image.new("RGB", size, BACKGROUND)
    canvas = ImageDraw.Draw(image)
    for number, row in enumerate(picture):
        for column, cell in enumerate(row):
            if cell.text.strip():
                place = (PADDING + column * width, PADDING + number * height)
                colour = COLOURS.get(cell.colour, COLOURS["default"])
                canvas.text(place, cell.text, font=font, fill=colour)
    return image


def page_of(run_dir: Path, size: tuple[int, int]) -> Image.Image:
    """Return what a browser shows of a run, in a window of the shape of `size`."""
    width, height = size
    errors: list[str] = []
    with browser.opened(errors) as page:
        server = Server(run_dir.parent)
        try:
            server.enter(page)
            page.set_viewport_size({"width": PAGE_WIDTH, "height": PAGE_WIDTH * height // width})
            page.goto(f"{server.address}/run?dir={run_dir.name}")
            # Charts are drawn when their place is known.
            page.wait_for_timeout(1000)
            shown = page.screenshot()
        finally:
            server.end()
    if errors:
        raise SystemExit("\n".join(["the browser complained:", *errors]))
    return Image.open(io.BytesIO(shown)).convert("RGB").resize(size, Image.Resampling.LANCZOS)


def write(pictures: list[Picture], run_dir: Path, path: Path) -> None:
    """Write the GIF. All screens have one palette, since each of them has the same few colours; the page has its own."""
    pictures = pictures[: -1 : 1 + len(pictures) // MOST_SCREENS] + pictures[-1:]
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    font = ImageFont.truetype(fonts / "DejaVuSansMono.ttf", FONT_SIZE)
    palette = draw(pictures[-1], font).quantize(32)
    frames = [
        draw(picture, font).quantize(palette=palette, dither=Image.Dither.NONE)
        for picture in pictures
    ]
    durations = [round(SHOWN_SECONDS * 1000)] * (len(frames) - 1) + [round(LAST_SECONDS * 1000)] * 2
    page = page_of(run_dir, frames[-1].size)
    frames.append(page.quantize(PAGE_COLOURS, dither=Image.Dither.NONE))
    frames[0].save(
        path, save_all=True, append_images=frames[1:], duration=durations, loop=0, optimize=True
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="the GIF to write")
    parser.add_argument("run", type=Path, help="the run directory that the command makes")
    parser.add_argument("command", nargs="+", help="what to run, after --")
    arguments = parser.parse_args()
    write(record(arguments.command), arguments.run, arguments.file)
    print(f"{arguments.file}: {arguments.file.stat().st_size / 1024:.0f} KiB")
