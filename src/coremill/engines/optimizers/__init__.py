"""What moves the weights: each optimizer, and what it costs."""
