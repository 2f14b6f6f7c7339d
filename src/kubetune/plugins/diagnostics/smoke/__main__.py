"""`torchrun … -m kubetune.plugins.diagnostics.smoke`: one rank of the smoke test."""

import sys

from kubetune.plugins.diagnostics.smoke.launch import main

sys.exit(main())
