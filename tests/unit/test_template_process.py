"""A chat template gets so much time and memory and no more, and what it writes is the same as without limits."""

from __future__ import annotations

import os
import re
import signal
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from kubetune.data.text import template_process
from kubetune.data.text.template_process import LimitedTemplate
from kubetune.data.text.templates import ChatTemplate, Rendered
from kubetune.errors import EnvironmentFault, ModelError
from tests.chat_templates import FAMILIES, TOKENS
from tests.tiny import CHATML

CHAT: list[dict[str, Any]] = [{"role": "user", "content": "Ping"}, {"role": "assistant", "content": "Pong"}]

BOMBS = {
    "doubled": "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "looped": "{% for i in range(99999) %}{% for k in range(99999) %}{% set x = i * k %}{% endfor %}{% endfor %}",
    "powered": "{% set ns = namespace(x=9) %}{% for i in range(9) %}{% set ns.x = ns.x ** ns.x %}{% endfor %}",
    "folded": "{{ 'x' * 99999999999 }}",
    "wide": "{{ '%099999999999d' % 1 }}",
}


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A process with limits that a test reaches soon."""
    monkeypatch.setattr(template_process, "SECONDS", 1)
    monkeypatch.setattr(template_process, "MEMORY", 1 << 27)
    template_process.end()
    yield
    template_process.end()


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("bomb", [pytest.param(b, marks=pytest.mark.slow) if b == "powered" else b for b in BOMBS])
def test_a_template_that_never_ends_or_fills_the_memory_is_stopped(bomb: str) -> None:
    limit = r"(1 seconds of processor time|128 MiB of memory)"
    with pytest.raises(ModelError, match=f"the tokenizer's chat template needs more than {limit} for one conversation"):
        LimitedTemplate(BOMBS[bomb] + CHATML, {}).render_all([(CHAT, [], [1])])
    assert LimitedTemplate(CHATML, {}).closing == "<|im_end|>"  # it goes on with others


def test_it_writes_what_the_template_writes() -> None:
    for source in FAMILIES.values():
        near, far = ChatTemplate(source, TOKENS), LimitedTemplate(source, TOKENS)
        assert far.closing == near.closing
        assert far.render(CHAT, generation_prompt=True) == near.render(CHAT, generation_prompt=True)
        (found,) = far.render_all([(CHAT, [], [1])])
        if isinstance(found, ValueError):
            with pytest.raises(ValueError, match=re.escape(str(found))):
                near.render_answers(CHAT, [], trained=[1])
        else:
            assert found == near.render_answers(CHAT, [], trained=[1])


def test_the_others_of_a_batch_are_not_held_up_by_one_refused() -> None:
    alone = [{"role": "system", "content": "Be brief."}]
    rows = LimitedTemplate(FAMILIES["gemma"], TOKENS).render_all([(CHAT, [], [1]), (alone, [], []), (CHAT, [], [1])])
    assert [type(row) for row in rows] == [Rendered, ValueError, Rendered]


def closing_in_a_fork() -> None:
    assert LimitedTemplate(CHATML, {}).closing == "<|im_end|>"


def test_a_fork_starts_its_own_and_a_killed_one_is_said_to_be(tmp_path: Path) -> None:
    template = LimitedTemplate(CHATML, {})
    template.load()
    assert template_process._current is not None
    child = template_process._current._child
    fork = get_context("fork").Process(target=closing_in_a_fork)
    fork.start()
    fork.join()
    assert fork.exitcode == 0
    assert child.poll() is None
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(EnvironmentFault, match="was killed"):
        template.render(CHAT)
    assert template.render(CHAT)
