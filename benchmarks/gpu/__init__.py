"""`make gpu`: builds weft on a bare machine with one GPU, runs checks and benchmarks there, and keeps the results.

The modules that `__main__` imports need only the standard library, so that a run without torch ends with a report.
"""
