"""Controls: right decoders that look wrong, or do unusually what the reference does plainly. None may be accused."""
