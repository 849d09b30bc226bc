"""``python -m gradveil`` is ``gradveil``."""

import sys

from gradveil.cli import main

if __name__ == "__main__":
    sys.exit(main())
