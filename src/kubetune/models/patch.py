"""A name of another package that is replaced for a while, and how to see that the installed release has it as expected."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple


class Use(NamedTuple):
    """Something in other code that a patch relies on: a text in the source of a function."""

    place: str  # `module:function`, or `module:class.method`
    text: str  # white space aside


@dataclass(frozen=True)
class Patch:
    """A name of another package that is replaced."""

    place: str  # what holds the name: `module`, or `module:class`
    name: str
    parameters: tuple[str, ...] = ()  # the first ones that it takes
    uses: tuple[Use, ...] = ()

    def owner(self) -> Any:
        """Return what holds the name. Raise ImportError or AttributeError if this version has no such place."""
        return _find(self.place)

    @cache  # noqa: B019  # the patches of this file live as long as the process
    def misfit(self) -> str:
        """Return why the patch does not fit the installed version, nothing if it fits."""
        try:
            content = vars(self.owner())[self.name]
            # The attribute that is bound to a class, as callers that name the class see it.
            is_bound = isinstance(content, classmethod)
            function = content.__func__ if is_bound else content
            if self.parameters:
                names = tuple(inspect.signature(function).parameters)[is_bound:]
                if names[: len(self.parameters)] != self.parameters:
                    return f"{self.name} takes ({', '.join(names)}); expected ({', '.join(self.parameters)})"
            for use in self.uses:
                if _squeezed(use.text) not in _squeezed(inspect.getsource(_find(use.place))):
                    return f"{use.place.rpartition(':')[2]} has no `{use.text}`"
        except (ImportError, AttributeError, KeyError):
            return f"{self.place} has no {self.name}, or has it elsewhere"
        except (OSError, TypeError, ValueError, SyntaxError) as error:
            return f"the source of {self.name} cannot be read ({error})"
        return ""

    def is_known(self) -> bool:
        """True if the installed version has the name, and uses it as the patch expects."""
        return not self.misfit()


class Replaced(AbstractContextManager[None]):
    """Within, `owner.name` is `new`."""

    # No generator: one that nobody holds any more would undo itself.

    def __init__(self, owner: Any, name: str, new: Any) -> None:
        self.owner = owner
        self.name = name
        self.new = new

    def __enter__(self) -> None:
        self.original = vars(self.owner)[self.name]
        setattr(self.owner, self.name, self.new)

    def __exit__(self, *error: object) -> None:
        setattr(self.owner, self.name, self.original)


def replaced(patch: Patch, new: Any) -> Replaced:
    """Return the context in which the name of a patch is `new`."""
    return Replaced(patch.owner(), patch.name, new)


def original_of(patch: Patch) -> Any:
    """Return what a patch's name stands for now: the original, if nothing has replaced it."""
    return vars(patch.owner())[patch.name]


def _find(place: str) -> Any:
    module_name, _, path = place.partition(":")
    value = import_module(module_name)
    for name in path.split(".") if path else ():
        value = getattr(value, name)
    return value


def _squeezed(source: str) -> str:
    return "".join(source.split())
