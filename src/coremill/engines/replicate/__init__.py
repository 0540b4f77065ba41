"""The whole model on every rank; gradients are exchanged."""
