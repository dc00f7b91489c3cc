"""Whether a module computes the same when its projections are sharded by heads: tried, not assumed."""
