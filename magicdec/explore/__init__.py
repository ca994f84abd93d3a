"""The what-if page: the planner's answer to a set of controls, in a browser on this machine. Works
without torch.
"""
