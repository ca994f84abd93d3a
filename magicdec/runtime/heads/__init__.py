"""Trained draft heads: small networks that read the target's hidden states.

`layout.py` reads what a head's config.json says, `builder.py` its weights, `chain.py` and
`parallel.py` are the heads themselves, `vocabulary.py` the tokens that they choose from. How they
draft for a batch, over a cache of their own, is in drafters/heads.py.
"""
