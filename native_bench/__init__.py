"""How fast can this machine go, and how near do the engine and others come?"""
