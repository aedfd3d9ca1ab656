"""Benchmarks. Each is a module with `measure(quick) -> Result`; `python -m bench` runs them all."""
