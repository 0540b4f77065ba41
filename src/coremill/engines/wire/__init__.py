"""What engines send through: collectives, codecs, buffers."""
