"""A running server: its metrics in, its acceptance, its load and advice out. Needs no torch."""
