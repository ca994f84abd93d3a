"""Compares predictions with measurements: our own runs, the paper's rows, pairs of servers."""
