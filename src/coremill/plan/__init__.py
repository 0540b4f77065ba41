"""Will it fit, how fast, at what cost: pure arithmetic over config, fleet and model card."""
