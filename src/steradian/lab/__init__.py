"""Many trainings at a time: the paper's experiments as recipes, and comparisons of one's own methods with them."""

from steradian.lab.registry import load_plugin, register_data, register_method, register_network, register_schedule

__all__ = ["load_plugin", "register_data", "register_method", "register_network", "register_schedule"]
