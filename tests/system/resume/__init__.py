"""Bit-identical resume under real kill -9: scenarios, the processes that run them, and the comparison."""
