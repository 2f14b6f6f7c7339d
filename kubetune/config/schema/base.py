"""Common ground of all sections: what a section is, and the short forms that a value may be written in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Section(BaseModel):
    """A part of the config: immutable, and a key it does not know is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", str_strip_whitespace=True, allow_inf_nan=False
    )

    @property
    def changed_keys(self) -> list[str]:
        """Keys whose values are not their defaults."""
        fields = type(self).model_fields
        return [key for key in fields if getattr(self, key) != fields[key].get_default()]


def _as_tuple(value: Any) -> Any:
    """JSON and YAML have lists only, and strict validation takes no list for a tuple behind another validator."""
    return tuple(value) if isinstance(value, list) else value


AsTuple = BeforeValidator(_as_tuple)


def renamed(names: Mapping[str, str]) -> BeforeValidator:
    """Other tools' words for a value, in ours."""
    return BeforeValidator(
        lambda value: names.get(value, value) if isinstance(value, str) else value
    )


def switched(section: type[Section]) -> BeforeValidator:
    """For a section that `true` stands for with its defaults, and `false` for none."""

    def as_section(value: Any) -> Any:
        return ({} if value else None) if isinstance(value, bool) else value

    return BeforeValidator(as_section, json_schema_input_type=section | bool | None)


def section_of(key: str, *others: type) -> Callable[[Any], Any]:
    """Validator of a section that may be written as one of its keys, text or one of `others`: `x` is `{key: x}`."""
    return lambda value: {key: value} if isinstance(value, (str, *others)) else value
