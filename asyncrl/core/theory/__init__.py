"""What the papers' formulas say about a run before it is started. Plain functions: numbers in, numbers out.

    staleness.py   the staleness paper: mean staleness of a queue-drop queue, train period of a GPU budget, the frontier
    completion.py  ROLL Flash §3.1: completion bounds, best split of workers, limit speed-ups
    broadcast.py   Laminar appendix C: chain broadcast of weights
    runtime.py     what follows for this runtime: mean staleness under the in-flight cap, the no-bubble bound

Decides nothing and owns nothing; ``asyncrl plan`` and the display call it. Arguments that make no sense (a batch of 0,
a utilisation below 0) are a ``ValueError``. Where a printed formula is loose or wrong, the docstring says so and why.
"""
