"""What a run leaves for others to load."""
