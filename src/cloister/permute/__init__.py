"""STIP, corrected: a checkpoint in secret coordinates that any ordinary server can run.

`protect` draws the coordinates and rewrites the checkpoint; `attacks` and `recovery` measure what they are worth.
No sockets here. Randomness comes from the operating system.
"""
