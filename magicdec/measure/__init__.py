"""Runs configurations, interleaved, and writes what they took as records."""
