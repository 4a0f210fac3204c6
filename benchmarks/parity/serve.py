"""The other end of `run.py`: read cases from a file, call the functions that they name, write what they return."""

import sys
from typing import Any

import torch


def serve(functions: dict[str, Any], version: str) -> None:
    """Command line of a side: the file of cases, the file for the results.

    A case is {"kind": a function, "columns": name -> tensor, "options": its keyword arguments}; a result is name -> tensor,
    or {"error": text} where this version cannot do it.
    """
    _, cases, results = sys.argv
    found = []
    for case in torch.load(cases):
        torch.manual_seed(0)
        try:
            result = functions[case["kind"]](case["columns"], **case["options"])
        except Exception as error:  # what a version cannot do is what its table says
            result = {"error": f"{type(error).__name__}: {error}"}
        found.append(result)
    torch.save({"version": version, "results": found}, results)
