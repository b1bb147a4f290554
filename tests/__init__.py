"""Tests of Motorcade."""
