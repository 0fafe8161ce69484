"""How far a sweep can grow on one machine: measurements for `python -m orchestrator.bench --scale`."""
