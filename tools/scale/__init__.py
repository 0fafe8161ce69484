"""How far a sweep can grow on one machine."""
