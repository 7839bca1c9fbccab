"""How fast can this machine go, and how near do the engine and others come?"""

import warnings

# torch imports pynvml if it is there, which warns. Every program here begins with this package, which nobody
# uses as a library.
warnings.filterwarnings("ignore", "The pynvml package is deprecated", FutureWarning)
