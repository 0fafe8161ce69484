"""How far a sweep is, for people: totals, tables, a view that is redrawn. Changes nothing."""
