"""Motorcade: a message hub for vehicle fleets.

Nothing is imported here on purpose: `import motorcade` must stay free of side effects and cheap for every layer.
"""

__version__ = "0.1.0"
