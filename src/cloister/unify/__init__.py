"""One Mixture-of-Experts model from experts whose owners cannot pool their data. So far: choosing public examples."""
