"""`$SYS`: the node's figures as retained messages, in the tree that mosquitto made customary."""

from motorcade.plugins.systopics.plugin import SysTopicsConfig, SysTopicsPlugin

__all__ = ["SysTopicsConfig", "SysTopicsPlugin"]
