"""Does fnppo compute what this model computes? `verify(module)`, and `fnppo verify MODEL` on the command line.

Needs `pip install fnppo[cli]`.
"""

from fnppo.verify.report import Check, Report
from fnppo.verify.run import verify

__all__ = ["Check", "Report", "verify"]
