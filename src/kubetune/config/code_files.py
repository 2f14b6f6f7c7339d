"""What a Python file of the user's defines and imports, read from its text. Nothing in it is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from kubetune.base.humanize import nearest
from kubetune.errors import ConfigError

# By these a file may define names that its text does not show.
_HIDDEN = {"exec", "globals", "locals", "setattr", "vars"}
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def require_functions(key: str, path: Path, functions: Sequence[str]) -> None:
    """Raise ConfigError for functions that a file does not define. `key`: the setting that names the file."""
    tree = _parsed(key, path)
    defined = set(_names(tree.body))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if "*" in defined or names & _HIDDEN:
        return
    functions_here = [node.name for node in tree.body if isinstance(node, _DEFINITIONS)]
    for function in functions:
        if function in defined:
            continue
        close = nearest(function, functions_here)
        hint = f"; did you mean {close}?" if close else "."
        raise ConfigError(
            f"{key}: {path} defines no {function}{hint} It has {', '.join(functions_here) or 'no function'}. "
            "Nothing was written."
        )


def modules_beside(path: Path) -> list[Path]:
    """Return the files and folders beside a Python file that it imports; none for a file that cannot be read."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    beside: dict[Path, None] = {}  # an ordered set
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules = [node.module]
        for module in modules:
            name = module.partition(".")[0]
            for place in (path.with_name(f"{name}.py"), path.with_name(name)):
                if place != path and (place.is_file() or any(place.glob("*.py"))):
                    beside[place] = None
    return list(beside)


def _parsed(key: str, path: Path) -> ast.Module:
    """Return the tree of a file. Raise ConfigError for one that cannot be read, or is not Python."""
    try:
        return ast.parse(path.read_bytes())
    except SyntaxError as error:
        reason = f"{path}:{error.lineno}: {error.msg}"
    except (OSError, ValueError) as error:
        reason = f"{path}: {error}"
    raise ConfigError(f"{key}: {reason}; expected a Python file. Nothing was written.")


def _names(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the names that statements of a module bind; `*` for an import of all names."""
    for statement in body:
        if isinstance(statement, _DEFINITIONS):
            yield statement.name
            continue
        # Conditions and `try` hold statements too, which the walk enters.
        for node in ast.walk(statement):
            if isinstance(node, _DEFINITIONS):
                yield node.name
            elif isinstance(node, ast.alias):
                yield (node.asname or node.name).partition(".")[0]
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
