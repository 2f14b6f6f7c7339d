"""What holds for every test: no network but loopback, nothing written into the home folder, steady hypothesis."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.strategies import none

import tests.offline.sitecustomize  # noqa: F401 - importing it is what guards this process
from kubetune.base import reminders
from tests import workers
from tests.slow_cases import is_slow

OFFLINE = Path(__file__).parent / "offline"

# At import, not in a fixture: libraries read these variables when they are imported, and so do child processes.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["KUBETUNE_DEFAULTS"] = ""  # none, whatever this machine has
# No machine of a cloud, which would be asked for credentials of its own.
os.environ["AWS_EC2_METADATA_DISABLED"] = os.environ["NO_GCE_CHECK"] = "true"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What a test starts would otherwise compile kubetune anew, each process for itself.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
sys.dont_write_bytecode = False
os.environ["KUBETUNE_CPU_DTYPE"] = "float32"  # whatever this machine's CPU is fastest at
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(OFFLINE), os.environ.get("PYTHONPATH")))
)

# How long something takes says nothing here, so nothing is said of it either.
reminders.SIGN_SECONDS = 3600.0

# What modules are made of stays; looking through it for garbage again and again takes longer than to make it.
gc.disable()

# Shells start what runs in the background deaf to Ctrl-C, and children inherit that: tests send it to some.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A shared machine is slow at times, which says nothing about the code.
# The same few cases each time, so that a change is red for what it did; `scripts/test --all` searches on.
settings.register_profile("kubetune", deadline=None, derandomize=True, max_examples=30)
settings.register_profile("search", deadline=None, max_examples=200)
settings.load_profile("kubetune")

# By what they take. Handed out first, so that no worker is left alone with one of them when all else is done.
LONGEST = (
    "test_verdict.py",
    "test_base_shards.py",
    "test_distill.py",
    "test_received_runs.py",
    "test_data_encode.py",
    "test_operate_prepare.py",
    "test_json.py",
    "test_result_elsewhere.py",
    "test_grpo.py",
    "test_export.py",
    "test_serve_check.py",
    "test_base_model.py",
    "test_data_tokenizer.py",
    "test_operate.py",
    "test_ui.py",
    "test_judgement.py",
    "test_prepare.py",
    "test_operate_queue.py",
    "test_ui_new.py",
    "test_operate_absences.py",
    "test_world.py",
    "test_distill_servers.py",
    "test_training.py",
    "test_layouts.py",
    "test_checkpoint.py",
    "test_grpo_servers.py",
    "test_operate_silence.py",
    "test_grpo_rewards.py",
    "test_vision.py",
    "test_remote_code.py",
    "test_operate_admission.py",
    "test_kill.py",
    "test_permissions.py",
    "test_gang.py",
    "test_agent.py",
    "test_operate_training.py",
    "test_classifiers.py",
    "test_preflight.py",
    "test_standin_api.py",
    "test_data_conversations.py",
    "test_padding_free.py",
    "test_adamw.py",
    "test_operate_leaving.py",
    "test_extras.py",
    "test_stop.py",
    "test_grpo_held_out.py",
    "test_model_folders.py",
    "test_examples.py",
    "test_manifests.py",
    "test_data_files.py",
    "test_identity.py",
    "test_launch.py",
    "test_nothing_runs.py",
    "test_demo.py",
    "test_gitops.py",
    "test_hang.py",
    "test_operate_ends.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Have files handed out in the order of the tests, where pytest-xdist would begin with those of most tests."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow cases. Begin with the longest files, in the order that chance gave all else."""
    for item in items:
        if is_slow(item.nodeid.removeprefix("tests/")):
            item.add_marker(pytest.mark.slow)
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONGEST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Let workers begin as copies of one process, which has imported everything."""
    workers.fork(config, specs)


@given(none())
def _draw(value: None) -> None:
    """Let hypothesis make its generator of numbers. It warns of one that is made after `gc.freeze` has hidden its owner."""


@pytest.fixture(scope="session", autouse=True)
def _process_of_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep what tests cache out of the user's ~/.cache, and away from other test processes; let ranks begin here."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    if ranks := sys.modules.get("tests.ranks"):
        importlib.import_module("tests.warm")
    _draw()
    gc.freeze()
    gc.set_threshold(10_000)  # seldom, as looking for garbage takes time that tests show nothing in
    gc.enable()
    if ranks:
        ranks.start_server()


@pytest.fixture(scope="session")
def _untouched_logging() -> Callable[[], None]:
    """Return a function that puts back the handlers, levels and hooks that `logs.configure` changes, as they are now."""
    loggers = logging.getLogger(), logging.getLogger("kubetune")
    kept = [(logger, list(logger.handlers), logger.level) for logger in loggers]
    factory = logging.getLogRecordFactory()
    hook = sys.excepthook
    hook_of_threads = threading.excepthook

    def put_back() -> None:
        for logger, handlers, level in kept:
            for handler in set(logger.handlers) - set(handlers):
                logger.removeHandler(handler)
                handler.close()
            if (
                logger.level != level
            ):  # setting it makes every logger forget what it knows of levels
                logger.setLevel(level)
        logging.captureWarnings(False)
        logging.setLogRecordFactory(factory)
        sys.excepthook, threading.excepthook = hook, hook_of_threads

    return put_back


@pytest.fixture(autouse=True)
def _logging_of_its_own(_untouched_logging: Callable[[], None]) -> Iterator[None]:
    """Let no test see log lines, or lack tracebacks, because of one before it, or of a fixture of its module."""
    _untouched_logging()
    yield
    _untouched_logging()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Add up by file what `--durations` lists by test: hundreds of quick tests take long too."""
    if not config.getoption("durations"):
        return
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.location[0]] += report.duration
    terminalreporter.section("slowest files")
    for file, took in seconds.most_common(40):
        terminalreporter.write_line(f"{took:8.2f}s {file}")
