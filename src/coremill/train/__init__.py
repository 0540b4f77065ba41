"""The loop over steps, its learning rate, and what is done about numbers that are not finite."""
