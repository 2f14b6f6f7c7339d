"""A form of export is one file and one line in a table: here one is added to a copy of the package, and a run exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kubetune.result.forms import FORMS
from kubetune.result.forms.form import Form
from tests import toy
from tests.package_copy import copy_package, put_before, run_script

FORM = '''"""Sizes: the number of values of each tensor, as JSON."""

from __future__ import annotations

import json
from dataclasses import replace

from kubetune.result.forms.form import QUANTIZE, CardParts, Form


class SizesForm(Form):
    """The form of sizes."""

    key = "sizes"
    option = QUANTIZE
    label = "Sizes"
    about = "How many values each tensor has."

    def write(self, draft):
        from kubetune.models import weight_files

        tensors = weight_files.read(draft.staging / "model.safetensors")
        sizes = {name: tensor.numel() for name, tensor in tensors.items()}
        (draft.folder / "sizes.json").write_text(json.dumps(sizes))
        return replace(draft, notes={"tensors": len(sizes)})

    def prove(self, draft):
        from kubetune.result.forms.equivalence import Comparison

        sizes = json.loads((draft.folder / "sizes.json").read_text())
        missing = draft.notes["tensors"] - len(sizes)
        return draft.proved_by(Comparison("sizes and their file", float(missing), 0.0, 1.0))

    def describe(self, facts):
        yield from super().describe(facts)
        yield "sizes", f"of {facts['sizes']['tensors']} tensors"

    def card(self, facts, model):
        return CardParts("sizes only", ("## How to read\\n\\nsizes.json is JSON.",))


FORM = SizesForm()
'''

SCRIPT = """
from pathlib import Path
from kubetune.result.publishing.description import describe
from kubetune.result.forms.wanted import WantedExport
from kubetune.result.publishing.exporting import export_run
from kubetune.ui.result.result_choices import forms_of, gguf_types_of

run = Path({run!r})
types = gguf_types_of(run)
export = export_run(run, wanted=WantedExport(quantize="sizes"), tell=lambda line: None)
assert ("sizes", "of 21 tensors") in list(describe(export.path, export.facts)), export.facts
print([choice.label for choice in forms_of(run, types)], export.path.name)
"""


@pytest.mark.parametrize("name", FORMS)
def test_a_form_has_all_its_parts(name: str) -> None:
    form = FORMS[name]
    for part in ("write", "prove", "card"):
        assert getattr(type(form), part) is not getattr(Form, part)
    assert form.label
    assert form.about


@pytest.mark.slow
def test_a_new_form_is_one_file_and_its_line(tmp_path: Path) -> None:
    inputs = toy.make_inputs(tmp_path)
    training = {"max_steps": 1, "eval_steps": 1, "save_steps": 1}
    run = toy.finished(tmp_path / "run", toy.make_config(inputs, training))
    package = copy_package(tmp_path)
    (package / "result/forms/sizes.py").write_text(FORM)
    table = package / "result/forms/__init__.py"
    put_before(table, "whole_model\n", "sizes, ")
    put_before(table, '    "fp8": float8', '    "sizes": sizes.FORM,\n')

    printed = run_script(tmp_path, SCRIPT.format(run=str(run)))
    assert printed.strip() == "['Adapter', 'Merged', 'GGUF', 'Sizes', 'FP8'] step-000001-sizes"
    folder = run / "exports" / "step-000001-sizes"
    assert sum(json.loads((folder / "sizes.json").read_text()).values()) > 0
    facts = json.loads((folder / "provenance.json").read_text())
    assert facts["kind"] == "merged"
    assert facts["proof"]["comparisons"][-1]["what"] == "sizes and their file"
    card = (folder / "README.md").read_text()
    assert "Weights are sizes only." in card
    assert "## How to read" in card
