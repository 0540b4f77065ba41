"""From a hub id or folder to a module that holds this rank's slices only."""
