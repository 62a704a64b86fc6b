"""Composition root: ``assemble`` wires the runtime, ``real`` and ``virtual`` give it a world, ``setup`` runs the
recipe's own script. Knows everyone; nothing below imports it.
"""
