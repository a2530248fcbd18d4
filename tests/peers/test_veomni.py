def test_none(): pass
