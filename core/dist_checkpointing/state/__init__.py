"""What users give: nested dicts of tensors, DTensors, optimizers and values, as shards of global arrays."""
