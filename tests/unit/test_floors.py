"""The shape of the house: a module imports its own floor or lower ones, and the light half nothing heavy, ever."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "kubetune"

FLOORS: tuple[set[str], ...] = (
    {
        "cgroup",
        "errors",
        "faults",
        "files",
        "jsonl",
        "lockfile",
        "logs",
        "metrics",
        "processes",
        "relay",
        "endings",
        "malloc",
        "oom",
        "progress",
        "watchdog",
        "writing",
    },
    {"config", "devices", "checkpoint", "machine", "mirror", "mirror_copy", "mirror_owner", "peaks"},
    {"plan", "memory", "weights", "basis", "bill", "forecast", "hindsight", "speeds", "tracking", "tracking_mlflow"},
    {"agent", "cluster", "launch", "manifests", "report"},
    {"cli", "__main__"},
)
"""The floors of the light half. What is not named here is heavy, and stands between the third and the last floor."""

HEAVY_FLOOR = 3
LIBRARIES = {"torch", "transformers", "datasets", "peft", "numpy", "tokenizers", "pyarrow", "accelerate"}
LATE = {"cli", "tracking", "tracking_mlflow"}
"""May import what is heavy inside functions, which heavy verbs and training alone call."""
CLUSTER = {"cluster", "manifests"}


def part(module: str) -> str:
    """`config` for `kubetune.config.load`."""
    return module.split(".")[1]


def floor(name: str) -> int:
    return next((number for number, names in enumerate(FLOORS) if name in names), HEAVY_FLOOR)


def is_light(name: str) -> bool:
    return any(name in names for names in FLOORS)


def imports(path: Path, *, at_import: bool = False) -> Iterator[tuple[int, str]]:
    """`(line, module)` of every import in a file; those for types only do not count.

    `at_import`: only those that run when the file is imported.
    """
    pending: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if at_import and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write absolute imports"
            inside = node.module == "kubetune"
            yield from ((node.lineno, f"kubetune.{a.name}" if inside else str(node.module)) for a in node.names)
        pending.extend(ast.iter_child_nodes(node))


FILES = {
    path: part(f"kubetune.{'.'.join(path.relative_to(PACKAGE).with_suffix('').parts)}")
    for path in PACKAGE.rglob("*.py")
}


def test_files_import_their_own_floor_or_lower_ones() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} imports {module}"
        for path, name in FILES.items()
        for line, module in imports(path)
        if module.startswith("kubetune.") and floor(part(module)) > floor(name)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_light_half_imports_nothing_heavy_not_even_late() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} imports {module}"
        for path, name in FILES.items()
        if is_light(name)
        for line, module in imports(path, at_import=name in LATE)
        if module.split(".")[0] in LIBRARIES
        or (name not in LATE and module.startswith("kubetune.") and not is_light(part(module)))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_heavy_half_knows_no_cluster() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} imports {module}"
        for path, name in FILES.items()
        if not is_light(name)
        for line, module in imports(path)
        if module.startswith("kubetune.") and part(module) in CLUSTER
    ]
    assert not wrong, "\n".join(wrong)


def test_the_rules_see_what_they_forbid(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"
        "def late():\n    import numpy as np\nfrom kubetune import plan\nimport kubetune.cli.main\n"
    )
    assert sorted(imports(path)) == [(1, "typing"), (5, "numpy"), (6, "kubetune.plan"), (7, "kubetune.cli.main")]
    assert (5, "numpy") not in set(imports(path, at_import=True))
