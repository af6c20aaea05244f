"""What a compiled program needs on a device that need not be present, from its HLO and the chip's figures."""
