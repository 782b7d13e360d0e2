"""Where a pool's bytes lie: files, PMDK pools and devices, and what they survive."""
