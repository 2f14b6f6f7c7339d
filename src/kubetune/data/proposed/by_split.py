"""Propose a run for files that are named by split: it trains on the training files and is evaluated on others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from kubetune.config.schema import SourceConfig
from kubetune.data.findings.split_files import named_files
from kubetune.data.proposed.bare_images import require_no_bare_images
from kubetune.data.proposed.proposal import Proposal, ReasonedChoice
from kubetune.data.proposed.proposing import propose
from kubetune.data.reading.sources import locate

_MOST_NAMED: Final = 6


def propose_by_split(source: SourceConfig, task: str | None = None) -> Proposal:
    """Return the proposal for a source.

    If its files are named by split, the run trains on the training files and is evaluated on the validation or test files.
    """
    require_no_bare_images(Path(os.path.expanduser(source.path)))
    files = named_files(locate(source))
    if files is None:
        return propose(source, task)

    train = files.path_of(files.train)
    evaluated = files.validation if files.path_of(files.validation) else files.test
    held_out = files.path_of(evaluated)
    if not train or not held_out:
        return propose(source, task)

    proposal = propose(source.model_copy(update={"path": train}), task)
    proposal.called = source.path
    proposal.held_out = ReasonedChoice(held_out, "named as data to evaluate on")
    remark = f"{source.path} has files by split: {train} is trained on, {held_out} is evaluated on"
    left = [file for file in (*files.held_out, *files.others) if file not in evaluated]
    if left:
        remark += f", not used: {', '.join(left[:_MOST_NAMED])}"
    if len(left) > _MOST_NAMED:
        remark += " …"
    proposal.remarks.append(remark)
    return proposal
