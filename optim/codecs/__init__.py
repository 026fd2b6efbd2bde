"""Codecs: tensors to bytes and back, in full precision, in fewer bits, or as the largest values
only.

    codec = codec_named("sign+ef")
    payload = codec.encode(tensors)
    tensors = codec.decode(payload, shapes)
"""
