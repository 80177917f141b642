"""Programs of the checkout: python -m tools.NAME; what a user needs is a command of fugaku-megatron instead."""
