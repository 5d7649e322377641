"""Benchmarks of mode unify. Nothing is imported here: rows measure the memory of processes that need little of it."""
