"""A job in a live cluster: submitted, looked at, read, stopped and deleted through the official client."""
