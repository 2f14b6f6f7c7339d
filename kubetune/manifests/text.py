"""Manifests as YAML text that every parser reads alike, whether it speaks YAML 1.1 (Go's, PyYAML) or 1.2.

`no`, `1e3`, `0o7`, `12:30` or `2026-01-01` are strings in one and something else in the other, so a string is left
without quotes only where no parser could see more in it than letters.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.nodes import ScalarNode, SequenceNode
from ruamel.yaml.representer import RoundTripRepresenter

# Letters first, and no sign that YAML gives a meaning: `e`, `x`, `.` and `_` mean something only after a digit.
PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./@-]*(:[A-Za-z0-9_./@-]+)*|[0-9]+(Ki|Mi|Gi|Ti|k|M|G|T|m)")
WORDS = frozenset("y n yes no on off true false null".split())
# A block keeps these as they are: printable ASCII in lines that end without spaces, the first one not indented.
BLOCK = re.compile(r"(?! )([ -~]*[!-~])?(\n([ -~]*[!-~])?)*[!-~]\n")
LONGEST_FLOW_LIST = 90


class _Representer(RoundTripRepresenter):
    """Chooses the styles; keys keep their order."""

    def represent_text(self, text: str) -> ScalarNode:
        style = '"'
        if PLAIN.fullmatch(text) and text.lower() not in WORDS:
            style = ""
        elif BLOCK.fullmatch(text):
            style = "|"
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    def represent_number(self, number: float) -> ScalarNode:
        # Without a dot, 2e-05 is a number in YAML 1.2 but a string in 1.1.
        text = repr(number)
        mantissa, e, exponent = text.partition("e")
        written = f"{mantissa}.0e{exponent}" if e and "." not in mantissa else text
        return self.represent_scalar("tag:yaml.org,2002:float", written)

    def represent_items(self, items: list[Any] | tuple[Any, ...]) -> SequenceNode:
        node: SequenceNode = self.represent_sequence("tag:yaml.org,2002:seq", items)
        scalars = [item.value for item in node.value if isinstance(item, ScalarNode)]
        if len(scalars) == len(node.value) and sum(map(len, scalars)) <= LONGEST_FLOW_LIST:
            node.flow_style = True
        return node

    def ignore_aliases(self, data: Any) -> bool:
        """Anchors are for machines: each pod template is written in full."""
        return True


_Representer.add_representer(str, _Representer.represent_text)
_Representer.add_representer(float, _Representer.represent_number)
_Representer.add_representer(list, _Representer.represent_items)
_Representer.add_representer(tuple, _Representer.represent_items)


def dump(objects: Sequence[dict[str, Any]]) -> str:
    """One YAML stream of the objects, `---` between them; the same objects give the same bytes."""
    yaml = YAML(pure=True)
    yaml.Representer = _Representer
    yaml.default_flow_style = False
    yaml.width = 10_000
    yaml.indent(mapping=2, sequence=4, offset=2)
    stream = io.StringIO()
    for index, obj in enumerate(objects):
        if index:
            stream.write("---\n")
        yaml.dump(obj, stream)
    return stream.getvalue()
