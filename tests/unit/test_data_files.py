"""The endings of data files: one table, by which readers, lint, manifests, imports and the page on data go."""

from __future__ import annotations

from pathlib import Path

import pytest

from kubetune.config.data_files import (
    FORMATS,
    GZIP,
    OTHER_RECORDS,
    OTHER_TEXTS,
    PACKED,
    is_hub_id,
)
from kubetune.config.load import load_config
from kubetune.config.schema import SourceConfig
from kubetune.data.reading.readers import reader_of
from kubetune.data.reading.sources import locate
from kubetune.errors import DataError
from kubetune.k8s.lint.config import lint
from kubetune.k8s.manifests.kinds import trainjob
from kubetune.k8s.manifests.run_spec import RunSpec
from kubetune.plan.plan import make_plan
from kubetune.plugins.importers import import_config
from tests.golden.manifests import FOLDER
from tests.package_copy import copy_package, put_before, run_script

FULL = FOLDER / "full.yaml"
PAGE = Path(__file__).parents[2] / "docs" / "data.md"
PACKED_OR_PLAIN = [*FORMATS, *(ending + GZIP for ending in FORMATS)]
EVERY_ENDING = [*PACKED_OR_PLAIN, *(".jsonl" + packer for packer in PACKED), *OTHER_RECORDS, *OTHER_TEXTS]  # fmt: skip


@pytest.mark.parametrize("ending", [*EVERY_ENDING, ".JSONL"])
def test_a_missing_file_is_taken_for_a_hub_id_by_nothing(ending: str, tmp_path: Path) -> None:
    name = f"train{ending}"
    assert not is_hub_id(name)
    with pytest.raises(DataError, match=f"{name} does not exist; "):
        locate(SourceConfig(path=name))

    # lint and the manifests: the pods have no such file, and no initializer fetches it from the hub
    config = load_config(FULL, overrides=[f"data.train={name}", "model.path=org/model"])
    plan = make_plan(config)
    messages = [f.text for f in lint(RunSpec.of(config, plan), []) if f.key == "data.train.0.path"]
    assert len(messages) == 1
    assert messages[0].startswith(f"{name} is not in the pods")
    spec = RunSpec.of(config, plan)
    assert f"hf://{name}" not in str(trainjob.sources(spec))

    # imports: ms-swift means a file, not a data set of ModelScope
    theirs = tmp_path / "swift.yaml"
    for data, is_told in ((name, False), ("org/name", True)):
        theirs.write_text(f"model: org/model\ndataset: {data}\n")
        assert ("ModelScope" in str(import_config(theirs, "ms-swift").notes)) is is_told


@pytest.mark.parametrize("path", ["org/name", "name", "org/name#500", "org-1/na.me_2", "org/v1.5"])
def test_hub_ids(path: str) -> None:
    assert is_hub_id(path)
    assert locate(SourceConfig(path=path)).files == ()


@pytest.mark.parametrize(
    "path",
    ["/a/b", "./a", "../a/b", "a/b/c", "data/train.jsonl", "train.csv#5", "s3://b/c", "a/.b"],
)
def test_paths_that_are_no_hub_ids(path: str) -> None:
    assert not is_hub_id(path)


@pytest.mark.parametrize("ending", FORMATS)
def test_every_ending_that_is_read_has_a_reader_and_stands_on_the_page(ending: str) -> None:
    assert callable(reader_of(Path(f"x{ending}")).read)
    files = PAGE.read_text("utf-8").partition("## Shapes")[0]
    assert f"`{ending}`" in files


@pytest.mark.parametrize("ending", PACKED_OR_PLAIN)
def test_every_ending_that_is_read_is_read_from_a_folder(ending: str, tmp_path: Path) -> None:
    (tmp_path / f"a{ending}").write_bytes(b"")
    assert [file.name for file in locate(SourceConfig(path=str(tmp_path))).files] == [f"a{ending}"]


@pytest.mark.parametrize("ending", [*OTHER_RECORDS, *(".csv" + packer for packer in PACKED)])
def test_records_that_nothing_reads_are_not_passed_over_in_a_folder(
    ending: str, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / f"b{ending}").write_bytes(b"")
    with pytest.raises(DataError, match=f"b{ending} is .*or move it out of"):
        locate(SourceConfig(path=str(tmp_path)))


ARROW = '''"""Reading Arrow's files."""

from kubetune.data.reading.files.columnar import damage_refused, as_json
from kubetune.data.reading.files.reader import Reader
from kubetune.data.reading.record import Record


def read_arrow(file, problems):
    import pyarrow

    with damage_refused(file):
        rows = pyarrow.ipc.open_file(file).read_all().to_pylist()
    for number, row in enumerate(rows, 1):
        yield Record(str(file), number, as_json(row))


def arrow_rows(file):
    import pyarrow

    return pyarrow.ipc.open_file(file).read_all().num_rows


ARROW = Reader(read_arrow, count=arrow_rows)
'''

SCRIPT = """
from pathlib import Path
import pyarrow
from kubetune.config.data_files import is_hub_id
from kubetune.config.schema import SourceConfig
from kubetune.data.reading.record_problems import Problems
from kubetune.data.reading.sources import count_rows, read_source
from kubetune.errors import DataError

folder = Path("data")
folder.mkdir()
table = pyarrow.Table.from_pylist([{"text": "one"}, {"text": "two"}])
with pyarrow.ipc.new_file(folder / "a.arrow", table.schema) as writer:
    writer.write_table(table)
for path in (folder, folder / "a.arrow"):
    source = SourceConfig(path=str(path))
    print([(record.line, record.value) for record in read_source(source, Problems())], count_rows(source))

problems = Problems()
(folder / "a.arrow").rename("a.jsonl")
list(read_source(SourceConfig(path="a.jsonl"), problems))
print(problems.sentences())
Path("b.arrow").write_text("no Arrow")
for name in ("b.arrow", "absent.arrow"):
    try:
        list(read_source(SourceConfig(path=name), Problems()))
    except DataError as error:
        print(error)
print(is_hub_id("absent.arrow"))
"""


def test_a_new_format_is_one_file_and_one_line(tmp_path: Path) -> None:
    package = copy_package(tmp_path)
    (package / "data/reading/files/arrow.py").write_text(ARROW)
    line = '    ".arrow": FileFormat("arrow.ARROW", "an Arrow file", begins=b"ARROW1", in_lines=False),\n'
    put_before(package / "config/data_files.py", '    ".txt": FileFormat(', line)

    whole, single, misnamed, damaged, absent, is_on_hub = run_script(tmp_path, SCRIPT).splitlines()
    assert whole == single == "[(1, {'text': 'one'}), (2, {'text': 'two'})] 2"
    assert "a.jsonl:1: is an Arrow file; name it a.arrow." in misnamed
    assert damaged.startswith("b.arrow cannot be read as an Arrow file: ")
    assert absent.startswith("absent.arrow does not exist; ")
    assert is_on_hub == "False"
