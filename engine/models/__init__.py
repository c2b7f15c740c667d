"""Model architectures, as plain as they can be."""
