"""What a batch, a loss and a metric are."""
