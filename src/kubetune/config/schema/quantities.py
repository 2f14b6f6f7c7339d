"""Amounts and names as Kubernetes writes them: types of fields, with the patterns of the API server."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

QUANTITY = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$"
UNITS = {
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
}
DNS_LABEL = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
DNS_NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
LABEL_KEY = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
LABEL_VALUE = r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$"
ABSOLUTE_PATH = r"^/[^:\x00]*$"


def quantity_bytes(text: str) -> int:
    """Return the bytes of a quantity such as `1.5Gi`. Raise ValueError for anything else."""
    digits = text.rstrip("kKMGTi")
    unit = text[len(digits) :]
    factor = UNITS[unit] if unit else 1
    return int(float(digits) * factor)


def quantity(number: int) -> str:
    """Return the shortest quantity of so many bytes: `24G`, `24564Mi`."""
    candidates = [str(number)]
    for unit, factor in UNITS.items():
        if number % factor == 0:
            candidates.append(f"{number // factor}{unit}")
    return min(candidates, key=len)


def _as_text(value: Any) -> Any:
    """Return the text of a number or truth value, since environment variables hold only texts: "false" for false."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, (int, float)) else value


def cores(text: str | int) -> float:
    """Return the cores of an amount of CPU such as `500m` or `4`."""
    amount = str(text)
    if amount.endswith("m"):
        return int(amount.removesuffix("m")) / 1000
    return float(amount)


# Types of fields. Their patterns are those of the API server, so that a mistake is shown with its line in the run file
# and not by the cluster. The examples appear in messages.
Quantity = Annotated[str, Field(pattern=QUANTITY, examples=["32Gi", "500G"])]
Cores = (
    Annotated[int, Field(ge=1)]
    | Annotated[
        str,
        Field(pattern=r"^([1-9][0-9]*m|[0-9]*\.[0-9]+)$", examples=["500m"]),
        BeforeValidator(_as_text),
    ]
)
Label = Annotated[str, Field(pattern=DNS_LABEL, examples=["team-a"])]
Name = Annotated[str, Field(pattern=DNS_NAME, max_length=253, examples=["hf-token"])]
EnvName = Annotated[str, Field(pattern=ENV_NAME, examples=["NCCL_DEBUG"])]
EnvValue = Annotated[str, BeforeValidator(_as_text)]
LabelKey = Annotated[
    str, Field(pattern=LABEL_KEY, max_length=317, examples=["team", "example.com/team"])
]
LabelValue = Annotated[str, Field(pattern=LABEL_VALUE, examples=["ml"])]
AbsolutePath = Annotated[str, Field(pattern=ABSOLUTE_PATH, examples=["/data"])]
