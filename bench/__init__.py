"""The bench of the project: workloads, measures, rivals (other ways to save), tables of results, and bars (targets).

It is not installed. ``lightck bench`` runs it in the root of a checkout (``lightck/cli/bench.py``) and measures the
installed lightck. Each row runs in a process of its own and checks that the saved state loads back bit for bit.
"""
