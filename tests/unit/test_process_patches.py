"""What is changed in transformers for a whole process is there in the version installed, and is undone."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import transformers
from packaging.requirements import Requirement
from transformers.utils import import_utils

from kubetune.models import patches


@pytest.mark.parametrize("patch", patches.PATCHES, ids=lambda patch: patch.name)
def test_the_installed_version_has_the_name_and_was_checked(patch: patches.Patch) -> None:
    wanted = Requirement(patch.checked)
    assert wanted.specifier.contains(version(wanted.name)), "look whether the patch still fits, then widen its range"
    assert callable(getattr(patch.owner(), patch.name)) or patch is patches.LOAD_REPORT


def test_the_table_that_is_hidden_is_still_called_so() -> None:
    import inspect

    from transformers.utils import loading_report

    assert "LOAD REPORT" in inspect.getsource(loading_report)


def test_a_patch_is_undone_after_an_error_too() -> None:
    for patch, replaced in (
        (patches.CUTTING, patches.cutting_by(print)),
        (patches.ROTARY, patches.rotary_by(patches.ROTARY.owner(), print)),
    ):
        theirs = vars(patch.owner())[patch.name]
        with suppress(ZeroDivisionError), replaced:
            assert getattr(patch.owner(), patch.name) is print
            raise ZeroDivisionError
        assert vars(patch.owner())[patch.name] is theirs


def test_slices_of_experts_are_turned_by_what_the_others_of_their_shape_are() -> None:
    """Half of 4 experts, in files of transformers' own form and of the hub's."""
    turn, name = patches.TURNING.owner()(1, 2, check_dims=True), "experts.down_proj"
    model, slices = torch.nn.ParameterDict({"whole": torch.empty(4, 6, 3)}), torch.randn(2, 6, 3)

    def read(tensor: torch.Tensor) -> torch.Tensor:
        found = turn.convert({name: [tensor]}, [name], [name], model=model, full_layer_name="whole")
        return found[name]  # type: ignore[no-any-return]

    assert read(slices).shape == (2, 3, 6), "once transformers knows slices, this patch can go"
    with patches.reading_slices():
        assert torch.equal(read(slices), slices)
        assert torch.equal(read(slices.mT), slices)


def test_the_list_of_models_files_is_that_which_transformers_makes() -> None:
    path = str(Path(transformers.__file__).parent / "models" / "__init__.py")
    scan = import_utils.define_import_structure.__wrapped__
    assert patches._listed(scan, path) == scan(path)


def test_names_of_a_models_file_are_those_that_transformers_finds() -> None:
    theirs = import_utils.fetch__all__
    for part in ("l", "q"):
        for file in Path(transformers.__file__).parent.glob(f"models/{part}*/*.py"):
            content = file.read_text()
            assert patches._names(theirs, content) == theirs(content), file


@pytest.mark.slow
def test_the_list_of_models_files_is_made_once_where_transformers_is_imported() -> None:
    """In a process of its own, where nothing has imported them; transformers' own list is made afterwards."""
    script = """
from kubetune.models import patches
patches.import_transformers()
import os, transformers.models
from transformers.utils.import_utils import define_import_structure as scan
path = os.path.join(os.path.dirname(transformers.__file__), "models", "__init__.py")
misses = scan.cache_info().misses
theirs = scan(path)
assert scan.cache_info().misses == misses + 1, "it was made a second time"
assert patches._listed(scan, path) == theirs
assert transformers.models.LlamaForCausalLM is transformers.LlamaForCausalLM
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
