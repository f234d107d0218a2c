"""How a model lies on several devices: the mesh, and which mesh axis each logical axis of a weight maps to.

Weights carry logical axis names from the models; the modules here turn them into shardings. Nothing yet: one device.
"""
