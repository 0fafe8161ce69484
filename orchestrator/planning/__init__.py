"""From a command line to the trials of a sweep, and everything that can be wrong with them. Starts nothing."""
