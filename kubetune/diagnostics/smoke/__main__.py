"""`torchrun … -m kubetune.diagnostics.smoke`: one rank of the smoke test."""

import sys

from kubetune.diagnostics.smoke.launch import main

sys.exit(main())
