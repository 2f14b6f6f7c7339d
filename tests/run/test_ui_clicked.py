"""The page in a real browser: a run begun from the form and seen to its end, compared, looked into, and talked to."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import psutil
import pytest

from benchmarks.pages import EMBEDDED, FILTERS, MILLION, mebibytes, write_rows
from kubetune.base import processes
from kubetune.config.load import load_config
from kubetune.errors import OK, PREEMPTED
from kubetune.rundir import metrics
from tests import browser
from tests.ranks import wait_until
from tests.run.test_report_long import write_run

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.slow, browser.needed]

SIZES = [(390, False), (390, True), (768, False), (1280, False), (1280, True)]
SECONDS = 900.0
MEBIBYTES = 150


class Server:
    """A real `kubetune ui` of a folder."""

    def __init__(self, folder: Path, *words: str, environ: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        command = processes.module("kubetune", "ui", str(folder), "--port", "0", *words)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = re.search(r"(http://\S+)/(\?token=\S+)", line)
        assert match, line
        self.address, self.token = match[1], match[2]

    def enter(self, tab: Page) -> None:
        """Open the page by its token."""
        tab.goto(f"{self.address}/{self.token}")
        tab.wait_for_url(f"{self.address}/")

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def wait(tab: Page, expression: str) -> Any:
    """Return the value of an expression once it is one, over reloads and new pages."""
    from playwright.sync_api import Error

    until = time.monotonic() + SECONDS
    while True:
        # Not wait_for_function: it evaluates texts within the page, whose policy forbids that.
        with suppress(Error):  # the page is just being left
            if value := tab.evaluate(expression):
                return value
        assert time.monotonic() < until, (expression, tab.inner_text("body"))
        tab.wait_for_timeout(100)


def go(tab: Page, server: Server, page: str, width: int = 1280, *, dark: bool = False) -> None:
    """Open a page of the server."""
    browser.show(tab, f"{server.address}{page}", width, dark=dark)


def fill(tab: Page, values: dict[str, str]) -> None:
    """Type into fields of the page, or choose; those that are folded away are looked for by their name."""
    for name, value in values.items():
        field = tab.locator(f'[name="{name}"]')
        if not field.is_visible():
            tab.fill("#find", name)
        if field.evaluate("field => field.localName") == "select":
            field.select_option(value)
        else:
            field.fill(value)


def leave(tab: Page, server: Server) -> None:
    """End a server. Its page is left before, since one that stays open complains that nobody answers."""
    tab.goto("about:blank")
    server.end()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("ui") / "outputs")
    yield server
    server.end()


def test_the_form_says_why_the_server_refuses(server: Server, tab: Page) -> None:
    server.enter(tab)
    go(tab, server, "/new")
    assert not tab.evaluate("document.querySelector('#submit').checkVisibility()"), (
        "nothing of a cluster is typed"
    )
    fill(tab, {"name": "a" * (1 << 20)})
    wait(
        tab,
        "document.querySelector('#problems').textContent === 'the request has more than 1,048,576 bytes'",
    )
    tab.context.clear_cookies()
    fill(tab, {"name": "first"})
    wait(
        tab,
        "document.querySelector('#problems').textContent.startsWith('Open the address that kubetune ui')",
    )
    # The other tests go on in this tab.
    server.enter(tab)


def test_mistakes_are_told_at_their_fields_which_a_list_and_start_lead_to(
    server: Server, tab: Page
) -> None:
    server.enter(tab)
    go(tab, server, "/new", 390)
    model = str(EMBEDDED / "model")
    fill(
        tab, {"model.path": model[:-1], "data.train": f"{EMBEDDED}/data/trian.jsonl", "name": "a b"}
    )
    wait(tab, "document.querySelectorAll('#problems .problem li').length === 3")
    # What is wrong is said once, at the field.
    assert "lower case letters" not in tab.inner_text("#problems")
    at_name = tab.locator("[name=name]")
    described = str(at_name.get_attribute("aria-describedby")).split()
    assert "lower case letters" in tab.inner_text(f"[id='{described[0]}']")
    assert at_name.get_attribute("aria-invalid") == "true"
    assert_axe_finds_nothing(tab)
    # The list is in the order of the form, and Start leads to its first line.
    tab.click("#start")
    focused = "document.activeElement.name"
    assert tab.evaluate(focused) == "model.path"
    tab.locator("#problems").get_by_role("link", name="Name of the run").click()
    assert tab.evaluate(focused) == "name"
    for name in (f"Use {EMBEDDED}/data/train.jsonl", "Call it a-b"):
        assert tab.get_by_role("button", name=name).is_visible()
    tab.get_by_role("button", name=f"Use {model}").click()
    wait(tab, "document.querySelectorAll('#problems .problem li').length === 2")
    # What is left is fixed at once.
    tab.get_by_role("button", name="Fix all 2").click()
    wait(tab, "document.querySelector('#summary.good')")
    assert tab.input_value("[name='model.path']") == model
    assert not tab.locator("[aria-invalid]").count()
    tab.fill("[name='data.train']", "")
    wait(tab, "document.querySelector('#summary').textContent === 'Still needed: Training data'")
    tab.click("#start")
    assert tab.evaluate(focused) == "data.train"


def test_files_at_hand_are_searched_and_looked_at_while_one_chooses(
    tmp_path: Path, tab: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    turns = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "a word"}]
    for number in range(120):
        line = json.dumps({"messages": turns, "n": number}) + "\n"
        (data / f"part-{number:03d}.jsonl").write_text(line * 20)
    monkeypatch.chdir(tmp_path)
    server = Server(tmp_path / "outputs")
    try:
        server.enter(tab)
        go(tab, server, "/new", 390)
        start = tab.locator("#start").bounding_box()
        assert start is not None
        assert start["y"] + start["height"] <= 900, "it is seen before anything is scrolled"
        tab.get_by_role("button", name="120 at hand").click()
        options = "document.querySelectorAll('[role=option]')"
        assert tab.evaluate(f"{options}.length") == 50
        assert "70 more: type any part of a name." in tab.inner_text("[data-list=data] .popup")
        tab.keyboard.type("art-1 17")
        wait(tab, f"{options}.length === 1")
        tab.keyboard.press("ArrowDown")
        wait(tab, "document.querySelectorAll('.preview tbody tr').length === 3")
        assert_axe_finds_nothing(tab)
        tab.keyboard.press("Enter")
        assert not tab.is_visible("[role=listbox]")
        assert tab.input_value('[name="data.train"]') == "data/part-117.jsonl"
        wait(tab, "document.querySelectorAll('#look tbody tr').length === 3")
        # On a busy machine the form still asks what the plan says.
        wait(tab, "document.querySelector('#summary').innerText === 'Still needed: Model'")
        assert tab.input_value('[name="name"]') == "part-117"
        # 20 rows are few; what is typed stays, whatever the data are.
        epochs = '[name="training.num_train_epochs"]'
        assert tab.input_value(epochs) == "3"
        fill(tab, {"training.global_batch_size": "4", "data.train": "data/part-118.jsonl#10"})
        wait(tab, "document.querySelector('[name=name]').value === 'part-118'")
        assert tab.input_value('[name="training.global_batch_size"]') == "4"
        assert tab.input_value('[name="data.eval"]') == ""
        assert tab.input_value(epochs) == "3"
    finally:
        leave(tab, server)


def test_runs_are_grouped_and_columns_chosen_and_a_browser_keeps_that(
    tmp_path: Path, tab: Page
) -> None:
    for name in ("a", "b", "c"):
        write_run(tmp_path / name, 60)
    server = Server(tmp_path)
    headings = "[...document.querySelectorAll('.heading')].filter((row) => !row.hidden).map((row) => row.textContent)"
    try:
        server.enter(tab)
        go(tab, server, "/")
        tab.select_option("#group", "method")
        assert len(tab.evaluate(headings)) == 1
        assert tab.evaluate(headings)[0].endswith("· 3 runs")
        tab.click("#filters .menu summary")
        tab.uncheck("#columns label:has-text('model') input")
        assert not tab.is_visible("td[data-label=model]")
        assert_axe_finds_nothing(tab)
        tab.reload()
        wait(tab, f"{headings}.length === 1")
        assert not tab.is_visible("td[data-label=model]")
        assert tab.is_visible("td[data-label=loss]")
        tab.fill("[name=text]", "no run is like this")
        assert tab.evaluate(headings) == []
    finally:
        tab.evaluate("localStorage.clear()")
        leave(tab, server)


def test_control_c_says_nothing_while_a_page_is_open(tmp_path: Path) -> None:
    command = processes.module("kubetune", "ui", str(tmp_path), "--port", "0")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        match = re.search(r"(http://\S+)/\?token=(\S+)", process.stdout.readline())
        assert match
        cookie = f"kubetune-{urlsplit(match[1]).port}={match[2]}"
        with urlopen(Request(f"{match[1]}/news", headers={"cookie": cookie})) as news:
            assert news.readline() == b"event: news\n"
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=SECONDS)
    assert stderr.strip() in ("", "kubetune: interrupted")


@pytest.fixture(scope="module")
def two_runs(server: Server, tab: Page, errors: list[str]) -> list[str]:
    """Return two runs begun from the form: the second as the first, with another rank."""
    server.enter(tab)
    assert "No runs yet" in tab.evaluate("document.body.innerText")
    go(tab, server, "/new")
    data = EMBEDDED / "data"
    fill(
        tab,
        {
            "name": "First Run",
            "model.path": str(EMBEDDED / "model"),
            "data.train": f"{data}/train.jsonl#64",
        },
    )
    wait(tab, "document.querySelector('#problem-name')?.textContent.includes('lower case letters')")
    tab.get_by_role("button", name="Call it first-run").click()
    wait(tab, "document.querySelector('[name=name]').value === 'first-run'")
    fill(tab, {"name": "first", "data.eval": f"{data}/heldout.jsonl#16", "lora": "true", "lora.r": "4",
               "training.learning_rate": "4e-3", "training.global_batch_size": "16", "data.max_length": "128",
               "training.num_train_epochs": "1"})  # fmt: skip
    assert wait(tab, "[...document.querySelectorAll('#facts tr')].find((r) => r.cells[0].textContent === 'steps')"
                     "?.cells[1].textContent").startswith("4 (1 epoch)")  # fmt: skip
    wait(
        tab,
        "!document.querySelector('#start').disabled && !document.querySelector('#plan[aria-busy]')",
    )
    see_to_the_end(tab, errors, "first")
    go(tab, server, "/new?dir=first")
    assert tab.evaluate("document.querySelector('[name=\"lora.r\"]').value") == "4"
    fill(tab, {"name": "second", "lora.r": "8"})
    wait(tab, "document.querySelector('#yaml').textContent.includes('r: 8')")
    wait(
        tab,
        "!document.querySelector('#start').disabled && !document.querySelector('#plan[aria-busy]')",
    )
    see_to_the_end(tab, errors, "second")
    assert load_config(server.folder / "second.yaml").lora.r == 8  # type: ignore[union-attr]
    return ["first", "second"]


def see_to_the_end(tab: Page, errors: list[str], name: str) -> None:
    """Begin the run that is typed, and look at its page until it says that it is done."""
    tab.click("#start")
    wait(tab, f"location.pathname === '/run' && location.search === '?dir={name}'")
    wait(tab, "document.querySelector('h1 .state')?.textContent === 'done'")
    wait(tab, "document.querySelectorAll('.chart canvas').length > 3")
    assert not [error for error in errors if "Failed to load resource" not in error], errors


def test_a_run_is_begun_seen_to_its_end_and_compared(
    server: Server, tab: Page, two_runs: list[str]
) -> None:
    go(tab, server, "/")
    for name in two_runs:
        tab.check(f'.runs-table input[value="{name}"]')
    tab.click("#compare")
    wait(
        tab,
        "location.pathname === '/compare' && document.querySelectorAll('.chart canvas').length > 3",
    )
    text = tab.evaluate("document.body.innerText")
    assert "lora.r" in text
    for name in two_runs:
        assert name in text


def test_a_run_of_a_terminal_is_stopped_and_continued_to_the_same_numbers(
    server: Server, tab: Page, errors: list[str], two_runs: list[str]
) -> None:
    run_dir = server.folder / "typed"
    words = [
        "train",
        str(server.folder / "first.yaml"),
        f"output={run_dir}",
        "training.num_train_epochs=12",
    ]
    whole = subprocess.run(
        processes.module("kubetune", *words[:2], f"output={run_dir}-whole", *words[3:]),
        capture_output=True,
        text=True,
    )
    assert whole.returncode == OK, whole.stderr
    with subprocess.Popen(
        processes.module("kubetune", *words), stdout=subprocess.PIPE, text=True
    ) as terminal:
        wait_until(
            lambda: (
                (run_dir / metrics.METRICS).exists()
                and (run_dir / metrics.METRICS).stat().st_size > 0
            )
        )
        # The run lasts three seconds. Without a pause it may end before the page is there.
        ranks = psutil.Process(terminal.pid).children(recursive=True)
        for rank in ranks:
            rank.suspend()
        go(tab, server, "/run?dir=typed")
        tab.get_by_role("button", name="Stop").click()
        with tab.expect_response(lambda response: response.request.method == "POST"):
            tab.get_by_role("button", name="Save a checkpoint and stop?").click()
        for rank in ranks:
            rank.resume()
        terminal.communicate()
    assert terminal.returncode == PREEMPTED
    wait(tab, "document.querySelector('h1 .state')?.textContent === 'stopped'")
    tab.get_by_role("button", name="Continue").click()
    wait(tab, "document.querySelector('h1 .state')?.textContent === 'done'")
    numbers = [
        (place / metrics.METRICS).read_bytes() for place in (run_dir, Path(f"{run_dir}-whole"))
    ]
    assert numbers[0] == numbers[1]
    assert len(numbers[0].splitlines()) > 48
    assert not [error for error in errors if "Failed to load resource" not in error], errors


def test_both_models_answer_side_by_side(server: Server, tab: Page, two_runs: list[str]) -> None:
    for _ in range(2):  # opened again while the model is loaded
        go(tab, server, "/chat?dir=first&beside=base")
    wait(tab, "!document.querySelector('#text').disabled")
    tab.fill("#text", "Please restart wallet in staging.")
    tab.press("#text", "Enter")
    wait(
        tab,
        "!document.querySelector('#text').disabled && document.querySelectorAll('.bubble.assistant').length === 2",
    )
    bubbles = tab.evaluate("[...document.querySelectorAll('.bubble')].map((b) => b.textContent)")
    assert bubbles.count("Please restart wallet in staging.") == 1, "once, above both answers"
    assert all(bubbles), bubbles
    assert "problem" not in tab.evaluate("document.querySelector('#talk').innerHTML")
    assert "undefined" not in tab.inner_text("#talk")
    below = [
        child
        for child in psutil.Process(server.process.pid).children()
        if child.status() != psutil.STATUS_ZOMBIE
    ]
    children = [child for child in below if "chat_child" in " ".join(child.cmdline())]
    assert len(children) == 1, "one process for both sides"
    go(tab, server, "/")
    psutil.wait_procs(children, SECONDS)
    assert not any(child.is_running() for child in children), "it ends with its page"


@pytest.fixture(scope="module")
def searched(server: Server, tab: Page, errors: list[str]) -> str:
    """Return a sweep that was begun in a terminal, and followed on its page to its end."""
    pytest.importorskip("optuna")
    server.enter(tab)
    folder = server.folder / "searched"
    example = Path(__file__).parents[2] / "examples" / "sweep.yaml"
    words = ["training.learning_rate=log(1e-4,1e-1)", "lora.r=8,4", "training.max_steps=27"]
    words += ["training.eval_steps=3", "--pruner", "asha", "--trials", "4", "-o", str(folder)]
    command = processes.module("kubetune", "sweep", str(example), *words)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as terminal:
        wait_until(lambda: (folder / "trials.json").exists(), SECONDS)
        go(tab, server, "/")
        tab.get_by_role("link", name="searched").first.click()
        wait(tab, "document.querySelector('h1 .state')?.textContent === 'running'")
        wait(tab, "document.querySelector('.trials tbody tr')")
        tab.get_by_role("button", name="lora.r").click()
        wait(tab, "document.querySelector('h1 .state')?.textContent === 'done'")
        output, _ = terminal.communicate()
    assert terminal.returncode == OK, output
    assert not [error for error in errors if "Failed to load resource" not in error], errors
    # The table is still in the order that was chosen before the last of its rows came.
    ranks = tab.evaluate(
        "[...document.querySelectorAll('.trials tbody tr')].map((row) => row.cells[5].textContent)"
    )
    assert len(ranks) == 4
    assert ranks == sorted(ranks)
    return "searched"


def test_a_trial_is_named_by_pointer_and_keyboard_and_leads_to_its_run(
    server: Server, tab: Page, searched: str
) -> None:
    go(tab, server, f"/sweep?dir={searched}")
    name = "document.querySelector('[data-readout-trial]').textContent"
    hint = tab.evaluate(name)
    # The middle of the best trial's line between the first two axes, in pixels of the window.
    x, y = tab.evaluate("""(() => {
        const line = document.querySelector('.parallel .best[data-trial]');
        line.scrollIntoView({ block: 'center', behavior: 'instant' });
        const [a, b] = line.getAttribute('d').slice(1).split('L').map((point) => point.split(',').map(Number));
        const at = new DOMPoint((a[0] + b[0]) / 2, (a[1] + b[1]) / 2);
        const { x, y } = at.matrixTransform(line.getScreenCTM());
        return [x, y];
    })()""")
    tab.mouse.move(x, y)
    best = tab.get_attribute(".parallel .best[data-trial]", "data-trial")
    wait(tab, f"{name}.startsWith('trial {best}: state done')")
    assert tab.evaluate("document.querySelector('.trials tr.chosen').id") == f"trial-{best}"
    tab.mouse.move(0, 0)
    wait(tab, f"{name} === {json.dumps(hint)}")
    tab.focus("[data-trials]")
    tab.keyboard.press("ArrowRight")
    wait(tab, f"{name} !== {json.dumps(hint)} && !{name}.startsWith('trial {best}:')")
    shown = tab.get_attribute("[data-trials]", "aria-valuetext")
    assert shown == tab.evaluate(name)

    tab.click(f"#trial-{best} a")
    wait(tab, "location.pathname === '/run'")
    tab.get_by_role("link", name=f"sweep {searched}").click()
    wait(tab, "location.pathname === '/sweep'")
    assert "Too few trials" in tab.inner_text("#importance")


@pytest.fixture(scope="module")
def million(server: Server) -> str:
    """Return a run whose prepared rows are a million."""
    return write_rows(server.folder).name


def test_a_million_rows_are_paged_and_searched(server: Server, tab: Page, million: str) -> None:
    server.enter(tab)
    go(tab, server, f"/data?dir={million}")
    assert "1,000,000 of 1,000,000 rows" in tab.evaluate("document.body.innerText")
    assert tab.evaluate("document.querySelectorAll('#rows .row').length") == 20
    assert tab.evaluate("document.querySelectorAll('mark.trained').length") >= 20
    go(tab, server, f"/data?dir={million}&at=999990")
    assert "row 1,000,000" in tab.evaluate("document.body.innerText")
    go(tab, server, f"/data?dir={million}&order=longest&text=kubectl")
    wait(tab, "document.querySelectorAll('#rows .row').length === 20")
    go(tab, server, f"/data?dir={million}&low=1&high=4&text=kubectl")
    wait(tab, "document.body.innerText.includes('No row is like that')")


def test_the_server_of_a_hundred_runs_stays_small(tmp_path: Path, tab: Page) -> None:
    for number in range(99):
        write_run(tmp_path / f"run-{number:03d}", 100)
    write_run(tmp_path / "long", MILLION)
    write_rows(tmp_path)
    server = Server(tmp_path)
    try:
        server.enter(tab)
        assert tab.evaluate("document.querySelectorAll('.runs-table tbody tr').length") == 101
        go(tab, server, "/run?dir=long")
        assert "Reading its numbers" in tab.evaluate("document.body.innerText")
        wait(tab, "!document.body.innerText.includes('Reading its numbers')")
        assert tab.evaluate("document.querySelector('.facts-line li').textContent").startswith(
            "1,000,000"
        )
        go(tab, server, "/compare?" + "&".join(f"dir=run-{number:03d}" for number in range(12)))
        for query in FILTERS:
            go(tab, server, f"/data?dir=million&{query}")
            assert "of 1,000,000 rows" in tab.inner_text("main"), query
            assert mebibytes(server.process.pid)[1] < MEBIBYTES, query
    finally:
        leave(tab, server)


PAGES = ["/", "/run?dir=first", "/compare?dir=first&dir=second", "/compare", "/data", "/data?dir=first", "/new",
         "/new?dir=first", "/chat", "/chat?dir=first&beside=second", "/run?dir=nothing",
         "/data/bad?dir=first", "/sweep?dir=searched", "/run/result?dir=first"]  # fmt: skip


@pytest.mark.parametrize(("width", "dark"), SIZES)
def test_axe_finds_nothing_and_no_page_is_wider_than_the_window(
    server: Server, tab: Page, two_runs: list[str], searched: str, width: int, dark: bool
) -> None:
    for page in PAGES:
        go(tab, server, page, width, dark=dark)
        assert_axe_finds_nothing(tab)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, page


def assert_axe_finds_nothing(tab: Page) -> None:
    """Assert that axe-core, where it is installed, finds no violation in the page as it stands."""
    if find_spec("axe_core_python") is None:
        return
    import axe_core_python

    axe = (Path(axe_core_python.__file__).parent / "axe.min.js").read_text("utf-8")
    tab.evaluate(f"{axe}; 0")
    violations = tab.evaluate(
        "axe.run({resultTypes: ['violations']}).then((r) => JSON.stringify(r.violations))"
    )
    problems = []
    for violation in json.loads(violations):
        nodes = "; ".join(node["html"][:160] for node in violation["nodes"][:3])
        problems.append(
            f"{tab.url}: {violation['impact']} {violation['id']}: {violation['help']} {nodes}"
        )
    assert not problems, "\n".join(problems)
