"""Python files of the user's before a run: functions that they lack, and files that would not travel with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kubetune import cli, errors
from kubetune.config.code_files import (
    depends_on,
    modules_beside,
    read_code,
    require_answers,
    require_functions,
)
from tests.golden.manifests import FOLDER

CODE = """\
from math import sqrt as root
from helpers import clean
import package.part
import json

raise SystemExit("this file must not be run")

def short(prompts, completions, **columns): ...
class Polite:
    def __call__(self, completions): ...
alias = short
try:
    import fast as quick
except ImportError:
    def quick(): ...
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(CODE)
    return path


def test_what_a_file_defines_is_read_and_not_run(code: Path) -> None:
    require_functions(read_code("rewards[0]", code), ["short", "Polite", "alias", "root", "quick"])
    with pytest.raises(errors.ConfigError, match="defines no shrt; did you mean short") as caught:
        require_functions(read_code("rewards[0]", code), ["shrt"])
    assert "short, Polite" in str(caught.value)
    code.write_text(f"{CODE}\nglobals()['shrt'] = short\n")
    require_functions(read_code("rewards[0]", code), ["shrt"])
    code.write_text(f"from helpers import *\n{CODE}")
    require_functions(read_code("rewards[0]", code), ["anything"])
    code.write_text("def short(:\n")
    with pytest.raises(errors.ConfigError, match=r"rewards\.py:1: invalid syntax"):
        require_functions(read_code("rewards[0]", code), ["short"])


@pytest.mark.parametrize(
    "text",
    [
        "f = 3", "f = -3.5", "f = 'a' + 'b'", "f: list[int] = [1]", "g = f = {'a': len}", "f = f'{g}'",
        "f = [len for _ in x]", "def f(): ...\nf = None", "f = ()", "if x:\n    f = len\nf = 3",
    ],
)  # fmt: skip
def test_a_name_for_a_value_is_no_function(code: Path, text: str) -> None:
    code.write_text(text)
    line = len(text.splitlines())
    with pytest.raises(errors.ConfigError, match=rf":{line}: f is `.*`; expected a function"):
        require_functions(read_code("rewards[0]", code), ["f"])


@pytest.mark.parametrize(
    "text",
    [
        "f = g", "f = g(3)", "f = lambda: 3", "f = table['f']", "f = 3\ndef f(): ...", "from x import f",
        "if x:\n    f = 3\nelse:\n    f = g", "f, g = 3, g", "f = g or 3", "f = 3 * g",
        "f = 3\ndef g():\n    global f\n    f = g", "f = None\n(f := g)", "f = None\nfor f in g: ...",
    ],
)  # fmt: skip
def test_a_name_that_only_running_the_file_explains_stays_open(code: Path, text: str) -> None:
    code.write_text(text)
    require_functions(read_code("rewards[0]", code), ["f"])


CALLABLE = "class G:\n    def __call__(self, completions): ...\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("class f: pass", "f is a class without `__call__`"),
        ("class g: pass\nclass f(g):\n    x = 1", "f is a class without `__call__`"),
        ("class g(object): pass\nf = g()", "f is an object of g, a class without `__call__`"),
        (f"{CALLABLE}class f(G):\n    def __init__(self, size): self.size = size", "f is a class that needs size"),
    ],
)  # fmt: skip
def test_what_the_text_shows_to_be_no_function_is_refused(
    code: Path, text: str, reason: str
) -> None:
    code.write_text(text)
    with pytest.raises(errors.ConfigError, match=f"{reason}.*; expected a function"):
        require_functions(read_code("rewards[0]", code), ["f"])


@pytest.mark.parametrize(
    "text",
    [
        f"{CALLABLE}class f(G): ...", f"{CALLABLE}f = G()", "class f(Elsewhere): ...", "@made\nclass f: ...",
        "class f(metaclass=g): ...", "class f: ...\nf.__call__ = g", "class f:\n    __call__ = g",
        f"{CALLABLE}class f(G):\n    def __init__(self, size=3, *more, **others): ...",
        "if x:\n    class f: ...\nelse:\n    f = g",
        f"{CALLABLE}class H:\n    def __init__(self, size): ...\n    __call__ = G.__call__\nf = H(3)",
    ],
)  # fmt: skip
def test_a_class_whose_objects_may_be_called_stays(code: Path, text: str) -> None:
    code.write_text(text)
    require_functions(read_code("rewards[0]", code), ["f"])


@pytest.mark.parametrize(
    "text",
    [
        "async def f(): return [1.0]", "def f(): return [1.0]", "f = g", "@made\ndef f(): yield 1",
        "def f():\n    def g(): yield 1\n    return list(g())", "def f():\n    if x:\n        return 1",
    ],
)  # fmt: skip
def test_what_may_give_an_answer_stays(code: Path, text: str) -> None:
    code.write_text(text)
    require_answers(read_code("rewards[0]", code), "f", may_wait=True)


def test_modules_beside_a_file(code: Path) -> None:
    assert modules_beside(code) == []
    helpers = code.with_name("helpers.py")
    helpers.touch()
    package = code.with_name("package")
    package.mkdir()
    assert modules_beside(code) == [helpers]
    (package / "part.py").touch()
    assert modules_beside(code) == [helpers, package]
    assert modules_beside(code.with_name("absent.py")) == []


def test_a_plan_names_a_function_that_is_not_there(
    code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (code.parent / "train.jsonl").write_text('{"prompt": "1 + 1?", "solution": "2"}\n')
    words = ["--model", "absent", "--data", str(code.parent / "train.jsonl"), "task=grpo"]
    reward = f"rewards=[{{file: {code}, function: shrt}}]"
    assert cli.main(["plan", *words, reward]) == errors.USER
    assert "rewards[0]: " in capsys.readouterr().err
    metrics = (
        f"evaluation={{generate: {{}}, metrics: {{file: {code}, functions: [short, polite]}}}}"
    )
    words += ["rewards=[exact_match]", "data.eval=0.5"]
    assert cli.main(["plan", *words, metrics]) == errors.USER
    assert "did you mean Polite?" in capsys.readouterr().err


def test_render_says_what_does_not_travel(code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code.with_name("helpers.py").touch()
    words = ["evaluation.generate={}", "data.eval=0.1"]
    metrics = f"evaluation.metrics={{file: {code}, functions: [short]}}"
    assert cli.main(["render", str(FOLDER / "minimal.yaml"), *words, metrics]) == 0
    message = "evaluation.metrics.file: advice: rewards.py imports helpers.py from its folder"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(text, truth): return truth in text", True),
        (
            "def f(text, truth):\n    def inner(): return truth.strip()\n    return inner() in text",
            True,
        ),
        ("class f:\n    def __call__(self, text, truth, info=None): return text == truth", True),
        ("def f(text, truth): return len(text)", False),
        ("def f(text, truth): return 0 if truth is None else text == truth", False),
        ("def f(text, truth):\n    if not truth: return None\n    return text == truth", False),
        ("def f(text, truth): return [one is not None for one in truth]", False),
        ("def f(text, truth): return text == (truth or '')", False),
        ("def f(text, truth): return 1\ndef f(text, truth): return truth in text", False),
    ],
)
def test_what_a_function_reads_and_does_not_provide_for(
    text: str, expected: bool, tmp_path: Path
) -> None:
    code = tmp_path / "code.py"
    code.write_text(text)
    assert depends_on(read_code("rewards[0]", code), "f", "truth") is expected
