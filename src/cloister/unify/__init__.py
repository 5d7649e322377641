"""Mode `unify`: one Mixture-of-Experts model from experts whose owners cannot pool their data."""
