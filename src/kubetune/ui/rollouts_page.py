"""The page of the answers to one prompt over time; as `kubetune rollouts RUN_DIR --row N`."""

from __future__ import annotations

import shlex

from starlette.requests import Request
from starlette.responses import Response

from kubetune.config.resolved import read_config
from kubetune.errors import ConfigError
from kubetune.reporting.answers_over_time import WHOLE_PROMPT, shown_rollouts
from kubetune.ui.site import page, run_of, site_of


def rollouts(request: Request) -> Response:
    """Show the answers to a prompt, of the row that the address names or of the one answered most often."""
    run_dir = run_of(request)
    row = None
    text = request.query_params.get("row", "").strip()
    if text:
        if not text.isdecimal() or len(text) > 12:
            raise ConfigError(f"row: found {text!r}; expected the number of a row")
        row = int(text)
    shown = shown_rollouts(run_dir, read_config(run_dir).rewards, WHOLE_PROMPT, row)
    if row is None and shown.prompts:
        row = shown.prompts[0].row
    words = ["kubetune", "rollouts", str(run_dir)]
    if row is not None:
        words += ["--row", str(row)]
    facts = {
        "title": "Answers over time",
        "run": site_of(request).records.name_of(run_dir),
        "row": row,
        "rollouts": shown,
    }
    return page(request, "rollouts.html", shlex.join(words), facts)
