"""Sparse-KV self-speculation inside vLLM: a plugin of the engine, and the class that drafts.

Nothing here is imported but by vLLM (plugin.py is its entry point, draft.py the class that a
speculative configuration names) and by measure/, for running it.
"""
