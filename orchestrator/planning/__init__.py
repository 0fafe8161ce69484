"""Turns the settings of a sweep into its trials, and checks them before anything is started."""
