"""The what-if page: a form with the options of a plan, and its answer, in a browser on this machine. Works
without torch.
"""
