"""Does an optimized graph compute what the eager model computes, within the error budget?"""

from fxopt.verify.check import Examples, Verdict, bisect, verify

__all__ = ["Examples", "Verdict", "bisect", "verify"]
