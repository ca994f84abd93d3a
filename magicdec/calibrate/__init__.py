"""Times kernels and phases of a step on this machine, or a server from outside, and fits profiles to them."""
