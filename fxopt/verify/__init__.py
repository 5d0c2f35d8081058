"""Does an optimized graph compute what the eager model computes, within the error budget?"""

from fxopt.verify.check import Verdict, bisect, verify

__all__ = ["Verdict", "bisect", "verify"]
