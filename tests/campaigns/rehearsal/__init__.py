"""A rehearsal of faults under supervise: predicted and measured effective training time, as a program."""
