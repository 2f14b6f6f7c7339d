"""docs/models.md says of each family what the self-check of today says."""

from __future__ import annotations

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kubetune.batching.batch import collate
from kubetune.models.learner import Learner
from kubetune.models.padding_free import choose_attention
from kubetune.tasks.causal_lm import TASK
from tests.architectures import (
    ONE_BY_ONE,
    PADDING_FREE,
    build_model,
    random_rows,
    reference_gradients,
    relative_error,
    take_gradients,
)
from tests.families import FAMILIES, IMAGES, OURS, PAGE, SEEING, line, seeing_line, table, untried
from tests.small_configs import OTHERS, UNTRIED, settings

QUICK = ("gpt2", "lfm2", "doge")


def test_the_page_has_every_family() -> None:
    assert set(table()) == set(FAMILIES)
    assert set(table(IMAGES)) == set(SEEING)
    assert untried() in PAGE.read_text()


def test_every_causal_language_model_of_transformers_is_tried_or_named() -> None:
    named = {name for names in UNTRIED.values() for name in names}
    tried = {name.partition("+")[0] for name in FAMILIES} | set(SEEING)
    assert not named & tried
    assert named | tried >= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in FAMILIES]
)
def test_the_page_says_how_a_family_runs(name: str) -> None:
    assert line(name) == table()[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEING)
def test_the_page_says_how_a_family_that_sees_runs(name: str) -> None:
    assert seeing_line(name) == table(IMAGES)[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PADDING_FREE, *ONE_BY_ONE, *OTHERS])
def test_one_packed_batch_gives_the_gradients_of_plain_transformers(name: str) -> None:
    """Or a batch of each sequence, where the page says so."""
    model = build_model(name, OURS[name] if name in OURS else settings(name), lora=False)
    rows = random_rows((37, 5, 300, 21, 140, 64))
    model.eval()  # some routers draw at random while they train
    expected = reference_gradients(model, rows)
    learner = Learner(model, choose_attention(model))
    labels = sum(int(trained[1:].sum()) for _, trained in rows)
    groups = [rows] if learner.route.padding_free else [[row] for row in rows]
    loss = sum(float(TASK.backward(learner, collate(group), 1 / labels)) for group in groups)
    assert loss == pytest.approx(expected[0], rel=1e-6)
    assert relative_error(take_gradients(model), expected[1]) <= 5e-6
