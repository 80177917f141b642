"""The performance model: published benchmark tables as data, and what a run of any size will take.

Run: python -m fugaku_megatron.perf --help
"""
