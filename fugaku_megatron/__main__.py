"""python -m fugaku_megatron COMMAND: the same as the command fugaku-megatron, without an installation."""

import sys

from .cli.program import main

if __name__ == "__main__":
    sys.exit(main())
