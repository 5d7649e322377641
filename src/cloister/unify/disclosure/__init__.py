"""What leaves an owner, and what it reveals: known before anything leaves.

    claims.public(done)                             # what was done, in fixed sentences: goes with the contribution
    contribution.of_contribution(...).write(home)   # runs the attacks on one's own contribution: stays

The attacks are in `membership`, `proxies` and `routing_vectors`; what differential privacy bounds is in `accounting`.
"""
