"""The planner: what to speculate with, or whether to, from one request (request → drafts → search →
planner).
"""
