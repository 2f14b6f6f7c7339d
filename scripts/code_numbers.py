"""Print how plain the code is, as a table: scripts/code_numbers.py [FOLDER …]

Each row is one folder of Python files; without arguments, it is `kubetune`. Give the checkouts of other projects to
compare with them. The numbers of this house alone (rooms, `Config`, imports, long classes, tests) follow the table.

A folded line holds many tokens, so tokens a line say how dense the code is. Syntax nodes (of Python's `ast`) do not
depend on how lines are broken, so they say how much code there is.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
PACKAGE = CHECKOUT / "src" / "kubetune"
MOST_IMPORTS = 20
MOST_LINES_OF_A_CLASS = 200
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
LAYOUT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.COMMENT,
    tokenize.ENDMARKER,
}


@dataclass
class Count:
    """What one folder of Python files holds."""

    files: int = 0
    lines: int = 0  # all lines, blank ones and docstrings too
    tokens: int = 0  # without comments, line ends and indentation; a docstring is one token
    nodes: int = 0  # of the syntax tree
    comment_lines: int = 0  # lines that hold a # comment and nothing else
    comprehensions: int = 0
    conditional_expressions: int = 0  # a if b else c
    walruses: int = 0  # :=
    tuple_assignments: int = 0  # a, b = x, y

    def add(self, source: str) -> None:
        """Add one file."""
        self.files += 1
        self.lines += len(source.splitlines())
        for node in ast.walk(ast.parse(source)):
            self.nodes += 1
            self.comprehensions += isinstance(node, COMPREHENSIONS)
            self.conditional_expressions += isinstance(node, ast.IfExp)
            self.walruses += isinstance(node, ast.NamedExpr)
            self.tuple_assignments += _assigns_tuple(node)
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type not in LAYOUT:
                self.tokens += 1
            if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
                self.comment_lines += 1

    def row(self, name: str) -> str:
        """Return a row of the table."""
        thousands = self.lines / 1000
        cells = [
            name,
            f"{self.files}",
            f"{self.lines:,}",
            f"{self.tokens / self.lines:.1f}",
            f"{self.nodes / 1000:.0f}k",
            f"{self.comment_lines / self.lines:.1%}",
            f"{self.comprehensions / thousands:.0f}",
            f"{self.conditional_expressions / thousands:.0f}",
            f"{self.walruses / thousands:.1f}",
            f"{self.tuple_assignments / thousands:.1f}",
        ]
        return f"| {' | '.join(cells)} |"


HEAD = """\
| | files | lines | tokens a line | syntax nodes | # comments | comprehensions a 1,000 lines | \
conditional expressions | walrus | `a, b = x, y` |
|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"""


def _assigns_tuple(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assign):
        return False
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def count(folder: Path) -> Count:
    """Count all Python files below a folder. A file that this Python cannot parse is named and left out."""
    total = Count()
    for path in sorted(folder.rglob("*.py")):
        try:
            total.add(path.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError) as error:
            print(f"{path}: left out: {error}", file=sys.stderr)
    return total


def functions_with_config() -> int:
    """Return how many functions of the package have a parameter of type `Config`."""
    number = 0
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                number += _takes_config(node)
    return number


def _takes_config(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    arguments = function.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    annotations = [ast.unparse(p.annotation) for p in parameters if p.annotation is not None]
    return any(annotation in {"Config", "Config | None"} for annotation in annotations)


def imports_of(path: Path) -> int:
    """Return how many modules of this package a file imports."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("kubetune"):
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    packages = {module for module in modules if _is_module(module)}
    names = {module.rpartition(".")[0] for module in modules - packages}
    return len(packages | names)


def _is_module(dotted: str) -> bool:
    place = CHECKOUT.joinpath(*dotted.split("."))
    return place.is_dir() or place.with_suffix(".py").exists()


def with_many_imports() -> list[str]:
    """Return the files of the package that import more modules of it than a reader can hold."""
    files = []
    for path in sorted(PACKAGE.rglob("*.py")):
        number = imports_of(path)
        if number > MOST_IMPORTS:
            files.append(f"{path.relative_to(PACKAGE)} {number}")
    return files


def long_classes() -> list[str]:
    """Return the classes of the package that are longer than a few screens."""
    classes = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MOST_LINES_OF_A_CLASS:
                    classes.append(f"{path.relative_to(PACKAGE)} {node.name} {lines}")
    return classes


def main(folders: list[str]) -> None:
    """Print the table, then the numbers of this house alone."""
    print(HEAD)
    for folder in folders or [str(PACKAGE)]:
        print(count(Path(folder)).row(Path(folder).resolve().name))
    rooms = [path for path in PACKAGE.iterdir() if (path / "__init__.py").exists()]
    tests = sum(
        len(path.read_text("utf-8").splitlines())
        for path in (CHECKOUT / "tests").rglob("*")
        if path.suffix in {".py", ".yaml"}
    )
    print()
    print(f"rooms {len(rooms)}")
    print(f"functions that take Config {functions_with_config()}")
    print(f"modules that training/loop imports {imports_of(PACKAGE / 'training' / 'loop.py')}")
    many = with_many_imports()
    print(f"files with more than {MOST_IMPORTS} imports {len(many)}: {', '.join(many)}")
    classes = long_classes()
    print(f"classes above {MOST_LINES_OF_A_CLASS} lines {len(classes)}: {', '.join(classes)}")
    print(f"lines of tests, golden YAML included {tests:,}")


if __name__ == "__main__":
    main(sys.argv[1:])
