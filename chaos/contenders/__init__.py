"""The peers under the same faults: training scripts as their users write them, started by torchrun."""
