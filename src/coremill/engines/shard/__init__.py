"""Every rank holds its part of the model (FSDP2 with collectives of our own)."""
