"""The interface between plugins and broker: hook points, the plugin base class, and how plugins are loaded."""
