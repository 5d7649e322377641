"""A round: the making of one model by parties that do not share data. Which files there are, and who does what when.

`recipe` is what all agree on, `invitation` and `contribution` are the two artefacts, `owner` and `coordinator` the two
parties, `state` what each remembers, and `steps` the seam to everything that computes. Nothing here knows a network.
"""
