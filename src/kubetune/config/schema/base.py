"""What all sections share: the base class, and validators for the short forms of a value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Section(BaseModel):
    """A part of the config. It is immutable, and an unknown key is an error."""

    model_config = ConfigDict(
        # A typo in a key must never be ignored, and no code may change a config that others read.
        frozen=True,
        extra="forbid",
        str_strip_whitespace=True,
        allow_inf_nan=False,
    )

    @property
    def changed_keys(self) -> list[str]:
        """Return the keys whose values differ from their defaults."""
        fields = type(self).model_fields
        return [key for key in fields if getattr(self, key) != fields[key].get_default()]

    def set_in_vain(self, keys: Iterable[str], why: str) -> list[str]:
        """Return a problem for each of these keys that is set. `why`: what it means nothing to, and what to do."""
        return [f"{key} means nothing {why}" for key in keys if key in self.changed_keys]


def _as_tuple(value: Any) -> Any:
    """Turn a list into a tuple. YAML has only lists, and pydantic's strict mode does not convert after a validator."""
    return tuple(value) if isinstance(value, list) else value


AsTuple = BeforeValidator(_as_tuple)


def renamed(names: Mapping[str, str]) -> BeforeValidator:
    """Return a validator that replaces other tools' words for a value by ours."""

    def as_our_word(value: Any) -> Any:
        return names.get(value, value) if isinstance(value, str) else value

    return BeforeValidator(as_our_word)


def switched(section: type[Section]) -> BeforeValidator:
    """Return a validator for an optional section: `true` means the section with its defaults, `false` none."""

    def as_section(value: Any) -> Any:
        if value is True:
            return {}
        if value is False:
            return None
        return value

    return BeforeValidator(as_section, json_schema_input_type=section | bool | None)


def section_of(key: str, *others: type) -> Callable[[Any], Any]:
    """Return a validator for a section that may be written as the value of one key: `x` means `{key: x}`.

    `x` is a text, or a value of one of the types `others`.
    """
    return lambda value: {key: value} if isinstance(value, (str, *others)) else value
