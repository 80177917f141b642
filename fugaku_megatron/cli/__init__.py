"""Command line: `main` is `fugaku-megatron`, `run_command` a program of one command."""

from .program import main as main
from .program import run_command as run_command
