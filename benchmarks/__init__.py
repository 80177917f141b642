"""Measured comparisons with torch and other programs: python -m benchmarks FAMILY --help"""
