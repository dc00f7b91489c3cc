"""weft.strategy.verification: verifies, by running modules, that they compute the same if sharded by heads."""
