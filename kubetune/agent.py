"""`python -m kubetune.agent`: what pods start; a name that manifests keep. All else is in supervisor/agent.py."""

import sys

from kubetune.supervisor.agent import main

if __name__ == "__main__":
    sys.exit(main())
