"""The page of a sweep; as `kubetune report FOLDER` and `kubetune sweep status FOLDER`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from kubetune.library.sweep.live_page import sweep_facts
from kubetune.library.sweep.sweep_record import SWEEP, TRIAL_RUNS
from kubetune.reporting.sweeps.facts import TrialFacts
from kubetune.reporting.sweeps.sweep_page import TEMPLATE, template_facts
from kubetune.rundir.status import LIVE
from kubetune.ui.run_pages import MOST_COMPARED, address
from kubetune.ui.site import Missing, Site, page, site_of


def sweep(request: Request) -> Response:
    """Show a sweep as it is at this moment. Its trials are links to the pages of their runs."""
    site = site_of(request)
    folder = sweep_of(request)

    # A run that has just been started, or runs on a cluster, has no page here.
    def address_of(run_dir: Path) -> str:
        if site.records.find(site.records.name_of(run_dir)) is None:
            return ""
        return address(site, run_dir)

    facts = sweep_facts(folder, address_of)
    verb = shlex.join(["kubetune", "report", str(folder)])
    page_facts = {
        **template_facts(facts),
        "runs": [],  # side by side they are on the page to compare
        "dir": site.records.name_of(folder),
        "is_live": facts.state in LIVE,
        "compare_link": _compare_link(site, folder, facts.trials),
        "best_link": facts.best.runs[0].address if facts.best else "",
    }
    return page(request, f"live_{TEMPLATE}", verb, page_facts)


def _compare_link(site: Site, folder: Path, trials: Sequence[TrialFacts]) -> str:
    """Return the address of the best trials side by side, "" if fewer than two have runs here."""
    run_dirs = []
    for trial in trials:
        if trial.state == "done":
            run_dirs += [folder / TRIAL_RUNS / run.name for run in trial.runs if run.address]
    if len(run_dirs) < 2:
        return ""
    return address(site, *run_dirs[:MOST_COMPARED], path="/compare")


def sweep_of(request: Request) -> Path:
    """Return the folder of the sweep that a request names. Raise Missing if it is not in the folder."""
    site = site_of(request)
    name = request.query_params.get("dir", "")
    folder = site.records.find(name, SWEEP)
    if folder is None:
        raise Missing(f"{name}: no sweep of this name in {site.folder}")
    return folder
