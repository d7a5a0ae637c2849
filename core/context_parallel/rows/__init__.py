"""Follows what a program makes of a context rank's own rows of sequences, and tells what is wrong of a part."""
