"""A run on Kubernetes: its objects, rendered from the run file, and what is wrong with anybody's manifests."""
