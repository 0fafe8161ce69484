"""The vocabulary that every other sub-package shares: configurations, trials, totals, errors."""
