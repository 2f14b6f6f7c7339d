"""The data's own page, from real files with a real tokenizer."""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kubetune import cli
from kubetune.config.schema import Config
from kubetune.data.inspect.survey import survey
from kubetune.data.length_bars import bars
from kubetune.data.prepared.profile import Profile
from kubetune.data.reading.images import ImageRef
from kubetune.data.text.encode import Encoded
from kubetune.reporting.histogram import drawn_bars
from tests.tiny import pretend_weights, train_tokenizer

ENGLISH = "Could you please tell me how the weather will be tomorrow morning in the city?"
GERMAN = "Kannst du mir bitte sagen, wie das Wetter morgen früh in der Stadt werden wird?"


def chat(question: str, answer: str, **more: Any) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ],
        **more,
    }


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pretend_weights(train_tokenizer(tmp_path_factory.mktemp("model")))


def page_of(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str], *overrides: str
) -> tuple[int, str]:
    run_file = folder / "run.yaml"
    run_file.write_text(
        f"name: mine\nmodel: {model}\ndata: {{train: data.jsonl, max_length: 128, num_proc: 1}}\n"
    )
    code = cli.main(
        ["data", "check", str(run_file), "--html", str(folder / "page.html"), *overrides]
    )
    capsys.readouterr()
    return code, (folder / "page.html").read_text()


def test_the_page_shows_what_is_trained_and_what_is_left_out(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [chat(f"{ENGLISH} {i}", f"Answer {i} <b>&") for i in range(20)]
    write(tmp_path / "data.jsonl", [*rows, rows[0], rows[0], chat("a b c " * 200, "too long")])
    code, page = page_of(tmp_path, model, capsys)
    assert code == 0
    assert "ready to train" in page
    assert "1 of 23 records of train left out: longer than 128 tokens" in page
    assert "2 of 22 rows of train repeat another" in page
    assert "appears 3 times" in page
    assert "<p>23 records, all of them conversations." in page
    assert '<mark class="piece trained">Answer 0 &lt;b&gt;&amp;</mark>' in page
    assert '<span class="piece special">&lt;|im_start|&gt;</span><span class="piece">user' in page
    assert '<tr class="limit">' in page
    assert "the dashed line" in page
    assert "English" in page
    assert not re.search(r'(src|href)="(?!#)', page)


def test_what_the_terminal_says_of_the_data_stands_at_the_top_of_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = pretend_weights(train_tokenizer(tmp_path / "model"))
    facts = {"model_type": "llama", "max_position_embeddings": 32, "vocab_size": 512}
    (model / "config.json").write_text(json.dumps(facts))
    rows = [{"prompt": f"{ENGLISH} {i}", "completion": f"{GERMAN} {i}"} for i in range(20)]
    write(tmp_path / "data.jsonl", [*rows, rows[0]])
    code, page = page_of(tmp_path, model, capsys)
    assert code == 0
    look = html.unescape(page.split('<section id="look">')[1].split("</section>")[0])
    assert "the model was trained on at most 32 positions" in look
    look = re.sub("</?code>", "`", re.sub("</?span[^>]*>", "", look))
    assert "it is trained without the chat template that `chat` and `generate` use" in look
    cli.main(["data", "check", str(tmp_path / "run.yaml")])
    terminal = capsys.readouterr().out
    cli.main(["data", "check", str(tmp_path / "run.yaml"), "--json"])
    for finding in json.loads(capsys.readouterr().out)["findings"]:
        assert finding["line"] in look
        assert finding["line"] in terminal


def test_the_page_of_bad_data_names_the_lines(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        tmp_path / "data.jsonl", [chat("1", "2"), {"messages": [{"role": "bot", "content": "x"}]}]
    )
    code, page = page_of(tmp_path, model, capsys)
    assert code == 2
    assert "not ready" in page
    assert "1 record of train cannot be used" in page
    assert "data.jsonl:2:" in page


COUNTS = "records", "rows", "overlong", "no_label", "refused", "unreadable"
MIXED = [
    json.dumps(chat("1", "2")),
    json.dumps({"messages": [{"role": "bot", "content": "x"}]}),
    '{"messages": ',
    json.dumps(chat("1", "2", id=3, **{"\x1b[31mred": 1})),
    json.dumps({"messages": [{"role": "user", "content": "x"}]}),
    json.dumps(chat("1", "a b c d " * 100)),
]


def test_the_counts_of_records_add_up_and_are_the_same_everywhere(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.jsonl").write_text("\n".join(MIXED))
    code, page = page_of(tmp_path, model, capsys)
    assert code == 2
    table = page.split('id="counts"')[1].split("</table>")[0]
    heads, cells = (re.findall(rf"<{tag}\b[^>]*>([^<]*)<", table) for tag in ("th", "td"))
    counts = dict(zip(heads[2:], cells[1:], strict=False))
    names = (
        "records",
        "rows kept",
        "too long, left out",
        "nothing to train on",
        "refused",
        "cannot be read",
    )
    assert [int(counts[name]) for name in names] == [6, 2, 1, 1, 1, 1]
    assert (
        "<p>6 records, 4 of them conversations, 1 of a form that is refused, 1 that cannot be read."
        in page
    )
    cli.main(["data", "check", str(tmp_path / "run.yaml"), "--json"])
    (source,) = json.loads(capsys.readouterr().out)["splits"]["train"]["sources"]
    assert [source[name] for name in COUNTS] == [6, 2, 1, 1, 1, 1]
    cli.main(["data", "check", str(tmp_path / "run.yaml")])
    stdout = capsys.readouterr().out
    assert "2 rows of 6 records" in stdout
    assert "2 records of train cannot be used" in stdout
    assert "1 of 6 records of train left out: longer than" in stdout
    assert "1 of 6 records of train left out: nothing to train on" in stdout


def test_what_data_hold_reaches_no_terminal_as_an_order(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "\x1b]0;owned\x07\x9b31m\u202e"
    rows = [
        chat(f"1{hostile}", f"2{hostile}", **{hostile: 1}),
        {"messages": [{"role": hostile, "content": "x"}]},
    ]
    write(tmp_path / "data.jsonl", [*rows, {hostile: 2}])
    run_file = tmp_path / "run.yaml"
    run_file.write_text(f"model: {model}\ndata: {{train: data.jsonl}}\n")
    targets = (str(run_file), f"{tmp_path}/data.jsonl")
    checks = [["check", target, *more] for target in targets for more in ([], ["--json"])]
    for command in (*checks, ["prepare", str(run_file)]):
        assert cli.main(["data", *command]) == 2
        out, err = capsys.readouterr()
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", out + err)
        assert "owned" in out + err


def test_keys_that_are_not_used_are_told_on_the_terminal_and_on_the_page(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        tmp_path / "data.jsonl",
        [chat("1", f"{i}", id=i, **({"source": "x"} if i else {})) for i in range(3)],
    )
    code, page = page_of(tmp_path, model, capsys)
    assert code == 0
    assert "train: keys not used: id × 3, source × 2" in page
    assert "the dashed line" not in page, "nothing is too long, so none is drawn"
    for target in (str(tmp_path / "run.yaml"), str(tmp_path / "data.jsonl")):
        assert cli.main(["data", "check", target]) == 0
        assert "keys not used: id × 3, source × 2" in capsys.readouterr().out


def test_long_rows_are_shortened_on_the_terminal(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = chat("q", "a")["messages"] * 30
    write(
        tmp_path / "data.jsonl",
        [chat("begin " + "a b c d " * 500 + " end", "x"), {"messages": talk}],
    )
    run_file = tmp_path / "run.yaml"
    run_file.write_text(f"model: {model}\ndata: {{train: data.jsonl, max_length: 100000}}\n")
    assert cli.main(["data", "check", str(run_file)]) == 0
    stdout = capsys.readouterr().out
    assert len(stdout) < 3000
    assert "begin a b c d" in stdout
    assert re.search(r"… 3,\d\d\d characters … .* end<\|im_end\|>", stdout, re.DOTALL)
    assert "… 37 pieces …" in stdout
    assert cli.main(["data", "check", str(run_file), "--json"]) == 0
    assert "a b c d " * 400 in capsys.readouterr().out


def test_the_page_says_what_another_length_would_cost(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = {"messages": chat("1", "2")["messages"] * 2}
    write(
        tmp_path / "data.jsonl",
        [*(chat("a", f"b {i}") for i in range(18)), chat("a", "a b c d " * 100), talk],
    )
    code, page = page_of(tmp_path, model, capsys, "data.overlong=truncate")
    assert code == 0
    costs = page.split("would cost train")[1].split("</table>")[0]
    table = [
        re.findall(r"<t[hd][^>]*>([^<]*)<", row) for row in re.findall(r"<tr.*?</tr>", costs)[1:]
    ]
    assert [row[0] for row in table] == ["128 (set)", "256", "512", "1,024"]
    numbers = [[float(cell.split()[0].strip("%")) for cell in row[1:]] for row in table]
    rows_too_long, _, lost = zip(*numbers, strict=True)
    assert rows_too_long == (5, 5, 5, 0)
    assert lost[0] > lost[1] > lost[2] > lost[3] == 0.0
    assert "Share of a row that is trained, train" in page
    assert "Answers in a conversation" in page


def test_rows_are_counted_by_what_they_are_made_of() -> None:
    profile, other = (Profile((128, 256, 512), image_token=7) for _ in range(2))
    profile.add_row(
        Encoded([7] * 100 + [1] * 200, [False] * 100 + [True] * 200, images=(ImageRef("a.png", 0),))
    )
    other.add_row(Encoded([1] * 10, [False] * 10))
    other.add_row(Encoded([1, 1], [True, True]))
    profile.add(other)
    assert profile.labels == 202
    assert profile.lost == {128: 172, 256: 44}
    assert profile.shares == {13: 1, 19: 1}
    assert profile.image_tokens == {100: 1}
    [short, _, enough] = profile.costs(Counter((300, 10, 2)), 128)
    assert short == {
        "limit": 128,
        "rows": 1 / 3,
        "tokens": 300 / 312,
        "labels": 172 / 202,
        "is_chosen": True,
    }
    assert (enough["limit"], enough["rows"], enough["labels"]) == (512, 0.0, 0.0)


def test_a_page_needs_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(tmp_path / "data.jsonl", [chat("1", "2")])
    assert cli.main(["data", "check", str(data), "--html", str(tmp_path / "page.html")]) == 2
    assert "give --model, or a run file" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_a_survey_counts_roles_languages_and_empty_answers(tmp_path: Path) -> None:
    pairs = [{"prompt": ENGLISH, "completion": " "}, {"prompt": ENGLISH, "completion": GERMAN}]
    chats = [chat(GERMAN, GERMAN), {"messages": [{"role": "user", "content": ENGLISH}]}]
    sources = [
        str(write(tmp_path / "pairs.jsonl", pairs)),
        str(write(tmp_path / "chats.jsonl", chats)),
    ]
    config = Config.model_validate({"model": "x", "data": {"train": sources}})
    first, second = survey(config.data, config.record_kind, config.training.seed)
    assert first["kinds"] == [("prompts with a completion", 1)]
    assert [role for role, _, _ in first["roles"]] == ["prompt", "completion"]
    assert first["languages"] == {"prompt": [("en", 1)], "completion": [("de", 1)]}
    assert (first["empty_answers"], first["empty"]) == (1, [f"{tmp_path}/pairs.jsonl:1"])
    assert second["languages"]["user"] == [("de", 1), ("en", 1)]
    assert second["turns"] == [(0, 1), (1, 1)]
    assert second["empty_answers"] == 1


def test_a_survey_measures_images(tmp_path: Path) -> None:
    for name, size in (("a.png", (40, 30)), ("b.png", (80, 60))):
        Image.new("RGB", size, "navy").save(tmp_path / name)
    rows = [
        chat("<image>what?", "blue", images=[name])
        for name in ("a.png", "b.png", "a.png", "missing.png")
    ]
    config = Config.model_validate(
        {"model": "x", "data": {"train": str(write(tmp_path / "d.jsonl", rows))}}
    )
    (source,) = survey(config.data, config.record_kind, config.training.seed)
    assert source["images"] == 4
    assert source["image_sizes"]["largest"] == (80, 60)
    assert source["image_sizes"]["common"][0] == ((40, 30), 2)
    assert sum(count for _, count in source["unusable"]) == 1


def test_a_survey_counts_labels(tmp_path: Path) -> None:
    rows = [{"text": "good film", "label": "good"}] * 3 + [{"text": "bad film", "label": "bad"}]
    source = str(write(tmp_path / "d.jsonl", rows))
    config = Config.model_validate(
        {"model": "x", "task": "sequence_classification", "data": {"train": source}}
    )
    (summary,) = survey(config.data, config.record_kind, config.training.seed)
    assert summary["labels"] == [("good", 3), ("bad", 1)]
    assert (summary["empty_answers"], summary["turns"]) == (0, [])


def test_bars_are_of_one_round_width_and_end_at_the_limit() -> None:
    assert bars([3, 3, 5], None) == [[3, 3, 2], [4, 4, 0], [5, 5, 1]]
    buckets = bars(range(1, 1001), 512)
    assert sum(count for _, _, count in buckets) == 1000
    assert any(high == 512 for _, high, _ in buckets)
    assert {high - low + 1 for low, high, _ in buckets} == {50, 12, 38}
    assert bars([]) == []


def test_empty_bars_are_kept_and_those_above_the_limit_marked() -> None:
    bars_of_rows = [[1, 10, 3], [11, 50, 0], [51, 90, 0], [91, 100, 1]]
    assert drawn_bars(bars_of_rows, 50) == [
        (1, 10, 3, 1.0, False), (11, 50, 0, 0.0, False), (51, 90, 0, 0.0, True), (91, 100, 1, 1 / 3, True),
    ]  # fmt: skip
    assert drawn_bars([]) == []
