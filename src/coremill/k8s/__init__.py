"""Kubernetes: manifests of a run, and what is checked in anybody's manifests before they leave the laptop."""
