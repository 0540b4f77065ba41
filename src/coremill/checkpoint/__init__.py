"""What a run leaves on disk: checkpoints to go on from, and an export for others to load."""
