"""Secrets that were written into a config by mistake, recognised so that they are refused and never echoed.

Secrets come from the environment, or from Kubernetes Secrets by reference. How log lines are cleaned is in base/logs.
"""

from __future__ import annotations

import math
import re
from collections import Counter

from kubetune.base.provenance import KeyPath

_NAME = re.compile(
    r"(^|[_.-])(token|password|passwd|passphrase|secret|api_?key|access_?key|private_?key|credentials?)$",
    re.IGNORECASE,
)
_NOT_A_SECRET = re.compile(
    r"(^|[_.-])(pad|eos|bos|unk|sep|cls|mask|special|image|stop)_token$", re.IGNORECASE
)
TOKEN = re.compile(
    r"hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|xox[abeprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}(?:\.[\w-]+)?"
    # Words such as "task-" and "disk-" end alike, so this one has to begin a word: after a mark, after an escape of
    # JSON (\n), or after a color of a terminal, which ends in "m".
    r"|(?:(?<![A-Za-z0-9])|(?<=\\[bfnrt])|(?<=[\d\[]m))sk-(?=[A-Za-z_-]*\d)[\w-]{16,}"
)
"""Tokens that are known by their form: of Hugging Face, GitHub, GitLab, Slack, AWS and OpenAI, and JSON Web Tokens."""
_VALUE = re.compile(
    rf"{TOKEN.pattern}|-----BEGIN [A-Z ]*PRIVATE KEY-----|://[^/\s:@]+:[^/\s@]+@"
    r"|://(?=[^/\s:@]*\d)[^/\s:@]{20,}@"
    r"|://\S*[?&](?i:(access_|auth_|api_?)?(token|key)|password|secret|sig(nature)?)=[^&\s]{6,}"
)
_REFERENCES = ("kubernetes", "secrets")

ADVICE = (
    "a secret must not stand in a run file; remove it, and name a Kubernetes Secret under kubernetes.secrets, "
    "or set it in the environment, such as HF_TOKEN. Change the secret if the file was shared"
)


def names_secret(key: str) -> bool:
    """A key named like something that holds a secret, such as `hf_token`."""
    return bool(_NAME.search(key)) and not _NOT_A_SECRET.search(key)


_RANDOM = re.compile(r"(?<![\w+/=@:.-])[A-Za-z0-9+/_-]{24,}={0,2}(?![\w+/=@:.-])")
_DIGEST = re.compile(
    r"[0-9a-f]{32}|[0-9a-f]{40}|[0-9a-f]{64}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    re.IGNORECASE,
)
_RANDOM_BITS = 3.8
"""Bits a character, as words and paths rarely have and random letters and digits do."""


def seems_random(value: str) -> bool:
    """A text that may well hold a token of nobody's known form; digests, identifiers and paths are none."""
    for text in (found[0].rstrip("=") for found in _RANDOM.finditer(value)):
        # Names end in a number, tokens have digits all over.
        is_mixed = (
            re.search("[a-z]", text)
            and re.search("[A-Z]", text)
            and len(re.findall("[0-9]+", text)) > 1
        )
        counts = Counter(text)
        bits = -sum(count / len(text) * math.log2(count / len(text)) for count in counts.values())
        if is_mixed and bits >= _RANDOM_BITS and not _DIGEST.fullmatch(text) and not _is_path(text):
            return True
    return False


def _is_path(text: str) -> bool:
    # Base64 has a slash in 64 characters; what is made of short words between separators was written by people.
    return max(len(word) for word in re.split(r"[/_+-]", text)) < 16


def is_secret(path: KeyPath, value: str, *, known: bool) -> bool:
    """A text that is a secret: it looks like one, or its key says so and is none of ours (`known`)."""
    if _VALUE.search(value):
        return True
    return not known and bool(value) and path[:2] != _REFERENCES and names_secret(str(path[-1]))
