"""Every installed platform, held to every check; the same three lines serve a third party."""


def test_conformance(graphhal_check):
    graphhal_check()
