"""A run on Kubernetes: its objects, rendered from the run file."""
