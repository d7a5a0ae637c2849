"""From files to tensors under any layout."""
