"""Fault experiments: break a run in every way that machines do, and measure what it makes of it. `python -m chaos`."""
