"""A campaign of faults: real sweeps, disturbed on purpose, must end with the rows of one that was not disturbed."""
