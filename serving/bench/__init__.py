"""Benchmarks of the engine; each is a command that prints a table and writes JSON."""
