"""The page to work in, asked in this process: who gets in, what its pages say, and that nothing of a run is HTML."""

from __future__ import annotations

import asyncio
import html
import json
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.testclient import TestClient

from kubetune.config.resolved import read_config
from kubetune.data.length_bars import bars
from kubetune.plan.plan import make_plan
from kubetune.reporting import write_report
from kubetune.reporting.cards import cautions_of
from kubetune.reporting.hero import hero
from kubetune.reporting.histogram import shared_bars
from kubetune.reporting.look.metric_values import measured
from kubetune.reporting.numbers import NumbersReader, read_numbers
from kubetune.reporting.point import point
from kubetune.reporting.reading import read_run
from kubetune.reporting.run_sentence import kind
from kubetune.rundir import checkpoints, metrics
from kubetune.rundir.intervals import highest_p, mcnemar, p_in_words
from kubetune.rundir.labels import read_labels
from kubetune.rundir.machine import versions
from kubetune.ui import connections, site
from kubetune.ui.chat.opening import first_of
from kubetune.ui.failure import failure_of
from kubetune.ui.form.fixes import for_failure
from kubetune.ui.security import Guard
from kubetune.ui.server import application, server_settings
from kubetune.ui.site import Site, templates
from tests import browser
from tests.run.test_report_long import write_run
from tests.unit.test_sweep_page import MIXED, write_sweep

TOKEN = "a-token-of-this-test"
HOSTILE = '"><script>alert(1)</script>'
OURS = {"origin": "http://localhost"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return two runs, one of a hostile name, hostile answers and a hostile log; beside them a run that is not theirs."""
    place = tmp_path_factory.mktemp("ui")
    runs = place / "outputs"
    runs.mkdir()
    for name in ("first", "second"):
        write_run(runs / name, 60)
    write_run(place / "elsewhere", 60)
    (runs / "out").symlink_to(place / "elsewhere")
    first = runs / "first"
    settings = json.loads((first / "resolved.json").read_text())
    (first / "resolved.json").write_text(
        json.dumps(
            {**settings, "tracking": {"mlflow": {"tags": {"team": HOSTILE}}}, "output": HOSTILE}
        )
    )
    sample = {"prompt": HOSTILE, "expected": HOSTILE, "before": "b", "after": HOSTILE}
    (first / metrics.BEFORE_AFTER).write_text(json.dumps(sample) + "\n")
    answers = {"metric": "exact_match", "before": 0.1, "after": 0.9, "before_interval": [0, 0.2],
               "after_interval": [0.81, 0.95], "gained": 1,
               "lost": 0, "p_value": 0.5, "test": "McNemar"}  # fmt: skip
    measured = {
        "base": {"eval_exact_match": 0.1},
        "best": {"eval_exact_match": 0.9},
        "answers": [answers],
    }
    (first / metrics.VERDICT).write_text(json.dumps({"step": 60, **measured}))
    (first / "logs").mkdir()
    (first / "logs" / "rank-0.log").write_text(f"[STEP] {HOSTILE}\nhf_secret_of_a_test\n")
    return runs


def client_of(folder: Path, **more: Any) -> TestClient:
    return TestClient(application(Site.of(folder), TOKEN), base_url="http://localhost", **more)


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    with client_of(folder) as opened:
        assert opened.get("/", params={"token": TOKEN}).status_code == 200
        yield opened


def test_without_the_token_nothing_is_shown(folder: Path) -> None:
    with client_of(folder) as stranger:
        for path in ("/", "/run?dir=first", "/news", "/compare", "/?token=another", "/?token="):
            assert stranger.get(path).status_code == 401, path
        assert stranger.get("/static/style.css").status_code == 200
        for path in ("/static/x", "/static/", "/healthzz", "/healthz/x", "/nothing"):
            answer = stranger.get(path)
            assert answer.status_code == 401, path
            assert str(folder) not in answer.text
            assert versions()["kubetune"] not in answer.text
        assert stranger.get("/healthz").text == "ok\n"
        for path in ("/static/style.css", "/healthz"):
            answer = stranger.post(path, headers=OURS)
            assert (answer.status_code, str(folder) in answer.text) == (401, False), path
        first_answer = stranger.get("/", params={"token": TOKEN})
        cookie = first_answer.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert stranger.get("/").status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 421),
        ({"host": "localhost.evil.example:80"}, 421),
        ({"host": ""}, 421),
        ({"host": "localhost:x"}, 421),
        ({"host": "localhost/static/"}, 421),
        ({"host": "localhost/healthz?"}, 421),
        ({"host": "localhost#"}, 421),
        ({"host": "x@localhost"}, 421),
        ({"host": "localhost\\static"}, 421),
        ({"host": "127.0.0.1/static/style.css"}, 421),
        ({"host": "[::1/static]"}, 421),
        ({"host": "local host"}, 421),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost:81"}, 403),
        ({"origin": "ftp://localhost"}, 403),
        ({"origin": "http://["}, 403),
        ({"origin": "https://localhost"}, 200),
        ({"origin": "https://localhost", "sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 200),
        ({"host": "127.0.0.1"}, 200),
        ({"host": "[::1]"}, 200),
        ({"host": "LOCALHOST"}, 200),
        (OURS, 200),
    ],
)
def test_requests_from_elsewhere_are_refused(
    client: TestClient, headers: dict[str, str], status: int
) -> None:
    assert client.get("/", headers=headers).status_code == status


def test_the_path_is_what_the_server_looks_up_not_what_a_host_makes_of_it(folder: Path) -> None:
    """Some versions of starlette build the URL of a request from its Host header, and the path with it."""
    paths = list[str]()

    async def pages(scope: Any, receive: Any, send: Any) -> None:
        paths.append(scope["path"])

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/run",
        "query_string": b"dir=first",
        "headers": [(b"host", b"localhost/static/style.css?")],
        "server": ("127.0.0.1", 80),
        "scheme": "http",
    }
    guard = Guard(pages, TOKEN, is_open=lambda path: path.startswith("/static/"))
    guard._is_known = lambda host: True  # type: ignore[method-assign]
    sent = list[Any]()

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(guard(scope, None, send))  # type: ignore[arg-type]
    assert paths == []
    assert sent[0]["status"] == 401


def test_a_client_that_leaves_in_the_middle_of_a_request_is_no_error(folder: Path) -> None:
    app = application(Site.of(folder), TOKEN)
    headers = {"host": "localhost", "origin": "http://localhost", "cookie": f"kubetune-80={TOKEN}",
               "content-type": "application/json", "content-length": "100"}  # fmt: skip
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/new/plan",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "server": ("127.0.0.1", 80),
        "scheme": "http",
        "root_path": "",
        "http_version": "1.1",
    }
    parts = [
        {"type": "http.request", "body": b'{"text"', "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent = list[Any]()

    async def receive() -> Any:
        return parts.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    assert not parts
    assert sent[0]["status"] == 400


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"GET / HT",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow:",
        b"POST /new/plan HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea",
    ],
    ids=["nothing", "line", "headers", "body", "second"],
)
def test_requests_that_never_come_do_not_stay_open(
    address: str, begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that sends a byte now and then gains no time by it."""
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.3)
    place = urlsplit(address)
    assert place.hostname is not None
    with socket.create_connection((place.hostname, place.port or 80), timeout=30) as client:
        client.sendall(begun)
        client.settimeout(0.05)
        began = time.monotonic()
        is_open = True
        while is_open:
            assert time.monotonic() - began < 30, "the server never gave up"
            try:
                client.sendall(b"x")
                is_open = client.recv(1000) != b""
            except TimeoutError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                is_open = False


def test_a_body_that_never_comes_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "BODY_SECONDS", 0.2)
    place = urlsplit(address)
    assert place.hostname is not None
    request = (
        f"POST /new/plan HTTP/1.1\r\nHost: {place.netloc}\r\nOrigin: {address}\r\n"
        f"Cookie: kubetune-{place.port}={TOKEN}\r\nContent-Type: application/json\r\n"
        "Content-Length: 99\r\n\r\n{"
    )
    with socket.create_connection((place.hostname, place.port or 80), timeout=30) as client:
        client.sendall(request.encode())
        answer = client.recv(1 << 20).decode()
    assert answer.startswith("HTTP/1.1 400")


def test_a_name_of_the_users_own_may_be_allowed(folder: Path) -> None:
    app = application(Site.of(folder), TOKEN, ["gpu-box"])
    with TestClient(app, base_url="http://gpu-box:8600") as named:
        assert named.get("/", params={"token": TOKEN}).status_code == 200
        assert named.get("/").status_code == 200


def test_pages_allow_no_script_or_style_but_their_own(client: TestClient) -> None:
    for path in (
        "/",
        "/run?dir=first",
        "/compare?dir=first&dir=second",
        "/compare",
        "/run?dir=nothing",
    ):
        page = client.get(path)
        policy = page.headers["content-security-policy"]
        assert "unsafe" not in policy
        assert "default-src 'none'" in policy
        text = page.text
        assert " style=" not in text, path
        assert "<style" not in text, path
        assert " on" + "click=" not in text
        assert "<script>" not in text.replace("&lt;script&gt;", ""), path
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", ""), (
            "nothing is loaded from elsewhere"
        )


def test_nothing_of_a_run_is_html_and_no_secret_is_shown(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_a_test")
    for path in ("/", "/run?dir=first", "/compare?dir=first&dir=second"):
        page = client.get(path)
        assert page.status_code == 200, page.text
        assert HOSTILE not in page.text, path
        assert "hf_secret_of_a_test" not in page.text, path
    assert "&lt;script&gt;" in client.get("/run?dir=first").text
    assert "[secret]" in client.get("/run?dir=first").text


@pytest.mark.parametrize(
    "name", ["../elsewhere", "out", "/etc", "first/../../elsewhere", "a%00b", "", "nothing", ".."]
)
def test_paths_stay_inside(client: TestClient, name: str) -> None:
    for path in ("/run", "/compare", "/news/run", "/sweep", "/news/sweep"):
        answer = client.get(f"{path}?dir={name}")
        assert answer.status_code == 404, (path, answer.text)
    assert client.get("/static/..%2f..%2ferrors.py").status_code == 404


def test_names_of_folders_turn_nothing_around_on_a_page(tmp_path: Path) -> None:
    folder = tmp_path / "red\x1b[31m\u202eback"
    folder.mkdir()
    write_run(folder / "run\u2066", 60)
    with client_of(folder) as visitor:
        visitor.get("/", params={"token": TOKEN})
        for path in ("/", "/nothing", "/run?dir=run\u2066"):
            text = visitor.get(path).text
            assert not set("\x1b\u202e\u2066") & set(text), path
            assert r"red\x1b[31m\u202eback" in text


def test_runs_are_filtered_and_sorted(client: TestClient) -> None:
    everything = client.get("/").text
    assert everything.index("/run?dir=second") > 0
    only = client.get("/", params={"text": "team"}).text
    assert "/run?dir=first" in only
    assert "/run?dir=second" not in only
    ascending, descending = (
        client.get("/", params={"sort": "path", "order": order}).text for order in ("asc", "desc")
    )
    assert ascending.index("/run?dir=first") < ascending.index("/run?dir=second")
    assert descending.index("/run?dir=first") > descending.index("/run?dir=second")
    assert client.get("/", params={"sort": "moon"}).status_code == 400
    assert "<polyline" in everything
    assert "No run is like that" in client.get("/", params={"text": "nothing of it"}).text


def change(client: TestClient, path: str, **body: Any) -> Any:
    return client.post(path, json=body, headers=OURS).json()["problems"]


def test_runs_are_named_tagged_archived_and_deleted(tmp_path: Path) -> None:
    for name in ("old", "bad", "live"):
        write_run(tmp_path / name, 60)
    with client_of(tmp_path) as visitor:
        visitor.get("/", params={"token": TOKEN})
        label = {"title": f"best {HOSTILE}", "note": "kept for June", "tags": ["prod", "prod"]}
        assert change(visitor, "/run/label", dirs=["old"], **label) == []
        page = visitor.get("/", params={"text": "june prod best"}).text
        assert "/run?dir=old" in page
        assert "/run?dir=bad" not in page
        assert HOSTILE not in page
        assert "kept for June" in visitor.get("/run?dir=old").text
        assert change(visitor, "/run/label", dirs=["old"], archived=True) == []
        assert read_labels(tmp_path / "old").note == "kept for June", "what is not named stays"
        assert "/run?dir=old" not in visitor.get("/").text
        assert "/run?dir=old" in visitor.get("/", params={"state": "archived"}).text
        for wrong in ({"tags": "prod"}, {"note": "x" * 3000}, {"color": "red"}, {"archived": 1}):
            assert change(visitor, "/run/label", dirs=["bad", "old"], **wrong), wrong
        assert not (tmp_path / "bad" / "labels.json").exists(), "all or nothing"
        assert change(visitor, "/run/label", dirs=["../old"], note="x")

        logs = tmp_path / "live" / "logs"
        logs.mkdir(exist_ok=True)
        beat = {"rank": 0, "phase": "step", "waiting": False, "step": 3}
        times = {"time": time.time(), "since": time.time()}
        (logs / "rank-0.beat.json").write_text(json.dumps({**beat, **times}))
        (tmp_path / "live" / "exit.json").unlink(missing_ok=True)
        refused = change(visitor, "/run/delete", dirs=["bad", "live"])
        live = tmp_path / "live"
        assert refused == [
            f"{live} is at work; `kubetune stop {live}` stops it. Nothing was deleted"
        ]
        (tmp_path / "link").symlink_to(tmp_path / "bad")
        assert "is a link" in change(visitor, "/run/delete", dirs=["link"])[0]
        assert change(visitor, "/run/delete", dirs=["bad"]) == []
        assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "live", "old"]
        assert "/run?dir=bad" not in visitor.get("/").text


def test_each_page_names_the_verb_that_does_the_same(client: TestClient, folder: Path) -> None:
    for path, verb in [
        ("/", f"kubetune runs {folder} --sort started --reverse"),
        (
            "/?text=a%20team&state=done",
            f"kubetune runs {folder} --sort started --reverse --state=done &#39;--filter=a team&#39;",
        ),
        ("/run?dir=first", f"kubetune watch {folder / 'first'}"),
        ("/chat?dir=first&beside=base", f"kubetune chat {folder / 'first'} --compare"),
        (
            "/chat?dir=first&beside=second",
            f"kubetune chat {folder / 'first'} --beside {folder / 'second'}",
        ),
        (
            "/compare?dir=first&dir=second",
            f"kubetune report {folder / 'first'} --compare {folder / 'second'}",
        ),
    ]:
        assert f">{verb}</code>" in browser.unmarked(client.get(path).text), path


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """Yield the address of a server of the folder, for browsers."""
    with served(folder) as address:
        yield address


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Yield the address of a server of a folder."""
    import uvicorn

    with socket.create_server(("127.0.0.1", 0)) as listening:
        app = application(Site.of(folder), TOKEN)
        server = uvicorn.Server(server_settings(app))
        serving = threading.Thread(target=server.run, args=([listening],))
        serving.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        serving.join()


@browser.needed
def test_a_browser_opens_all_pages_and_has_nothing_to_say(address: str) -> None:
    errors = list[str]()
    with browser.opened(errors) as page:
        browser.enter(page, address, TOKEN)
        for path in (
            "/run?dir=first",
            "/compare?dir=first&dir=second",
            "/data",
            "/new",
            "/chat?dir=first",
            "/",
        ):
            browser.show(page, f"{address}{path}")
        # As other soft words, not as the browser has it: too faint on dark.
        faint = "getComputedStyle(document.querySelector(`[type=search]`), `::placeholder`).color"
        assert page.evaluate(f"{faint} === getComputedStyle(document.querySelector(`.live`)).color")
        page.get_by_label("Find").fill("team")
        page.get_by_text("1 of 2 runs").wait_for()
        page.get_by_label("Find").fill("")
        page.get_by_text("2 runs", exact=True).wait_for()
        page.get_by_label("Choose first").check()
        page.locator("#pane .chart canvas").first.wait_for()
        page.get_by_role("button", name="Clear").click()
        page.locator("#pane").wait_for(state="hidden")
        # A menu opens by its button, and Escape closes it and goes back to the button.
        browser.show(page, f"{address}/run?dir=first")
        more = page.locator("summary[aria-label='More to do with this run']")
        more.click()
        page.get_by_role("link", name="Rows").wait_for()
        page.keyboard.press("Escape")
        page.get_by_role("link", name="Rows").wait_for(state="hidden")
        assert page.evaluate("document.activeElement.localName") == "summary"
        # What is folded has its charts drawn when it is opened.
        page.get_by_text(re.compile(r"\d+ more charts")).click()
        page.locator(".more-charts .chart canvas").first.wait_for()
        page.select_option("#x-axis", "share")
        # On paper nothing can be pressed.
        page.emulate_media(media="print")
        assert not page.locator(":is(.bar-top, .actions, .toolbar, .verb button):visible").count()
        page.emulate_media(media="screen")
        # The table of runs is as wide as the window, and its cells stand below their headings.
        browser.show(page, f"{address}/")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        boxes = [cell.bounding_box() for cell in page.locator("#rows [data-label=state]").all()]
        assert len({box["x"] for box in boxes if box}) == 1
        # Data are found by the runs that used them; what does not fit goes with its file.
        browser.show(page, f"{address}/data")
        page.get_by_label("Find").fill("first")
        page.locator("#data-sets tbody", has_text="first").wait_for()
        page.get_by_label("Find").fill("nothing-like-this")
        page.locator("#data-sets tbody").first.wait_for(state="hidden")
        assert page.is_visible("#data-sets thead")
        browser.show(page, f"{address}/compare?dir=first&dir=second")
        page.get_by_role("link", name="Choose others").click()
        for name in ("first", "second"):
            assert page.is_checked(f"input[value={name}]"), "what is compared stays chosen"
        page.get_by_label("Find").fill("nothing-like-this")
        page.get_by_text("0 of 2 runs").wait_for()
        assert not errors, "neither a script failed nor was anything refused by the policy"


@browser.needed
def test_a_live_page_keeps_its_curve_and_what_is_ticked(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "live", 60)
    (run_dir / "exit.json").unlink(missing_ok=True)
    (run_dir / "logs").mkdir(exist_ok=True)
    beat = {"rank": 0, "phase": "step", "waiting": False, "step": 60}
    times = {"time": time.time(), "since": time.time()}
    (run_dir / "logs" / "rank-0.beat.json").write_text(json.dumps({**beat, **times}))

    def go_on(step: int) -> None:
        with (run_dir / metrics.METRICS).open("a") as lines:
            lines.write(json.dumps({"step": step, "epoch": 1.0, "loss": 1.0}) + "\n")

    errors = list[str]()
    with served(tmp_path) as address, browser.opened(errors) as page:
        browser.enter(page, address, TOKEN)
        page.get_by_label("Choose live").check()
        page.locator("#pane .chart canvas").first.wait_for()
        go_on(61)
        # The column of progress gives way to the curves.
        page.locator("#run-rows progress[value='61']").wait_for(state="attached")
        assert page.get_by_label("Choose live").is_checked()
        browser.show(page, f"{address}/run?dir=live")
        page.locator(".hero canvas").wait_for()
        go_on(62)
        page.locator(".facts-line", has_text="62").wait_for()
        assert page.locator(".hero canvas").count() == 1
        # What a comparison says is taken anew too.
        write_run(tmp_path / "other", 60)
        browser.show(page, f"{address}/compare?dir=live&dir=other")
        page.locator("#said").get_by_text("are equally good").wait_for()
        with (run_dir / metrics.METRICS).open("a") as lines:
            lines.write('{"step": 63, "epoch": 1.0, "eval_loss": 1e-5}\n')
        page.locator("#said").get_by_text("live has the lowest held-out loss, 1e-05").wait_for()
    assert not errors


@browser.needed
def test_the_first_curve_and_the_first_evaluation_come_without_a_reload(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "live", 60)
    numbers = run_dir / metrics.METRICS
    numbers.write_text("")
    (run_dir / "logs").mkdir(exist_ok=True)
    beat = {"rank": 0, "phase": "step", "waiting": False, "step": 1}
    times = {"time": time.time(), "since": time.time()}
    (run_dir / "logs" / "rank-0.beat.json").write_text(json.dumps({**beat, **times}))
    errors = list[str]()
    with served(tmp_path) as address, browser.opened(errors) as page:
        browser.enter(page, address, TOKEN)
        browser.show(page, f"{address}/run?dir=live")
        page.evaluate("window.isSamePage = true")
        assert page.locator(".hero").count() == 0
        with numbers.open("a") as lines:
            for step in range(1, 9):
                lines.write(json.dumps({"step": step, "epoch": 1.0, "loss": 9.0 / step}) + "\n")
        page.locator(".hero canvas").wait_for()
        assert "training loss" in page.locator(".hero .what").inner_text().lower()
        # A heading that repeats the name of its tab stays hidden where its section was put in anew.
        page.locator("#curves h2.visually-hidden").wait_for(state="attached")
        with numbers.open("a") as lines:
            lines.write('{"step": 8, "epoch": 1.0, "eval_loss": 1.0, "eval_exact_match": 0.5}\n')
        # One evaluation makes no curve: that of the steps stays beside it.
        page.locator(".hero .to", has_text="50 %").first.wait_for()
        page.locator(".hero figure h3", has_text="Loss").wait_for()
        assert page.evaluate("window.isSamePage")
    assert not errors


# What is lower than a finger needs; links within a sentence, a line of a table or a legend are as high as their text.
LOW = """[...document.querySelectorAll("a[href], button, select, summary, input[type=search]")].filter((part) =>
  part.checkVisibility() && !part.closest("p, td, th, figure, footer, .skip") && part.getBoundingClientRect().height < 39.5
).map((part) => part.outerHTML.slice(0, 90))"""


@browser.needed
def test_a_phone_has_room_for_a_finger(tmp_path: Path) -> None:
    for name in ("good", "bad"):
        checkpoints.commit(
            write_run(tmp_path / name, 60), checkpoints.State(step=60), lambda folder: None
        )
    ended = {"code": 2, "reason": "no such column: answer", "step": None, "error": "ConfigError"}
    (tmp_path / "bad" / "exit.json").write_text(json.dumps(ended))
    size = {"width": 390, "height": 844}
    with served(tmp_path) as address, browser.opened([]) as first:
        assert first.context.browser is not None
        phone = first.context.browser.new_context(viewport=size, has_touch=True, is_mobile=True)
        page = phone.new_page()
        browser.enter(page, address, TOKEN)
        assert page.get_by_text("no such column: answer").is_visible(), "the reason is in the row"
        for path in ("/", "/run?dir=good", "/compare?dir=good&dir=bad", "/data", "/new", "/chat"):
            page.goto(f"{address}{path}")
            assert page.evaluate(LOW) == [], path
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, path
        # The field of a chat stays at the bottom.
        box = page.locator(".say").bounding_box()
        assert box is not None
        assert box["y"] + box["height"] == 844
        page.goto(f"{address}/run?dir=good")
        tabs = page.locator("nav.tabs").bounding_box()
        point = page.locator("#point").bounding_box()
        assert tabs is not None
        assert point is not None
        assert tabs["y"] < point["y"]
        page.get_by_role("tab", name="History").tap()
        assert not page.locator("#point").is_visible()
        phone.close()


def test_results_stand_side_by_side_with_their_intervals(client: TestClient) -> None:
    text = client.get("/compare?dir=first&dir=second").text
    assert re.search(r"<td[^>]*>90 % <small>81–95 %</small>", text)
    assert "/compare?dir=first&amp;dir=second" in text


def test_distillation_is_about_its_divergence_not_the_loss_of_evaluations(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "a", 60)
    settings = json.loads((run_dir / "resolved.json").read_text())
    settings |= {"task": "distill", "distill": {"teacher": "a/teacher", "lmbda": 0}}
    (run_dir / "resolved.json").write_text(json.dumps(settings))
    lines = []
    for step in range(1, 61):
        divergence = 0.5 if step < 30 else 0.25
        lines.append({"step": step, "epoch": step / 60, "loss": 1.0, "divergence": divergence})
    lines.append({"step": 60, "epoch": 1.0, "eval_loss": 2.9})
    (run_dir / metrics.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = hero(read_run(run_dir))
    assert shown is not None
    assert (shown.value.label, shown.value.before, shown.value.after) == (
        "divergence from the teacher", "0.5", "0.25",
    )  # fmt: skip
    assert "held out" not in shown.sure
    assert not shown.is_worse


def test_the_headline_says_how_sure_it_is_and_the_list_names_the_metric(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "a", 60)
    settings = json.loads((run_dir / "resolved.json").read_text())
    settings["training"] = {"metric_for_best_model": "eval_exact_match", "max_steps": 60}
    settings["evaluation"] = {"generate": {"metric": "exact_match"}}
    settings["data"]["eval"] = 0.1
    (run_dir / "resolved.json").write_text(json.dumps(settings))
    with (run_dir / metrics.METRICS).open("a") as lines:
        lines.write('{"step": 60, "epoch": 0.06, "eval_loss": 0.0726, "eval_exact_match": 0.94}\n')
    (run_dir / metrics.BASE).write_text(json.dumps({"metrics": {"eval_exact_match": 0.0}}))
    line = {"metric": "exact_match", "before": 0.0, "after": 0.94, "before_interval": [0, 0.2],
            "after_interval": [0.81, 0.95], "gained": 94, "lost": 0, "p_value": 1.01e-28,
            "test": "McNemar"}  # fmt: skip
    verdict = {"base": {"eval_exact_match": 0.0}, "best": {"eval_exact_match": 0.94}}
    (run_dir / metrics.VERDICT).write_text(json.dumps({**verdict, "step": 60, "answers": [line]}))

    def point() -> tuple[str, str, str]:
        shown = hero(read_run(run_dir))
        assert shown is not None
        return shown.value.before, shown.value.after, shown.sure

    assert point() == (
        "0", "94 %", "p = 1e-28 by McNemar, 81–95 % with 95 % confidence, at step 60"
    )  # fmt: skip
    with client_of(tmp_path) as client:
        client.get("/", params={"token": TOKEN})
        listed = '<small class="from">0 →</small>94 %<small>exact match</small>'
        assert listed in client.get("/").text, "as the page of the run has it"
        # One number is the same text in the point and the table of evaluations, which has its interval and its test.
        page = client.get("/run?dir=a").text
        assert '<span class="to">94 %</span>' in page
        assert page.partition('id="evaluation"')[2].count(">94 %</td>") == 1
        assert ">p = 1e-28 by McNemar</td>" in page
        assert ">0.94</td>" not in page
        assert ">81–95 %</td>" in page
        chosen = client.get("/", params={"metric": "eval_loss"}).text
        assert "</svg>0.0726</span>" in chosen
        assert client.get("/", params={"metric": "eval_moon"}).status_code == 400
    # A test of another checkpoint, or of another metric, says nothing of this one.
    (run_dir / "checkpoints").mkdir(exist_ok=True)
    (run_dir / "checkpoints" / "best").symlink_to("step-000060")
    (run_dir / metrics.VERDICT).write_text(json.dumps({**verdict, "step": 40, "answers": [line]}))
    assert point()[2] == "at step 60"
    other = {**line, "metric": "token_f1"}
    (run_dir / metrics.VERDICT).write_text(json.dumps({**verdict, "step": 60, "answers": [other]}))
    assert point()[2] == "at step 60"
    chance = {**line, "p_value": 0.31}
    (run_dir / metrics.VERDICT).write_text(json.dumps({**verdict, "step": 60, "answers": [chance]}))
    assert point()[2].startswith("may be chance: p = 0.31")
    (run_dir / metrics.BASE).unlink()
    (run_dir / metrics.VERDICT).unlink()
    assert point() == ("", "94 %", "at step 60; the model before training was not evaluated")


def test_each_task_leads_with_its_number_and_how_sure_that_is(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "a", 60)
    settings = json.loads((run_dir / "resolved.json").read_text())
    plan = make_plan(read_config(run_dir), 60, 48, 0)
    (run_dir / "plan.json").write_text(plan.model_dump_json())

    def point(task: str, **measured: float) -> tuple[str, str, str]:
        rewards = {"rewards": [{"name": "exact_match"}]} if task == "grpo" else {}
        (run_dir / "resolved.json").write_text(json.dumps({**settings, **rewards, "task": task}))
        evaluation = {"step": 60, "epoch": 1.0, "eval_loss": 0.5}
        evaluation |= {f"eval_{name}": value for name, value in measured.items()}
        (run_dir / metrics.METRICS).write_text(json.dumps(evaluation) + "\n")
        shown = hero(read_run(run_dir))
        assert shown is not None
        return shown.value.label, shown.value.after, shown.sure.partition(";")[0]

    wilson = "61.2–85.1 % with 95 % confidence, of 48 held-out"  # of 36 of 48
    assert point("preference", accuracy=0.75, margin=1.0) == (
        "accuracy", "75 %", f"{wilson} pairs, at step 60"
    )  # fmt: skip
    assert point("reward_model", accuracy=0.75, margin=1.0) == (
        "agreement with the preferred answers", "75 %", f"{wilson} pairs, at step 60",
    )  # fmt: skip
    assert point("sequence_classification", accuracy=0.75, f1_macro=0.7) == (
        "F1 macro", "70 %", "of 48 held-out rows, at step 60"
    )  # fmt: skip
    # F1 is no share of rows: its interval is not known, that of the accuracy stands beside it.
    shown = hero(read_run(run_dir))
    assert shown is not None
    assert [(value.label, value.sure) for value in shown.further] == [
        ("accuracy", "61.2–85.1 % with 95 % confidence"), ("held-out loss", "")
    ]  # fmt: skip
    assert point("preference", accuracy=1.0)[2].startswith("92.6–100 % with 95 % confidence")
    # What got worse beside a better point is marked.
    (run_dir / metrics.BASE).write_text('{"metrics": {"eval_loss": 0.4, "eval_accuracy": 0.5}}')
    point("preference", accuracy=0.75)
    shown = hero(read_run(run_dir))
    assert shown is not None
    assert not shown.is_worse
    assert [(value.label, value.is_worse) for value in shown.further] == [("held-out loss", True)]
    # Of 24 and 36 right ones of 48, at most 12 got worse and 24 better.
    assert point("preference", accuracy=0.75)[2].startswith(
        "may be chance: p ≤ 0.065 by McNemar on 48 held-out pairs"
    )
    # All are right, so that none can have got worse: that is the p-value itself.
    assert point("preference", accuracy=1.0)[2].startswith("p = 1.2e-07 by McNemar")
    # F1 is no share of rows; the accuracy of the same rows has a test.
    point("sequence_classification", accuracy=1.0, f1_macro=1.0)
    shown = hero(read_run(run_dir))
    assert shown is not None
    assert "; accuracy: p = 1.2e-07 by McNemar on 48 held-out rows" in shown.sure
    # A pair is told apart by chance in half of the cases.
    point("reward_model", accuracy=0.75)
    shown = hero(read_run(run_dir))
    assert shown is not None
    assert shown.guess == (50, "guessing 50 %")
    (run_dir / metrics.BASE).unlink()
    assert point("grpo", exact_match=0.5, reward=1.5, reward_std=0.2) == (
        "reward", "1.5", "1.443–1.557 with 95 % confidence, of 48 held-out rows, at step 60",
    )  # fmt: skip
    shown = hero(read_run(run_dir))
    assert shown is not None
    assert [value.label for value in shown.further] == ["spread of rewards", "exact match"]


def test_a_p_value_is_a_bound_where_more_is_not_known() -> None:
    for rows in range(1, 9):
        for lost in range(rows + 1):
            for gained in range(rows + 1 - lost):
                for right in range(rows + 1 - lost - gained):
                    # `right` rows are right before and after, so that all numbers of right rows are possible.
                    highest = highest_p(right + lost, right + gained, rows)
                    assert mcnemar(gained, lost) <= highest + 1e-12
    assert p_in_words(1 / 10_001, "paired permutation") == "p ≤ 0.0001"
    assert p_in_words(2 / 10_001, "paired permutation") == "p = 0.0002"
    assert p_in_words(1e-28, "McNemar") == "p = 1e-28"
    # What is 0 but for rounding is 0.
    assert measured(-1.788e-08, "eval_margin") == "0"
    assert measured(-1.788e-05, "eval_margin") == "-1.788e-05"


def test_a_classifier_that_was_evaluated_by_hand_has_a_page(tmp_path: Path) -> None:
    evaluation = {"names": ["a", "b", "c"], "confusion": [[8, 2, 0], [1, 3, 0], [0, 0, 0]]}
    run_dir = write_run(tmp_path / "a", 60)
    settings = json.loads((run_dir / "resolved.json").read_text())
    settings["task"] = "sequence_classification"
    (run_dir / "resolved.json").write_text(json.dumps(settings))
    (run_dir / metrics.EVALUATION).write_text(json.dumps(evaluation))
    with client_of(tmp_path) as client:
        client.get("/", params={"token": TOKEN})
        page = client.get("/run?dir=a").text
    # "namespace" is what the page calls that of a cluster, and no function of its templates.
    assert re.findall(r'<td class="(\w+) part-\d+">8<', page) == ["right"]


def test_rewards_that_are_sums_of_different_rewards_are_not_compared(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "a", 60)
    settings = json.loads((run_dir / "resolved.json").read_text())
    rewards = [{"name": "exact_match"}, {"name": "json_valid"}]
    (run_dir / "resolved.json").write_text(
        json.dumps({**settings, "task": "grpo", "rewards": rewards})
    )
    before = {"eval_reward": 1.13, "eval_reward/exact_match": 0.37, "eval_reward/json_valid": 0.76}
    base = {"metrics": {**before, "eval_exact_match": 0.37, "eval_loss": 0.5}}
    (run_dir / metrics.BASE).write_text(json.dumps(base))
    after = {"eval_reward": 0.75, "eval_reward/exact_match": 0.75, "eval_exact_match": 0.75}
    line = {"step": 60, "epoch": 1.0, "eval_loss": 0.4, **after}
    (run_dir / metrics.METRICS).write_text(json.dumps(line) + "\n")

    record = read_run(run_dir)
    shown = point(record)
    assert shown is not None
    assert (shown.label, shown.texts) == ("exact match", ("37", "75 %"))
    assert not shown.is_worse
    assert "json_valid failed on all held-out prompts" in str(cautions_of(record))


def test_a_run_whose_numbers_are_to_be_doubted_is_no_quiet_success(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "a", 60)
    settings = json.loads((run_dir / "resolved.json").read_text())
    rewards = [{"name": "exact_match"}, {"name": "json_valid"}]
    (run_dir / "resolved.json").write_text(
        json.dumps({**settings, "task": "grpo", "rewards": rewards})
    )
    done = {"code": 0, "reason": "done", "step": 60, "error": None}
    (run_dir / "exit.json").write_text(json.dumps(done))
    step = {"step": 60, "epoch": 1.0, "loss": 0.1, "reward": 0.5, "reward/exact_match": 0.5}
    evaluation = {"step": 60, "epoch": 1.0, "eval_loss": 0.5, "eval_reward": 0.75}
    lines = [step, {**evaluation, "eval_reward/exact_match": 0.75}]
    (run_dir / metrics.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))

    def finding(id: str, count: int, sentence: str) -> dict[str, Any]:
        of_split = {"split": "train", "count": count, "sentence": sentence, "id": id}
        return {"severity": "warning", "line": f"{sentence}. Do this", **of_split}

    source = {"path": "train.jsonl", "records": 500, "rows": 500, "overlong": 0, "truncated": 60,
              "no_label": 0, "tokens": 9, "trained_tokens": 9, "longest": 9}  # fmt: skip
    cut = finding("truncated", 60, "60 of 500 records of train truncated at 64 tokens")
    few = finding("repeats", 2, "2 of 500 rows of train repeat another")
    split = {"sources": [source], "records": 500}
    data = {"splits": {"train": split}, "findings": [cut, few]}
    (run_dir / metrics.DATA).write_text(json.dumps(data))

    failed = (
        "reward json_valid failed on all held-out prompts, so the held-out reward is without it"
    )
    with client_of(tmp_path) as client:
        client.get("/", params={"token": TOKEN})
        listed = client.get("/").text
        page = client.get("/run?dir=a").text
    assert 'class="state done warned"' in listed
    for text in (failed, cut["sentence"]):
        assert text in listed
        assert text[1:] in page, "it begins with a capital letter there"
        # Before the point of the run, not among its data.
        assert page.index(text[1:]) < page.index('class="hero"')
    assert 'class="state done warned"' in page
    assert "<title>⚠ long" in page
    assert few["sentence"] not in listed


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"task": "causal_lm"}, "Supervised fine-tuning (SFT) of MODEL"),
        ({"task": "preference"}, "Preference (DPO) of MODEL"),
        ({"task": "preference", "preference": {"loss": "simpo"}}, "Preference (SimPO) of MODEL"),
        ({"task": "reward_model"}, "Reward model, from MODEL"),
        (
            {"task": "sequence_classification", "classification": {"labels": ["good", "bad"]}},
            "Classifier, 2 classes, from MODEL",
        ),
        (
            {"task": "grpo", "rewards": [{"name": "exact_match"}, {"name": "json_valid"}]},
            "GRPO of MODEL, rewarded by exact_match + json_valid, 2 at most",
        ),
        ({"task": "distill", "distill": {"teacher": "big/teacher"}}, "MODEL distilled from big/teacher"),
        ({"task": "distill", "distill": {"teacher": "self"}}, "MODEL distilled from itself"),
    ],
)  # fmt: skip
def test_a_run_says_what_it_learns_in_words(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    run_dir = write_run(tmp_path / "a", 60)
    resolved = json.loads((run_dir / "resolved.json").read_text())
    (run_dir / "resolved.json").write_text(json.dumps({**resolved, **settings}))
    run = read_run(run_dir)
    assert kind(run) == words.replace("MODEL", run.model)


def test_answers_before_and_after_share_their_bars() -> None:
    rows = shared_bars([[1, 5, 4], [6, 10, 0], [11, 15, 1]], [[6, 10, 8]])
    counts = [(low, high, [bar.rows for bar in sides]) for low, high, sides in rows]
    assert counts == [(1, 5, [4, 0]), (6, 10, [0, 8]), (11, 15, [1, 0])]
    assert rows[0][2][0].part == 0.8, "4 of 5, beside 8 of 8"
    rows = shared_bars([[1, 10, 3]], [[31, 40, 5]])
    assert [(low, high) for low, high, _ in rows] == [(1, 10), (11, 20), (21, 30), (31, 40)]
    assert [bar.rows for bar in rows[1][2]] == [0, 0]
    assert shared_bars([], []) == []
    assert bars([3, 4], longest=130)[0][1] == bars([3, 130])[0][1], "the same width"


def test_a_run_is_best_only_where_intervals_are_apart_and_task_and_data_agree(
    tmp_path: Path,
) -> None:
    def judge(name: str, value: float, interval: list[float]) -> None:
        line = {"metric": "exact_match", "before": 0.1, "after": value, "before_interval": [0, 0.2],
                "after_interval": interval, "gained": 1, "lost": 0, "p_value": 0.5, "test": "McNemar"}  # fmt: skip
        best = {"eval_exact_match": value}
        verdict = {"step": 60, "base": {"eval_exact_match": 0.1}, "best": best, "answers": [line]}
        (tmp_path / name / metrics.VERDICT).write_text(json.dumps(verdict))

    for name in ("a", "b"):
        write_run(tmp_path / name, 60)
    with client_of(tmp_path) as client:
        client.get("/", params={"token": TOKEN})

        def compared() -> str:
            return client.get("/compare?dir=a&dir=b").text.replace("\N{NO-BREAK SPACE}", " ")

        judge("a", 0.9, [0.8, 0.96])
        judge("b", 0.5, [0.4, 0.6])
        text = compared()
        assert (
            '<p class="verdict">a has the highest exact match, 90 % against 50 %; its 95 % interval is apart'
            in text
        )
        assert text.count('class="best"') == 1
        assert "the same in all (Loss" in text, "charts in which nothing differs are behind a line"
        judge("b", 0.85, [0.7, 0.92])
        text = compared()
        assert (
            "a has the highest exact match, 90 %, but that may be chance: the 95 % interval of b (85 %) overlaps."
            in text
        )
        assert 'class="best"' not in text
        judge("b", 0.9, [0.8, 0.96])
        assert "All are equally good: exact match 90 %." in compared()

        judge("b", 0.5, [0.4, 0.6])
        settings = json.loads((tmp_path / "b" / "resolved.json").read_text())
        (tmp_path / "b" / "resolved.json").write_text(
            json.dumps({**settings, "task": "reward_model"})
        )
        text = compared()
        assert "Their losses and scores measure different things" in text
        assert "None can be called the best: they learn different tasks." in text
        assert 'class="best"' not in text


def test_a_failed_run_says_the_cause_the_line_and_what_mends_it(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    run_dir = write_run(folder / "a", 60)
    resolved = json.loads((run_dir / "resolved.json").read_text())
    resolved |= {"name": "a", "lora": {"target_modules": ["qproj", "v_proj"]}}
    (run_dir / "resolved.json").write_text(json.dumps(resolved))
    (run_dir / metrics.CONFIG).write_text(
        "name: a\nlora:\n  r: 8\n  target_modules: [qproj, v_proj]\n"
    )
    reason = "lora.target_modules: this model has no module named qproj; did you mean q_proj? It has q_proj. Nothing."
    ended = {"code": 2, "reason": reason, "step": None, "error": "ConfigError"}
    (run_dir / "exit.json").write_text(json.dumps(ended))
    with client_of(folder) as visitor:
        visitor.get("/", params={"token": TOKEN})
        page = visitor.get("/run?dir=a").text
        assert "named qproj; did you mean q_proj?</h2>" in page
        assert '<span class="here"><b>4</b>  target_modules: [qproj, v_proj]' in page
        assert "Set target_modules to q_proj, and start" in page
        assert page.index('href="#log">Log') < page.index('href="#history">')
        assert "<title>✕ " in page
        for verb in ("chat", "run/result"):
            assert f'href="/{verb}?dir=a' not in page, "there is no checkpoint"
        # Nothing of a file that is not the run's is shown, though a reason names it.
        secret = tmp_path / "secret"
        secret.write_text("never shown\n")
        ended["reason"] = f"{secret}:1: is no record"
        (run_dir / "exit.json").write_text(json.dumps(ended))
        page = visitor.get("/run?dir=a").text
        assert "is no record" in page
        assert "never shown" not in page
        assert "Run again, changed" in page
        refused = change(visitor, "/run/mend", dir="a")
        assert refused == ["what would mend this run is not known; change it in the form"]


def test_a_run_that_was_killed_shows_its_steps_and_is_run_again_first(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "a", 60)
    lines = [{"step": step, "epoch": 1.0, "loss": 6.0 - step / 20} for step in range(1, 61)]
    (run_dir / metrics.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    # What the model was before training is known, and nothing since.
    (run_dir / metrics.BASE).write_text('{"metrics": {"eval_exact_match": 0.0}}')
    (run_dir / metrics.CONFIG).write_text("model: org/model\ndata: {train: train.jsonl}\n")
    reason = "rank 0 was killed by SIGKILL (not for memory, as the kernel says: somebody's kill -9)"
    ended = {"code": 145, "reason": reason, "step": None, "error": "RankDied"}
    (run_dir / "exit.json").write_text(json.dumps(ended))
    at = {"schema_version": 1, "time": "2026-01-01T00:00:00Z", "node": 0}
    events = [{**at, "event": "launch"}, {**at, **ended, "event": "exit"}]
    (run_dir / metrics.EVENTS).write_text("".join(json.dumps(event) + "\n" for event in events))
    with client_of(tmp_path) as visitor:
        visitor.get("/", params={"token": TOKEN})
        page = visitor.get("/run?dir=a").text
        listed = visitor.get("/").text
    assert re.search(r'class="main i-play" data-continue="a">Run again</button>', page)
    assert '<p class="what">training loss</p>' in page
    assert '<dt>exact match before training</dt><dd><span class="to">0 %' in page
    assert "not evaluated since it began" in page
    assert "rank 0 was killed by SIGKILL</h2>" in page
    assert "<p>Not for memory, as the kernel says: somebody&#39;s kill -9" in page
    # Its curve has a mark where it died.
    assert '"markers":[{"step":60,' in page
    # In the list the reason stands where its numbers would be.
    assert re.search(r'data-label="evaluation"><small class="why" title="rank 0 was killed', listed)


def test_the_list_draws_the_metric_that_is_chosen_and_is_where_runs_to_compare_are(
    tmp_path: Path,
) -> None:
    for name, values in (("a", (0.0, 0.5, 1.0)), ("b", ())):
        lines = [{"step": 1, "epoch": 1.0, "loss": 2.0}, {"step": 2, "epoch": 1.0, "loss": 1.0}]
        for step, value in enumerate(values, start=1):
            lines.append({"step": step, "epoch": 1.0, "eval_accuracy": value})
        run_dir = write_run(tmp_path / name, 60)
        (run_dir / metrics.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    with client_of(tmp_path) as visitor:
        visitor.get("/", params={"token": TOKEN})
        page = visitor.get("/").text
        choosing = visitor.get("/compare?dir=a").text
        both = visitor.get("/compare?dir=a&dir=b&choose=1").text
    curves = re.findall(r"<title>(.*?)</title><polyline points=\"(.*?)\"", page)
    assert curves == [
        ("accuracy", "0.0,26.0 60.0,14.0 120.0,2.0"),
        ("training loss", "0.0,2.0 120.0,26.0"),
    ]
    assert "<h1>Compare</h1>" in choosing
    assert choosing.count(" checked") == 1
    assert both.count(" checked") == 2


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        run_dir = write_run(tmp_path / name, 60)
        settings = json.loads((run_dir / "resolved.json").read_text())
        file = "other.jsonl" if name == "c" else f"of/{name}/data/train.jsonl"
        settings["data"]["train"] = [{"path": f"/{file}"}]
        (run_dir / "resolved.json").write_text(json.dumps(settings))
    with client_of(tmp_path) as visitor:
        visitor.get("/", params={"token": TOKEN})
        page = visitor.get("/data").text
    names = re.findall(r'<a href="/data\?dir=.">(.*?)</a>', page)
    assert sorted(names) == ["a/data/train.jsonl", "b/data/train.jsonl", "other.jsonl"]


def test_runs_of_two_tasks_show_only_what_both_measure(tmp_path: Path) -> None:
    for name, task, measured_there in (
        ("a", "causal_lm", {"eval_exact_match": 0.5}),
        ("b", "preference", {"eval_accuracy": 0.7, "eval_margin": 1.0}),
    ):
        run_dir = write_run(tmp_path / name, 60)
        settings = json.loads((run_dir / "resolved.json").read_text())
        (run_dir / "resolved.json").write_text(json.dumps({**settings, "task": task}))
        line = {"step": 60, "epoch": 1.0, "eval_loss": 0.25 if name == "a" else 0.5}
        (run_dir / metrics.METRICS).write_text(json.dumps({**line, **measured_there}) + "\n")
    with client_of(tmp_path) as visitor:
        visitor.get("/", params={"token": TOKEN})
        text = visitor.get("/compare?dir=a&dir=b").text
    results = text[text.index('id="results"') : text.index('id="differences"')]
    assert '<th scope="row">held-out loss' in results
    assert '<th scope="row">margin' not in results
    assert "Measured in one run only: exact match, accuracy, margin." in results


def test_a_chat_opens_with_the_newest_run_that_is_done() -> None:
    def run(name: str, **facts: Any) -> dict[str, Any]:
        return {"dir": name, "task": "causal_lm", "state": "done", "cautions": [], **facts}

    runs = [
        run("stopped", state="stopped"),
        run("of classes", task="sequence_classification"),
        run("doubtful", cautions=["its reward failed"]),
        run("good"),
    ]
    assert first_of(runs) == "good"
    assert first_of(runs[:3]) == "stopped"
    assert first_of(runs[1:2]) == "of classes"
    assert first_of([]) == ""


def test_a_reward_that_failed_is_shown_at_its_line(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "a", 60)
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def graded(**columns):\n    raise KeyError('command')\n")
    other = tmp_path / "other.py"
    other.write_text("not shown\n")
    resolved = json.loads((run_dir / "resolved.json").read_text())
    resolved |= {"task": "grpo", "rewards": [{"file": str(rewards), "function": "graded"}]}
    (run_dir / "resolved.json").write_text(json.dumps(resolved))
    for file, is_shown in ((rewards, True), (other, False)):
        reason = f'reward graded could judge no answer: File "{file}", line 1, in graded\nKeyError'
        shown = failure_of(read_run(run_dir), reason)
        assert shown["title"] == "reward graded could judge no answer"
        assert bool(shown["lines"]) == is_shown, "a file that is not of the run is not read"


@pytest.mark.parametrize(
    ("reason", "texts", "values"),
    [
        ("lora.target_modules: this model has no module named qproj; did you mean q_proj? It has q_proj",
         {"lora.target_modules": '["qproj", "v_proj"]'}, {"lora.target_modules": '["q_proj", "v_proj"]'}),
        ("rank 0 ran out of memory (CUDA)", {"training.per_device_train_batch_size": "8"},
         {"training.per_device_train_batch_size": "4"}),
        ("rank 0 ran out of memory (CUDA)", {}, {"training.gradient_checkpointing": "true"}),
        ("rank 0 ran out of memory (CUDA)", {"training.gradient_checkpointing": "true"}, None),
        ("training.learning_rate: found 20; expected less", {"training.learning_rate": "20"}, None),
        ("the loss was not finite at step 3", {}, None),
    ],
)  # fmt: skip
def test_what_mends_a_failure_is_known_by_its_words(
    reason: str, texts: dict[str, str], values: dict[str, str] | None
) -> None:
    fix = for_failure(reason, texts)
    assert (fix[1] if fix else None) == values


def test_what_cannot_be_compared_is_said_first_and_nothing_of_it_is_best(tmp_path: Path) -> None:
    for name, steps, fingerprint in (("a", 60, "one"), ("b", 200, "other")):
        run_dir = write_run(tmp_path / name, steps)
        (run_dir / "data.json").write_text(json.dumps({"fingerprint": fingerprint}))
    with client_of(tmp_path) as visitor:
        visitor.get("/", params={"token": TOKEN})
        text = visitor.get("/compare?dir=a&dir=b").text
        assert "Of 60 to 200 steps" in text
        assert "The prepared data differ" in text
        assert '<option value="share" selected>' in text
        assert 'class="best"' not in text
        assert text.index('id="curves"') < text.index('id="results"')
        # Speed, time and memory say nothing of quality, so that none of them is ever best.
        (tmp_path / "b" / "data.json").write_text(json.dumps({"fingerprint": "one"}))
        text = visitor.get("/compare?dir=a&dir=b").text
        assert "The prepared data differ" not in text
        assert not re.search(r">(Tokens/s|Peak memory|Time in steps)<.*class=.best", text)


def test_data_are_listed_by_set_and_a_chat_opens_with_runs_and_prompts(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        run_dir = write_run(tmp_path / name, 60)
        train = {
            "sources": [],
            "rows": 1234,
            "tokens": 99,
            "longest": 17,
            "lengths": [[1, 9, 4], [10, 17, 2]],
        }
        rows = {"train": train, "eval": {"sources": [], "rows": 56}}
        fingerprint = "other" if name == "c" else "same"
        (run_dir / "data.json").write_text(json.dumps({"fingerprint": fingerprint, "splits": rows}))
    asked = {"messages": [{"role": "user", "content": "What is 2?"}], "tools": []}
    (tmp_path / "c" / "conversations.json").write_text(json.dumps({"conversations": [asked]}))
    checkpoints.commit(tmp_path / "a", checkpoints.State(step=60), lambda folder: None)
    with client_of(tmp_path) as visitor:
        visitor.get("/", params={"token": TOKEN})
        page = visitor.get("/data").text
        assert page.count("<td>1,234</td>") == 2, "two sets of one file, one of two runs"
        assert page.count('scope="rowgroup"') == 1
        assert "1 file, 2 data sets" in page
        assert page.count('title="10–17 tokens: 2 rows"') == 2
        assert page.count('<small class="example-of">What is 2?</small>') == 1
        assert "1 run before" in page
        assert "<td>56</td>" in page
        for name in ("a", "b", "c"):
            assert f'href="/run?dir={name}"' in page
        lines = [
            {
                "prompt": f"user\nWhat is {what}?\nassistant\n",
                "reference": f"the {what} that is expected",
                "before": f"no {what}",
                "answer": f"a {what}",
            }
            for what in ("plum", HOSTILE)
        ]
        turned = {"exact_match": {"gained": [*lines, *lines]}}
        (tmp_path / "a" / metrics.VERDICT).write_text(json.dumps({"turned": turned}))
        # Without a choice it opens with the newest run that has a model, and loads nothing yet.
        opened = visitor.get("/chat").text
        assert HOSTILE not in opened
        assert 'data-dir="a" data-beside="base">' in opened
        assert "data-at-once" in visitor.get("/chat?dir=a").text
        # What the evaluation asked stands once above both answers; what else it asked is proposed, each once.
        assert re.findall("bubble assistant.>([^<]*)", opened) == ["no plum", "a plum"]
        assert opened.count("data-prompt=") == 1
        assert "should answer: the " in opened
        # With more questions as many are shown with their answers as are proposed.
        asked = [{"row": row, "prompt": f"user\nWhat is {row}?\nassistant\n"} for row in range(9)]
        kept = tmp_path / "a" / metrics.ANSWERS
        kept.mkdir()
        questions = "".join(json.dumps({**line, "reference": "so"}) + "\n" for line in asked)
        (kept / "questions.jsonl").write_text(questions)
        answered = [{"row": row, "answer": "x", "scores": {}} for row in range(9)]
        text = "".join(json.dumps(line) + "\n" for line in answered)
        (kept / "step-000000.jsonl").write_text(text)
        opened = visitor.get("/chat").text
        assert len(re.findall("bubble user", opened)) == 2, "of two both answers are known"
        assert re.findall('data-prompt="([^"]*)', opened) == [f"What is {row}?" for row in range(3)]


def test_a_sweep_is_listed_and_leads_to_its_runs_and_back(tmp_path: Path) -> None:
    write_sweep(tmp_path / "searched", MIXED)
    (tmp_path / "searched" / "trials").mkdir()
    for number in (0, 1):
        write_run(tmp_path / "searched" / "trials" / f"{number:03d}", 60)
    write_run(tmp_path / "alone", 60)
    with client_of(tmp_path) as visitor:
        visitor.get("/", params={"token": TOKEN})
        listed = visitor.get("/").text
        assert listed.count('<a href="/sweep?dir=searched"') == 1
        assert "of them in 1 sweep</span>" in listed
        rows = re.findall(r'<tr [^>]*data-sweep="searched"[^>]*>', listed)
        assert ["trial" in row for row in rows] == [False, True, True], "its trials are below it"
        assert "/sweep?dir=" not in visitor.get("/", params={"text": "alone"}).text
        page = visitor.get("/sweep?dir=searched").text
        # Of six trials only two have a run directory.
        assert page.count('<a href="/run?dir=') == 2
        assert "/compare?dir=searched%2Ftrials%2F001&amp;dir=searched%2Ftrials%2F000" in page
        assert f"kubetune report {tmp_path / 'searched'}" in browser.unmarked(page)
        assert 'data-news="/news/sweep?dir=searched"' in page, "its record was written just now"
        assert "/sweep?dir=searched" in visitor.get("/run?dir=searched/trials/001").text
        assert "/sweep?dir=" not in visitor.get("/run?dir=alone").text
        (tmp_path / "searched" / "trials.json").write_text("{")
        assert "trials.json is damaged" in visitor.get("/").text
        answer = visitor.get("/sweep?dir=searched")
        assert answer.status_code == 400
        assert "trials.json is damaged" in answer.text


def test_a_run_that_changes_is_read_anew(client: TestClient, folder: Path) -> None:
    before = client.get("/run?dir=second").text
    assert ">60<" in before
    with (folder / "second" / metrics.METRICS).open("a") as lines:
        lines.write('{"step": 61, "epoch": 0.061, "loss": 1.5, "learning_rate": 0.1, "grad_norm": 1, "samples": 1, '
                    '"tokens": 1, "trained_tokens": 1}\n')  # fmt: skip
    assert ">61<" in client.get("/run?dir=second").text


def test_a_long_run_is_read_bit_by_bit_to_the_same_numbers(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "long", 1500)
    reader = NumbersReader(run_dir, 100)
    looks = 0
    while (so_far := reader.read(0)).unread:
        looks += 1
        assert so_far.totals.steps < 1500
    assert looks > 2
    whole = read_numbers(run_dir, 100, {metrics.METRICS: [], metrics.TIMINGS: []})
    assert replace(so_far, ranks=None) == replace(whole, ranks=None)
    assert so_far.ranks is not None
    assert whole.ranks is not None
    assert so_far.ranks.means == pytest.approx(whole.ranks.means)  # added up in other parts
    kept = "".join((run_dir / metrics.METRICS).read_text().splitlines(keepends=True)[:700])
    (run_dir / metrics.METRICS).write_text(f"{kept}damaged\n")
    assert reader.read().totals.steps == len(
        [line for line in kept.splitlines() if '"loss"' in line]
    )
    assert reader.damaged == {metrics.METRICS: [701], metrics.TIMINGS: []}
    assert write_report([run_dir], tmp_path / "page.html").is_file()


def test_words_that_begin_with_a_dash_are_words_in_the_command_too(
    client: TestClient, folder: Path
) -> None:
    from kubetune import cli, errors

    page = browser.unmarked(client.get("/", params={"text": "-x"}).text)
    match = re.search(r'id="verb" data-live>([^<]+)<', page)
    assert match
    assert cli.main(shlex.split(html.unescape(match[1]))[1:]) == errors.OK


def test_a_namespace_is_another_source_of_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    app = application(Site.of(folder, "finetune"), TOKEN)
    with TestClient(app, base_url="http://localhost") as client:
        client.get("/", params={"token": TOKEN})
        page = browser.unmarked(client.get("/cluster").text)
        assert ">kubetune status --namespace finetune</code>" in page
        assert "Asking the cluster" in page
        assert 'class="problem"' in client.get("/cluster/part").text, "there is none, which is said"
        page = browser.unmarked(client.get("/cluster?name=a-run").text)
        assert ">kubetune watch a-run --namespace finetune</code>" in page
        assert client.get("/cluster?name=--help").status_code == 400
    with client_of(folder) as client:
        client.get("/", params={"token": TOKEN})
        assert "/cluster" not in client.get("/").text
        assert client.get("/cluster").status_code == 400


def test_an_empty_folder_says_how_to_begin(tmp_path: Path) -> None:
    with client_of(tmp_path / "none") as client:
        client.get("/", params={"token": TOKEN})
        assert "No runs yet" in client.get("/").text
        assert "Nothing to compare yet" in client.get("/compare").text


def test_the_server_needs_no_torch() -> None:
    heavy = {"torch", "transformers", "peft", "pyarrow"}
    code = f"import sys, kubetune.ui.server; sys.exit(bool({heavy} & set(sys.modules)))"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host", "0.0.0.0"], "open to other machines"),
        (["--token", "short"], "expected at least 16"),
        (["pyproject.toml"], "is a file"),
    ],
)
def test_what_would_let_strangers_in_is_refused(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kubetune import cli, errors

    monkeypatch.delenv("KUBETUNE_UI_TOKEN", raising=False)
    assert cli.main(["ui", *words]) == errors.USER
    assert message in capsys.readouterr().err


def test_a_run_of_a_cluster_without_a_step_says_so() -> None:
    part = templates().get_template("cluster_part.html")
    listed = part.render(problem="", name="", status=[{"name": "far", "state": "failed"}])
    shown = part.render(problem="", name="far", status={"state": "failed", "why": "exit code 3"})
    assert "– of –" not in listed + shown
    assert "no step yet" in shown
    run = {"state": "running", "why": "", "progress": {"step": 3, "steps": 9, "loss": 0.5}}
    assert "3 of 9 steps, loss 0.5" in part.render(problem="", name="far", status=run)
