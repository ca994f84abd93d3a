"""Servers under arrivals, and the devices that a rate takes.

A simulation of every iteration, driven by the costs that plans are made of.

requests.py   what arrives: drawn from a rate, or read from a trace
costs.py      the seconds of an iteration, from `predict`, in tables
drafts.py     the tokens that each request's steps emit
replica.py    the scheduler: queue, chunks of prompts, cache, preemption
simulate.py   replicas behind a balancer, and what their users see
load.py       a plan's request under arrivals
layouts.py    the ways to spread devices that are compared
trials.py     simulations of one layout, cheapest question first
capacity.py   the least devices that keep the limits
"""
