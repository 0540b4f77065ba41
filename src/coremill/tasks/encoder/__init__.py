"""What the tasks of encoders share: rows padded by the batch, steps that count in samples, outputs that are scored."""
