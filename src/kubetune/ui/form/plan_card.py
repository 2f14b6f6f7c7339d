"""The plan of a new run as a card: steps, time, memory against what is there, and price."""

from __future__ import annotations

from typing import Any

import psutil

from kubetune.base.humanize import counted, duration, size
from kubetune.library.plan_forecast import PlanForecast


def plan_card(forecast: PlanForecast) -> list[dict[str, Any]] | None:
    """Return the cells of the card: label, value, a remark, and how full a bar is. None before steps are known."""
    plan = forecast.plan
    if forecast.problems or not plan.num_steps:
        return None
    cells = [
        _cell("Steps", f"{plan.num_steps:,}", f"of {plan.global_batch_size:,} rows each"),
        _time(forecast),
        _memory(forecast),
    ]
    bill = forecast.costs.bill
    if bill is not None and bill.price is not None:
        cells.append(_cell("Price", f"{bill.price:,.2f}", "of the steps"))
    return cells


def _cell(label: str, value: str, about: str = "", percent: int | None = None) -> dict[str, Any]:
    """Return one cell."""
    return {"label": label, "value": value, "about": about, "percent": percent}


def _time(forecast: PlanForecast) -> dict[str, Any]:
    """Return how long the steps take."""
    bill = forecast.costs.bill
    if bill is None or bill.hours is None:
        return _cell("Time", "unknown", "no run here has shown a speed yet")
    about = ""
    if bill.low_hours is not None and bill.high_hours is not None:
        about = f"{duration(bill.low_hours * 3600)} to {duration(bill.high_hours * 3600)}"
    return _cell("Time", f"about {duration(bill.hours * 3600)}", about)


def _memory(forecast: PlanForecast) -> dict[str, Any]:
    """Return the peak of memory, and how much of what is there that takes."""
    memory = forecast.costs.memory
    if memory is None:
        return _cell("Memory", "unknown")
    plan = forecast.plan
    available = memory.device_bytes
    place = "a GPU" if plan.device == "cuda" else "a process"
    if available is None and plan.device == "cpu" and forecast.config.kubernetes is None:
        # The processes of a machine share its memory.
        available = psutil.virtual_memory().total // plan.processes_per_node
    if available is None:
        return _cell("Memory", size(memory.peak_bytes), place)
    percent = max(1, round(100 * memory.peak_bytes / available))
    about = f"{percent} % of {size(available)}, {place}"
    if plan.world_size > 1:
        about += f" of {counted(plan.world_size, 'process')}"
    return _cell("Memory", size(memory.peak_bytes), about, percent)
