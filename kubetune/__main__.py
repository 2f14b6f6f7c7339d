"""`python -m kubetune` is `kubetune`."""

from __future__ import annotations

import sys

from kubetune.cli import main

sys.exit(main())
