"""Reusable kinds of components, a file per family; importing a module declares its kinds.

Values between components are per step: a vector [channels], a sequence [frames, channels] with time first, or a
spectrum [..., 2, bins] with real parts before imaginary ones.
"""
