"""Benchmarks: coremill beside its peers on the machine at hand; docs/benchmarks.md explains."""
