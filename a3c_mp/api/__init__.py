"""The library from Python; `a3c_mp.train` etc. are loaded from here when they are used."""
