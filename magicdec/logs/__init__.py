"""Answers from the requests that a server has logged: what look-ups accept, and what traffic is
like.

A look-up proposes one token at each position, so lossless verification accepts it exactly where it
equals the token that was emitted next, whatever the temperature. Logged prompts and outputs
therefore determine every accepted count (`replay`), without a model and without torch.

    lookups     rules of the engines' look-ups and their settings
    ngram       numba kernels of the n-gram rules
    suffix      numba kernels of suffix decoding
    replay      steps of every setting on one request, and their counts (`tally`)
    formats     readers of the log formats; `tokens` turns text into token ids
    profiles    acceptance profiles from counts
"""
