"""weft.strategy.reports: what became of each parameter and module, as tables and sentences."""
