def test_conformance(graphhal_check):
    graphhal_check()
