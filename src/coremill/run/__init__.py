"""A run from top to bottom: story.py first."""
