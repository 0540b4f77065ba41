"""Lints."""
def lint(manifests): return []
