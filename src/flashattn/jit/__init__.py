"""From a kernel specification to machine code on a GPU. Knows nothing of attention."""
