"""Runs planned trials with Ray Tune: the driver, the warm workers, the result actor and the cluster they run on."""
