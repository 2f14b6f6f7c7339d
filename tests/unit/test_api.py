"""The Python interface: everything it promises can be imported, and importing it costs nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kubetune


@pytest.mark.parametrize("name", kubetune.__all__)
def test_every_promised_name_exists(name):
    assert getattr(kubetune, name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        _ = kubetune.nonsense


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, kubetune; print([m for m in ('torch', 'numpy', 'pydantic') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
