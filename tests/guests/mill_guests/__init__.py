"""Guests of coremill, as another package would bring them: a task and an engine, found by their entry points.

With the folder above on PYTHONPATH, which has their metadata too, every process finds them: launcher, planner, fork
server, ranks. Each has a half without torch, which the entry point names, and one that ranks import.
"""
