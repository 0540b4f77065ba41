"""The pages of a report: of one run, live or for good, and of several side by side."""
