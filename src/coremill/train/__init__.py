"""The arithmetic of a step: loss, optimizer, loop."""
