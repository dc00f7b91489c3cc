"""weft.strategy.reports: how each parameter and module is sharded, as tables and sentences."""
