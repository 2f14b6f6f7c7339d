"""A chat template gets so much time and memory and no more, and what it writes is the same as without limits."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import pytest

from kubetune.data.text.turns import limited_template
from kubetune.data.text.turns.limited_template import LimitedTemplate
from kubetune.data.text.turns.template import ChatTemplate, Rendered
from kubetune.errors import EnvironmentFault, ModelError
from tests.chat_templates import FAMILIES, TOKENS
from tests.ranks import wait_until
from tests.tiny import CHATML

CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Ping"},
    {"role": "assistant", "content": "Pong"},
]

BOMBS = {
    "doubled": "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "looped": "{% for i in range(99999) %}{% for k in range(99999) %}{% set x = i * k %}{% endfor %}{% endfor %}",
    "powered": "{% set ns = namespace(x=9) %}{% for i in range(9) %}{% set ns.x = ns.x ** ns.x %}{% endfor %}",
    "folded": "{{ 'x' * 99999999999 }}",
    "wide": "{{ '%099999999999d' % 1 }}",
}
SLOW = (
    "{% for i in range(5000) %}{% for k in range(300) %}{% set x = i * k %}{% endfor %}{% endfor %}"
)


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Yield a process with limits that a test reaches soon."""
    monkeypatch.setattr(limited_template, "SECONDS", 3)
    monkeypatch.setattr(limited_template, "MEMORY", 1 << 27)
    limited_template.end()
    yield
    limited_template.end()


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize(
    "bomb", [pytest.param(b, marks=pytest.mark.slow) if b == "powered" else b for b in BOMBS]
)
def test_a_template_that_never_ends_or_fills_the_memory_is_stopped(bomb: str) -> None:
    limit = r"(4 seconds of processor time for 1|128 MiB of memory for one) conversation"
    with pytest.raises(
        ModelError,
        match=f"the tokenizer's chat template needs more than {limit}",
    ):
        LimitedTemplate(BOMBS[bomb] + CHATML, {}).render_all([(CHAT, [], [1])])
    assert LimitedTemplate(CHATML, {}).closing == "<|im_end|>"  # it goes on with others


@pytest.mark.slow
@pytest.mark.usefixtures("strict")
def test_many_slow_conversations_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stays below the limit of one, and all of them would take long."""
    monkeypatch.setattr(limited_template, "SECONDS_FOR_EACH", 0.001)
    slow = LimitedTemplate(SLOW + CHATML, {})
    slow.load()
    with pytest.raises(
        ModelError,
        match=r"needs more than 4 seconds of processor time for 1,000 conversations; set",
    ):
        slow.render_all([(CHAT, [], [1])] * 1000)


def test_a_renderer_ends_with_a_killed_process_though_it_is_busy() -> None:
    """kill -9 of who asks, while a template works on something that takes long."""
    code = (
        "import sys\n"
        "from kubetune.data.text.turns import limited_template\n"
        "limited_template.LimitedTemplate('x', {}).load()\n"
        "print(limited_template._process().child.pid, flush=True)\n"
        f"limited_template.LimitedTemplate({BOMBS['looped'] + CHATML!r}, {{}}).closing\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as asking:
        assert asking.stdout is not None
        renderer = psutil.Process(int(asking.stdout.readline()))
        before = renderer.cpu_times().user
        wait_until(lambda: renderer.cpu_times().user > before + 0.3)
        asking.kill()
        # By its own limit it would end later. Its time is counted, not that of a busy machine.
        used = before

        def has_ended() -> bool:
            nonlocal used
            try:
                used = max(used, renderer.cpu_times().user)
                return renderer.status() == psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                return True

        wait_until(has_ended)
        assert used - before < limited_template.SECONDS / 2


def test_it_writes_what_the_template_writes() -> None:
    for source in FAMILIES.values():
        near = ChatTemplate(source, TOKENS)
        far = LimitedTemplate(source, TOKENS)
        assert far.closing == near.closing
        assert far.render(CHAT, generation_prompt=True) == near.render(CHAT, generation_prompt=True)
        (rendered,) = far.render_all([(CHAT, [], [1])])
        if isinstance(rendered, ValueError):
            with pytest.raises(ValueError, match=re.escape(str(rendered))):
                near.render_answers(CHAT, [], trained=[1])
        else:
            assert rendered == near.render_answers(CHAT, [], trained=[1])


def test_the_others_of_a_batch_are_not_held_up_by_one_refused() -> None:
    alone = [{"role": "system", "content": "Be brief."}]
    rows = LimitedTemplate(FAMILIES["gemma"], TOKENS).render_all(
        [(CHAT, [], [1]), (alone, [], []), (CHAT, [], [1])]
    )
    assert [type(row) for row in rows] == [Rendered, ValueError, Rendered]


def closing_in_a_fork() -> None:
    assert LimitedTemplate(CHATML, {}).closing == "<|im_end|>"


def test_a_fork_starts_its_own_and_a_killed_one_is_said_to_be(tmp_path: Path) -> None:
    template = LimitedTemplate(CHATML, {})
    template.load()
    assert limited_template._current is not None
    child = limited_template._current.child
    fork = get_context("fork").Process(target=closing_in_a_fork)
    fork.start()
    fork.join()
    assert fork.exitcode == 0
    assert child.poll() is None
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(EnvironmentFault, match="was killed"):
        template.render(CHAT)
    assert template.render(CHAT)
