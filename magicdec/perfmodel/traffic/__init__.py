"""Servers under arrivals: a simulation of every iteration, driven by the costs that plans are made
of.

costs.py      the seconds of an iteration, from `predict`, in tables
requests.py   what arrives: drawn from a rate, or read from a trace
replica.py    the scheduler: queue, chunks of prompts, cache, preemption
simulate.py   replicas behind a balancer, and what their users see
"""
