"""`torchrun … -m kubetune.worker`: one rank of a run; a name that scripts keep. All else is in training/worker.py."""

import sys

from kubetune.training.worker import main

if __name__ == "__main__":
    sys.exit(main())
