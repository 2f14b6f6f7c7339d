"""Plays the preparation before the ranks, as the role `prepare` says: `python -m tests.run.actor_prepare RUN_DIR`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.run.actor import play, read_role

if __name__ == "__main__":
    run_dir = Path(sys.argv[1])
    role = read_role(Path(sys.argv[1]), "prepare")
    sys.exit(play(run_dir, int(os.environ["RANK"]), role) if role else 0)
