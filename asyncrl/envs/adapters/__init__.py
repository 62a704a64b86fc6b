"""Environments and data sets as other libraries have them: one module each, which imports its library when used."""
