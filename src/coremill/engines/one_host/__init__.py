"""Shard where all ranks are on one host: one copy of the weights in shared memory."""
