"""What needs no torch is said without it: each mistake of scripts/first_words.py, in an interpreter that has none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from scripts.first_words import MISTAKES, make_world

# Makes all mistakes, one after the other, and prints what each said and which large libraries there were by then.
# The rank's own process would import torch beside the one that prepares the data and says the mistake: that one is
# what `prepare` stands for here.
MAKE_MISTAKES = """
import contextlib, io, json, sys
from pathlib import Path
from kubetune.cli import main
from kubetune.config.load import load_config
from kubetune.errors import KubetuneError
from kubetune.library.plans import plan_here

def prepare(words):
    from kubetune.training.start.data_preparation import _prepare_folder
    config, _ = plan_here(load_config(Path(words[1]), overrides=words[2:]))
    try:
        _prepare_folder(config, Path(str(config.output)))
    except KubetuneError as error:
        print(error)
        return error.exit_code
    return 0

said = {}
for command, by_rank in json.loads(sys.argv[1]):
    words = command.split()[1:]
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.redirect_stderr(text):
        try:
            code = prepare(words) if by_rank else main(words)
        except SystemExit as left:
            code = left.code
    large = sorted({"torch", "transformers", "datasets", "peft"} & sys.modules.keys())
    said[command] = [code, text.getvalue(), large]
print(json.dumps(said))
"""

# What the process says that prepares the data, beside the rank.
BY_RANK = (
    "kubetune train run.yaml data.max_length=8",
    "kubetune train bad.yaml",
    "kubetune train untemplated.yaml",
    "kubetune train sees.yaml",
    "kubetune train answers.yaml",
)


def test_each_mistake_is_named_without_torch(tmp_path: Path) -> None:
    make_world(tmp_path)
    commands = [(command, command in BY_RANK) for command in MISTAKES]
    assert {command for command, by_rank in commands if by_rank} == set(BY_RANK)
    done = subprocess.run(
        [sys.executable, "-c", MAKE_MISTAKES, json.dumps(commands)],
        cwd=tmp_path,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for command, (code, text, large) in json.loads(done.stdout.splitlines()[-1]).items():
        assert MISTAKES[command] in text, f"{command}: {text}"
        assert large == [], f"{command} imports {large}"
        # A run that has ended is no mistake.
        assert (code == 0) is (command == "kubetune train done.yaml"), f"{command}: {code}"
