"""Speed of a run: tokens a second, TFLOP/s of each device, and MFU, their share of what the device can do.

Example: 1,000 tokens/s × 6e9 FLOPs a token ÷ 2 devices = 3 TFLOP/s on each; of a peak of 300 that is an MFU of 1 %.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kubetune.base.humanize import share

_COUNTED = (
    "FLOPs that training needs: 4 a token for a frozen weight and 6 for a trained one, causal attention halved, the "
    "head only for labels; no padding, no recomputation. Time within steps; evaluation and saving are not in it."
)


def throughput(
    events: Sequence[Mapping[str, Any]],
    tokens: int,
    trained_tokens: int,
    seconds: float,
    world_size: int,
) -> dict[str, Any] | None:
    """Return the speed within steps, and its share of the devices' peak where the last start names one.

    Tokens are those of the data: nothing is padded. MFU counts the FLOPs that training needs (flops.py). None where no
    time was spent.
    """
    if not seconds:
        return None
    # The devices and the FLOPs of a token are those of the last start.
    start = last_start(events)
    speed = tokens / seconds
    tflops, mfu = utilization(start, speed, world_size)
    return {
        "tokens_per_second": speed,
        "trained_tokens_per_second": trained_tokens / seconds,
        "flops_per_token": start.get("flops_per_token"),
        "tflops_per_device": tflops,
        "peak_tflops": start.get("peak_tflops"),
        "peak_source": start.get("peak_source"),
        "mfu": mfu,
        "counted": _COUNTED,
    }


def last_start(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the last event that says what the devices are and what a token takes; empty before the first."""
    for event in reversed(events):
        kind = event["event"]
        if kind in ("start", "resume"):
            start: Mapping[str, Any] = event
            return start
    return {}


def utilization(
    start: Mapping[str, Any], tokens_per_second: float | None, world_size: int
) -> tuple[float | None, float | None]:
    """Return the TFLOP/s of each device, and MFU; None for what the event `start` does not know.

    A share above 100 % is none: the peak is not that of the device, as when it was measured while others computed.
    """
    flops = start.get("flops_per_token")
    peak = start.get("peak_tflops")
    if not tokens_per_second or not flops:
        return None, None
    tflops = tokens_per_second * flops / world_size / 1e12
    if not peak or tflops > peak:
        return tflops, None
    return tflops, tflops / peak


def throughput_line(speed: Mapping[str, Any]) -> str:
    """Return what `throughput` returned in one line, for the log."""
    tokens = speed["tokens_per_second"]
    trained = speed["trained_tokens_per_second"]
    line = f"{tokens:,.0f} tokens/s without padding, {trained:,.0f} trained"
    if speed["mfu"] is None:
        return line
    return f"{line}; MFU {mfu_sentence(speed)}"


def mfu_sentence(speed: Mapping[str, Any]) -> str:
    """Return the MFU and what it is a share of: `9.7 %: 0.00661 of the 0.0682 TFLOP/s that … reached`."""
    kind, _, product = speed["peak_source"].partition(": ")
    sources = {
        "compute.peak_tflops": "that compute.peak_tflops says",
        "measured": f"that {product} reached",
    }
    source = sources.get(kind, speed["peak_source"])
    reached = speed["tflops_per_device"]
    peak = speed["peak_tflops"]
    return f"{share(speed['mfu'])}: {reached:.3g} of the {peak:.3g} TFLOP/s {source}"
