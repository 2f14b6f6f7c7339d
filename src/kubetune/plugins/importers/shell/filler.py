"""The words and texts at one place of a script, with the values of its variables filled in."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from kubetune.plugins.importers.shell.arithmetic import calculated
from kubetune.plugins.importers.shell.doubts import Doubts
from kubetune.plugins.importers.shell.statements import EXPANSION, PART, words_of

# $NAME, ${NAME}, ${NAME:-default}
_DEFAULT = re.compile(r"\$(\w+)|\$\{(\w+)(?::-(.*))?\}", re.DOTALL)
_ARRAY = re.compile(r'"?\$\{(\w+)\[[@*]\]\}"?')
_IN_QUOTES = re.compile(rf"\\([$`\"\\])|{EXPANSION}", re.DOTALL)
_PLAIN = re.compile(r"[^'\"$`(<>]")
_BLANKS = re.compile(r"[ \t\n]+")
_BRACES = re.compile(r"(?<!\\)\{[^{}]*(?:,|\.\.)[^{}]*\}")


@dataclass
class Filler:
    """Fills in the words at one place of a script.

    LR=1e-4; ARGS=(--seed 7)        values: LR is 1e-4, and ARGS is --seed, 7
    --lr $LR "${ARGS[@]}"           words: --lr, 1e-4, --seed, 7

    A variable that is not certain stays as `$NAME`, and `reasons` says why.
    """

    doubts: Doubts
    reasons: dict[str, str]  # filled in: why a variable stays as `$NAME`
    values: dict[str, str | list[str]]  # of variables; an array has several
    spoiled: dict[str, str] = field(default_factory=dict)  # why they are not certain here

    def copy(self, late: Collection[str] = ()) -> Filler:
        """Return another one for a place of its own. `late`: variables that are set behind it, and may be before."""
        spoiled = self.spoiled | dict.fromkeys(late, "is set behind the call too")
        return replace(self, values=dict(self.values), spoiled=spoiled)

    def set(self, name: str, value: str | list[str]) -> None:
        """Set a variable."""
        self.values[name] = value
        self.spoiled.pop(name, None)

    def spoil(self, why: str) -> None:
        """Take all variables that are set for not certain until they are set again."""
        self.spoiled |= dict.fromkeys(self.values.keys() - {"HOME"}, why)

    def why(self, name: str) -> str:
        """Return why the value of a variable is not certain here."""
        return self.doubts.of_names.get(name) or self.spoiled.get(name, "")

    def assigned(self, raw: str) -> str | list[str]:
        """Return the value that an assignment gives, which for `( … )` is several words."""
        if raw.startswith("("):
            return [text for word in words_of(raw[1:-1]) for text in self.words(word)]
        return self.joined(raw)

    def joined(self, raw: str) -> str:
        """Return a word as one text."""
        return PART.sub(lambda part: self.part(part[0]), raw)

    def words(self, raw: str) -> list[str]:
        """Return the words that a word becomes: those of an array, or those that the blanks of a value part."""
        match = _ARRAY.fullmatch(raw)
        value = self.values.get(match[1]) if match and not self.why(match[1]) else None
        if isinstance(value, list):
            return value
        words = [""]
        for part in PART.finditer(raw):
            text = self.part(part[0])
            if part[0][0] in "$`" and is_known(text):
                first, *others = _BLANKS.split(text)
                words[-1] += first
                words += others
            else:
                words[-1] += text
        filled = [word for word in words if word]
        # Quotes keep a word that is empty: "" is an argument, and $UNSET is none.
        if not filled and re.search("[\"']", raw):
            return [""]
        return filled

    def part(self, text: str) -> str:
        """Return what a piece of a word stands for, as it is written if that is not known."""
        if text.startswith("'"):
            return text[1:-1].replace("\0", "\\\n")
        text = text.replace("\0", "")
        if text.startswith('"'):
            return _IN_QUOTES.sub(lambda match: match[1] or self.value(match[0]), text[1:-1])
        if text.startswith(("$", "`")):
            return self.value(text)
        if text.startswith(("(", "<(", ">(")):
            return "$" + text.lstrip("<>")
        return re.sub(r"\\(.)", r"\1", text)

    def value(self, written: str) -> str:
        """Return the value of $NAME, ${NAME:-default}, $((…)) or $(expr …); others stay as they are written."""
        if written.startswith("`"):
            written = f"$({written[1:-1]})"
        if written.startswith("$(("):
            return self.calculated(written[3:-2]) or written
        if written.startswith("$(expr "):
            text = self.joined(written[7:-1])
            # `expr 10/2` is a text, since its signs need spaces around them.
            if not all(len(word) == 1 or word.isdigit() for word in text.split()):
                return written
            return self.calculated(text) or written
        match = _DEFAULT.fullmatch(written)
        if match is None:
            return written
        name = match[1] or match[2]
        why = self.why(name)
        if why:
            self.reasons[name] = why
            return f"${name}"
        value = self.values.get(name)
        if not value and match[3] is not None:
            return self.joined(match[3])
        return value if isinstance(value, str) else written

    def calculated(self, text: str) -> str:
        """Return the result of a calculation with whole numbers; empty if a part is not known."""
        filled = re.sub(EXPANSION, lambda match: self.value(match[0]), text)
        filled = re.sub(r"\b[A-Za-z_]\w*", lambda match: self.value(f"${match[0]}"), filled)
        return calculated(filled)

    def problem(self, raw: str) -> str:
        """Return why nobody knows the words that a word of a call becomes; empty if they are known."""
        match = _ARRAY.fullmatch(raw) or _DEFAULT.fullmatch(raw)
        name = next(filter(None, match.groups()), "") if match else ""
        line = self.doubts.options.get(name)
        if line and self.why(name):
            return f"{raw} holds options (line {line}), but {name} {self.why(name)}"
        if _BRACES.search(PART.sub(lambda part: part[0] if _PLAIN.match(part[0]) else "x", raw)):
            return f"{raw} stands for several words of a shell"
        return ""


def is_known(text: str) -> bool:
    """True if a text has nothing in it that only a running shell knows."""
    return "$" not in text and "`" not in text
