"""Runs configurations, interleaved, and writes their times as records."""
