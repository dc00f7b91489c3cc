"""What the tests share: ranks (process groups that stay warm) and processes (fresh process trees)."""
