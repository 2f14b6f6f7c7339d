"""What is changed in transformers for a whole process is there in the version installed, and is undone."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement

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
