"""Adapters that graphhal ships: one file for each family of encoders."""
