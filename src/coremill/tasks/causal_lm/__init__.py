"""Next-token prediction on packed rows."""
