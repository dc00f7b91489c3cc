"""Verifies by running a module that it computes the same when its projections are sharded by heads."""
