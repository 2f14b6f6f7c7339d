"""Code that comes with a model is asked for by name in every call of the libraries, or refused by name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import kubetune

ROOT = Path(kubetune.__file__).parent
LOADERS = {"from_pretrained", "from_config"}
# Classes whose loaders know no code of models.
WITHOUT_CODE = {"PeftModel"}


def _loading_calls() -> Iterator[tuple[str, ast.Call]]:
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text("utf-8")
        # Parsing every file takes seconds; few have such a call.
        if not any(name in text for name in LOADERS):
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr in LOADERS:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_every_loader_is_told_about_code() -> None:
    """Without a word transformers asks on the terminal, and runs the code on `y`."""
    calls = dict(_loading_calls())
    assert len(calls) > 10
    silent = []
    for place, call in calls.items():
        assert isinstance(call.func, ast.Attribute)
        owner = call.func.value
        if isinstance(owner, ast.Name) and owner.id in WITHOUT_CODE:
            continue
        if "trust_remote_code" not in {keyword.arg for keyword in call.keywords}:
            silent.append(place)
    assert not silent
