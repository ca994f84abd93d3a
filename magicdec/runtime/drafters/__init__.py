"""Draft methods, one small class each. drafter.py holds the registry."""
