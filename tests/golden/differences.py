"""Expected texts, written down whole or as what differs from another expected text.

Five kinds of a run share most of their 1,200 lines, so that one is kept whole (`job.yaml`) and the others as differences
(`jobset.diff`), in which only what a kind does in its own way is left to read:

    beside: job
    sha256: 5d41402a…
    @@ Role support-bot-operator
    -- apiGroups: [batch]
    +- apiGroups: [jobset.x-k8s.io]

Indentation is left out, since a pod stands deeper in a JobSet than in a Job; the sum covers every byte with it.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator


def difference(base: str, base_text: str, text: str) -> str:
    """Return what a `.diff` file holds: every line in which `text` is not `base_text`, and a sum of all its bytes."""
    before = [line.strip() for line in base_text.splitlines()]
    after = [line.strip() for line in text.splitlines()]
    titles = list(titles_of_lines(text))
    lines = [f"beside: {base}", f"sha256: {hashlib.sha256(text.encode()).hexdigest()}"]
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for tag, start, end, new_start, new_end in matcher.get_opcodes():
        if tag == "equal":
            continue
        lines.append(f"@@ {titles[min(new_start, len(titles) - 1)]}")
        lines += [f"-{line}" for line in before[start:end]]
        lines += [f"+{line}" for line in after[new_start:new_end]]
    return "\n".join(lines) + "\n"


def titles_of_lines(text: str) -> Iterator[str]:
    """Yield for each line of a YAML stream the kind and the name of the object that it belongs to."""
    for document in text.split("---\n"):
        lines = document.splitlines()
        kind = next(line for line in lines if line.startswith("kind: "))
        name = next(line for line in lines if line.startswith("  name: "))
        title = kind.removeprefix("kind: ") + " " + name.removeprefix("  name: ")
        for _ in lines:
            yield title
        yield title  # the line that ends the document
