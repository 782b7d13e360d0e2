"""Storage of a pool's bytes: files, PMDK pools and devices, and what they survive."""
