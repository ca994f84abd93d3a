"""Sparse-KV self-speculation inside vLLM: the engine's plugin (plugin.py), the class that a
speculative configuration names (draft.py), and the session that `magicdec run --engine vllm` times
(session.py). docs/vllm.md is its manual.
"""

__version__ = "0.1.0"
