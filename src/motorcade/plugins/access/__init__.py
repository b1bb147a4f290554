"""Access control: who gets in (`backends/`), and what they may publish and subscribe to (`rules.py`)."""

from motorcade.plugins.access.plugin import AccessPlugin

__all__ = ["AccessPlugin"]
