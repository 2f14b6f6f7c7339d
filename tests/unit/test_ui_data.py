"""The page of data: prepared rows of a run file, a page at a time, by length, source, problem and words."""

from __future__ import annotations

import html
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

import kubetune
from kubetune.config.load import load_config
from kubetune.config.naming import RESOLVED
from kubetune.config.resolved import resolved
from kubetune.data.prepared.fingerprint import FORMAT
from kubetune.data.prepared.prepare import prepare
from kubetune.rundir import metrics
from kubetune.ui import row_search
from kubetune.ui.row_search import PAGE, Query, open_rows
from kubetune.ui.server import application
from kubetune.ui.site import Site
from tests import browser
from tests.ranks import wait_until
from tests.run.test_report_long import write_run

MODEL = Path(kubetune.__file__).parent / "cli" / "local" / "embedded" / "model"
TOKEN = "a-token-of-this-test"
ROWS = 60
HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return two run files: of rows in two sources, which are prepared, and of rows that are not."""
    place = tmp_path_factory.mktemp("data")
    for name, count in (("one", ROWS), ("two", 5)):
        lines = (
            {"messages": [
                {"role": "user", "content": "scale " * (1 + i % 7) + (HOSTILE if i == 3 else f"to {i}")},
                {"role": "assistant", "content": f"replicas {i % 50}" if i % 10 else "the same again"},
            ]} for i in range(count)
        )  # fmt: skip
        (place / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    runs = place / "outputs"
    runs.mkdir()
    text = f"model: {MODEL}\ndata: {{train: [{place}/one.jsonl, {place}/two.jsonl], cache: {place}/cache, num_proc: 1}}\n"
    (runs / "first.yaml").write_text(text)
    (runs / "second.yaml").write_text(text.replace("/one.jsonl, ", "/one.jsonl#7, "))
    prepare(load_config(runs / "first.yaml"))
    return runs


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    with TestClient(application(Site.of(folder), TOKEN), base_url="http://localhost") as opened:
        opened.get("/", params={"token": TOKEN})
        yield opened


def rows_of(text: str) -> list[int]:
    return [
        int(number.replace(",", ""))
        for number in re.findall(r"<strong>row ([\d,]+)</strong>", text)
    ]


def test_rows_are_paged_and_nothing_in_them_is_html(client: TestClient) -> None:
    seen = list[int]()
    address = "/data?file=first.yaml"
    while address:
        page = client.get(address).text
        assert HOSTILE not in page
        seen += rows_of(page)
        after = re.search(r'id="next" href="([^"]+)"', page)
        address = after[1].replace("&amp;", "&") if after else ""
    assert seen == list(range(1, ROWS + 5 + 1))
    first = client.get("/data?file=first.yaml").text
    assert len(rows_of(first)) == PAGE
    assert "&lt;script&gt;" in first
    assert re.search(r'<mark class="piece trained">replicas 1</mark>', first)


def test_bad_records_are_listed_a_page_at_a_time(
    client: TestClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kubetune.ui.data.MOST_BAD", 2)
    data = folder.parent / "bad.jsonl"
    good = json.dumps({"prompt": "a", "completion": "b"})
    data.write_text(
        "\n".join([good, "{torn", json.dumps({"prompt": HOSTILE}), good, '{"messages": 5}']) + "\n"
    )
    (folder / "bad.yaml").write_text(f"model: {MODEL}\ndata: {{train: {data}, num_proc: 1}}\n")
    assert "Not checked yet" in client.get("/data/bad?file=bad.yaml").text
    begun = client.post(
        "/data/check", json={"file": "bad.yaml"}, headers={"origin": "http://localhost"}
    ).json()
    assert begun["problems"] == []
    wait_until(lambda: not client.get("/new/job", params={"name": begun["job"]}).json()["running"])
    seen = list[tuple[str, str]]()
    address = "/data/bad?file=bad.yaml"
    while address:
        page = client.get(address).text
        assert "3 bad records" in page
        assert HOSTILE not in page
        seen += re.findall(r"<tr><td[^>]*>([^<]+)</td><td[^>]*>(\d+)</td><td[^>]*>", page)
        after = re.search(r'id="next" href="([^"]+)"', page)
        address = after[1].replace("&amp;", "&") if after else ""
    assert seen == [(str(data), "2"), (str(data), "3"), (str(data), "5")]
    for name in ("bad", "of a team/bad"):  # others that are called so, of which nothing was checked
        (folder / name).parent.mkdir(exist_ok=True)
        write_run(folder / name, 60)
        page = browser.unmarked(client.get("/data/bad", params={"dir": name}).text)
        page = html.unescape(page)
        assert "Not checked yet" in page, name
        assert (
            f"kubetune data check {shlex.quote(str(folder / name / metrics.CONFIG))} --json" in page
        )


def test_filters_leave_what_fits(client: TestClient, folder: Path) -> None:
    def ask(**filters: object) -> list[int]:
        page = client.get("/data", params={"file": "first.yaml", **filters})  # type: ignore[dict-item]
        assert page.status_code == 200, page.text
        return rows_of(page.text)

    assert ask(source=1) == list(range(ROWS + 1, ROWS + 6))
    assert ask(text="ALERT script") == [4, ROWS + 4]
    assert set(ask(problem="repeated")) >= {1, ROWS + 1}
    assert ask(problem="limit") == []
    config = load_config(folder / "first.yaml")
    opened = open_rows(config, prepare(config).fingerprint)
    assert opened is not None
    longest = opened.look(Query(order="longest")).rows
    assert [row["tokens"] for row in longest] == sorted(
        (row["tokens"] for row in longest), reverse=True
    )
    low = longest[-1]["tokens"] - 1
    high = longest[-1]["tokens"]
    lengths = [row["tokens"] for row in opened.look(Query(low=low, high=high)).rows]
    assert lengths
    assert all(low <= length <= high for length in lengths)
    shares = [row["trained"] / row["tokens"] for row in opened.look(Query(order="least")).rows]
    assert shares == sorted(shares)
    for wrong in ({"low": "x"}, {"problem": "none"}, {"order": "up"}, {"source": "-1"}):
        assert client.get("/data", params={"file": "first.yaml", **wrong}).status_code == 400
    assert ask(source=9) == ask(split="other") == []


def test_what_is_not_prepared_or_not_there_is_said(client: TestClient, folder: Path) -> None:
    page = client.get("/data?file=second.yaml").text
    assert "Not prepared here" in page
    assert "kubetune data prepare" in page
    # The name of what is not there breaks at no dash.
    (folder / "third-one.yaml").write_text((folder / "second.yaml").read_text())
    page = client.get("/data?file=third-one.yaml").text
    assert 'The rows of <code><span class="whole">' in page
    listed = client.get("/data").text
    assert "/data?file=first.yaml" in listed
    for name in ("../first.yaml", "nothing.yaml", "/etc/passwd"):
        assert client.get("/data", params={"file": name}).status_code == 404


def test_rows_of_an_older_form_are_shown_once_they_are_prepared_again(
    folder: Path, client: TestClient
) -> None:
    run_dir = folder / "older"
    run_dir.mkdir()
    text = (folder / "second.yaml").read_text().replace("#7", "#9")
    (run_dir / metrics.CONFIG).write_text(text)
    config = load_config(run_dir / metrics.CONFIG)
    (run_dir / RESOLVED).write_text(json.dumps(resolved(config)))
    with pytest.MonkeyPatch.context() as then:
        for module in ("prepare", "fingerprint"):
            then.setattr(f"kubetune.data.prepared.{module}.FORMAT", FORMAT - 1)
        older = prepare(config).fingerprint
    (run_dir / metrics.DATA).write_text(json.dumps({"fingerprint": older, "splits": {}}))
    assert "Not prepared here" in client.get("/data?dir=older").text
    # As the page's button does, or the command that it names.
    prepare(load_config(run_dir / metrics.CONFIG))
    page = client.get("/data?dir=older").text
    assert len(rows_of(page)) == 9 + 5
    assert "not the bytes that the run trained on" in page
    assert older[:12] in page
    # What the run has recorded and this machine has is what it trained on.
    (run_dir / metrics.DATA).write_text(
        json.dumps({"fingerprint": prepare(config).fingerprint, "splits": {}})
    )
    page = client.get("/data?dir=older").text
    assert len(rows_of(page)) == 9 + 5
    assert "not the bytes" not in page


def test_rows_are_in_the_order_of_a_stable_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_search, "_FILTER_BATCH", 7)
    draw = np.random.default_rng(0)
    for count in (0, 1, 7, 8, 100):
        keys = draw.integers(0, 20, 200).astype(np.uint32)
        chosen = np.sort(draw.choice(200, count, replace=False)).astype(np.uint32)
        expected = chosen[np.argsort(keys[chosen], kind="stable")]
        assert (
            row_search._put_in_order(chosen.copy(), keys.__getitem__).tolist() == expected.tolist()
        )

        hashes = draw.integers(0, 2**64, 30, np.uint64)[draw.integers(0, 30, 200)]
        values, counts = np.unique(hashes[chosen], return_counts=True)
        repeats = chosen[np.isin(hashes[chosen], values[counts > 1])]
        expected = repeats[np.argsort(hashes[repeats], kind="stable")]
        assert row_search._repeated(chosen.copy(), hashes).tolist() == expected.tolist()


@browser.needed
def test_what_is_folded_keeps_its_remark_apart_for_a_finger_too(folder: Path) -> None:
    from tests.unit import test_ui

    gap = """() => {
      const [name, remark] = ["strong", "small"].map((part) =>
        document.querySelector(`.group > summary ${part}`).getBoundingClientRect());
      return remark.left - name.right;
    }"""
    with test_ui.served(folder) as address, browser.opened([]) as first:
        assert first.context.browser is not None
        for has_touch in (False, True):
            size = {"width": 390, "height": 844}
            phone = first.context.browser.new_context(
                viewport=size, has_touch=has_touch, is_mobile=has_touch
            )
            page = phone.new_page()
            browser.enter(page, address, test_ui.TOKEN)
            page.goto(f"{address}/data?file=first.yaml")
            assert page.evaluate(gap) > 3, has_touch
            phone.close()
