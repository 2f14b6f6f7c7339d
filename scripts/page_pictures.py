"""Make the pictures of pages in the docs: `python -m scripts.page_pictures docs/images`.

Trains the demo twice, with adapters of two ranks, and searches its settings. Opens each page of it in a headless
Chromium, and keeps what that shows. Nothing is drawn by hand. Takes some minutes. Needs Chromium, and the extras
[test] and [docs].
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from kubetune.base import processes
from kubetune.cli.local.demo import EMBEDDED, NEXT_PROMPT, RUN_FILES
from tests import browser
from tests.run.test_ui_clicked import Server, fill, wait

if TYPE_CHECKING:
    from playwright.sync_api import Page

COLOURS = 128  # of a picture, which keeps its file small
RANKS = {"kubectl-bot": 16, "kubectl-bot-r4": 4}  # of the adapters, by run
SEARCHED = """\
name: rate-and-rank
model: models/chat-0.8m
data: {train: data/train.jsonl, eval: data/heldout.jsonl, max_length: 128}
lora: {dropout: 0.1}
training: {global_batch_size: 16, per_device_train_batch_size: 8, learning_rate: 1e-5, eval_steps: 10, max_steps: 40}
compute: {processes: 1}
"""
RANGES = ("training.learning_rate=log(1e-4,3e-2)", "lora.r=4,8,16")
TRIALS = "12"  # of them are importances computed


@dataclass(frozen=True)
class Picture:
    """A picture of the docs: its file, and the part of a page that it shows."""

    name: str
    width: int = 1280  # pixels
    height: int = 800
    top: str = ""  # what stands at its top, as a selector; "" for the beginning of the page


def main() -> None:
    """Train, look at every page, and write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the pictures are written")
    folder = parser.parse_args().folder.absolute()
    with tempfile.TemporaryDirectory() as place:
        # Paths on the pages are short, and name no folder of this machine.
        os.chdir(place)
        train()
        errors: list[str] = []
        with browser.opened(errors) as page:
            take_files(page, folder)
            server = Server(Path("outputs"))
            try:
                server.enter(page)
                take_pages(page, server.address, folder)
            finally:
                server.end()
    if errors:
        raise SystemExit("\n".join(["the browser complained:", *errors]))


def train() -> None:
    """Train the demo with adapters of each rank, and write what is made of a run and of data."""
    shutil.copytree(EMBEDDED / "model", "models/chat-0.8m")
    shutil.copytree(EMBEDDED / "data", "data")
    for name, rank in RANKS.items():
        text = RUN_FILES["causal_lm"].format(
            model="models/chat-0.8m",
            train="data/train.jsonl",
            held_out="data/heldout.jsonl",
            output=f"outputs/{name}",
            compute="{processes: 1}",
        )
        file = Path(f"{name}.yaml")
        file.write_text(text)
        kubetune("train", str(file), f"name={name}", f"lora.r={rank}")
    Path("search.yaml").write_text(SEARCHED)
    kubetune("sweep", "search.yaml", *RANGES, "--sampler", "tpe", "--trials", TRIALS)
    first = next(iter(RANKS))
    kubetune("report", f"outputs/{first}", "-o", "report.html")
    kubetune("data", "check", f"{first}.yaml", "--html", "data.html")


def kubetune(*words: str) -> None:
    """Run a command, and end with its output if it fails."""
    done = subprocess.run(processes.module("kubetune", *words), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"kubetune {' '.join(words)} failed:\n{done.stderr}")


def take_files(page: Page, folder: Path) -> None:
    """Take the pictures of pages that are files."""
    browser.show(page, Path("report.html"))
    take(page, folder, Picture("report", height=1060))
    browser.show(page, Path("data.html"), 1160)
    take(page, folder, Picture("data-page", 1160, 960, "#sources"))


def take_pages(page: Page, address: str, folder: Path) -> None:
    """Take the pictures of the pages of a server."""
    first, second = RANKS
    browser.show(page, f"{address}/run?dir={first}")
    take(page, folder, Picture("ui-run"))

    browser.show(page, f"{address}/compare?dir={first}&dir={second}")
    take(page, folder, Picture("ui-compare", height=1240))

    browser.show(page, f"{address}/sweep?dir=sweep-rate-and-rank")
    take(page, folder, Picture("ui-sweep", height=1250))

    browser.show(page, f"{address}/chat?dir={first}&beside=base")
    wait(page, "!document.querySelector('#text').disabled")
    page.fill("#text", NEXT_PROMPT)
    page.press("#text", "Enter")
    answered = "document.querySelectorAll('.bubble.assistant').length === 2"
    wait(page, f"!document.querySelector('#text').disabled && {answered}")
    take(page, folder, Picture("ui-chat"))

    browser.show(page, f"{address}/new")
    fill(page, {"model.path": "models/chat-0.8m", "name": "kubectl-bot-3"})
    wait(page, "!document.querySelector('[data-list=data] .open').hidden")
    page.click("[data-list=data] .open")
    page.keyboard.type("train")
    page.keyboard.press("ArrowDown")
    wait(page, "document.querySelector('[data-list=data] .preview table')")
    page.keyboard.press("Enter")
    wait(page, "document.querySelector('#summary.good')")
    # What a field means is shown while one is in it.
    page.evaluate("document.activeElement.blur()")
    page.evaluate("scrollTo({top: 0, behavior: 'instant'})")
    take(page, folder, Picture("ui-new"))


def take(page: Page, folder: Path, picture: Picture) -> None:
    """Write what the page shows, in few colours."""
    page.set_viewport_size({"width": picture.width, "height": picture.height})
    if picture.top:
        page.eval_on_selector(picture.top, "part => part.scrollIntoView({behavior: 'instant'})")
    # Charts are drawn anew for a window of another size.
    page.wait_for_timeout(1000)
    path = folder / f"{picture.name}.png"
    page.screenshot(path=path)
    with Image.open(path) as image:
        image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB", flush=True)


if __name__ == "__main__":
    main()
