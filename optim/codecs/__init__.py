"""Codecs: tensors to bytes and back, in full precision, in fewer bits, or as the largest values
only.
"""
