"""What leaves an owner, and what it reveals: measured before anything leaves.

    report = contribution.of_contribution(...)      # runs the attacks on one's own contribution
    report.write(home, leaves, count=..., texts=...)    # a page that stays, and one that may go with the contribution

The attacks are in `membership`, `proxies` and `routing_vectors`; what differential privacy bounds is in `accounting`.
"""
