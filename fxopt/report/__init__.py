"""Findings and measurements as data (`Report`), and how they read."""

from fxopt.callable_module import make_callable
from fxopt.report.collect import report
from fxopt.report.data import Report

__all__ = ["Report", "report"]


make_callable(__name__, report)
