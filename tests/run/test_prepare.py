"""Prepared data: right, whole or absent, made once, and another input never passes for the same."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kubetune.base import whole_folder
from kubetune.base.files import sha256_file
from kubetune.base.whole_folder import contents, is_whole
from kubetune.config.schema import Config
from kubetune.data.prepared import identity
from kubetune.data.prepared.fingerprint import MANIFEST
from kubetune.data.prepared.prepare import Prepared, prepare
from kubetune.data.reading.formats import convert
from kubetune.data.text.encode import Encoder
from kubetune.errors import DataError
from tests.tiny import train_tokenizer

WORDS = "the quick brown fox jumps over a lazy dog what is one two three".split()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tokenizer(tmp_path_factory.mktemp("model"))


def record(number: int) -> dict[str, Any]:
    random.seed(number)
    words = [" ".join(random.choices(WORDS, k=random.randint(1, 12))) for _ in range(4)]
    if number % 3 == 0:
        return {"prompt": words[0], "completion": f" {number} {words[1]}"}
    if number % 3 == 1:
        return {"text": f"{number} {words[0]}"}
    roles = ("user", "assistant") * 2
    turns = zip(roles, words, strict=True)
    return {"messages": [{"role": role, "content": f"{number} {text}"} for role, text in turns]}


def write(file: Path, records: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(value) + "\n" for value in records))
    return file


def config(
    model: Path, cache: Path, train: Any, training: dict[str, Any] | None = None, **data: Any
) -> Config:
    return Config.model_validate(
        {
            "model": str(model),
            "data": {"train": train, "cache": str(cache), "num_proc": 2, **data},
            "training": training or {},
        }
    )


def ids_of(prepared: Prepared) -> list[list[int]]:
    return [prepared.train.row(i)[0].tolist() for i in range(len(prepared.train))]


def test_rows_are_those_of_the_encoder_in_the_order_of_the_file(
    model: Path, tmp_path: Path
) -> None:
    records = [record(n) for n in range(4000)]  # enough for several processes to share the work
    prepared = prepare(config(model, tmp_path, str(write(tmp_path / "a.jsonl", records))))
    encoder = Encoder(prepared.tokenizer)
    rows = prepared.train
    assert len(rows) == 4000
    for i in range(0, 4000, 7):
        expected = encoder.encode(convert(records[i]))
        ids, trained = rows.row(i)
        assert (ids.tolist(), trained.tolist()) == (expected.ids, expected.trained)
        assert (rows.lengths[i], rows.trained_counts[i]) == (len(ids), sum(expected.trained))
    assert rows.record.tolist() == list(range(4000))
    assert rows.weights == (1.0,)
    assert prepared.eval is None
    assert prepared.stats["train"]["tokens"] == rows.lengths.sum()
    assert is_whole(prepared.path, MANIFEST, thorough=True)


def test_one_process_and_several_write_the_same_bytes(model: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [record(n) for n in range(3000)])
    paths = [prepare(config(model, tmp_path / str(n), str(file), num_proc=n)).path for n in (1, 3)]
    first, second = ({f.name: f.read_bytes() for f in (path / "train").iterdir()} for path in paths)
    assert first == second


def test_a_second_start_reads_nothing_but_bytes(model: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [record(n) for n in range(50)])
    first = prepare(config(model, tmp_path, str(file)))
    written = (first.path / "manifest.json").stat().st_mtime_ns
    again = prepare(config(model, tmp_path, [{"path": str(file), "weight": 2.0}]))
    assert again.path == first.path
    assert (again.path / "manifest.json").stat().st_mtime_ns == written
    assert again.train.weights == (2.0,)


def test_rows_prepared_from_another_place_are_told_by_the_path_of_this_run(
    model: Path, tmp_path: Path
) -> None:
    first, second = (
        write(tmp_path / name, [record(n) for n in range(4)]) for name in ("a.jsonl", "b.jsonl")
    )
    cache = tmp_path / "cache"
    prepared = [prepare(config(model, cache, str(file))) for file in (first, second, first)]
    assert len({data.path for data in prepared}) == 1, "they are the same rows"
    paths = [[source["path"] for source in data.stats["train"]["sources"]] for data in prepared]
    assert paths == [[str(first)], [str(second)], [str(first)]]


def test_rows_of_drawn_answers_are_not_those_of_given_ones(model: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"prompt": "one two"}, {"prompt": "three"}])
    drawn = config(model, tmp_path / "cache", str(file)).model_dump(exclude_unset=True)
    drawn |= {"task": "distill", "distill": {"teacher": "a/big"}}
    assert len(prepare(Config.model_validate(drawn)).train) == 2
    given = drawn | {"distill": {"teacher": "a/big", "lmbda": 0}}
    with pytest.raises(DataError, match=r"prompts without an answer are for .*`lmbda: 1`"):
        prepare(Config.model_validate(given))


def test_every_change_that_matters_changes_the_fingerprint(model: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [record(n) for n in range(60)])
    name = str(file)
    prepared = [
        prepare(config(*arguments, **options))
        for arguments, options in [
            ((model, tmp_path, name), {}),
            ((model, tmp_path, name), {"max_length": 100}),
            ((model, tmp_path, name), {"overlong": "truncate"}),
            ((model, tmp_path, name), {"train_on": "all"}),
            ((model, tmp_path, name), {"add_special_tokens": False}),
            ((model, tmp_path, name), {"eval": 0.1}),
            ((model, tmp_path, name), {"eval": 0.1, "training": {"seed": 1}}),
            ((model, tmp_path, f"{name}#30"), {}),
            ((model, tmp_path, [{"path": name, "range": [0, 30]}]), {}),
            ((model, tmp_path, [name, name]), {}),
            ((train_tokenizer(tmp_path / "other", vocab_size=400), tmp_path, name), {}),
        ]
    ]
    stat = file.stat()
    text = file.read_text().replace("quick", "quack", 1)
    file.write_text(text)
    os.utime(
        file, ns=(stat.st_atime_ns, stat.st_mtime_ns)
    )  # the same size and time, but other bytes
    prepared.append(prepare(config(model, tmp_path, name)))
    assert len({p.fingerprint for p in prepared}) == len(prepared)
    assert (
        prepare(config(model, tmp_path, name, training={"seed": 9})).fingerprint
        == prepared[-1].fingerprint
    )


def test_a_share_is_held_out_and_samples_are_taken(model: Path, tmp_path: Path) -> None:
    files = [write(tmp_path / f"{name}.jsonl", [record(n) for n in range(400)]) for name in "ab"]
    train = [f"{files[0]}#300", {"path": str(files[1]), "range": [100, 300]}]
    prepared = prepare(config(model, tmp_path, train, eval=0.1))
    assert prepared.eval is not None
    assert (len(prepared.train), len(prepared.eval)) == (450, 50)
    origins = [
        set(zip(rows.source.tolist(), rows.record.tolist(), strict=True))
        for rows in (prepared.train, prepared.eval)
    ]
    assert not origins[0] & origins[1]
    taken = origins[0] | origins[1]
    assert [sum(source == s for source, _ in taken) for s in (0, 1)] == [300, 200]
    assert np.all(np.diff(prepared.train.record[prepared.train.source == 0].astype(int)) > 0)
    spread = [row for source, row in taken if source == 0]
    assert 50 < sum(row < 100 for row in spread) < 90  # drawn from all over the file
    other = prepare(config(model, tmp_path, train, eval=0.1, training={"seed": 1}))
    assert set(other.train.record.tolist()) != set(prepared.train.record.tolist())


@pytest.mark.parametrize("share", [0.001, 0.5, 0.999])
def test_both_splits_have_a_row_at_least(model: Path, tmp_path: Path, share: float) -> None:
    file = write(tmp_path / "a.jsonl", [record(n) for n in range(2)])
    prepared = prepare(config(model, tmp_path, str(file), eval=share))
    assert prepared.eval is not None
    assert (len(prepared.train), len(prepared.eval)) == (1, 1)


LONG = {"text": "one two three " * 100}
ASKED = {"messages": [{"role": "user", "content": "Ping"}]}


def test_what_is_left_out_is_counted(model: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [record(n) for n in range(97)] + [LONG, LONG, ASKED])
    stats = prepare(config(model, tmp_path, str(file), max_length=128)).stats["train"]
    assert (stats["records"], stats["rows"], stats["overlong"], stats["no_label"]) == (
        100,
        97,
        2,
        1,
    )
    assert stats["longest"] > 128
    cut = prepare(config(model, tmp_path, str(file), max_length=128, overlong="truncate"))
    assert (cut.stats["train"]["truncated"], len(cut.train)) == (2, 99)
    assert cut.train.lengths.max() == 128


@pytest.mark.parametrize("seed", range(3))
def test_long_texts_are_split_without_loss(model: Path, tmp_path: Path, seed: int) -> None:
    """The rows of each text, end to end but for the token that each begins with again, are the text whole."""
    draw = random.Random(seed)
    limit = draw.randint(8, 70)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 160))) for _ in range(40)]
    file = write(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    whole, prepared = (
        prepare(config(model, tmp_path, str(file), **settings))
        for settings in ({"max_length": 1000}, {"max_length": limit, "overlong": "split"})
    )
    stats = prepared.stats["train"]
    rows = prepared.train
    assert stats["trained_tokens"] == whole.stats["train"]["trained_tokens"]
    assert rows.lengths.max() <= limit
    assert len(rows) == stats["rows"] == stats["pieces"] + stats["records"] - stats["split"]
    assert stats["split"] == int((whole.train.lengths > limit).sum()) > 0
    joined: dict[int, list[int]] = {}
    for number in range(len(rows)):
        ids, trained = rows.row(number)
        before = joined.setdefault(int(rows.record[number]), [])
        assert not before or before[-1] == ids[0]
        assert trained.tolist() == [False] + [True] * (len(ids) - 1)
        before += ids.tolist()[1 if before else 0 :]
    assert joined == {
        int(whole.train.record[n]): whole.train.row(n)[0].tolist() for n in range(len(whole.train))
    }


def test_only_plain_texts_are_split(model: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Ping"}, {"role": "assistant", "content": LONG["text"]}]
    file = write(tmp_path / "a.jsonl", [LONG, {"messages": turns}])
    with pytest.raises(
        DataError, match=r"a.jsonl:2: has .* tokens of 128, and .*split is only for plain texts"
    ):
        prepare(config(model, tmp_path, str(file), max_length=128, overlong="split"))


def listing(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.suffix != ".lock")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {},
            "20 of 120 records (16.7%) would be left out: 20 longer than data.max_length 128 (the longest has",
        ),
        ({"overlong": "error"}, "a.jsonl:101: has "),
        ({"max_length": 8, "max_lost_share": 1.0}, "would be left out"),
    ],
)
def test_too_much_lost_stops_before_anything_is_kept(
    model: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    file = write(tmp_path / "a.jsonl", [record(n) | {} for n in range(100)] + [LONG] * 20)
    settings = {"max_length": 128} | options
    if settings["max_length"] == 8:
        write(file, [LONG] * 20)
    (tmp_path / "cache" / "prepared").mkdir(parents=True)
    before = listing(tmp_path)
    with pytest.raises(DataError) as caught:
        prepare(config(model, tmp_path / "cache", str(file), **settings))
    assert message in str(caught.value)
    assert str(caught.value).endswith("Nothing was written.")
    assert listing(tmp_path) == before


def test_a_stricter_share_holds_for_data_already_prepared(model: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [record(n) for n in range(9)] + [LONG])
    prepare(config(model, tmp_path, str(file), max_length=128, max_lost_share=0.2))
    with pytest.raises(DataError, match=r"data\.max_lost_share allows 5%"):
        prepare(config(model, tmp_path, str(file), max_length=128, max_lost_share=0.05))


def test_bad_records_found_by_many_processes_are_all_counted(model: Path, tmp_path: Path) -> None:
    records = [record(n) for n in range(3000)]
    records[7] = {"messages": [{"role": "bot", "content": "x"}]}
    records[2999] = {"text": ""}
    file = write(tmp_path / "a.jsonl", records)
    with pytest.raises(DataError) as caught:
        prepare(config(model, tmp_path, str(file)))
    assert str(caught.value).splitlines() == [
        f'{file}:8: messages[0].role is "bot"; expected system, user, assistant or tool.',
        f"{file}:3000: text is empty; expected a text.",
        "2 problems. Nothing was written.",
    ]


START = """
import sys
from kubetune.config.schema import Config
from kubetune.data.prepared.prepare import prepare
print(prepare(Config.model_validate_json(sys.argv[1])).fingerprint)
"""


def start(config: Config) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", START, config.model_dump_json()]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def test_concurrent_starts_prepare_once(model: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [record(n) for n in range(3000)])
    starts = [start(config(model, tmp_path / "cache", str(file))) for _ in range(3)]
    outputs = [process.communicate()[0] for process in starts]
    assert len(set(outputs)) == 1
    assert all(process.returncode == 0 for process in starts)
    assert sum(path.is_dir() for path in (tmp_path / "cache" / "prepared").iterdir()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kills", [20])
def test_a_killed_start_leaves_nothing_that_counts(model: Path, tmp_path: Path, kills: int) -> None:
    """SIGKILL at random moments of preparing, of the process alone: its workers must go with it."""
    file = write(tmp_path / "a.jsonl", [record(n) for n in range(20_000)])
    settings = config(model, tmp_path / "cache", str(file))
    folder = tmp_path / "cache" / "prepared"
    random.seed(1)
    killed = 0
    for _ in range(kills):
        with start(settings) as process:
            wait_until(lambda: any(folder.glob(".*.tmp/train/tokens.u32")), process)
            time.sleep(random.uniform(0, 0.5))  # the moment of the kill, not a wait for anything
            process.send_signal(signal.SIGKILL)
        killed += process.returncode == -signal.SIGKILL
        assert all(
            is_whole(path, MANIFEST, thorough=True)
            for path in folder.iterdir()
            if path.is_dir() and path.name[0] != "."
        )
    assert killed
    prepared = prepare(settings)
    assert len(prepared.train) == 20_000
    assert is_whole(prepared.path, MANIFEST, thorough=True)
    assert [path.name for path in folder.iterdir() if path.is_dir()] == [prepared.path.name]


def wait_until(condition: Any, process: subprocess.Popen[str]) -> None:
    while not condition() and process.poll() is None:
        time.sleep(0.005)


@pytest.mark.parametrize("damage", ["truncate", "delete", "manifest"])
def test_damaged_data_are_made_again(model: Path, tmp_path: Path, damage: str) -> None:
    settings = config(
        model, tmp_path, str(write(tmp_path / "a.jsonl", [record(n) for n in range(30)]))
    )
    first = prepare(settings)
    expected = ids_of(first)
    victim = first.path / ("manifest.json" if damage == "manifest" else "train/tokens.u32")
    if damage == "delete":
        victim.unlink()
    else:
        os.truncate(victim, victim.stat().st_size - 4)
    assert ids_of(prepare(settings)) == expected


def flip(path: Path, place: int, bit: int = 0) -> None:
    """Flip one bit of a file, and put its time back as a careful copy would."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("places", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_no_bit_of_prepared_data_changes_in_silence(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, places: int
) -> None:
    """One bit between, at the start and at the end of each file: said, set aside, and prepared again."""
    file = write(tmp_path / "a.jsonl", [record(n) for n in range(40)])
    settings = config(model, tmp_path / "cache", str(file), eval=0.2)
    first = prepare(settings)
    expected = {name: path.read_bytes() for name, path in contents(first.path).items()}
    assert len(expected) == 16
    draw = random.Random(3)
    for name, content in expected.items():
        drawn = [draw.randrange(len(content)) for _ in range(4)]
        for place in [*drawn, 0, len(content) - 1][:places]:
            bit = draw.randrange(8)
            flip(first.path / name, place, bit)
            caplog.clear()
            prepared = prepare(settings)
            where = (name, place, bit)
            assert f"the prepared data {first.path} has " in caplog.text, where
            assert name == MANIFEST or f"has damage in {name} (its" in caplog.text, where
            aside = first.path.with_name(f"damaged-{first.path.name}")
            assert (aside / name).read_bytes() != content, where
            again = {name: path.read_bytes() for name, path in contents(prepared.path).items()}
            assert again == expected, where


def test_large_prepared_data_are_read_once_and_again_when_they_change(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The checksum of a large file is known by its stamp, which no copy with the former time can keep."""
    monkeypatch.setattr(identity, "_WORTH_KEEPING_BYTES", 1)
    file = write(tmp_path / "a.jsonl", [record(n) for n in range(40)])
    settings = config(model, tmp_path / "cache", str(file))
    first = prepare(settings)
    expected = ids_of(first)
    read = list[Path]()

    def counted(path: Path) -> str:
        read.append(path)
        return sha256_file(path)

    monkeypatch.setattr(identity.files, "sha256_file", counted)
    prepare(settings)
    assert read == [], "what was just written has not to be read for its checksum"
    flip(first.path / "train" / "tokens.u32", 100)
    assert ids_of(prepare(settings)) == expected
    assert first.path.resolve() / "train" / "tokens.u32" in read
    assert "has damage in train/tokens.u32 (its checksum differs)" in caplog.text


@pytest.mark.parametrize("what", ["file", "link", "pipe as manifest"])
def test_other_things_in_the_place_of_prepared_data_are_set_aside(
    model: Path, tmp_path: Path, what: str
) -> None:
    settings = config(
        model, tmp_path / "cache", str(write(tmp_path / "a.jsonl", [record(n) for n in range(9)]))
    )
    first = prepare(settings)
    expected = ids_of(first)
    for _ in range(2):
        if what == "pipe as manifest":
            (first.path / MANIFEST).unlink()
            os.mkfifo(first.path / MANIFEST)
        else:
            whole_folder.remove(first.path)
            if what == "file":
                first.path.write_text("nothing")
            else:
                first.path.symlink_to("nowhere")
        assert ids_of(prepare(settings)) == expected
