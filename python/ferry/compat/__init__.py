"""Interfaces of other programs, done by Ferry. Each module needs the program that it is named after only where it says so, and imports it when called."""
