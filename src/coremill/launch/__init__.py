"""From a layout to running processes: argv, environment, pinning, and their end."""
