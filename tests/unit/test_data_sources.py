"""What a source path may mean, and what it may not; conversions; hub failures each with its own words."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from kubetune import cli
from kubetune.cli.local.demo import EMBEDDED
from kubetune.config.schema import ModelConfig, SourceConfig
from kubetune.data.inspect.estimate import taken_by
from kubetune.data.reading.convert import convert_source
from kubetune.data.reading.formats import convert
from kubetune.data.reading.hub import find_files, unresolved_host
from kubetune.data.reading.record_problems import Problems
from kubetune.data.reading.selection import select_rows
from kubetune.data.reading.sources import count_rows, locate, read_source
from kubetune.data.text.encode import trained_messages
from kubetune.errors import ConfigError, DataError, EnvironmentFault
from kubetune.result.publishing import hub_upload


def write(file: Path, values: list[Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(value) + "\n" for value in values))
    return file


def texts(source: SourceConfig) -> list[str]:
    return [record.value["text"] for record in read_source(source, Problems())]


def test_files_folders_and_patterns(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", [{"text": "b"}])
    write(tmp_path / "sub" / "a.jsonl", [{"text": "a"}, {"text": "aa"}])
    (tmp_path / "c.csv").write_text("text\nc\n")
    (tmp_path / "d.json").write_text('[{"text": "d"}]')
    (tmp_path / "notes.txt").write_text("no data")
    assert texts(SourceConfig(path=str(tmp_path))) == ["b", "c", "d", "a", "aa"]
    assert texts(SourceConfig(path=f"{tmp_path}/*.jsonl")) == ["b"]
    assert texts(SourceConfig(path=f"{tmp_path}/**/*.jsonl")) == ["b", "a", "aa"]
    assert count_rows(SourceConfig(path=str(tmp_path))) == 5
    assert locate(SourceConfig(path=f"{tmp_path}/b.jsonl#7")).sample == 7
    assert texts(SourceConfig(path=f"{tmp_path}/notes.txt")) == ["no data"]
    odd = write(tmp_path / "odd#3", [])
    odd.rename(tmp_path / "odd#3.jsonl")
    assert locate(SourceConfig(path=f"{tmp_path}/odd#3.jsonl")).sample is None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("file:///etc/passwd", "is no path"),
        ("https://example.org/a.jsonl", "is no path"),
        ("a\0.jsonl", "is no path"),
        ("/dev/zero", "is a device, pipe or socket"),
        ("{tmp}/pipe", "is a device, pipe or socket"),
        ("{tmp}/empty", "holds no data; expected files of .jsonl"),
        ("{tmp}/absent.jsonl", "does not exist; expected a file of .jsonl"),
        ("{tmp}/*.parquet", "matches no file"),
        ("{tmp}/notes.md", "is of an unknown kind"),
        ("{tmp}/notes.md#0", "asks for 0 samples"),
        ("absent.jsonl.gz", r"absent.jsonl.gz does not exist; expected a file of .jsonl"),
        ("absent.TXT", "absent.TXT does not exist"),
        ("{tmp}/circle.jsonl", r"is a link to .*circle.jsonl, and following it leads in a circle"),
        ("{tmp}/dangling.jsonl", "is a link to gone, which does not exist"),
        ("../../nowhere/at/all", "does not exist"),
    ],
)
def test_what_holds_no_records_is_refused(path: str, message: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.md").write_text("")
    (tmp_path / "circle.jsonl").symlink_to(tmp_path / "circle.jsonl")
    (tmp_path / "dangling.jsonl").symlink_to("gone")
    with pytest.raises(DataError, match=message):
        locate(SourceConfig(path=path.format(tmp=tmp_path)))


def test_what_is_hidden_in_a_folder_is_no_data(tmp_path: Path) -> None:
    """A ConfigMap's files are links into a hidden folder; Jupyter's copies, into which nobody looks, lie in another."""
    for name in (".ipynb_checkpoints/a-checkpoint.jsonl", "..2026_11_23/a.jsonl", "._a.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "a"}\n')
    (tmp_path / "a.jsonl").symlink_to("..2026_11_23/a.jsonl")
    assert texts(SourceConfig(path=str(tmp_path))) == ["a"]


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        ("more", "..", "more is a link to .., a folder; name it as a source, or move it out of"),
        ("b.jsonl", "gone", "b.jsonl is a link to gone, which does not exist, or move it out of"),
        ("b.arrow", None, "b.arrow is of an unknown kind; make one of .jsonl"),
    ],
)
def test_what_a_folder_has_beside_its_data_is_not_passed_over(
    name: str, target: str | None, message: str, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / name).symlink_to(target) if target else (tmp_path / name).write_text("")
    with pytest.raises(DataError, match=re.escape(message)):
        locate(SourceConfig(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("link", "target"), [("data/b.jsonl", "../secret/b.jsonl"), ("data/b.jsonl", "/dev/zero")]
)
@pytest.mark.parametrize("source", ["data", "data/*.jsonl", "data/**/*.jsonl", "../{folder}/data/"])
def test_links_out_of_a_folder_of_data_are_refused(
    link: str, target: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "data" / "a.jsonl", [{"text": "a"}])
    write(tmp_path / "secret" / "b.jsonl", [{"text": "secret"}])
    (tmp_path / link).symlink_to(target)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"b\.jsonl is a link that leads out of .*data"):
        texts(SourceConfig(path=source.format(folder=tmp_path.name)))


@pytest.mark.parametrize("source", ["data", "data/**/*.jsonl", "data/*/*.jsonl"])
def test_linked_folders_that_lead_out_of_a_folder_of_data_are_refused(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "data" / "a.jsonl", [{"text": "a"}])
    write(tmp_path / "secret" / "b.jsonl", [{"text": "secret"}])
    (tmp_path / "data" / "more").symlink_to("../secret")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"data/more(/b.jsonl)? is a link"):
        texts(SourceConfig(path=source))


def test_a_pipe_in_a_folder_of_data_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"text": "a"}])
    os.mkfifo(tmp_path / "b.jsonl")
    with pytest.raises(DataError, match=r"b\.jsonl is a pipe"):
        texts(SourceConfig(path=str(tmp_path)))


def test_links_that_the_user_typed_are_followed(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere" / "a.jsonl", [{"text": "a"}])
    (tmp_path / "data").symlink_to("elsewhere")
    (tmp_path / "b.jsonl").symlink_to("elsewhere/a.jsonl")
    for path in ("data", "data/*.jsonl", "b.jsonl"):
        assert texts(SourceConfig(path=str(tmp_path / path))) == ["a"]


def test_snapshots_of_data_in_the_hubs_cache(tmp_path: Path) -> None:
    """Their files are links to the blobs beside the snapshots."""
    repo = tmp_path / "datasets--org--name"
    write(repo / "blobs" / "0", [{"text": "a"}])
    snapshot = repo / "snapshots" / ("a" * 40)
    (snapshot / "data").mkdir(parents=True)
    (snapshot / "data" / "a.jsonl").symlink_to("../../../blobs/0")
    assert texts(SourceConfig(path=str(snapshot))) == ["a"]


def test_a_folder_of_plain_texts(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("third\n")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbffirst line\r\nsecond line\r\n\r\n \t\nsecond\n")
    source = SourceConfig(path=str(tmp_path))
    assert texts(source) == ["first line\nsecond line", "second", "third"]
    assert [record.where for record in read_source(source, Problems())] == [
        f"{tmp_path}/a.txt:1", f"{tmp_path}/a.txt:5", f"{tmp_path}/b.txt:1",
    ]  # fmt: skip
    assert count_rows(source) == 3
    assert select_rows(SourceConfig(path=f"{tmp_path}#2"), 1) is not None


@pytest.mark.slow
def test_a_missing_file_is_named_before_the_hub_is_asked_for_the_model(
    tmp_path: Path, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(Hub, "do_HEAD", lambda handler: asked.append(handler.path))
    run_file = tmp_path / "run.yaml"
    run_file.write_text("model: org/gated\ndata: {train: absent.jsonl}\n")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path)}
    for action in ("check", "prepare"):
        command = [sys.executable, "-m", "kubetune", "data", action, str(run_file)]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 2
        assert "absent.jsonl does not exist; expected a file of .jsonl" in done.stderr
    assert asked == []


def test_samples_are_a_function_of_the_seed(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"text": str(n)} for n in range(1000)])
    few, many = (select_rows(SourceConfig(path=f"{file}#{n}"), 1) for n in (50, 100))
    assert few is not None
    assert many is not None
    assert set(few.tolist()) < set(many.tolist())
    assert select_rows(SourceConfig(path=f"{file}#50"), 2).tolist() != few.tolist()  # type: ignore[union-attr]
    whole = select_rows(SourceConfig(path=f"{file}#5000"), 1)
    assert whole is not None
    assert len(whole) == 1000
    parts = [select_rows(SourceConfig(path=str(file), range=r), 1) for r in ((0, 400), (400, 1000))]
    assert sorted(i for part in parts if part is not None for i in part.tolist()) == list(
        range(1000)
    )
    with pytest.raises(DataError, match=r"range \[1000, 2000\) takes no record of 1,000"):
        select_rows(SourceConfig(path=str(file), range=(1000, 2000)), 1)
    # A start counts records first, and says the same.
    with pytest.raises(DataError, match=r"range \[1000, 2000\) takes no record of 1,000"):
        taken_by(SourceConfig(path=str(file), range=(1000, 2000)))


def test_a_data_set_of_the_hub_without_the_hub_is_explained() -> None:
    """As when a file's name is misspelt and the machine has no network."""
    pytest.importorskip("datasets")
    with pytest.raises(
        EnvironmentFault,
        match="dataset trian is not in the local cache and the hub cannot be reached",
    ):
        count_rows(SourceConfig(path="trian"))


def test_saved_datasets_stay_in_their_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"text": "secret"}])
    rows.save_to_disk(str(tmp_path / "secret"))
    arrow = "data-00000-of-00001.arrow"
    for name in ("linked", "naming"):
        rows.save_to_disk(str(tmp_path / name))
        (tmp_path / name / arrow).unlink()
    (tmp_path / "linked" / arrow).symlink_to(f"../secret/{arrow}")
    state = tmp_path / "naming" / "state.json"
    state.write_text(state.read_text().replace(arrow, f"../secret/{arrow}"))
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["../secret"]}')
    for name, problem in (
        ("linked", rf"{arrow} is a link that leads out of"),
        ("naming", rf"state\.json names '\.\./secret/{arrow}'; expected names of what lies in"),
        ("splits", r"dataset_dict\.json names '\.\./secret'; expected names of what lies in"),
    ):
        with pytest.raises(DataError, match=problem):
            texts(SourceConfig(path=str(tmp_path / name), split="train"))


def test_saved_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}])
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(
        str(tmp_path / "two")
    )
    assert texts(SourceConfig(path=str(tmp_path / "one"))) == ["a", "b"]
    assert texts(SourceConfig(path=str(tmp_path / "two"), split="test")) == ["b"]
    assert count_rows(SourceConfig(path=str(tmp_path / "two"))) == 2
    with pytest.raises(DataError, match="has no split 'dev'; it has the splits train, test"):
        count_rows(SourceConfig(path=str(tmp_path / "two"), split="dev"))
    for name, split in (("one", "test"), ("one", "train[:1]"), ("two", "train[:1]")):
        with pytest.raises(
            DataError, match=re.escape(f"has no split '{split}'; it has the splits train")
        ):
            texts(SourceConfig(path=str(tmp_path / name), split=split))
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    for path in ("a.jsonl", "*.jsonl"):
        with pytest.raises(
            DataError, match=re.escape("is read whole, and has no `split: train[:1]`")
        ):
            texts(SourceConfig(path=f"{tmp_path}/{path}", split="train[:1]"))
    with pytest.raises(DataError, match="has no `subset: de`"):
        texts(SourceConfig(path=f"{tmp_path}/a.jsonl", subset="de"))


PAIR = {"prompt": "Ping", "completion": "Pong"}
CHAT = {"messages": [{"role": "user", "content": "Ping"}, {"role": "assistant", "content": "Pong"}]}
TREE = [
    {"message_id": "1", "parent_id": None, "role": "prompter", "text": "Ping", "rank": None},
    {"message_id": "2", "parent_id": "1", "role": "assistant", "text": "worse", "rank": 1},
    {"message_id": "3", "parent_id": "1", "role": "assistant", "text": "Pong", "rank": 0},
    {"message_id": "4", "parent_id": "2", "role": "prompter", "text": "What?", "rank": None},
]


@pytest.mark.parametrize(
    ("values", "to", "expected"),
    [
        ([PAIR], "messages", [CHAT]),
        ([CHAT], "prompt_completion", [PAIR]),
        ([PAIR, {"text": "a"}], "text", [{"text": "PingPong"}, {"text": "a"}]),
        (TREE, "messages", [CHAT]),
        (
            [{"instruction": "Ping", "output": "Pong"}, {"messages": CHAT["messages"][:1]}],
            "messages",
            [CHAT],
        ),
        ([{"sentence": "Ping", "label": "Pong"}], "messages", [CHAT]),
    ],
)
def test_conversions(values: list[Any], to: str, expected: list[Any], tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", values)
    counts, _ = convert_source(SourceConfig(path=str(file)), tmp_path / "out.jsonl", to)
    assert [
        json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()
    ] == expected
    assert counts["written"] == len(expected)
    assert counts["read"] == len(values)


def test_converted_records_keep_what_is_trained(tmp_path: Path) -> None:
    """Read again, they have the answers that are trained, and no others; a key that is not written is counted."""
    user = {"role": "user", "content": "Ping"}
    answer = {"role": "assistant", "content": "Pong"}
    values: list[Any] = [
        {"messages": [user, answer | {"weight": 0}, user, answer], "id": 7},
        {"prompt": [user, answer, user], "completion": "Pong"},
    ]
    file = tmp_path / "in.jsonl"
    output = tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps(value) + "\n" for value in values))
    assert convert_source(SourceConfig(path=str(file)), output, "messages")[1] == {"id": 1}
    for line in output.read_text().splitlines():
        assert trained_messages(convert(json.loads(line))) == [3]  # type: ignore[arg-type]
    file.write_text(json.dumps({"messages": [user, answer, user, answer | {"weight": 0}]}))
    with pytest.raises(
        DataError, match="ends with an answer that is not trained, as a completion is"
    ):
        convert_source(SourceConfig(path=str(file)), output, "prompt_completion")
    pair = {
        "prompt": [user],
        "chosen": [answer, user, answer | {"weight": 0}],
        "rejected": [answer | {"content": "No"}],
    }
    file.write_text(json.dumps(pair))
    convert_source(SourceConfig(path=str(file)), output, "preference")
    assert [message.get("train") for message in json.loads(output.read_text())["chosen"]] == [
        None,
        None,
        False,
    ]


def test_csv_to_jsonl_keeps_line_breaks_and_a_bad_record_leaves_no_file(tmp_path: Path) -> None:
    file = tmp_path / "in.csv"
    file.write_text('input,output\n"Pi\nng",Pong\n')
    convert_source(SourceConfig(path=str(file)), tmp_path / "out.jsonl", "prompt_completion")
    assert json.loads((tmp_path / "out.jsonl").read_text()) == {
        "prompt": "Pi\nng",
        "completion": "Pong",
    }
    file.write_text("input,output\na,b\n,\n")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match=r"in\.csv:3: output is empty.* Nothing was written\."):
        convert_source(SourceConfig(path=str(file)), tmp_path / "other.jsonl", "messages")
    assert sorted(tmp_path.iterdir()) == before


FAILURES = {
    "gated": (403, "GatedRepo"),
    "unknown": (401, "RepoNotFound"),
    "no-revision": (404, "RevisionNotFound"),
}


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does, in the headers by which its client library tells failures apart."""

    def do_HEAD(self) -> None:
        name = self.path.split("/")[2]
        status, code = FAILURES.get(name, (404, "EntryNotFound"))
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


ASK = """
import sys
from kubetune import cli
from kubetune.cli.local.demo import EMBEDDED
from kubetune.config.schema import ModelConfig
from kubetune.data.text.tokenizer import load_tokenizer
from kubetune.errors import KubetuneError
for name in sys.argv[1:]:
    try:
        load_tokenizer(ModelConfig(path=f"org/{name}", revision="v9"))
    except KubetuneError as error:
        print(type(error).__name__, error.exit_code, error)
"""


def ask(endpoint: str, cache: Path, *names: str, **environ: str) -> list[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), **environ}
    command = [sys.executable, "-c", ASK, *names]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()


@pytest.mark.slow
def test_each_failure_of_the_hub_has_its_own_words(hub: str, tmp_path: Path) -> None:
    messages = ask(hub, tmp_path, "gated", "unknown", "no-revision", "empty")
    assert messages[0].startswith(
        "ModelError 2 model org/gated is gated and no token is set: accept its licence at"
    )
    assert "set HF_TOKEN" in messages[0]
    assert messages[1].startswith(
        "ModelError 2 model org/unknown is not on the hub, or is private; check the spelling"
    )
    assert messages[2].startswith("ModelError 2 model org/no-revision has no revision 'v9'")
    assert messages[3].startswith("ModelError 2 org/empty holds no tokenizer; expected one of")
    (with_token,) = ask(hub, tmp_path, "gated", HF_TOKEN="hf_canary")
    assert "the token in HF_TOKEN has no access yet" in with_token
    assert "hf_canary" not in with_token


def test_offline_says_how_to_get_the_model(tmp_path: Path) -> None:
    (message,) = ask("http://127.0.0.1:9", tmp_path, "any", HF_HUB_OFFLINE="1")
    assert message.startswith(
        "EnvironmentFault 3 model org/any is not in the local cache and the hub cannot be reached"
    )


def test_a_conversion_does_not_overwrite_what_it_reads(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    link = tmp_path / "link.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    link.symlink_to(rows)
    for source in (rows, link, tmp_path):
        with pytest.raises(ConfigError, match=r"rows\.jsonl is the file that is read"):
            convert_source(SourceConfig(path=str(source)), rows, "messages")
    assert rows.read_text() == '{"prompt": "a", "completion": "b"}\n'


def test_a_hub_whose_name_leads_nowhere_is_noticed_before_it_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    words = "the name hub.invalid cannot be resolved"
    assert words in unresolved_host()
    with pytest.raises(EnvironmentFault, match=words):
        find_files(ModelConfig(path="org/model"), "org/model", ["config.json"])
    for name in hub_upload.OFFLINE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_any")
    with pytest.raises(EnvironmentFault, match=f"{words}.*Nothing was pushed"):
        hub_upload.token_to_upload()
    # A proxy resolves names itself.
    monkeypatch.setenv("https_proxy", "http://proxy.invalid:1")
    assert unresolved_host() == ""


def command_of(verb: str, file: Path, folder: Path) -> list[str]:
    """Return the words of a verb that looks at a file for a classifier."""
    run_file = folder / "run.yaml"
    tree = {
        "model": str(EMBEDDED / "model"),
        "task": "sequence_classification",
        "data": {"train": str(file), "cache": str(folder / "cache")},
        "output": str(folder / "output"),
    }
    run_file.write_text(json.dumps(tree))
    return {
        "init": ["init", str(file), "--model", "demo"],
        "check": ["data", "check", str(file)],
        "plan": ["plan", str(run_file)],
        "train": ["train", str(run_file)],
    }[verb]


UNREADABLE = {
    "a column twice": ("a.tsv", b"text\tlabel\ttext\na\tb\tc\n", "has the column `text` more than once"),
    "UTF-16": ("a.csv", "text,label\na,b\n".encode("utf-16"), "is UTF-16; expected UTF-8"),
    "a zip": ("a.jsonl", b"PK\x03\x04 and more", "is packed; unpack it by `unzip a.jsonl`"),
}  # fmt: skip


@pytest.mark.parametrize("verb", ["init", "check", "plan", "train"])
@pytest.mark.parametrize(("name", "content", "reason"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_each_verb_says_why_no_record_of_a_file_can_be_read(
    name: str,
    content: bytes,
    reason: str,
    verb: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    assert cli.main(command_of(verb, file, tmp_path)) == 2
    assert f"{name}:1: {reason}" in "".join(capfd.readouterr())
