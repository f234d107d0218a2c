"""How a model lies on several devices: the mesh, and which mesh axis each logical axis of a weight maps to.

Weights carry logical axis names from the models; `mesh` and `rules` turn them into shardings. `topology` describes TPU
slices that are not here.
"""
