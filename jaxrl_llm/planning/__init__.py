"""What a compiled program will need on a device that is not there: read from its HLO, against the chip's figures."""
