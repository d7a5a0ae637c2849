"""The commands: show, compare, export, import, reshard, sign."""
