"""What is changed in transformers for a whole process is there in the version installed, and is undone."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from kubetune.models import patches, slice_patches
from kubetune.models.patch import Patch


@pytest.mark.parametrize("patch", patches.PATCHES, ids=lambda patch: patch.name)
def test_the_installed_version_is_as_a_patch_expects(patch: Patch) -> None:
    assert patch.misfit() == "", "look whether the patch still fits"
    assert callable(getattr(patch.owner(), patch.name))


def test_the_table_that_is_hidden_is_still_called_so() -> None:
    import inspect

    from transformers.utils import loading_report

    assert "LOAD REPORT" in inspect.getsource(loading_report)


def test_a_patch_is_undone_after_an_error_too() -> None:
    for patch, replaced in (
        (patches.SHARD_ON_LOAD, patches.cutting_by(print)),
        (patches.ROTARY, patches.rotary_by(patches.ROTARY.owner(), print)),
    ):
        theirs = vars(patch.owner())[patch.name]
        with suppress(ZeroDivisionError), replaced:
            assert getattr(patch.owner(), patch.name) is print
            raise ZeroDivisionError
        assert vars(patch.owner())[patch.name] is theirs


def test_slices_of_experts_are_turned_by_what_the_others_of_their_shape_are() -> None:
    """Half of 4 experts, in files of transformers' own form and of the hub's."""
    turn = patches.TRANSPOSE_EXPERTS.owner()(1, 2, check_dims=True)
    name = "experts.down_proj"
    model = torch.nn.ParameterDict({"whole": torch.empty(4, 6, 3)})
    slices = torch.randn(2, 6, 3)

    def read(tensor: torch.Tensor) -> torch.Tensor:
        converted = turn.convert(
            {name: [tensor]}, [name], [name], model=model, full_layer_name="whole"
        )
        return converted[name]  # type: ignore[no-any-return]

    assert read(slices).shape == (2, 3, 6), "once transformers knows slices, this patch can go"
    with slice_patches.reading_slices():
        assert torch.equal(read(slices), slices)
        assert torch.equal(read(slices.mT), slices)
