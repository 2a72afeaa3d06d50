"""Doors into other libraries, which are imported when a door is opened, not before."""
