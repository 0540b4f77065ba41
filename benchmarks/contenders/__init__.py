"""The peers coremill is measured against: one script each, started by `benchmarks.peers` under torchrun."""
