"""A tool for `kubetune import` is one file and one line in `TOOLS`: here one is added to a copy of the package."""

from __future__ import annotations

from pathlib import Path

from tests.package_copy import copy_package, put_before, run_script

TOOL = '''
"""Toy's configs."""

from kubetune.plugins.importers.common.source_keys import take_sources
from kubetune.plugins.importers.engine import Table, Tool, switch


def _data(draft):
    take_sources(draft, {"corpus": "data.train"}, lambda draft, place, item: [{"path": str(item)}])


TOOL = Tool(
    name="Toy",
    marks="corpus brain",
    sources=_data,
    tables=(
        Table(
            same={"model.path": "brain", "data.max_length": "longest"},
            rows=[switch("thin", "training.save_total_limit", 1)],
            dropped={"glitter": "nothing glitters here"},
        ),
    ),
    defaults={"training.num_train_epochs": 7},
)
'''

SCRIPT = """
from pathlib import Path
from kubetune.plugins.importers import import_config

Path("toy.yaml").write_text("brain: org/m\\ncorpus: a.jsonl\\nlongest: 99\\nthin: true\\nglitter: 3\\nother: 1\\n")
result = import_config(Path("toy.yaml"))
print(result.peer)
print(result.text)
for note in result.notes:
    print(note.kind, note.key, note.text)
"""


def test_a_new_tool_is_one_file_and_its_line(tmp_path: Path) -> None:
    package = copy_package(tmp_path)
    importers = package / "plugins/importers"
    (importers / "toy.py").write_text(TOOL)
    put_before(
        importers / "__init__.py",
        '    "TRL": "kubetune.',
        '    "Toy": "kubetune.plugins.importers.toy",\n',
    )

    printed = run_script(tmp_path, SCRIPT)
    assert printed.startswith("Toy\n"), "it is recognised by its keys"
    for line in ("max_length: 99", "save_total_limit: 1", "num_train_epochs: 7"):
        assert line in printed
    assert "dropped glitter nothing glitters here" in printed
    assert "dropped other " in printed, "what has no row is named"
