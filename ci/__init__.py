"""The platform matrix: which combinations are tested, how, and by which machine."""
