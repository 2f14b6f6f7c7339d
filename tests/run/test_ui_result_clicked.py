"""The result of a real run in a real browser: evaluated, exported, pushed and cancelled; and the dialogs of the runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.pages import EMBEDDED
from kubetune.base import fault_injection, processes, whole_folder
from kubetune.base.files import read_object
from kubetune.errors import OK
from kubetune.result.forms.wanted import PROVENANCE
from kubetune.result.publishing.exporting import export_run
from kubetune.rundir import labels, metrics
from tests import browser
from tests.push_hub import TOKEN, serving
from tests.run.test_report_long import write_run
from tests.run.test_ui_clicked import SECONDS, Server, go, leave, wait
from tests.served_model import ServedModel, served

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.slow, browser.needed]

RUN_FILE = {
    "name": "bot",
    "model": str(EMBEDDED / "model"),
    "data": {
        "train": f"{EMBEDDED}/data/train.jsonl#64",
        "eval": f"{EMBEDDED}/data/heldout.jsonl#16",
        "max_length": 128,
    },
    "lora": {"r": 8},
    "evaluation": {
        "generate": {"metric": "exact_match", "max_new_tokens": 24},
    },
    "training": {"num_train_epochs": 2, "global_batch_size": 16, "learning_rate": 4e-3},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of the demo's model that has ended."""
    folder = tmp_path_factory.mktemp("trained")
    run_file = folder / "bot.yaml"
    run_file.write_text(json.dumps(RUN_FILE))
    command = processes.module("kubetune", "train", str(run_file), f"output={folder / 'bot'}")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == OK, done.stderr
    return folder / "bot"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, trained: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("ui") / "outputs"
    folder.mkdir()
    shutil.copytree(trained, folder / "bot", symlinks=True)
    server = Server(folder)
    yield server
    server.end()


def result_of(tab: Page, server: Server, verb: str) -> None:
    """Open the page of the result by the menu on the page of the run."""
    server.enter(tab)
    go(tab, server, "/run?dir=bot")
    tab.click("summary[aria-label='More to do with this run']")
    tab.get_by_role("link", name=verb, exact=True).click()
    tab.wait_for_url("**/run/result?dir=bot*")


def exported(run_dir: Path) -> list[Path]:
    """Return the folders of exports; beside them is what the model says of proof rows."""
    return [path for path in (run_dir / "exports").iterdir() if path.is_dir()]


def begin(tab: Page, verb: str) -> None:
    """Click the button of a form, and wait until its command has begun."""
    tab.locator(f"#{verb.lower()} button:not([type])").click()
    wait(
        tab,
        f"document.querySelector('#job code')?.textContent.startsWith('kubetune {verb.lower()} ')",
    )


def end_of(tab: Page) -> str:
    """Return how the command ended, in words."""
    text = wait(
        tab,
        "!document.querySelector('#job')?.dataset.job && document.querySelector('#end')?.textContent",
    )
    return str(text)


def test_an_evaluation_outlives_a_reload_and_shows_what_the_verb_wrote(
    server: Server, tab: Page, errors: list[str]
) -> None:
    result_of(tab, server, "Evaluate")
    begin(tab, "Evaluate")
    tab.reload()
    assert tab.locator("#export button:not([type])").is_disabled(), "one at a time"
    assert end_of(tab) == "It is done (exit code 0)."
    evaluation = read_object(server.folder / "bot" / metrics.EVALUATION)
    for name in evaluation["metrics"]:
        assert name.removeprefix("eval_").replace("_", " ") in tab.inner_text("#evaluated")
    assert "exact_match" in tab.inner_text("#output")

    tab.check('#evaluate input[value="base"]')
    command = f"kubetune evaluate {server.folder}/bot --compare=base --json"
    wait(tab, f"document.querySelector('#command-evaluate').textContent === {json.dumps(command)}")
    begin(tab, "Evaluate")
    assert end_of(tab) == "It is done (exit code 0)."
    printed = subprocess.run(
        processes.module("kubetune", *command.split()[1:]), capture_output=True, check=True
    )
    table = tab.inner_text("#evaluated table.numbers >> nth=0")
    for line in json.loads(printed.stdout):
        low, high = line["after_interval"]
        assert f"{100 * low:.3g}–{100 * high:.3g} %" in table
        assert f"{line['p_value']:.2g}" in table
    # What was begun last stays open, and each tab has its own form.
    assert tab.is_visible("#evaluate")
    tab.get_by_role("tab", name="Export").click()
    assert tab.is_visible("#export")
    assert not tab.is_visible("#evaluate")
    assert not errors


def test_an_export_shows_its_proof(server: Server, tab: Page, errors: list[str]) -> None:
    result_of(tab, server, "Export")
    begin(tab, "Export")
    assert end_of(tab) == "It is done (exit code 0)."
    (folder,) = exported(server.folder / "bot")
    assert folder.name.endswith("-adapter")
    (comparison, *_) = read_object(folder / PROVENANCE)["proof"]["comparisons"]
    shown = tab.inner_text("#exported")
    assert str(folder) in shown
    assert f"{comparison['difference']:.1e} apart" in shown
    assert f"same first choice {comparison['agreement']:.1%}" in shown

    tab.click("#export summary")
    tab.fill("#export-output", "../elsewhere")
    wait(tab, "!document.querySelector('#export .problem').hidden")
    assert "expected the name of a folder" in tab.inner_text("#export .problem")
    assert not errors


def test_a_cancelled_export_leaves_nothing(trained: Path, tmp_path: Path, tab: Page) -> None:
    shutil.copytree(trained, tmp_path / "bot", symlinks=True)
    environ = {**os.environ, fault_injection.FAULT: "hang:export.weights"}
    server = Server(tmp_path, environ=environ)
    try:
        result_of(tab, server, "Export")
        tab.check('#export input[value="merged"]')
        begin(tab, "Export")
        # It hangs with its weights written, and the proof still to come.
        wait(tab, "document.querySelector('#output').textContent.includes('…')")
        exports = tmp_path / "bot" / "exports"
        wait_for_files(tab, exports)
        tab.click("#cancel")
        assert end_of(tab).startswith("It was cancelled; nothing half-written is left")
        assert exported(tmp_path / "bot") == []
    finally:
        leave(tab, server)


def wait_for_files(tab: Page, folder: Path) -> None:
    """Wait until weights lie in a folder that is half written."""
    while not list(folder.glob(".*.tmp/*.safetensors")):
        tab.wait_for_timeout(100)


def test_a_push_without_a_token_is_refused_and_with_one_arrives_private(
    trained: Path, tmp_path: Path, tab: Page
) -> None:
    shutil.copytree(trained, tmp_path / "bot", symlinks=True)
    closed = ("HF_HUB_OFFLINE", "HF_TOKEN")
    environ = {name: value for name, value in os.environ.items() if name not in closed}
    environ |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    with serving() as hub:
        environ["HF_ENDPOINT"] = hub.url
        for token in ("", TOKEN):
            server = Server(tmp_path, environ={**environ, "HF_TOKEN": token})
            try:
                result_of(tab, server, "Push")
                tab.fill("#push-repo", "org/bot")
                if not token:
                    tab.click("#push button:not([type])")
                    wait(tab, "!document.querySelector('#push .problem').hidden")
                    assert "no token for the hub: set HF_TOKEN" in tab.inner_text("#push .problem")
                    assert not hub.requests
                    continue
                begin(tab, "Push")
                assert end_of(tab) == "It is done (exit code 0)."
                assert f"{hub.url}/org/bot" in tab.inner_text("#pushed")
                assert "arrived whole" in tab.inner_text("#pushed")
                assert token not in tab.content()
            finally:
                leave(tab, server)
        (folder,) = exported(tmp_path / "bot")
        assert whole_folder.is_whole(folder, PROVENANCE)
        assert hub.files("org/bot") == {path.name: path.read_bytes() for path in folder.iterdir()}
        assert hub.repos["org/bot"]["private"] is True


@pytest.fixture
def runs(tmp_path: Path, tab: Page) -> Iterator[Server]:
    """Yield a server of three runs, of which the first two are chosen from."""
    for name in ("one", "two", "three"):
        write_run(tmp_path / name, 60)
    server = Server(tmp_path)
    server.enter(tab)
    yield server
    leave(tab, server)


def rows_of(tab: Page) -> list[str]:
    """Return the runs of the list."""
    return sorted(tab.eval_on_selector_all("#run-rows input", "all => all.map((x) => x.value)"))


def test_a_run_gets_a_name_a_note_and_tags_by_the_dialog(runs: Server, tab: Page) -> None:
    tab.check('#run-rows input[value="one"]')
    tab.get_by_role("button", name="Name, note, tags").click()
    tab.get_by_label("Name", exact=True).fill("The best")
    tab.get_by_label("Tags, with commas between them").fill("prod, june,, prod")
    tab.get_by_label("Note", exact=True).fill("kept for June")
    tab.get_by_role("button", name="Cancel").click()
    assert labels.read_labels(runs.folder / "one").title == "", "Cancel changes nothing"

    tab.get_by_role("button", name="Name, note, tags").click()
    tab.get_by_label("Name", exact=True).fill("The best")
    tab.get_by_label("Tags, with commas between them").fill("prod, june,, prod")
    tab.get_by_label("Note", exact=True).fill("kept for June")
    tab.get_by_role("button", name="Save", exact=True).click()
    tab.get_by_role("link", name="The best").wait_for()
    written = labels.read_labels(runs.folder / "one")
    assert (written.title, written.note, list(written.tags)) == (
        "The best",
        "kept for June",
        ["prod", "june"],
    )

    # On the page of the run the dialog holds what was saved, and Enter saves too.
    go(tab, runs, "/run?dir=one")
    tab.click("summary[aria-label='More to do with this run']")
    tab.get_by_role("button", name="Name, note, tags").click()
    assert tab.get_by_label("Note", exact=True).input_value() == "kept for June"
    tab.get_by_label("Name", exact=True).fill("The very best")
    tab.get_by_label("Name", exact=True).press("Enter")
    tab.get_by_role("heading", name="The very best").wait_for()

    tab.click("summary[aria-label='More to do with this run']")
    tab.get_by_role("button", name="Name, note, tags").click()
    tab.get_by_label("Tags, with commas between them").fill("x" * 300)
    tab.get_by_role("button", name="Save", exact=True).click()
    wait(tab, "document.querySelector('#labels-problem').textContent")
    assert tab.locator("#labels").is_visible(), "what is refused is not lost"


def test_runs_are_archived_and_taken_out_again(runs: Server, tab: Page) -> None:
    for name in ("one", "two"):
        tab.check(f'#run-rows input[value="{name}"]')
    assert not tab.get_by_role("button", name="Name, note, tags").is_visible(), "of one alone"
    tab.get_by_role("button", name="Archive").click()
    wait(tab, "document.querySelectorAll('#run-rows tr').length === 1")
    assert rows_of(tab) == ["three"]
    tab.locator("nav.states a", has_text="archived").click()
    wait(tab, "document.querySelectorAll('#run-rows tr').length === 2")
    tab.check('#run-rows input[value="one"]')
    tab.get_by_role("button", name="Take out of the archive").click()
    wait(tab, "document.querySelectorAll('#run-rows tr').length === 1")
    assert rows_of(tab) == ["two"]
    assert not labels.read_labels(runs.folder / "one").archived


def test_runs_are_deleted_at_the_second_click_and_a_busy_one_is_not(
    runs: Server, tab: Page
) -> None:
    for name in ("one", "two"):
        tab.check(f'#run-rows input[value="{name}"]')
    tab.get_by_role("button", name="Delete").click()
    assert (runs.folder / "one").is_dir(), "it asks once more"
    # Another choice is another question.
    tab.uncheck('#run-rows input[value="two"]')
    tab.get_by_role("button", name="Delete", exact=True).click()
    tab.get_by_role("button", name="Delete one for good?").click()
    wait(tab, "document.querySelectorAll('#run-rows tr').length === 2")
    assert not (runs.folder / "one").exists()
    assert (runs.folder / "two").is_dir()

    # A rank of the third was heard a moment ago, and what it says holds for this test.
    logs = runs.folder / "three" / "logs"
    logs.mkdir()
    now = time.time() + SECONDS
    beat = {"rank": 0, "phase": "step", "waiting": False, "step": 3, "time": now, "since": now}
    (logs / "rank-0.beat.json").write_text(json.dumps(beat))
    go(tab, runs, "/")
    tab.check('#run-rows input[value="two"]')
    tab.check('#run-rows input[value="three"]')
    tab.get_by_role("button", name="Delete").click()
    tab.get_by_role("button", name="Delete 2 runs for good?").click()
    wait(tab, "document.querySelector('#chosen-problem').textContent.includes('three is at work')")
    assert (runs.folder / "two").is_dir(), "none of the chosen ones is deleted then"


def test_a_server_is_checked_and_the_page_says_whether_it_is_the_model(
    trained: Path, tmp_path: Path, tab: Page, errors: list[str]
) -> None:
    run_dir = tmp_path / "bot"
    shutil.copytree(trained, run_dir, symlinks=True)
    adapter = export_run(run_dir, tell=lambda _: None).path
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    served_model = ServedModel(
        PeftModel.from_pretrained(model, adapter).eval(), tokenizer, names=("bot",)
    )
    pages = Server(tmp_path)
    try:
        result_of(tab, pages, "Evaluate")
        tab.get_by_role("tab", name="Check a server").click()
        tab.locator("#serve button:not([type])").click()
        wait(tab, "!document.querySelector('#serve .problem').hidden")
        assert "the server's address is missing" in tab.inner_text("#serve .problem")
        with served(served_model) as url:
            tab.fill("#serve-url", url)
            begin(tab, "Serve")
            assert end_of(tab) == "It is done (exit code 0)."
            assert "right: those of the trained model" in tab.inner_text("#output")
            served_model.model = AutoModelForCausalLM.from_pretrained(EMBEDDED / "model").eval()
            tab.fill("#serve-url", url)
            tab.fill("#serve-model", "bot")
            # The page still shows the command before.
            with tab.expect_navigation():
                tab.locator("#serve button:not([type])").click()
            assert "exit code 5" in end_of(tab)
            assert "those of the base" in tab.inner_text("#output")
        assert not errors
    finally:
        leave(tab, pages)
