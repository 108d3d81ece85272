"""The library from Python: what `a3c_mp.train` and `a3c_mp.load_policy` are."""
