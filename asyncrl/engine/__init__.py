"""Inference servers behind the Engine port (DESIGN.md §7)."""
