"""Ray, Tune and the warm workers that run planned trials. Decides nothing about what is to be done."""
