"""The shape of the house: rooms in the order of `kubetune.ROOMS`, each importing only itself and those above it."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import kubetune

PACKAGE = Path(kubetune.__file__).parent
ORDER = [name for name, _ in kubetune.ROOMS]
LIGHT = set(ORDER[: ORDER.index(kubetune.NUMPY_BEGINS)])
TORCHLESS = set(ORDER[: ORDER.index(kubetune.TORCH_BEGINS)]) - LIGHT
CLUSTER = {"manifests", "lint", "kube_api", "cluster"}
DOORS = {"", "__main__", "agent", "worker"}
"""Files of the root; they lead into rooms."""

TORCH = {"torch", "transformers", "peft", "accelerate"}
HEAVY = TORCH | {"numpy", "tokenizers", "pyarrow", "datasets"}
LATE = {"rundir.trackers", "rundir.mlflow_tracker"}
"""Light, and yet they may import what is heavy inside functions: training alone calls those."""

MOST_FILES, MOST_LINES_OF_A_FILE = 20, 500
MOST_LINES_OF_A_FUNCTION = 60
MOST_LINES_OF_A_ROOM, LARGE, MOST_LINES_OF_PLUGINS = 2700, {"data", "cli", "plugins"}, 5265
SPINE, MOST_LINES_OF_THE_SPINE = 15, 2800
RETIRED = {
    "Snapshots": "Checkpointer", "Piece": "OptimizerShard", "Journal": "RunLog", "Room": "MemoryBudget",
    "Ending": "ExitStatus", "Title": "Lease", "Meeting": "Rendezvous",
    "Streams": "LogFollower", "Watched": "Informer", "Sight": "RunView", "Copied": "Downloaded",
    "last_words": "termination", "inside": "in_pod", "copies": "download", "vitals": "status",
    "snapshot": "checkpointer", "pieces": "optimizer_shards", "journal": "run_log", "endings": "exit_status",
    "meeting": "rendezvous", "hindsight": "actuals", "foreseen": "forecast", "probe": "preflight",
    "health": "stop or finite", "train_worker": "worker", "optim": "adamw", "trace": "step_digest",
    "sharded": "fsdp", "flat": "padding_free", "parallel": "process_group", "samples": "before_after",
    "lean": "fused_forwards", "Snapshot": "ObservedRun", "Foreseen": "PlanForecast",
}  # fmt: skip
"""Words that were names of classes and modules once, with what stands in for each: one word for one idea."""
GONE = {"learnt": "trained", "unlearnt": "not_trained", "borders": "cu_seqlens or boundaries", "endings": "exit_status"}
"""Words that are part of no name any more, and stand in no page, with what stands in for each."""
ELSEWHERE = {("plugins", "journal"), ("plugins", "Journal")}
"""The same word for something else."""
SAID_ELSEWHERE = {"add_arguments", "run", "forward", "backward"}
"""What every verb has (cli), and every operation of autograd (its class says what it is)."""
MODULES_OF_OTHERS = {"base", "head", "last", "layer", "lm", "model", "module", "table"}
"""Names that modules of a model have in the rooms that change them."""
SET_THERE = {
    "feed_forward_chunk", "forward", "gradient_checkpointing", "sparse", "support_avx512bf16_for_cpu", "training",
    "weight",
}  # fmt: skip
"""Attributes of theirs that are set on them."""
HUNG_THERE = {"call_inside", "shared_input"}
"""All of ours that hangs on them; docs/design.md says why."""
QUESTIONS = re.compile(
    r"(What|Whether|Which|How|Where|When|Whose|Who|Why|Does|Is|Are|Can|Has|True (where|when|if|of|on))\b"
)
"""Openings of docstrings that ask instead of saying the thing."""


class Import(NamedTuple):
    """One import statement: where, of what, and whether it runs when its file is imported, later, or never."""

    line: int
    module: str
    when: str


@cache
def tree(path: Path) -> ast.Module:
    """A file, parsed once for all tests."""
    return ast.parse(path.read_text("utf-8"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file."""
    return tuple(ast.walk(tree(path)))


@pytest.fixture(scope="module", autouse=True)
def _forget_the_trees() -> Iterator[None]:
    """Let the process that goes on with other tests be rid of them."""
    yield
    tree.cache_clear()
    nodes.cache_clear()


def imports(path: Path) -> Iterator[Import]:
    """Every import in a file: `when` is `"now"`, `"late"` (inside a function) or `"types"` (for types only)."""
    yield from _walk(tree(path), "now", path)


def _walk(node: ast.AST, when: str, path: Path) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        then = when
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            then = "types"
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and when == "now":
            then = "late"
        if isinstance(child, ast.Import):
            yield from (Import(child.lineno, alias.name, then) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{path}:{child.lineno}: write absolute imports"
            for alias in child.names:
                whole = f"{child.module}.{alias.name}"
                yield Import(child.lineno, whole if whole in MODULES else str(child.module), then)
        yield from _walk(child, then, path)


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring of a file, those of values included."""
    for node in nodes(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def dotted(path: Path) -> str:
    """`kubetune.config.load` of a file."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted(path): path for path in PACKAGE.rglob("*.py")}


def room(module: str) -> str:
    """`config` of `kubetune.config.load`; nothing for the package itself."""
    return f"{module}.".split(".")[1]


@cache
def found_in(module: str) -> list[Import]:
    return list(imports(MODULES[module]))


def of_house(module: str) -> Iterator[Import]:
    return (found for found in found_in(module) if found.module.split(".")[0] == "kubetune")


def test_every_room_is_on_the_list_and_says_what_it_is_for() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert folders == set(ORDER)
    silent = [m for m, path in MODULES.items() if not ast.get_docstring(tree(path))]
    assert not silent


def test_a_room_says_what_it_is_not_for_and_what_to_read_first() -> None:
    for name in ORDER:
        said = " ".join((ast.get_docstring(tree(PACKAGE / name / "__init__.py")) or "").split())
        assert re.search(r"\b[Nn]ot for\b", said), name
        first = re.search(r"\bRead `([\w/]+)`", said)
        assert first, name
        assert any((PACKAGE / name / f"{first[1]}{end}").exists() for end in ("", ".py")), (name, first[1])


def test_a_room_imports_only_itself_and_rooms_above_it() -> None:
    wrong = [
        f"{module}:{found.line} imports {found.module}"
        for module in MODULES
        if room(module) in ORDER
        for found in of_house(module)
        if room(found.module) not in {"", "errors"} and ORDER.index(room(found.module)) > ORDER.index(room(module))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_imports_go_in_a_circle_late_ones_and_those_for_types_included() -> None:
    needs: dict[str, set[str]] = defaultdict(set)
    for module in MODULES:
        if room(module) not in DOORS:
            needs[module] = {found.module for found in of_house(module)} - {module, "kubetune"}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as circle:
        raise AssertionError(" → ".join(reversed(circle.args[1]))) from None


def test_what_is_light_imports_nothing_heavy() -> None:
    wrong = []
    for module in MODULES:
        name, short = room(module), module.removeprefix("kubetune.")
        for found in found_in(module):
            library = found.module.split(".")[0]
            if name in LIGHT and library in HEAVY and (found.when == "now" or short not in LATE):
                wrong.append(f"{module}:{found.line} imports {found.module}")
            if name in TORCHLESS and library in TORCH and found.when == "now":
                wrong.append(f"{module}:{found.line} imports {found.module}, not inside a function")
            if name == "cli" and library in HEAVY and found.when == "now":
                wrong.append(f"{module}:{found.line} imports {found.module}, not inside a function")
    assert not wrong, "\n".join(wrong)


def test_training_knows_no_cluster() -> None:
    wrong = [
        f"{module}:{found.line} imports {found.module}"
        for module in MODULES
        if room(module) in ORDER[ORDER.index(kubetune.NUMPY_BEGINS) : ORDER.index("plugins")]
        for found in of_house(module)
        if room(found.module) in CLUSTER
    ]
    assert not wrong, "\n".join(wrong)


def test_files_of_tests_have_names_of_their_own() -> None:
    """pytest takes two of one name for the same module."""
    names = Counter(path.name for path in Path(__file__).parents[1].glob("*/test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_function_is_longer_than_a_screen() -> None:
    found = (
        (module, node.name, (node.end_lineno or 0) - node.lineno + 1)
        for module, path in MODULES.items()
        for node in nodes(path)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )
    assert not [long for long in found if long[2] > MOST_LINES_OF_A_FUNCTION]


def test_folders_stay_small_enough_to_be_read() -> None:
    counts = Counter(path.parent for path in MODULES.values())
    assert not {str(folder.relative_to(PACKAGE)): count for folder, count in counts.items() if count > MOST_FILES}


def test_files_stay_short_enough_to_be_read() -> None:
    lines = {module: len(path.read_text("utf-8").splitlines()) for module, path in MODULES.items()}
    assert not {module: count for module, count in lines.items() if count > MOST_LINES_OF_A_FILE}


def test_rooms_stay_small_enough_to_be_known() -> None:
    lines: Counter[str] = Counter()
    for module, path in MODULES.items():
        lines[room(module)] += len(path.read_text("utf-8").splitlines())
    assert not {name: count for name, count in lines.items() if count > MOST_LINES_OF_A_ROOM and name not in LARGE}
    assert lines["plugins"] <= MOST_LINES_OF_PLUGINS


def test_the_spine_is_there_and_can_be_read_in_an_hour() -> None:
    page = (PACKAGE.parent / "docs" / "design.md").read_text("utf-8")
    spine = re.findall(r"^\| \d+ \| \[(.+?)\]\(../kubetune/\1\.py\) \|", page, re.MULTILINE)
    assert len(spine) == SPINE
    lines = sum(len((PACKAGE / f"{name}.py").read_text("utf-8").splitlines()) for name in spine)
    assert lines <= MOST_LINES_OF_THE_SPINE


def test_the_page_on_design_lists_the_rooms_as_the_package_does() -> None:
    page = (PACKAGE.parent / "docs" / "design.md").read_text("utf-8")
    assert [name for name in re.findall(r"^(\w+)  +\S", page, re.MULTILINE) if name in ORDER] == ORDER


def test_the_rules_see_what_they_forbid(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"
        "def late():\n    import numpy as np\nfrom kubetune.planning import plan\nimport kubetune.cli\n"
    )
    assert sorted(imports(path)) == [
        (1, "typing", "now"),
        (3, "torch", "types"),
        (5, "numpy", "late"),
        (6, "kubetune.planning.plan", "now"),
        (7, "kubetune.cli", "now"),
    ]


def test_no_retired_word_is_a_key_of_the_run_file() -> None:
    keys = {
        node.target.id
        for path in (PACKAGE / "config" / "schema").glob("*.py")
        for node in nodes(path)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert len(keys) > 100
    assert keys & RETIRED.keys() <= {"optim"}, "which is Hugging Face's word"


def test_no_retired_word_comes_back_as_a_name() -> None:
    names = [
        (module, name)
        for module, path in MODULES.items()
        for name in (
            module.rpartition(".")[2],
            *(node.name for node in nodes(path) if isinstance(node, ast.ClassDef)),
        )
    ]
    wrong = [
        f"{module}: {name}, which is called {RETIRED[name]} now"
        for module, name in names
        if name in RETIRED and (room(module), name) not in ELSEWHERE
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_hangs_on_modules_of_others_but_what_the_page_on_design_names() -> None:
    set_there = {
        target.attr
        for name in ("adapters", "mixtures", "models", "tasks")
        for path in (PACKAGE / name).rglob("*.py")
        for node in nodes(path)
        if isinstance(node, ast.Assign)
        for each in node.targets
        for target in (each.elts if isinstance(each, ast.Tuple) else [each])
        if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") in MODULES_OF_OTHERS
    }
    assert set_there == SET_THERE | HUNG_THERE
    page = (PACKAGE.parent / "docs" / "design.md").read_text("utf-8")
    assert all(f"`{name}`" in page for name in HUNG_THERE)


def test_no_word_that_is_gone_comes_back() -> None:
    words = re.compile(rf"(?<![a-z])({'|'.join(GONE)})(?![a-z])", re.IGNORECASE)
    pages = [*PACKAGE.parent.glob("*.md"), *PACKAGE.parent.glob("docs/*.md")]
    wrong = [
        f"{path}:{number} {found[0]}, which is called {GONE[found[0].lower()]} now"
        for path in [*MODULES.values(), *pages]
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if (found := words.search(line))
    ]
    assert not wrong, "\n".join(wrong)


def test_docstrings_say_the_thing_first() -> None:
    asking = [
        f"{module}:{line} {text.splitlines()[0]}"
        for module, path in MODULES.items()
        for line, text in docstrings(path)
        if QUESTIONS.match(text)
    ]
    assert not asking, "\n".join(asking)


def test_what_other_files_use_says_what_it_is() -> None:
    silent = [
        f"{module}:{node.lineno} {node.name}"
        for module, path in MODULES.items()
        for node in _public(tree(path))
        if not ast.get_docstring(node) and node.name not in SAID_ELSEWHERE
    ]
    assert not silent, "\n".join(silent)


def _public(node: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for child in node.body:
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not child.name.startswith("_"):
            yield child
            if isinstance(child, ast.ClassDef):
                yield from _public(child)


def test_docstrings_are_found_wherever_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(
        '"""What."""\nclass A:\n    """How."""\n    a = 1\n    """Where."""\n    def f(self):\n        "Who."\n'
    )
    assert [text for _, text in docstrings(path)] == ["What.", "How.", "Where.", "Who."]
    assert all(QUESTIONS.match(text) for _, text in docstrings(path))
