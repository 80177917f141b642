"""python -m fugaku_megatron.logs LOG...: see log_table."""

import sys

from .log_table import main

sys.exit(main())
