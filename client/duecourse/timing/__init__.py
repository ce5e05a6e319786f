"""Clocks and back-off: the only place that asks the machine what time it is."""
