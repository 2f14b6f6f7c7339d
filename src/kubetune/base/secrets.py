"""Recognise secrets that a user wrote into a config by mistake, so that they are refused and never printed.

Secrets come from the environment, or from Kubernetes Secrets by reference. base/logs removes them from log lines.
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
# Tokens with a known form: of Hugging Face, GitHub, GitLab, Slack, AWS and OpenAI, and JSON Web Tokens.
TOKEN = re.compile(
    r"hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|xox[abeprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}(?:\.[\w-]+)?"
    # OpenAI's tokens begin with "sk-", and so do the ends of "task-7" and "disk-1". So the token must begin a word: no
    # letter or digit before it, except those of an escape in JSON (\n) or of a terminal's color (\x1b[31m).
    r"|(?:(?<![A-Za-z0-9])|(?<=\\[bfnrt])|(?<=[\d\[]m))sk-(?=[A-Za-z_-]*\d)[\w-]{16,}"
)
# A token, a private key, an address with a password or token before its @, or with one among its parameters.
_VALUE = re.compile(
    rf"{TOKEN.pattern}|-----BEGIN [A-Z ]*PRIVATE KEY-----|://[^/\s:@]+:[^/\s@]+@"
    r"|://(?=[^/\s:@]*\d)[^/\s:@]{20,}@"
    r"|://\S*[?&](?i:(access_|auth_|api_?)?(token|key)|password|secret|sig(nature)?)=[^&\s]{6,}"
)
# Below this key names such as HF_TOKEN are expected: they name Secrets.
_REFERENCES = ("kubernetes", "secrets")

# Variables that may hold an access token for the hub, in the order in which they count.
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN")

ADVICE = (
    "a secret must not stand in a run file; remove it, and name a Kubernetes Secret under kubernetes.secrets, "
    "or set it in the environment, such as HF_TOKEN. Change the secret if the file was shared"
)


def names_secret(key: str) -> bool:
    """True if a key is named like a secret, such as `hf_token`. `pad_token` is not one."""
    return bool(_NAME.search(key)) and not _NOT_A_SECRET.search(key)


_RANDOM = re.compile(r"(?<![\w+/=@:.-])[A-Za-z0-9+/_-]{24,}={0,2}(?![\w+/=@:.-])")
_DIGEST = re.compile(
    r"[0-9a-f]{32}|[0-9a-f]{40}|[0-9a-f]{64}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    re.IGNORECASE,
)
# Entropy in bits a character. Random letters and digits have more; words and paths rarely do.
_RANDOM_BITS = 3.8


def seems_random(value: str) -> bool:
    """True if a text may hold a token of unknown form. Digests, identifiers and paths do not count."""
    for match in _RANDOM.finditer(value):
        text = match[0].rstrip("=")
        if _DIGEST.fullmatch(text) or _is_path(text):
            continue
        if _is_mixed(text) and _entropy(text) >= _RANDOM_BITS:
            return True
    return False


def _is_mixed(text: str) -> bool:
    """True if small letters, capitals and digits are mixed. Names end in a number; tokens have digits all over."""
    has_both_cases = re.search("[a-z]", text) and re.search("[A-Z]", text)
    return bool(has_both_cases) and len(re.findall("[0-9]+", text)) > 1


def _entropy(text: str) -> float:
    """Return Shannon's entropy of the characters, in bits a character."""
    bits = 0.0
    for count in Counter(text).values():
        frequency = count / len(text)
        bits -= frequency * math.log2(frequency)
    return bits


def _is_path(text: str) -> bool:
    # Words between separators are short. Base64 has a separator in 32 characters on average.
    return max(len(word) for word in re.split(r"[/_+-]", text)) < 16


def is_secret(path: KeyPath, value: str, *, known: bool) -> bool:
    """True if a text looks like a secret, or if its key is named like one.

    `known`: the schema has that key, so its name says nothing. The names of Kubernetes Secrets are no secrets either.
    """
    if _VALUE.search(value):
        return True
    if known or not value or path[:2] == _REFERENCES:
        return False
    return names_secret(str(path[-1]))
