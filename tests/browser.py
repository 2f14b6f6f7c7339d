"""A headless Chromium that opens a page, clicks and types in it: the DevTools protocol over two pipes, nothing else.

The pages are files; no port is opened.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_SECONDS = 120.0


class Tab:
    """One page. What it threw is in `errors`; files that it saves come to `downloads`."""

    def __init__(self, process: subprocess.Popen[bytes], said: int, heard: int, downloads: Path) -> None:
        self._process, self._said, self._heard, self._rest = process, said, heard, b""
        self._number, self._session = 0, ""
        self.errors: list[str] = []
        self._loaded = False
        self.downloads = downloads
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        self.send("Browser.setDownloadBehavior", session="", behavior="allow", downloadPath=str(downloads))

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session is None and self._session:
            message["sessionId"] = self._session
        os.write(self._said, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, (method, answer)
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._heard, 1 << 16)
            assert part, "Chromium has ended"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        event: dict[str, Any] = json.loads(line)
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif event.get("method") == "Page.loadEventFired":
            self._loaded = True
        return event

    def open(self, page: Path | str, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        """Open a file or an address at a size and wait until it is loaded."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        wish = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[wish])
        self._loaded = False
        self.send("Page.navigate", url=page if isinstance(page, str) else page.absolute().as_uri())
        while not self._loaded:
            self._next()

    def ask(self, expression: str) -> Any:
        """The value of an expression, once it is there where it is promised."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, (expression, found["exceptionDetails"])
        return found["result"].get("value")

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of the first element that a selector finds."""
        x, y = self.ask(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center', "
            "behavior: 'instant'}); const r = e.getBoundingClientRect(); "
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """Press a key where the focus is."""
        text = {"text": "\r"} if key == "Enter" else {"text": " "} if key == " " else {}
        codes = {"Enter": 13, " ": 32, "Tab": 9, "ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "Home": 36}
        for kind in ("keyDown", "keyUp"):
            more = text if kind == "keyDown" else {}
            self.send("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=codes[key], **more)

    def saved(self, name: str) -> Path:
        """The file of this name among the downloads, once it is whole."""
        until, path = time.monotonic() + _SECONDS, self.downloads / name
        while not path.exists() or not path.stat().st_size:
            assert time.monotonic() < until, f"{name} was not saved; there is {os.listdir(self.downloads)}"
            self.ask("new Promise((done) => setTimeout(done, 20))")
        return path

    def picture(self, path: Path, *, whole: bool = False) -> Path:
        """What is seen, or the whole page, as PNG."""
        found = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))
        return path


@contextmanager
def opened(downloads: Path) -> Iterator[Tab]:
    """A tab of a Chromium of its own, whose profile goes with it."""
    assert CHROMIUM is not None
    asked, saying = os.pipe()
    hearing, answered = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        words += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "--hide-scrollbars"]
        # Chromium reads from file descriptor 3 and answers on 4.
        shell = 'in=$1 out=$2; shift 2; eval "exec 3<&$in 4>&$out"; exec "$@"'
        process = subprocess.Popen(
            ["/bin/bash", "-c", shell, "-", str(asked), str(answered), CHROMIUM, *words],
            pass_fds=(asked, answered), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(asked)
        os.close(answered)
        try:
            yield Tab(process, saying, hearing, downloads)
        finally:
            os.close(saying)
            os.close(hearing)
            process.terminate()
            process.wait()
