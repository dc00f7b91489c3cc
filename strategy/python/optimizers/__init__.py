"""weft.strategy.optimizers: how optimizers step without temporaries, and inside the backward."""
