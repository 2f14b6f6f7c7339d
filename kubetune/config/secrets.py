"""Recognises secrets that were written into a config by mistake, so that they are refused and never echoed.

Secrets come from the environment, or from Kubernetes Secrets by reference. How log lines are cleaned is in logs.py.
"""

from __future__ import annotations

import re

from kubetune.config.layers import KeyPath

_NAME = re.compile(
    r"(^|[_.-])(token|password|passwd|passphrase|secret|api_?key|access_?key|private_?key|credentials?)$", re.IGNORECASE
)
_NOT_A_SECRET = re.compile(r"(^|[_.-])(pad|eos|bos|unk|sep|cls|mask|special|image|stop)_token$", re.IGNORECASE)
_VALUE = re.compile(
    r"hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|-----BEGIN [A-Z ]*PRIVATE KEY-----|://[^/\s:@]+:[^/\s@]+@"
    r"|://\S*[?&](?i:(access_|auth_|api_?)?(token|key)|password|secret|sig(nature)?)=[^&\s]{6,}"
)
_REFERENCES = ("kubernetes", "secrets")

ADVICE = (
    "a secret must not stand in a run file; remove it, and name a Kubernetes Secret under kubernetes.secrets, "
    "or set it in the environment, such as HF_TOKEN. Change the secret if the file was shared"
)


def names_secret(key: str) -> bool:
    """Whether a key is named like something that holds a secret, such as `hf_token`."""
    return bool(_NAME.search(key)) and not _NOT_A_SECRET.search(key)


def is_secret(path: KeyPath, value: str, *, known: bool) -> bool:
    """Whether a text at a path is a secret: it looks like one, or its key says so and is none of ours (`known`)."""
    if _VALUE.search(value):
        return True
    return not known and bool(value) and path[:2] != _REFERENCES and names_secret(str(path[-1]))
