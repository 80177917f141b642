"""Timed comparisons of the kernels with torch: python -m benchmarks FAMILY --help"""
