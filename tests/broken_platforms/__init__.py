"""Deliberately broken platforms: what the conformance suite must catch, and by which check."""
