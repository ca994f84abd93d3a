"""How long a step takes, how much memory it needs, what a draft accepts, and which draft to run. Needs no torch."""
