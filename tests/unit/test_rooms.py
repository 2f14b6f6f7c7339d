"""The shape of the house: rooms in the order of `kubetune.ROOMS`, each importing only itself and those above it."""

from __future__ import annotations

import ast
import re
from collections import Counter
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
CLUSTER = {"k8s"}
# Packages within a room, each of which imports only itself, files of the room and packages before it.
INNER_ORDER = {
    "data": ["reading", "text", "vision", "prepared", "findings", "inspect", "proposed"],
    "result": ["inference", "gguf_files", "forms", "publishing", "served"],
}
# Files of the package's root. They import rooms, and no room imports them.
DOORS = {"", "__main__", "agent", "worker"}

TORCH = {"torch", "transformers", "peft", "accelerate"}
HEAVY = TORCH | {"numpy", "tokenizers", "pyarrow", "datasets"}
# These light files may import heavy libraries inside functions that only training calls.
LATE = {"rundir.tracking.tensorboard_tracker", "rundir.tracking.mlflow_tracker"}

MOST_FILES_OF_A_FOLDER = 20
MOST_LINES_OF_A_FUNCTION = 60
MOST_SYNTAX_NODES_OF_A_FUNCTION = 450
# Functions that are longer than the limits allow. The list may only shrink.
STILL_TOO_LONG: set[str] = set()

# What every verb has (cli), and every operation of autograd (its class says what it is).
SELF_EXPLAINING = {"add_arguments", "run", "forward", "backward"}
# Names that modules of a model have in the rooms that change them.
MODULES_OF_OTHERS = {"base", "head", "last", "layer", "lm", "model", "module", "table"}
# Attributes of modules of other libraries that our code sets.
REPLACED_ATTRIBUTES = {
    "chunk_size", "feed_forward_chunk", "forward", "gradient_checkpointing", "sparse", "support_avx512bf16_for_cpu",
    "training", "weight",
}  # fmt: skip
# Attributes of ours on such modules. docs/design.md says why.
OUR_ATTRIBUTES = {"call_inside", "shared_input"}


class Import(NamedTuple):
    """One import statement: where, of what, and whether it runs when its file is imported, later, or never."""

    line: int
    module: str
    when: str


@cache
def tree(path: Path) -> ast.Module:
    """Return a file, parsed once for all tests."""
    return ast.parse(path.read_text("utf-8"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file."""
    return tuple(ast.walk(tree(path)))


@pytest.fixture(scope="module", autouse=True)
def _forget_the_trees() -> Iterator[None]:
    """Free the memory for the tests that follow in this process."""
    yield
    tree.cache_clear()
    nodes.cache_clear()


def imports(path: Path) -> Iterator[Import]:
    """Yield every import in a file: `when` is `"now"`, `"late"` (inside a function) or `"types"` (for types only)."""
    yield from _walk(tree(path), "now", path)


def _walk(node: ast.AST, when: str, path: Path) -> Iterator[Import]:
    for child in _statements(node):
        then = when
        if isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING":
            then = "types"
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and when == "now":
            then = "late"
        if isinstance(child, ast.Import):
            yield from (Import(child.lineno, alias.name, then) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{path}:{child.lineno}: write absolute imports"
            for alias in child.names:
                whole = f"{child.module}.{alias.name}"
                is_module = whole in MODULES or whole in STANDIN
                yield Import(child.lineno, whole if is_module else str(child.module), then)
        yield from _walk(child, then, path)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements within a statement, and what holds some; no expression holds an import."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        yield from getattr(node, name, ())


def modules_of(package: Path) -> dict[str, Path]:
    """Return the files of a package by their dotted names, such as `kubetune.config.load`."""
    modules = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


MODULES = modules_of(PACKAGE)
STANDIN = modules_of(Path(__file__).parents[2] / "standin")


def room(module: str) -> str:
    """Return the room of a module, `config` of `kubetune.config.load`; nothing for the package itself."""
    return f"{module}.".split(".")[1]


@cache
def imports_of(module: str) -> list[Import]:
    """Return the imports of a module of the package."""
    return list(imports(MODULES[module]))


def of_house(module: str) -> Iterator[Import]:
    """Yield its imports of other modules of the package."""
    return (
        imported for imported in imports_of(module) if imported.module.split(".")[0] == "kubetune"
    )


def test_every_room_is_on_the_list_and_says_what_it_is_for() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert folders == set(ORDER)
    silent = [m for m, path in MODULES.items() if not ast.get_docstring(tree(path))]
    assert not silent


def test_a_room_says_what_it_is_not_for_and_what_to_read_first() -> None:
    for name in ORDER:
        docstring = " ".join(
            (ast.get_docstring(tree(PACKAGE / name / "__init__.py")) or "").split()
        )
        assert re.search(r"\b[Nn]ot for\b", docstring), name
        first = re.search(r"\bRead `([\w/]+)`", docstring)
        assert first, name
        assert any((PACKAGE / name / f"{first[1]}{end}").exists() for end in ("", ".py")), (
            name,
            first[1],
        )


def test_a_room_imports_only_itself_and_rooms_above_it() -> None:
    wrong = [
        f"{module}:{imported.line} imports {imported.module}"
        for module in MODULES
        if room(module) in ORDER
        for imported in of_house(module)
        if room(imported.module) not in {"", "errors", "extras"}
        and ORDER.index(room(imported.module)) > ORDER.index(room(module))
    ]
    assert not wrong, "\n".join(wrong)


def floor_within(module: str) -> int:
    """Return the place of a module's package in the order of its room; 0 for a file of the room itself."""
    _, name, inner = f"{module}..".split(".")[:3]
    order = INNER_ORDER[name]
    return 1 + order.index(inner) if (PACKAGE / name / inner).is_dir() and inner else 0


def test_a_package_within_a_room_imports_only_those_before_it() -> None:
    wrong = [
        f"{module}:{imported.line} imports {imported.module}"
        for module in MODULES
        if room(module) in INNER_ORDER
        for imported in of_house(module)
        if room(imported.module) == room(module)
        and floor_within(imported.module) > floor_within(module)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_page_on_design_lists_the_packages_of_a_room_in_their_order() -> None:
    page = (PACKAGE.parents[1] / "docs" / "design.md").read_text("utf-8")
    for name, order in INNER_ORDER.items():
        assert f"Within `{name}`: {' → '.join(order)}." in page


@pytest.mark.parametrize("modules", [MODULES, STANDIN], ids=["kubetune", "standin"])
def test_no_imports_go_in_a_circle_late_ones_and_those_for_types_included(
    modules: dict[str, Path],
) -> None:
    needs = {}
    for module, path in modules.items():
        if room(module) not in DOORS:
            needed = {imported.module for imported in imports(path)}
            needs[module] = needed & modules.keys() - {module, "kubetune"}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as circle:
        raise AssertionError(" → ".join(reversed(circle.args[1]))) from None


def test_what_is_light_imports_nothing_heavy() -> None:
    wrong = []
    for module in MODULES:
        name = room(module)
        short = module.removeprefix("kubetune.")
        for imported in imports_of(module):
            library = imported.module.split(".")[0]
            if name in LIGHT and library in HEAVY and (imported.when == "now" or short not in LATE):
                wrong.append(f"{module}:{imported.line} imports {imported.module}")
            if name in TORCHLESS and library in TORCH and imported.when == "now":
                wrong.append(
                    f"{module}:{imported.line} imports {imported.module}, not inside a function"
                )
            if name == "cli" and library in HEAVY and imported.when == "now":
                wrong.append(
                    f"{module}:{imported.line} imports {imported.module}, not inside a function"
                )
    assert not wrong, "\n".join(wrong)


def test_training_knows_no_cluster() -> None:
    wrong = [
        f"{module}:{imported.line} imports {imported.module}"
        for module in MODULES
        if room(module) in ORDER[ORDER.index(kubetune.NUMPY_BEGINS) : ORDER.index("plugins")]
        for imported in of_house(module)
        if room(imported.module) in CLUSTER
    ]
    assert not wrong, "\n".join(wrong)


def test_files_of_tests_have_names_of_their_own() -> None:
    """pytest takes two of one name for the same module."""
    names = Counter(path.name for path in Path(__file__).parents[1].glob("*/test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def too_long(path: Path) -> set[str]:
    """Return the names of a file's functions that exceed a limit, in lines or in syntax nodes."""
    names = set()

    def size_of(node: ast.AST) -> int:
        size = 1 + sum(map(size_of, ast.iter_child_nodes(node)))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > MOST_LINES_OF_A_FUNCTION or size > MOST_SYNTAX_NODES_OF_A_FUNCTION:
                names.add(node.name)
        return size

    size_of(tree(path))
    return names


def test_a_function_fits_on_a_screen_and_is_not_folded_to_fit() -> None:
    names = {
        f"{module.removeprefix('kubetune.')}:{name}"
        for module, path in MODULES.items()
        for name in too_long(path)
    }
    assert names == STILL_TOO_LONG


def test_a_function_too_long_in_lines_or_in_nodes_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    in_lines = "def lines():\n" + "    pass\n" * 60
    in_nodes = "def nodes():\n    return " + " + ".join(["1"] * 300) + "\n"
    path.write_text(in_lines + in_nodes + "def short():\n    pass\n")
    assert too_long(path) == {"lines", "nodes"}


def test_no_comment_stands_behind_a_lone_bracket_or_value() -> None:
    # The formatter folds a line for its comment, which then is behind `)` or `None`. It belongs above the line.
    lone = re.compile(r'^\s*(?:[)\]}]+,?|None|True|False|"")  # (?!fmt:|noqa|type:)')
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
            if lone.search(line):
                found.append(f"{file.relative_to(PACKAGE)}:{number}")
    assert not found


def test_folders_stay_small_enough_to_be_read() -> None:
    counts = Counter(path.parent for path in MODULES.values())
    assert not {
        str(folder.relative_to(PACKAGE)): count
        for folder, count in counts.items()
        if count > MOST_FILES_OF_A_FOLDER
    }


def test_the_page_on_design_lists_the_rooms_as_the_package_does() -> None:
    page = (PACKAGE.parents[1] / "docs" / "design.md").read_text("utf-8")
    assert [
        name for name in re.findall(r"^(\w+)  +\S", page, re.MULTILINE) if name in ORDER
    ] == ORDER


def test_the_page_on_design_names_every_package_within_a_room() -> None:
    page = (PACKAGE.parents[1] / "docs" / "design.md").read_text("utf-8")
    block = page.partition("Packages within rooms")[2].split("```")[1]
    named = set()
    # data/{reading, text} means data/reading and data/text.
    for entry in re.split(r"  +|\n", block.strip()):
        room, _, names = entry.partition("/")
        named |= {f"{room}/{name}" for name in names.strip("{}").split(", ")}
    packages = {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("__init__.py")}
    assert named == {name for name in packages if "/" in name}


def test_a_package_names_a_file_to_read_first_that_it_has() -> None:
    for path in PACKAGE.rglob("__init__.py"):
        docstring = " ".join((ast.get_docstring(tree(path)) or "").split())
        for name in re.findall(r"\bRead `([\w/]+)`", docstring):
            assert any((path.parent / f"{name}{end}").exists() for end in ("", ".py")), path


def test_the_rules_see_what_they_forbid(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"
        "def late():\n    import numpy as np\nfrom kubetune.plan import plan\nimport kubetune.cli\n"
    )
    assert sorted(imports(path)) == [
        (1, "typing", "now"),
        (3, "torch", "types"),
        (5, "numpy", "late"),
        (6, "kubetune.plan.plan", "now"),
        (7, "kubetune.cli", "now"),
    ]


def test_nothing_hangs_on_modules_of_others_but_what_the_page_on_design_names() -> None:
    set_there = {
        target.attr
        for name in ("models", "tasks")
        for path in (PACKAGE / name).rglob("*.py")
        for node in nodes(path)
        if isinstance(node, ast.Assign)
        for assigned in node.targets
        for target in (assigned.elts if isinstance(assigned, ast.Tuple) else [assigned])
        if isinstance(target, ast.Attribute)
        and getattr(target.value, "id", "") in MODULES_OF_OTHERS
    }
    assert set_there == REPLACED_ATTRIBUTES | OUR_ATTRIBUTES
    page = (PACKAGE.parents[1] / "docs" / "design.md").read_text("utf-8")
    assert all(f"`{name}`" in page for name in OUR_ATTRIBUTES)


def test_what_other_files_use_says_what_it_is() -> None:
    silent = [
        f"{module}:{node.lineno} {node.name}"
        for module, path in MODULES.items()
        for node in _public(tree(path))
        if not ast.get_docstring(node) and node.name not in SELF_EXPLAINING
    ]
    assert not silent, "\n".join(silent)


def _public(
    node: ast.Module | ast.ClassDef,
) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for child in node.body:
        if isinstance(
            child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        ) and not child.name.startswith("_"):
            yield child
            if isinstance(child, ast.ClassDef):
                yield from _public(child)


# Rooms that a rank imports, whose threads docs/design.md lists.
OF_A_RANK = ORDER[: ORDER.index("training") + 1]
NOT_OF_A_RANK = {"plan", "k8s", "reporting", "supervisor"}
# Their threads are in processes of their own.
THREADS_ELSEWHERE = {"rundir/mirror/copier.py", "data/text/turns/limited_template.py"}


def test_the_page_says_why_each_thread_of_a_rank_is_safe() -> None:
    """Such as the thread that writes checkpoints: it must touch nothing that the loop computes with."""
    starting = set()
    for room in set(OF_A_RANK) - NOT_OF_A_RANK:
        for path in (PACKAGE / room).rglob("*.py"):
            # `reminders.beside` starts a thread too.
            if re.search(
                r"\bThread\(|\bThreadPoolExecutor\(|\bTimer\(|reminders\.beside\(",
                path.read_text("utf-8"),
            ):
                starting.add(str(path.relative_to(PACKAGE)))
    page = (PACKAGE.parents[1] / "docs" / "design.md").read_text("utf-8")
    table = page.partition("**Threads.**")[2].partition("test_beside_the_loop")[0]
    listed = set(re.findall(r"\(\.\./src/kubetune/(\S+?)\)", table))
    listed.discard("training/saving/checkpoint_copies.py")  # what a thread gets
    assert listed == starting - THREADS_ELSEWHERE
