"""magicdec: will speculative decoding pay, with which draft, draft-cache budget and gamma, and by how much?"""

__version__ = "0.1.0"
