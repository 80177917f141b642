"""The performance model: published benchmark tables as data, and what a run of any size will take.

Run: fugaku-megatron --help
"""
