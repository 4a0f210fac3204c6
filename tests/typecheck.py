"""The run-time checker of types and shapes; an int passes for a float, as it does in Python."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
