"""The settings of a file that a script names are those that its training gets, or are refused: bash is asked."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kubetune.errors import ConfigError
from kubetune.plugins.importers import import_config

BASH = shutil.which("bash")
CONFIG = "model_name_or_path: a/model\ndataset_name: a/set\nlearning_rate: {rate}\n"
# Stands for the tool: writes down the rate that it is given.
TOOL = """#!/bin/sh
while [ $# -gt 0 ]; do
  case $1 in --config) grep -h learning_rate "$2" | cut -d' ' -f2 >> "$RATE";; --learning_rate) echo "$2" >> "$RATE";; esac
  shift
done
"""

# Each names c.yaml or changes the folder before `trl sft` reads it, and what its refusal says.
CHANGING = {
    "sed -i s/1e-3/5e-6/ c.yaml\ntrl sft --config c.yaml": "line 1 may write it",
    "F=c.yaml\nsed -i s/1e-3/5e-6/ $F\ntrl sft --config $F": "line 2 may write it",
    "cp sub/c.yaml .\ntrl sft --config c.yaml": "line 1 may write it",
    "{ cat other.yaml; } > c.yaml\ntrl sft --config c.yaml": "line 1 may write it",
    "write() { cat other.yaml > c.yaml; }\nwrite\ntrl sft --config c.yaml": "line 1 may write it",
    "for f in other.yaml; do cat $f > c.yaml; done\ntrl sft --config c.yaml": "line 1 may write it",
    "dd if=other.yaml of=c.yaml\ntrl sft --config c.yaml": "line 1 may write it",
    "cp other.yaml $PWD/c.yaml\ntrl sft --config c.yaml": "line 1 may write it",
    "grep rate c.yaml\ntrl sft --config c.yaml": "line 1 may write it",
    "cd sub\ntrl sft --config c.yaml": "line 1 changes the folder",
    "(cd sub && trl sft --config c.yaml)": "line 1 changes the folder",
    "[ -d sub ] && cd sub\ntrl sft --config c.yaml": "line 1 changes the folder",
    "into() { cd sub; }\ninto\ntrl sft --config c.yaml": "line 1 changes the folder",
    "pushd sub\npopd\ntrl sft --config c.yaml": "line 1 changes the folder",
    # Nobody knows that it is this file.
    "F=c.yaml\n[ -d / ] && F=other.yaml\ntrl sft --config ${F:-c.yaml}": "from $F, which only a running shell knows",
    '[ -d / ] && F="--config c.yaml"\ntrl sft $F': "$F holds options",
}
PLAIN = [
    "trl sft --config c.yaml",
    "trl sft --config sub/c.yaml",
    "mkdir -p out\ntrl sft --config c.yaml > log 2>&1",
    "trl sft --config c.yaml\nsed -i s/1e-3/5e-6/ c.yaml",
    # NAME=value before a command is set after the other words are filled in.
    "LR=2e-4\nLR=6 trl sft --model_name_or_path a/model --dataset_name a/set --learning_rate $LR",
    "LR=2e-4 B=1\ntrl sft --model_name_or_path a/model --dataset_name a/set --learning_rate $LR",
    "LR=2e-4 B=1 \\\ntrue\nLR=6 trl sft --model_name_or_path a/model --dataset_name a/set --learning_rate ${LR:-7}",
    "LR=2e-4\nLR=6 B=$LR exec trl sft --model_name_or_path a/model --dataset_name a/set --learning_rate $LR",
]


def made(folder: Path, script: str) -> Path:
    """Return a script in a new folder, with the files that it reads."""
    (folder / "sub").mkdir(parents=True)
    for name, rate in (("c.yaml", "1e-3"), ("other.yaml", "5e-6"), ("sub/c.yaml", "7e-5")):
        (folder / name).write_text(CONFIG.format(rate=rate))
    path = folder / "run.sh"
    path.write_text(f"{script}\n")
    return path


def rate_of_bash(script: Path, tmp_path: Path) -> float:
    """Run a script, and return the rate that its training got."""
    tool = tmp_path / "bin" / "trl"
    tool.parent.mkdir()
    tool.write_text(TOOL)
    tool.chmod(0o755)
    rate = tmp_path / "rate"
    environ = {
        "PATH": f"{tool.parent}:{os.environ['PATH']}",
        "RATE": str(rate),
        "OUT": str(tmp_path),
    }
    assert BASH is not None
    subprocess.run(
        [BASH, script.name],
        cwd=script.parent,
        env=environ,
        check=False,
        capture_output=True,
        timeout=60,
    )
    return float(rate.read_text())


def imported_rate(script: Path) -> float:
    """Return the rate that is carried over."""
    for note in import_config(script).notes:
        if note.key == "learning_rate" and note.kind == "carried":
            return float(note.text.rpartition(" ")[2])
    raise AssertionError("no rate is carried over")


@pytest.mark.parametrize("script", CHANGING)
def test_a_file_that_a_script_may_change_is_refused(script: str, tmp_path: Path) -> None:
    path = made(tmp_path / "imported", script)
    with pytest.raises(ConfigError) as caught:
        import_config(path)
    assert CHANGING[script] in str(caught.value)


@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize("script", PLAIN)
def test_a_file_that_a_script_only_reads_is_read_as_bash_does(script: str, tmp_path: Path) -> None:
    expected = rate_of_bash(made(tmp_path / "run", script), tmp_path)
    assert imported_rate(made(tmp_path / "imported", script)) == expected
