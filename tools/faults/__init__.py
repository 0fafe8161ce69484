"""The fault campaign: real sweeps, disturbed on purpose, must end with the rows of an undisturbed sweep."""
