"""How ranks share the work: the engine protocol and its strategies."""
