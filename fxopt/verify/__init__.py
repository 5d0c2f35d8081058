"""Does an optimized graph compute what the eager model computes, within the error budget?"""

from fxopt.verify.check import Verdict, bisect
from fxopt.verify.examples import Examples, verify

__all__ = ["Examples", "Verdict", "bisect", "verify"]
