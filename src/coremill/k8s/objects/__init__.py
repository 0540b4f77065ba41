"""The objects of a run, a module for each kind of concern; each function returns plain values for JSON and YAML."""
