"""Helpers for tests: ranks (warm process groups) and processes (fresh process trees)."""
