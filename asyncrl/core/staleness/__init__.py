"""Staleness control: who may start, and who is trained when, so that no sample exceeds its bound (DESIGN.md §6)."""
