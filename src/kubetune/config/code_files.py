"""What a Python file of the user's defines and imports, read from its text. Nothing in it is run."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kubetune.base.humanize import nearest
from kubetune.errors import ConfigError
from kubetune.extras import is_installed

# By these a file may define names that its text does not show.
_HIDDEN = {"exec", "globals", "locals", "setattr", "vars"}
# By these it may bind a name to something else later.
_REBINDING = (ast.Global, ast.NamedExpr)
_VALUES = (
    ast.Constant,
    ast.JoinedStr,
    ast.List,
    ast.Tuple,
    ast.Set,
    ast.Dict,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class CodeFile:
    """A Python file of the user's, as its text says."""

    key: str  # the setting that names it
    path: Path
    tree: ast.Module


def read_code(key: str, path: Path) -> CodeFile:
    """Return a file that the setting `key` names. Raise ConfigError for one that cannot be read, or is not Python."""
    try:
        return CodeFile(key, path, ast.parse(path.read_bytes()))
    except SyntaxError as error:
        reason = f"{path}:{error.lineno}: {error.msg}"
    except (OSError, ValueError) as error:
        reason = f"{path}: {error}"
    raise ConfigError(f"{key}: {reason}; expected a Python file. Nothing was written.")


def require_functions(code: CodeFile, functions: Sequence[str]) -> None:
    """Raise ConfigError for functions that a file does not define, or for names that it gives to values."""
    tree = code.tree
    defined = set(_names(tree.body))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if "*" in defined or names & _HIDDEN:
        return
    functions_here = [node.name for node in tree.body if isinstance(node, _DEFINITIONS)]
    for function in functions:
        if function in defined:
            _require_no_value(code, function)
            reason = _not_callable(tree, function)
            if reason:
                raise ConfigError(
                    f"{code.key}: {code.path}: {reason}; expected a function. Nothing was written."
                )
            continue
        close = nearest(function, functions_here)
        hint = f"; did you mean {close}?" if close else "."
        raise ConfigError(
            f"{code.key}: {code.path} defines no {function}{hint} It has {', '.join(functions_here) or 'no function'}. "
            "Nothing was written."
        )


def _require_no_value(code: CodeFile, name: str) -> None:
    """Raise ConfigError if the text shows that a name is a number, a text or a list, which nobody can call.

    An import, a call or another name may be a function.
    """
    if any(isinstance(node, _REBINDING) for node in ast.walk(code.tree)):
        return
    value: ast.stmt | None = None
    for statement in code.tree.body:
        if name not in set(_names([statement])):
            continue
        value = statement if _gives_value(statement, name) else None
    if value is not None:
        raise ConfigError(
            f"{code.key}: {code.path}:{value.lineno}: {name} is `{ast.unparse(value)[:60]}`; expected a function. "
            "Nothing was written."
        )


def _not_callable(tree: ast.Module, name: str) -> str:
    """Return why objects of a class, or an object that the file makes of one, cannot be called; empty if they may be.

    A class with a base, a decorator or a metaclass from elsewhere may be anything.
    """
    for node in ast.walk(tree):
        # The method may be given to the class later, or another thing to the name.
        is_call = isinstance(node, ast.Attribute) and node.attr == "__call__"
        if is_call or isinstance(node, _REBINDING):
            return ""
    made = name
    for statement in tree.body:
        value = _value_given(statement, name)
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
            made = value.func.id
    body = _class_body(tree, made)
    if body is None:
        return ""
    bound = set(_names(body))
    if "__call__" not in bound:
        what = (
            "a class without `__call__`"
            if made == name
            else f"an object of {made}, a class without `__call__`"
        )
        return f"{name} is {what}"
    init = next((node for node in body if getattr(node, "name", "") == "__init__"), None)
    if made == name and isinstance(init, ast.FunctionDef) and not init.decorator_list:
        needed = []
        for parameter in _parameters(init.args)[1:]:
            is_open = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if parameter.default is parameter.empty and not is_open:
                needed.append(parameter.name)
        if needed:
            return f"{name} is a class that needs {', '.join(needed)}, which nothing gives it"
    return ""


def _class_body(tree: ast.Module, name: str) -> list[ast.stmt] | None:
    """Return the statements of a class and of its bases, those of the class first; None where the text leaves them open."""
    statements = [statement for statement in tree.body if name in set(_names([statement]))]
    definition = statements[0] if len(statements) == 1 else None
    if not isinstance(definition, ast.ClassDef):
        return None
    if definition.decorator_list or definition.keywords:
        return None
    body = list(definition.body)
    for base in definition.bases:
        if not isinstance(base, ast.Name) or base.id == name:
            return None
        if base.id == "object":
            continue
        inherited = _class_body(tree, base.id)
        if inherited is None:
            return None
        body += inherited
    return body


def _gives_value(statement: ast.stmt, name: str) -> bool:
    """True for `name = 3` and `name: list[int] = [3]`, but not for what a condition or a loop holds."""
    value = _value_given(statement, name)
    return value is not None and _is_value(value)


def _value_given(statement: ast.stmt, name: str) -> ast.expr | None:
    """Return what an assignment gives to a name; None for any other statement."""
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    is_named = any(isinstance(target, ast.Name) and target.id == name for target in targets)
    value = getattr(statement, "value", None)
    return value if is_named and isinstance(value, ast.expr) else None


def _is_value(expression: ast.expr) -> bool:
    """True if an expression cannot be a function, whatever the names in it are."""
    if isinstance(expression, ast.UnaryOp):
        return _is_value(expression.operand)
    if isinstance(expression, ast.BinOp):
        return _is_value(expression.left) and _is_value(expression.right)
    return isinstance(expression, _VALUES)


def signature_of(code: CodeFile, function: str) -> inspect.Signature | None:
    """Return the parameters of a function by the text of its file; None where the text leaves them open.

    Of a class these are the parameters of `__call__`, as its objects are called. An import, an assignment or a
    decorator may be anything.
    """
    definition = _definition(code, function)
    if definition is None:
        return None
    # The class or the object itself comes first in a method.
    is_method = definition.name != function
    return inspect.Signature(_parameters(definition.args)[is_method:])


def require_answers(code: CodeFile, function: str, *, may_wait: bool) -> None:
    """Raise ConfigError for a function whose text shows that a call of it gives no number.

    def f(completions): yield 1.0            a generator: nobody takes its values
    async def f(completions): return [1.0]   a coroutine, unless `may_wait`: whoever calls it waits for it
    def f(completions): print(completions)   returns None
    """
    definition = _definition(code, function)
    if definition is None:
        return
    nodes = list(_own_statements(definition))
    problem = ""
    if any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in nodes):
        problem = "is a generator (it has `yield`), and its values are never read"
    elif isinstance(definition, ast.AsyncFunctionDef) and not may_wait:
        problem = "is `async`, and it is never awaited"
    elif not any(isinstance(node, ast.Return) and node.value is not None for node in nodes):
        problem = "has no `return` with a value"
    if problem:
        raise ConfigError(
            f"{code.key}: {code.path}:{definition.lineno}: {function} {problem}; expected a function that returns what it "
            "computes. Nothing was written."
        )


def depends_on(code: CodeFile, function: str, parameter: str) -> bool:
    """True if the text of a function shows that it reads a parameter, and nowhere provides for None in its place.

    def f(solution_str, ground_truth): return ground_truth in solution_str                       True
    def f(solution_str, ground_truth): return len(solution_str)                                  False
    def f(labels): return [0 if label is None else 1 for label in labels]                        False
    def f(labels=None): return 1 if labels else 0                                                False
    """
    definition = _definition(code, function)
    if definition is None:
        return False
    is_read = False
    for node in _below(definition.body):
        if isinstance(node, ast.Compare) and any(_is_none(part) for part in node.comparators):
            return False
        if isinstance(node, (ast.If, ast.IfExp)) and _is_name(node.test, parameter):
            return False
        if isinstance(node, ast.BoolOp) and any(_is_name(part, parameter) for part in node.values):
            return False
        if isinstance(node, ast.UnaryOp) and _is_name(node.operand, parameter):
            return False
        is_read = is_read or _is_name(node, parameter)
    return is_read


def _below(statements: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    for statement in statements:
        yield from ast.walk(statement)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _own_statements(definition: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.AST]:
    """Yield what is in a function, without what is in functions and classes within it."""
    waiting: list[ast.AST] = list(definition.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (*_DEFINITIONS, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)


def _definition(code: CodeFile, function: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Return a function as its file has it, `__call__` of a class; None where the text leaves it open."""
    definitions = []
    for node in ast.walk(code.tree):
        if isinstance(node, _DEFINITIONS) and node.name == function:
            definitions.append(node)
    # If two functions have one name, only running the file tells which is left.
    if len(definitions) != 1:
        return None
    definition = definitions[0]
    if isinstance(definition, ast.ClassDef):
        calls = [node for node in definition.body if getattr(node, "name", "") == "__call__"]
        if len(calls) != 1 or not isinstance(calls[0], (ast.FunctionDef, ast.AsyncFunctionDef)):
            return None
        definition = calls[0]
    assert isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef))
    return None if definition.decorator_list else definition


def _parameters(arguments: ast.arguments) -> list[inspect.Parameter]:
    """Return parameters as `inspect` has them. Their defaults are only known to be there."""
    kinds = inspect.Parameter
    parameters = []
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    for number, argument in enumerate(positional):
        is_only = number < len(arguments.posonlyargs)
        kind = kinds.POSITIONAL_ONLY if is_only else kinds.POSITIONAL_OR_KEYWORD
        default = None if number >= first_default else kinds.empty
        parameters.append(kinds(argument.arg, kind, default=default))
    if arguments.vararg is not None:
        parameters.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        default = kinds.empty if value is None else None
        parameters.append(kinds(argument.arg, kinds.KEYWORD_ONLY, default=default))
    if arguments.kwarg is not None:
        parameters.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return parameters


def require_imports(code: CodeFile) -> None:
    """Raise ConfigError where the top of a file imports a module that is neither installed nor beside the file.

    Imports within functions, conditions and `try` may never run, so they are left alone.
    """
    path = code.path
    for node in code.tree.body:
        for module in _imported(node):
            is_beside = path.with_name(f"{module}.py").is_file() or path.with_name(module).is_dir()
            if not is_beside and not is_installed(module):
                raise ConfigError(
                    f"{code.key}: {path}:{node.lineno}: imports {module}, which is not installed; "
                    f"install it beside kubetune (pip install {module}), or leave the import out. Nothing was written."
                )


def _imported(node: ast.AST) -> list[str]:
    """Return the first parts of the modules that a statement imports: `import os.path` imports os."""
    names = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        names = [node.module]
    return [name.partition(".")[0] for name in names]


def modules_beside(path: Path) -> list[Path]:
    """Return the files and folders beside a Python file that it imports; none for a file that cannot be read."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    beside: dict[Path, None] = {}  # an ordered set
    for node in ast.walk(tree):
        for name in _imported(node):
            for place in (path.with_name(f"{name}.py"), path.with_name(name)):
                if place != path and (place.is_file() or any(place.glob("*.py"))):
                    beside[place] = None
    return list(beside)


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
