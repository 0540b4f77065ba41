"""What a run says: events, and the readers that turn them into a screen, a page and JSON."""
