"""What the user asked for: a strict schema, a loader that knows where each value came from."""
